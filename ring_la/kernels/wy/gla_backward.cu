// GLA's gradients in one launch, from what gla_forward.cu with KEEP left: the state S before each chunk, and P.
//
// With the names of gla_forward.cu, and from right to left the gradient dS of the state after a chunk, S' = e^M S before it and
// dS' = e^M dS:
//
//   dV = ki dS' + P^T dO       dP = tril(dO V^T)
//   Y = dO S'^T + dP ki        W = V dS'^T + dP^T qi
//   dq = scale e^(G - M) Y     dk = e^(M - G) W
//   dS <- e^M (dS' + qi^T dO)
//
// The gradient of g is the sum over a chunk's tokens from its own on of qi Y - ki W, and of ki (V dS'^T) over all of them, and
// S' dS'. In a hard chunk qi and ki are scale q e^G and k e^(GL - G), S' and dS' are S and dS, and the pairs' parts are found
// one by one, from q and k and factors of at most 1. What tiles are multiplied by: see half.cuh.
//
// A program works through a span of one head from its end to its begin: three warps make the factors and dP of a chunk
// each, one fetches states, eight carry dS transposed, [V, K]. A span that is not a piece's last starts up to 24 chunks late
// from zero where those forget what comes from the right, or with the piece's end; else it finds what its tokens leave of no
// dS, waits for the span after it, hands its own on, and goes over its tokens once more.
#define WITH_Q 1
#define WITH_K !MAPS
#include "gla.cuh"

#define SLOTS 3 // chunks under way, one a warp that makes factors
// A slot: q, k, then qi, ki, and at last dq, dk; dO; v, then dV; g, then G by log2, then dg; P; dP; e^M (of a hard chunk 1)
#define SLOT 54272
#define OFF_Q 0
#define OFF_K 8192
#define OFF_X 16384
#define OFF_V 24576
#define OFF_G 32768
#define OFF_P 49152
#define OFF_DP 51200
#define OFF_E 53248
#define ROW 512                     // bytes of a token's G
#define STATE (SLOTS * SLOT)        // the state before a chunk, [K half][V row][64 channels]
#define ADJOINT (STATE + 32768)     // dS the same way
#define SUMS (ADJOINT + 32768)      // of each maker: log2 of what its chunks leave of each channel, of a span that waits
#define BARS (SUMS + SLOTS * 512)   // of each slot: full, empty
#define BARS_S (BARS + SLOTS * 16)  // of the state: full, empty
#define NUMBERS (BARS_S + 16)       // of each slot: see `Numbers`, and behind them what the state before it was multiplied by
#define LARGEST (NUMBERS + SLOTS * 64) // see `largest_of`
#define SAID (LARGEST + 32)         // the ticket; three words, of which `leave` takes the last; masks

// What a maker says of a chunk: what it adds to dS at most and leaves of it; what dS is multiplied by for a chunk's part of it,
// fo fq; fk fv; and what sums are multiplied by: dV's, Y's, W's, and those of the gates' gradients
struct Numbers { int kind; float add, left, own, write, dv, y, w, dg; };

struct BackArgs {
  Args a;          // S0: the gradients of the states that leave; S1: those of the states that enter
  const u16* dout; // [tokens, H, 128]
  u16 *dq, *dk, *dv; // [tokens, H, 128]
  void* dg;        // like g
};

// -- what needs a chunk's own tokens alone: a warp a chunk -----------------------------------------------------------

// Ask for the rows of 32 tokens from t on; those from `end` on are zero. v and P only for the span's `own`.
INLINE void load_chunk(const BackArgs& b, int t, int end, int chunk, int h, bool own, u32 numbers, u32 at, int lane) {
  const Args& a = b.a;
  const int hk = h / (a.H / a.HK), row = lane >> 4, j = lane & 15, live = end - t - row;
  const u64 sk = (u64)a.HK * (D * 2), sv = (u64)a.H * (D * 2);
  const char* q = (const char*)a.q + (u64)(t + row) * sk + hk * (D * 2) + j * 16;
  const char* o = (const char*)b.dout + (u64)(t + row) * sv + h * (D * 2) + j * 16;
  const u64 to_k = (const char*)a.k - (const char*)a.q, to_v = (const char*)a.v - (const char*)b.dout;
  const u32 jr = (u32)((j ^ row) & 7) << 4, to = at + (u32)((j >> 3) * HALF + row * 128);
#pragma unroll 2
  for (int i = 0; i < 16; i++) {
    const u32 place = to + (jr ^ ((2 * i & 6) << 4)) + i * 256;
    const bool ok = 2 * i < live;
    const char *from = ok ? q : (const char*)a.q, *from_o = ok ? o : (const char*)b.dout;
    cp16(place + OFF_Q, from, ok);
    if (WITH_K) cp16(place + OFF_K, from + to_k, ok);
    cp16(place + OFF_X, from_o, ok);
    if (!MAPS) cp16(place + OFF_V, from_o + to_v, ok && own);
    q += 2 * sk; o += 2 * sv;
  }
  load_gates(a, t, end, h, at + OFF_G, ROW, lane);
  if (!own) return;
  const char* pairs = (const char*)a.kept_P + kept_at(a, chunk, h) * PAIRS + lane * 16;
#pragma unroll
  for (int i = 0; i < 4; i++) cp16(at + OFF_P + i * 512 + lane * 16, pairs + i * 512, true);
  if (lane == 0) cp16(numbers + 48, pairs + 2 * C * C, true);
}

// What dS needs of a chunk, and dP of the span's `own`. `left`: log2 of what chunks leave is added there, and left at `sums`.
INLINE void make_chunk(float scale, bool own, float* left, u32 sums, u32 numbers, u32 at, int lane) {
  float GL[4], E[4], kept;
  Kind kind = kind_of(GL, E, kept, at + OFF_G, ROW, lane);
  if (left) {
#pragma unroll
    for (int j = 0; j < 4; j++) left[j] += GL[j];
    sts128(sums + lane * 16, left);
  }
  sts128(at + OFF_E + lane * 16, E);
  const Size q = size_of(largest_in(at + OFF_Q, lane), exponent(scale) + 1, ORDINARY);
#if MAPS
  const Size k = {0, true}, v = k;
#else
  const Size k = size_of(largest_in(at + OFF_K, lane), 0, ORDINARY), v = size_of(largest_in(at + OFF_V, lane), 0, ORDINARY);
#endif
  const int o = min(max(size_of(largest_in(at + OFF_X, lane), 0, WIDEST).e, -WIDEST), WIDEST);
  if (kind == HALVES && !(q.fits && k.fits && v.fits)) kind = WIDE;
  const bool half = kind == HALVES;
  if (lane == 0) {
    const int fq = 4 - q.e, fk = 4 - k.e, fv = 3 - v.e, fo = 3 - o;
    const float add = power(7 + o + q.e), own_by = half ? power(fo + fq) : 1.f, write = half ? power(fk + fv) : 1.f;
    const float dv = half ? power(2 - fq - fk - fo) : 1.f, y = half ? power(-fk - fv - fo) : 1.f;
    const float w = half ? power(-fq - fv - fo) : 1.f, dg = half ? power(-fq - fk - fv - fo) : 1.f;
    const float n[8] = {__uint_as_float(kind), add, kept, own_by, write, dv, y, w};
    sts128(numbers, n);
    sts128(numbers + 16, n + 4);
    sts32(numbers + 32, __float_as_uint(dg));
  }
  if (half) {
    if (!MAPS) to_halves(at + OFF_V, power(3 - v.e), lane);
    to_halves(at + OFF_X, power(3 - o), lane);
    make_factors<true>(GL, false, scale * power(4 - q.e), power(4 - k.e), at + OFF_Q, at + OFF_K, at + OFF_G, ROW, true, lane);
  } else {
    make_factors<false>(GL, kind == HARD, scale, 1.f, at + OFF_Q, at + OFF_K, at + OFF_G, ROW, true, lane);
  }
  __syncwarp();
  if (!own) return;
  if (half) make_pairs<true>(at + OFF_X, at + OFF_V, 1.f, at + OFF_DP, lane);
  else make_pairs<false>(at + OFF_X, at + OFF_V, 1.f, at + OFF_DP, lane);
}

// The chunks of `passes` over a span, n each, the last first. `first`: the first chunk whose gradients are wanted.
INLINE void produce(const BackArgs& b, const Span& x, int h, int lim, int n, int passes, int first, u32 base, int w, int lane) {
  const u32 at = base + w * SLOT, full = base + BARS + w * 16;
  float left[4] = {0.f, 0.f, 0.f, 0.f};
  for (int c = w; c < n * passes; c += SLOTS) {
    if (c >= SLOTS) bar_wait(full + 8, (c / SLOTS - 1) & 1);
    const int m = (c / n + 1) * n - 1 - c;
    const bool own = !MAPS && c >= first;
    const u32 numbers = base + NUMBERS + w * 64;
    load_chunk(b, x.begin + m * C, lim, x.chunk + m, h, own, numbers, at, lane);
    cp_wait();
    __syncwarp();
    make_chunk(b.a.scale, own, c < n * (passes - 1) ? left : 0, base + SUMS + w * 512, numbers, at, lane);
    proxy_fence();
    __syncwarp();
    if (lane == 0) bar_arrive(full);
  }
}

// States on their way in, by one warp
INLINE void fetch(const BackArgs& b, const Span& x, int h, int own, u32 base, int lane) {
  const u32 bar = base + BARS_S;
  for (int i = 0; i < own; i++) {  // once nobody reads the one before it
    if (i) bar_wait(bar + 8, (i - 1) & 1);
    if (lane == 0) {
      bar_expect(bar, 32768);
      copy_in(base + STATE, b.a.kept_S + kept_at(b.a, x.chunk + own - 1 - i, h) * (D * D), 32768, bar);
    }
    __syncwarp();
  }
}

// -- dS, from chunk to chunk: 16 of its rows, [V, K], a warp; and the gradients of 16 channels of K ------------------

// Sums over tokens to the right and including: x of tokens 8 i + 2 t and one more, i of four, of lane t of four
INLINE void sum_from_right(float (&x)[8], int t) {
  float later = 0.f;
#pragma unroll
  for (int i = 3; i >= 0; i--) {
    const float mine = x[2 * i] + x[2 * i + 1];
    float right = 0.f, all = mine;
#pragma unroll
    for (int m = 1; m < 4; m++) {
      const float y = __shfl_down_sync(~0u, mine, m, 4);
      if (t + m < 4) right += y;
    }
    all += __shfl_xor_sync(~0u, all, 1);
    all += __shfl_xor_sync(~0u, all, 2);
    x[2 * i + 1] += right + later;
    x[2 * i] += x[2 * i + 1];
    later += all;
  }
}

// The parts that pairs have in the gradients of one token's channel of q (`dq`) and k, one after another
INLINE void hard_pair(float& dq, float& dk, const Args& a, int t, int end, int h, int token, int channel, u32 at) {
  const u64 step = (u64)a.HK * D;
  const u64 from = (u64)t * step + h / (a.H / a.HK) * D + channel;
  const float G = lds(at + OFF_G + token * ROW + channel * 4);
  dq = dk = 0.f;
#pragma unroll 1
  for (int j = 0; j < C && t + j < end; j++) {
    const int row = max(token, j), column = min(token, j);
    const u32 two = lds32(at + OFF_DP + pair_place(row, column >> 3) + (column & 6) * 2);
    const float other = lds(at + OFF_G + j * ROW + channel * 4);
    const float p = (column & 1 ? hi(two) : lo(two)) * a.scale * ex2(j <= token ? G - other : other - G);
    if (j <= token) dq = fmaf(p, bf16_of(a.k + from + j * step), dq);
    if (j >= token) dk = fmaf(p, bf16_of(a.q + from + j * step), dk);
  }
}
// The same of all that a lane has: a loop, which takes no registers of the common path
INLINE void hard_pairs(float (&A)[16], float (&B)[16], const Args& a, int t, int end, int h, int kc, u32 at, int lane) {
#pragma unroll 1
  for (int j = 0; j < 16; j++) {
    const int token = (j >> 2) * 8 + 2 * (lane & 3) + (j & 1), channel = kc * 8 + (lane >> 2) + (j & 2) * 4;
    float dq, dk;
    hard_pair(dq, dk, a, t, end, h, token, channel, at);
#pragma unroll
    for (int i = 0; i < 16; i++) {
      A[i] = i == j ? dq : A[i];
      B[i] = i == j ? dk : B[i];
    }
  }
}

// What pairs of dP with qi and ki (at chunk kc of their channels) give: A to q's tokens, B to k's
template <bool FP16>
INLINE void add_key_pairs(float (&A)[16], float (&B)[16], const u32 (&q)[2][4], const u32 (&k)[2][4], u32 at, int lane) {
  add_pairs<FP16>(A, k, at + OFF_DP, (lane & 7) + ((lane >> 4) << 3), (lane >> 3) & 1);
  add_pairs_back<FP16>(B, q, at + OFF_DP, (lane & 7) + (((lane >> 3) & 1) << 3), lane >> 4);
}

// The gradients of q, k and g of 16 channels of K, from chunk kc on. Y: dO S'^T; Z: V dS'^T, of which `cy` and `cz` make what pairs
// are by.
template <bool FP16>
INLINE void key_gradients(const BackArgs& b, float (&Y)[16], float (&Z)[16], float cy, float cz, const float (&trace)[2], bool hard,
                          u32 numbers, u32 at, int kc, int t, int end, int h, int lane) {
  const Args& a = b.a;
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1, r = lane >> 2, tq = lane & 3;
  u32 q[2][4], k[2][4];
#pragma unroll
  for (int m = 0; m < 2; m++) {
    ldm_trans(q[m], at + OFF_Q + tile_place(16 * m + rb, kc + cb));
    ldm_trans(k[m], at + OFF_K + tile_place(16 * m + rb, kc + cb));
  }
  float A[16] = {}, B[16] = {};
  if (FP16 || !hard) add_key_pairs<FP16>(A, B, q, k, at, lane);
  else hard_pairs(A, B, a, t, end, h, kc, at, lane);
  const float by_y = lds(numbers + 24) * a.scale, by_w = lds(numbers + 28), by_g = lds(numbers + 32);
#pragma unroll
  for (int e = 0; e < 2; e++) {  // rows r and r + 8
    const int channel = kc * 8 + r + 8 * e;
    const float GL = lds(at + OFF_G + (C - 1) * ROW + channel * 4), from = hard ? 0.f : 0.5f * GL, to = hard ? GL : 0.5f * GL;
    float dg[8], ended = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int nt = i >> 1, j = nt * 4 + 2 * e + (i & 1), token = nt * 8 + 2 * tq + (i & 1), f = 2 * (nt & 1) + e;
      const u32 qx = q[nt >> 1][f], kx = k[nt >> 1][f];
      const float qi = i & 1 ? hi<FP16>(qx) : lo<FP16>(qx), ki = i & 1 ? hi<FP16>(kx) : lo<FP16>(kx);
      const float G = lds(at + OFF_G + token * ROW + channel * 4);
      const float mine = Z[j] * cz, y = fmaf(Y[j], cy, hard ? 0.f : A[j]), z = mine + (hard ? 0.f : B[j]);
      ended = fmaf(ki, mine, ended);
      dg[i] = qi * y - ki * z;
      Y[j] = fmaf(y, ex2(G - from) * by_y, hard ? A[j] : 0.f);
      Z[j] = fmaf(z, ex2(to - G) * by_w, hard ? B[j] : 0.f);
      if (hard && t + token < end) {
        const u64 from = ((u64)(t + token) * a.HK + h / (a.H / a.HK)) * D + channel;
        dg[i] += bf16_of(a.q + from) * A[j] - bf16_of(a.k + from) * B[j];
      }
    }
    ended += __shfl_xor_sync(~0u, ended, 1);
    ended += __shfl_xor_sync(~0u, ended, 2);
    ended = fmaf(hard ? ex2(GL) : cy * cz, trace[e], ended);
    sum_from_right(dg, tq);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      dg[i] = (dg[i] + ended) * by_g;
#if GATE_BF16
      A[(i >> 1) * 4 + 2 * e + (i & 1)] = dg[i];
#else
      const int token = (i >> 1) * 8 + 2 * tq + (i & 1);
      if (t + token < end) ((float*)b.dg)[((u64)(t + token) * a.H + h) * D + channel] = dg[i];
#endif
    }
  }
  __syncwarp();  // this warp alone reads its channels of these tiles now
#pragma unroll
  for (int m = 0; m < 2; m++) {
    u32 x[4], y[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      x[j] = pack(Y[8 * m + 2 * j], Y[8 * m + 2 * j + 1]);
      y[j] = pack(Z[8 * m + 2 * j], Z[8 * m + 2 * j + 1]);
    }
    stm_trans(x, at + OFF_Q + tile_place(16 * m + rb, kc + cb));
    stm_trans(y, at + OFF_K + tile_place(16 * m + rb, kc + cb));
#if GATE_BF16
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = pack(A[8 * m + 2 * j], A[8 * m + 2 * j + 1]);
    stm_trans(x, at + OFF_G + (16 * m + rb) * ROW + kc * 32 + cb * 16);
#endif
  }
  __syncwarp();
#pragma unroll
  for (int m = 0; m < 2; m++) {
    const int row = 16 * m + (lane >> 1), j = kc + (lane & 1);
    const u64 to = ((u64)(t + row) * a.H + h) * D + j * 8;
    u32 x[4], y[4];
    lds128(x, at + OFF_Q + tile_place(row, j));
    lds128(y, at + OFF_K + tile_place(row, j));
    if (t + row < end) {
      stg128(b.dq + to, x);
      stg128(b.dk + to, y);
    }
#if GATE_BF16
    lds128(x, at + OFF_G + row * ROW + kc * 32 + (lane & 1) * 16);
    if (t + row < end) stg128((u16*)b.dg + to, x);
#endif
  }
}

// A chunk on its way: its slot, what its maker said of it, its first token, the span's end, and whether its gradients are wanted.
struct Chunk { u32 at, numbers; int t, end; bool own, hard; };

// dS over a chunk; `by`: what dS is multiplied by over what the chunk's own part of it is. `turn`: which of
// the span's own.
template <bool FP16>
INLINE void step(float (&S)[16][4], const BackArgs& b, const Chunk& x, float by, int turn, int h, u32 base, int w, int lane) {
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1;
  const int rt = (lane & 7) + (((lane >> 3) & 1) << 3), ct = lane >> 4;
  const int tile_row = w * 16 + rt, kc = (w >> 2) * 8 + (w & 3) * 2;
  const u32 adjoint = base + ADJOINT, state = base + STATE, bar_s = base + BARS_S, at = x.at;
  const float cz = FP16 ? inverse(by) : 1.f;
  u32 dout[2][4], dv[2][4];
#pragma unroll
  for (int m = 0; m < 2; m++) ldm_trans(dout[m], at + OFF_X + tile_place(16 * m + rb, w * 2 + cb));
  if (x.own) {
    float X[16], L[16] = {};
    {
      u32 f[8][4];
      as_operand<FP16>(f, S);
      wg_fence();
#pragma unroll
      for (int ks = 0; ks < 8; ks++)
        wgmma32<FP16>(X, f[ks], descriptor(at + OFF_K + (ks >> 2) * HALF, 16, 1024) + (ks & 3) * 2, ks > 0);
      wg_commit();
#pragma unroll
      for (int ks = 0; ks < 8; ks++) stm(f[ks], adjoint + state_place(tile_row, 2 * ks + ct));
    }
    add_pairs_back<FP16>(L, dout, at + OFF_P, rt, ct);
    wg_wait(X);
    const float by_dv = lds(x.numbers + 20), cx = FP16 ? 0.25f * cz : 1.f;
#pragma unroll
    for (int j = 0; j < 8; j++)
      dv[j >> 2][j & 3] = pack(fmaf(X[2 * j], cx, L[2 * j]) * by_dv, fmaf(X[2 * j + 1], cx, L[2 * j + 1]) * by_dv);
    proxy_fence();
    between_warps();  // dS of all warps is there
    bar_wait(bar_s, turn & 1);
  }
  if (!FP16 && x.hard) decay_to_end(S, at + OFF_G + (C - 1) * ROW, lane);
  if (FP16) { times(dout[0], by); times(dout[1], by); }
  float Y[16], Z[16];
  wg_fence();
  wgmma128<FP16>(S, dout[0], descriptor(at + OFF_Q, HALF, 1024));
  wgmma128<FP16>(S, dout[1], descriptor(at + OFF_Q + 2048, HALF, 1024));
  wg_commit();
  if (!x.own) {
    wg_wait(S);
    return;
  }
  const u64 sd = descriptor(state + (w >> 2) * 16384, 16, 1024), ad = descriptor(adjoint + (w >> 2) * 16384, 16, 1024);
  wg_fence();
#pragma unroll
  for (int ks = 0; ks < 8; ks++)
    wgmma32<FP16>(Y, sd + ks * 128, descriptor(at + OFF_X + (ks >> 2) * HALF, 16, 1024) + (ks & 3) * 2, ks > 0);
#pragma unroll
  for (int ks = 0; ks < 8; ks++)
    wgmma32<FP16>(Z, ad + ks * 128, descriptor(at + OFF_V + (ks >> 2) * HALF, 16, 1024) + (ks & 3) * 2, ks > 0);
  wg_commit();
  float trace[2];
  traces<FP16>(trace, state, adjoint, kc, lane);
  wg_wait(S);
  wg_settled(Y);
  wg_settled(Z);
  between_warps();  // nobody reads tiles of all channels any more
  if (lane == 0) bar_arrive(bar_s + 8);
#pragma unroll
  for (int m = 0; m < 2; m++) stm_trans(dv[m], at + OFF_V + tile_place(16 * m + rb, w * 2 + cb));
  __syncwarp();
#pragma unroll
  for (int m = 0; m < 2; m++) {
    const int row = 16 * m + (lane >> 1), j = w * 2 + (lane & 1);
    u32 z[4];
    lds128(z, at + OFF_V + tile_place(row, j));
    if (x.t + row < x.end) stg128(b.dv + ((u64)(x.t + row) * b.a.H + h) * D + j * 8, z);
  }
  const float cy = FP16 ? lds(x.numbers + 16) * inverse(lds(x.numbers + 48)) : 1.f;
  key_gradients<FP16>(b, Y, Z, cy, cz, trace, !FP16 && x.hard, x.numbers, at, kc, x.t, x.end, h, lane);
}

// Over chunks c0 to `stop` (not included) of those under way, the last of which begins at token `begin`; those before `first`
// only bring dS.
INLINE void walk(float (&S)[16][4], const BackArgs& b, int h, int begin, int end, int c0, int stop, int first, u32 base, int w,
                 int lane) {
  Unit unit = {1.f, largest_of(S, base + LARGEST, w, lane)};
  for (int c = c0; c < stop; c++) {
    const int slot = c % SLOTS;
    const u32 at = base + slot * SLOT, bars = base + BARS + slot * 16, numbers = base + NUMBERS + slot * 64;
    bar_wait(bars, (c / SLOTS) & 1);
    u32 said[4];
    lds128(said, numbers);
    const int kind = uniform(said[0]);
    const bool half = kind == HALVES, hard = kind == HARD;
    const float change = unit.next(half, __uint_as_float(said[1]), __uint_as_float(said[2]));
    decay_by(S, at + OFF_E, change, lane);
    const Chunk x = {at, numbers, begin + (stop - 1 - c) * C, end, !MAPS && uniform(c >= first), hard};
    if (half) step<true>(S, b, x, unit.by * inverse(__uint_as_float(said[3])), c - first, h, base, w, lane);
    else step<false>(S, b, x, 1.f, c - first, h, base, w, lane);
    decay(S, at + OFF_E, lane);
    __syncwarp();
    if (lane == 0) bar_arrive(bars + 8);
  }
  multiply(S, inverse(unit.by));
}

INLINE void consume(const BackArgs& b, const Span& x, int s, int h, int n, int first, bool known, bool waits, int passes, u32 base,
                    int w, int lane) {
  const Args& a = b.a;
  float S[16][4];
  if (passes == 1 && waits && !a.given)
    take(S, a, s + 1, h, w, lane);
  else
    begin_with(S, entering(a, x.piece, s, h, known, waits), w, lane);
#pragma unroll 1
  for (int pass = 0; pass < passes; pass++) {
    walk(S, b, h, uniform(x.begin), uniform(x.end), pass * n, (pass + 1) * n, min(first, (pass + 1) * n), base, w, lane);
    if (pass < passes - 1) hand_on(S, a, s + 1, s, h, base + SUMS, SLOTS, w, lane);
  }
  if (passes == 1 && !a.given) leave(S, a, x.piece, x.first, s, s - 1, h, base + SAID, w, lane);
}

// How many chunks from token t on, of so many tokens there, forget what comes from the right, or -1. By all warps.
INLINE int forgotten_behind(const Args& a, int t, int there, int h, u32 base, int lane) {
  return forgotten_after(a, t, C, there / C, h, base, base + SAID + 16, lane);
}
#if MAPS
INLINE Forgets forgetting(const Args& a, int t, int next, int there, int beyond, int, int h, bool behind, u32 base, int lane) {
  const int found = uniform(forgotten_behind(a, t, there, h, base, lane));
  return {found, found >= 0 && behind ? uniform(forgotten_behind(a, next, beyond, h, base, lane)) : -1};
}
#endif

// How many chunks late a span begins, or -1: it waits. By all warps.
INLINE int late(const Args& a, const Span& x, int s, int h, u32 base, int lane) {
  if (x.last) return 0;
  const int behind = piece_end(a, x) - x.end;
  int found = forgotten_behind(a, x.end, behind, h, base, lane);
  if (found < 0 && !a.given && behind <= BACK * C) found = (behind + C - 1) / C;  // begins with the piece's end
  if (!a.given && threadIdx.x == 0) store_release(decided(a, s, h), found < 0 ? 2 : 1);
  return uniform(found);
}

extern "C" __global__ void __launch_bounds__(384, 1) gla_backward(const __grid_constant__ BackArgs b) {
  extern __shared__ __align__(1024) char smem[];
  const Args& a = b.a;
  const u32 base = (smem_addr(smem) + 1023) & ~1023u;
  const int tid = threadIdx.x;
  if (tid == 0) {
    for (int i = 0; i < SLOTS; i++) {
      bar_init(base + BARS + i * 16, 1);
      bar_init(base + BARS + i * 16 + 8, 8);
    }
    bar_init(base + BARS_S, 1);
    bar_init(base + BARS_S + 8, 8);
    bars_ready();
  }
  for (int i = tid; i < SLOTS * 128; i += 384) sts32(base + SUMS + i * 4, 0);
  const int w = uniform((tid >> 5) & 7), lane = tid & 31;
#if MAPS
  const Part p = part_of(a, false, base, lane);
  if (p.x.end <= p.x.begin) return;
  __syncthreads();  // what found the part lay where slots are
  if (uniform(tid >> 8)) {
    registers_down<104>();
    if (w < SLOTS) produce(b, p.x, p.h, p.x.end, p.r.n, 1, p.r.n, base, w, lane);
  } else {
    registers_up<200>();
    float S[16][4];
    begin_with(S, 0, w, lane);
    walk(S, b, p.h, p.x.begin, p.x.end, 0, p.r.n, p.r.n, base, w, lane);
    put_state(S, a.states + ((u64)p.s * a.H + p.h) * (D * D), w, lane);
  }
#else
  const Choice mine = chosen(a, false, base + SAID, [&](int s, const Span& x, int h) { return late(a, x, s, h, base, lane); });
  const int s = mine.s, h = mine.h, behind = mine.back;
  const Span x = span_of(a, s);
  if (x.end <= x.begin) return;
  const int lim = piece_end(a, x);
  const bool known = x.last || (!a.given && behind >= 0 && behind * C >= lim - x.end);
  const int own = uniform((x.end - x.begin + C - 1) / C), n = own + max(behind, 0);
  const int passes = uniform(behind < 0 && !x.first && !a.given ? 2 : 1), first = n * passes - own;
  __syncthreads();  // SUMS are zero
  if (uniform(tid >> 8)) {
    registers_down<104>();
    if (w < SLOTS) produce(b, x, h, lim, n, passes, first, base, w, lane);
    else fetch(b, x, h, own, base, lane);
  } else {
    registers_up<200>();
    consume(b, x, s, h, n, first, known, behind < 0, passes, base, w, lane);
  }
#endif
}
