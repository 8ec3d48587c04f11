// The gradients of a transition that is diagonal plus low rank, in one launch, from what dplr_forward.cu with KEEP left: the state
// S before each chunk, Y, the pairs P_k, P_b and L, and M.
//
// With the names of dplr_forward.cu, and from right to left the gradient dS of the state after a chunk, S' = e^(GL/2) S and dS' =
// e^(GL/2) dS:
//
//   dY = bi dS' + P_b^T dO      Z = M^T dY      dV = ki dS' + P_k^T dO + L^T Z
//   dP_k = tril(dO V^T)   dP_b = tril(dO Y^T)   dL = tril(Z V^T, -1)   dN = tril(Z Y^T, -1)
//   Q = dO S'^T + dP_k ki + dP_b bi         A = Z S'^T + dL ki + dN bi
//   K = V dS'^T + dP_k^T qi + dL^T ai       B = Y dS'^T + dP_b^T qi + dN^T ai
//   dq = scale e^(G - GL/2) Q     da = e^(G' - GL/2) A     dk = e^(GL/2 - G) K     db = e^(GL/2 - G) B
//   dS <- e^(GL/2) (dS' + qi^T dO + ai^T Z)
//
// The gradient of g is the sum over a chunk's tokens from its own on of qi Q - ki K - bi B, over those behind it of ai A, and
// over all of ki (V dS'^T) + bi (Y dS'^T), and S' dS'.
//
// A program works through a span of one head from its end to its begin: two pairs of warps make a chunk's factors
// and find its pairs' gradients each, eight carry dS transposed, [V, K]. A span that is not a piece's last starts some chunks late from
// zero where those behind it leave nothing of the identity, or waits for the one after it, as in the forward.
#include "dplr.cuh"

#define SLOTS 2 // chunks under way, one a pair of warps that makes factors
// A slot: a and q, then ai and qi; k and b, then ki and bi; dO and Z; V and Y; P_k, P_b, L, M, then their gradients; g, then -G
#define SLOT 81920
#define OFF_A 0
#define OFF_K 16384
#define OFF_X 32768
#define OFF_W 49152
#define OFF_P 65536
#define OFF_G 73728
#define STATE (SLOTS * SLOT)        // the state before a chunk, [K half][V row][64 channels]
#define ADJOINT (STATE + 32768)     // dS' the same way
#define ENDS (ADJOINT + 32768)      // of each slot: e^(GL/2)
#define NUMBERS (ENDS + SLOTS * 512) // of each slot: see `Told`
#define LARGEST (NUMBERS + SLOTS * 48) // of each slot: see `say_largest`
#define AGREED (LARGEST + SLOTS * 64) // twice 32 bytes, see `agree`
#define BARS (AGREED + 64)          // of each slot: full, empty, Z there, pairs' gradients there
#define BARS_S (BARS + SLOTS * 32)  // of the state: full, empty
#define OPEN (BARS_S + 16)          // barriers: the last of several passes may begin; it is known whether the span waits
#define SAID (OPEN + 16)            // the ticket, what `choose` takes again, whether the span starts early, one of `leave`
#define STEPS 700                   // of -G, by log2, in 16 bits

// What a maker says of a chunk: powers of its tiles, of v and of dO, the most by which e^M makes dS larger, a bound of what q and dO
// add to it; and what the forward has said of it
struct Told { int a, q, k, b, v, o, grow, add; Kept kept; };
INLINE Told told(u32 at) {
  u32 x[12];
#pragma unroll
  for (int i = 0; i < 3; i++) lds128(x + 4 * i, at + 16 * i);
  return {(int)x[0], (int)x[1], (int)x[2], (int)x[3], (int)x[4], (int)x[5], (int)x[6], (int)x[7], {(int)x[8], (int)x[9], (int)x[10]}};
}

struct BackArgs {
  Args a;          // S0: the gradients of the states that leave; S1: those of the states that enter
  const u16* dout; // [tokens, H, 128]
  u16 *dq, *dk, *dv, *da, *db, *dg; // [tokens, H, 128]
};

// -- what needs a chunk's own tokens alone: two warps a chunk, each 16 of them -----------------------------------------------------------

// Ask for the rows of this half's 16 tokens of those from t on; those from `end` on are zero, dO where it is not `wanted`; V and Y for the span's `own`.
INLINE void load_chunk(const BackArgs& b, int t, int end, int chunk, int h, bool wanted, bool own, u32 numbers, u32 at, int half,
                       int lane) {
  const Args& a = b.a;
  const int hk = h / (a.H / a.HK), row = half * (C / 2) + (lane >> 4), j = lane & 15, live = end - t - row;
  const u64 sk = (u64)a.HK * (D * 2), sv = (u64)a.H * (D * 2);
  const char* q = (const char*)a.q + (u64)(t + row) * sk + hk * (D * 2) + j * 16;
  const u64 from_v = (u64)(t + row) * sv + h * (D * 2) + j * 16;
  const u64 to_k = (const char*)a.k - (const char*)a.q;
#pragma unroll 2
  for (int i = 0; i < 8; i++) {
    const int r = 2 * i + row;
    const bool ok = 2 * i < live;
    const char* from = ok ? q : (const char*)a.q;
    const u64 at_v = ok ? from_v + i * 2 * sv : 0;
    const u32 place = at + both_place(r, j);
    cp16(place + OFF_A + SECOND, from, ok);
    cp16(place + OFF_K, from + to_k, ok);
    cp16(place + OFF_A, (const char*)a.a + at_v, ok);
    cp16(place + OFF_K + SECOND, (const char*)a.b + at_v, ok);
    cp16(place + OFF_X, (const char*)b.dout + at_v, ok && wanted);
    cp16(place + OFF_W, (const char*)a.v + at_v, ok && own);
    cp16(at + OFF_G + r * 256 + j * 16, (const char*)a.g + at_v, ok);
    q += 2 * sk;
  }
  const u64 kept = kept_at(a, chunk, h);
  const char* pairs = (const char*)a.kept_P + kept * PAIRS + lane * 16;
  if (half == 0 && lane == 0) cp16(numbers + 32, pairs + 8 * C * C, true);
#pragma unroll 2
  for (int i = half; i < 16; i += 2) cp16(at + OFF_P + i * 512 + lane * 16, pairs + i * 512, true);
  if (!own) return;
  const char* y = (const char*)(a.kept_Y + kept * (C * D)) + lane * 16;
#pragma unroll 2
  for (int i = half; i < 16; i += 2) cp16(at + OFF_W + SECOND + (i >> 3) * BOTH + (i & 7) * 512 + lane * 16, y + i * 512, true);
}

// The tiles of a chunk in fp16, of v where the span's `own`
INLINE void make_chunk(float scale, bool own, u32 ends, u32 numbers, u32 said, u32 at, int pair, int half, int lane) {
  say_largest<6>({{at + OFF_A, at + OFF_A + SECOND, at + OFF_K, at + OFF_K + SECOND, at + OFF_X, at + OFF_W},
                  {BOTH, BOTH, BOTH, BOTH, BOTH, BOTH}}, said, half, lane);
  between_two(pair);
  const Powers by = powers(scale, said);
  const int o = room(said, 4) + 3, v = own ? room(said, 5) + 3 : 0;
  float GL[4], G[4], E[4];
  const int grow = half_decay(GL, G, E, at + OFF_G, half, lane);
  to_halves<8>(at + OFF_X + half * 2048, power(o), lane, BOTH);
  if (own) to_halves<8>(at + OFF_W + half * 2048, power(v), lane, BOTH);
  if (half == 0) {
    sts128(ends + lane * 16, E);
    if (lane == 0) {
      sts64(numbers, by.a, by.q);
      sts64(numbers + 8, by.k, by.b);
      sts64(numbers + 16, v, o);
      sts64(numbers + 24, grow, added(said, 1, 4, by.q + o));
    }
  }
  between_two(pair);  // gates are read
  make_factors<STEPS>(GL, G, by, scale, at + OFF_A, at + OFF_K, at + OFF_G, half * (C / 2), lane);
}

// -- and their pairs' gradients, and states on their way in ----------------------------------------------------------

// Rows 16 m to 16 m + 15 of products of dO and Z with V and Y
INLINE void pair_gradients(int m, u32 at, int lane) {
  const int ra = (lane & 7) + (((lane >> 3) & 1) << 3), ca = lane >> 4;
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1;
#pragma unroll 1
  for (int which = 0; which < 4; which++) {  // dP_k, dP_b, dL, dN
    const u32 left = at + OFF_X + (which >> 1) * SECOND, right = at + OFF_W + (which & 1) * SECOND;
    float P[4][4] = {};
#pragma unroll
    for (int ks = 0; ks < 8; ks++) {
      u32 x[4], w[4];
      ldm(x, left + both_place(16 * m + ra, 2 * ks + ca));
      ldm(w, right + both_place(rb, 2 * ks + cb));
      mma<true>(P[0], x, w[0], w[1]); mma<true>(P[1], x, w[2], w[3]);
      if (m) {
        ldm(w, right + both_place(16 + rb, 2 * ks + cb));
        mma<true>(P[2], x, w[0], w[1]); mma<true>(P[3], x, w[2], w[3]);
      }
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int i = m * 16 + e * 8 + (lane >> 2), last = which < 2 ? i : i - 1;
#pragma unroll
      for (int nt = 0; nt < 4; nt++) {
        if (nt >= 2 + 2 * m) continue;
        const int j = nt * 8 + 2 * (lane & 3);
        const float* y = &P[nt][2 * e];
        sts32(at + OFF_P + which * 2048 + pair_place(i, nt) + (lane & 3) * 4,
              pack<true>(j <= last ? y[0] : 0.f, j + 1 <= last ? y[1] : 0.f));
      }
    }
  }
}

// Ask for the state of the i-th chunk of the span's own, once nobody reads the one before it.
INLINE void fetch(const BackArgs& b, int chunk, int i, int h, u32 base, int lane) {
  const u32 bar = base + BARS_S;
  if (i) bar_wait(bar + 8, (i - 1) & 1);
  if (lane) return;
  bar_expect(bar, 32768);
  copy_in(base + STATE, b.a.kept_S + kept_at(b.a, chunk, h) * (D * D), 32768, bar);
}

// The chunks of a span, the last first: those behind it, if it may begin `early`, and then those again and its own n, or if it waits
// these in as many `passes`, the second of three without dO.
INLINE void produce(const BackArgs& b, const Span& x, int h, int n, int early, int passes, u32 base, int w, int lane) {
  const int pair = w >> 1, half = w & 1, lim = piece_end(b.a, x);
  const u32 at = base + pair * SLOT, full = base + BARS + pair * 32, numbers = base + NUMBERS + pair * 48;
  bool found = false;
  int of_Z = 0;  // this pair's chunks of the span's own
  if (w == 0) fetch(b, x.chunk + n - 1, 0, h, base, lane);
  for (int c = pair;; c += SLOTS) {
    if (early && c >= early && c < early + SLOTS) {
      bar_wait(base + OPEN + 8, 0);
      found = lds32(base + SAID + 8);
    }
    const Turn now = turn(c, early, found, n, passes);
    if (!now.live) break;
    if (c >= SLOTS) bar_wait(full + 8, (c / SLOTS - 1) & 1);
    const int m = n - 1 - now.m;
    if (now.pass == 2) bar_wait(base + OPEN, 0);
    load_chunk(b, x.begin + m * C, lim, x.chunk + m, h, now.values, now.own, numbers, at, half, lane);
    cp_wait();
    __syncwarp();
    make_chunk(b.a.scale, now.own, base + ENDS + pair * 512, numbers, base + LARGEST + pair * 64, at, pair, half, lane);
    proxy_fence();
    __syncwarp();
    if (lane == 0) bar_arrive(full);
    if (!now.own) continue;
    bar_wait(full + 16, of_Z++ & 1);
    pair_gradients(half, at, lane);
    __syncwarp();
    if (lane == 0) bar_arrive(full + 24);
    if (half == 0 && m) fetch(b, x.chunk + m - 1, n - m, h, base, lane);
  }
}

// -- dS, from chunk to chunk: 16 of its rows, [V, K], a warp; and the gradients of 16 channels of K ------------------

// Sums over tokens to the right and including of x, and of y over those to the right alone: of tokens 8 i + 2 t and one more, i of
// two, of lane t of four. `later`: of the tokens behind these, and then of these too
INLINE void sum_from_right(float (&x)[4], const float (&y)[4], float& later, int t) {
#pragma unroll
  for (int i = 1; i >= 0; i--) {
    const float mine = x[2 * i] + x[2 * i + 1] + y[2 * i] + y[2 * i + 1];
    float right = 0.f, all = mine;
#pragma unroll
    for (int m = 1; m < 4; m++) {
      const float z = __shfl_down_sync(~0u, mine, m, 4);
      if (t + m < 4) right += z;
    }
    all += __shfl_xor_sync(~0u, all, 1);
    all += __shfl_xor_sync(~0u, all, 2);
    const float behind = right + later;
    x[2 * i] += x[2 * i + 1] + y[2 * i + 1] + behind;
    x[2 * i + 1] += behind;
    later += all;
  }
}

INLINE void multiply(float (&x)[32], float by) {
#pragma unroll
  for (int i = 0; i < 32; i++) x[i] *= by;
}

// The gradients of q, a, k, b and g of 16 channels of K, from chunk kc on. Y: dO S'^T, then Z S'^T; Z: V dS'^T, then Y dS'^T, of Z
// times 2^z and dS' times 2^held.
INLINE void key_gradients(const BackArgs& b, float (&Y)[32], float (&Z)[32], const float (&trace)[2], const Told& n, int z, int held,
                          u32 at, u32 ends, int kc, int t, int end, int h, int lane) {
  const Args& a = b.a;
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1;
  const int rt = (lane & 7) + (((lane >> 3) & 1) << 3), ct = lane >> 4, r = lane >> 2, tq = lane & 3;
  const int v = n.v, y = n.kept.y;
  float ended[2], later[2] = {0.f, 0.f};
  {
    u32 k[2][4], bi[2][4];
#pragma unroll
    for (int m = 0; m < 2; m++) {
      ldm_trans(k[m], at + OFF_K + both_place(16 * m + rb, kc + cb));
      ldm_trans(bi[m], at + OFF_K + both_place(32 + 16 * m + rb, kc + cb));
    }
    const float of_k = power(-n.k - held - v), of_b = power(-n.b - held - y), of_trace = power(-n.kept.s - held);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      float x[2] = {0.f, 0.f};
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int j = (i >> 1) * 4 + 2 * e + (i & 1), f = 2 * ((i >> 1) & 1) + e;
        const u32 kx = k[i >> 2][f], bx = bi[i >> 2][f];
        x[0] += (i & 1 ? hi<true>(kx) : lo<true>(kx)) * Z[j];
        x[1] += (i & 1 ? hi<true>(bx) : lo<true>(bx)) * Z[16 + j];
      }
      ended[e] = x[0] * of_k + x[1] * of_b;
      ended[e] += __shfl_xor_sync(~0u, ended[e], 1);
      ended[e] += __shfl_xor_sync(~0u, ended[e], 2);
      ended[e] = fmaf(of_trace, trace[e], ended[e]);
    }
    multiply(Y, power(v + n.k - n.kept.s));
    add_pairs<true>(Y, k, at + OFF_P, rb, cb);
    add_pairs<true>(Y + 16, k, at + OFF_P + 4096, rb, cb);
    multiply(Y, power(y + n.b - v - n.k));
    add_pairs<true>(Y, bi, at + OFF_P + 2048, rb, cb);
    add_pairs<true>(Y + 16, bi, at + OFF_P + 6144, rb, cb);
  }
  {
    u32 q[2][4], ai[2][4];
#pragma unroll
    for (int m = 0; m < 2; m++) {
      ldm_trans(ai[m], at + OFF_A + both_place(16 * m + rb, kc + cb));
      ldm_trans(q[m], at + OFF_A + both_place(32 + 16 * m + rb, kc + cb));
    }
    multiply(Z, power(n.o + n.q - held));
    add_pairs_back<true>(Z, q, at + OFF_P, rt, ct);
    add_pairs_back<true>(Z + 16, q, at + OFF_P + 2048, rt, ct);
    multiply(Z, power(z + n.a - n.o - n.q));
    add_pairs_back<true>(Z, ai, at + OFF_P + 4096, rt, ct);
    add_pairs_back<true>(Z + 16, ai, at + OFF_P + 6144, rt, ct);
  }
  const float of_Q = power(-n.o - y - n.b), of_A = power(-z - y - n.b), of_K = power(-v - z - n.a), of_B = power(-y - z - n.a);
  const float ia = power(-n.a), iq = power(-n.q), ik = power(-n.k), ib = power(-n.b);
#pragma unroll
  for (int m = 1; m >= 0; m--) {  // tokens 16 m to 16 m + 15: this warp alone reads its channels of these tiles now
    u32 x[4][4], dg[4];  // ai, qi, ki, bi
#pragma unroll
    for (int l = 0; l < 4; l++) ldm_trans(x[l], at + (l >> 1) * OFF_K + both_place((l & 1) * 32 + 16 * m + rb, kc + cb));
#pragma unroll
    for (int e = 0; e < 2; e++) {  // rows r and r + 8
      const int channel = kc * 8 + r + 8 * e;
      const float M = lg2(lds(ends + channel * 4));
      float own[4], behind[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int nt = 2 * m + (i >> 1), j = nt * 4 + 2 * e + (i & 1), token = nt * 8 + 2 * tq + (i & 1), f = 2 * (i >> 1) + e;
        auto of = [&](int l) { return i & 1 ? hi<true>(x[l][f]) : lo<true>(x[l][f]); };
        auto G_of = [&](int token) {
          const u32 two = lds32(at + OFF_G + token * 256 + (channel >> 1) * 4);
          return (float)(channel & 1 ? two >> 16 : two & 0xffffu) * (-1.f / STEPS);
        };
        const float G = G_of(token), before = token ? G_of(token - 1) : 0.f, down = ex2(M - G);
        Y[j] *= of_Q; Y[16 + j] *= of_A; Z[j] *= of_K; Z[16 + j] *= of_B;
        own[i] = of(1) * iq * Y[j] - of(2) * ik * Z[j] - of(3) * ib * Z[16 + j];
        behind[i] = of(0) * ia * Y[16 + j];
        Y[j] *= ex2(G - M) * a.scale;
        Y[16 + j] *= ex2(before - M);
        Z[j] *= down;
        Z[16 + j] *= down;
      }
      sum_from_right(own, behind, later[e], tq);
#pragma unroll
      for (int i = 0; i < 2; i++) dg[2 * i + e] = pack(own[2 * i] + ended[e], own[2 * i + 1] + ended[e]);
    }
    __syncwarp();
#pragma unroll
    for (int l = 0; l < 4; l++) {  // da, dq, dk, db
      const float* from = (l == 0 ? Y + 16 : l == 1 ? Y : l == 2 ? Z : Z + 16) + 8 * m;
      const u32 f[4] = {pack(from[0], from[1]), pack(from[2], from[3]), pack(from[4], from[5]), pack(from[6], from[7])};
      stm_trans(f, at + (l >> 1) * OFF_K + both_place((l & 1) * 32 + 16 * m + rb, kc + cb));
    }
    stm_trans(dg, at + OFF_G + (16 * m + rb) * 256 + (kc + cb) * 16);
    __syncwarp();
    const int row = 16 * m + (lane >> 1), j = kc + (lane & 1);
    const u64 to = ((u64)(t + row) * a.H + h) * D + j * 8;
    if (t + row < end) {
#pragma unroll
      for (int l = 0; l < 5; l++) {
        u32 z[4];
        lds128(z, l == 4 ? at + OFF_G + row * 256 + j * 16 : at + (l >> 1) * OFF_K + both_place((l & 1) * 32 + row, j));
        stg128((l == 0 ? b.da : l == 1 ? b.dq : l == 2 ? b.dk : l == 3 ? b.db : b.dg) + to, z);
      }
    }
  }
}

// Z of a chunk times 2^(what is returned), from X, on its way to ki dS' and bi dS', and dO, times what `n` says and 2^held
INLINE int find_Z(u32 (&z)[2][4], float (&X)[32], const u32 (&dout)[2][4], const Told& n, int held, bool all, u32 pairs, u32 at, int w,
                  int lane) {
  const int rt = (lane & 7) + (((lane >> 3) & 1) << 3), ct = lane >> 4;
  float U[16] = {};
  add_pairs_back<true>(U, dout, pairs + 2048, rt, ct);
  wg_wait(X);
  const float in = power(n.q + n.o - held);
#pragma unroll
  for (int j = 0; j < 16; j++) U[j] = fmaf(X[16 + j], in, U[j]);
  const int by = min(3 - size_in_warp(U), 60);
  const float f = power(by);
#pragma unroll
  for (int j = 0; j < 8; j++) z[j >> 2][j & 3] = pack<true>(U[2 * j] * f, U[2 * j + 1] * f);
#pragma unroll
  for (int j = 0; j < 16; j++) U[j] = 0.f;
  add_pairs_back<true>(U, z, pairs + 6144, rt, ct);
  const int is = n.kept.m + by + n.q + n.b + n.o;
  const int to = min(3 - agree(size_in_warp(U) - is, all, at, w, lane), n.q + n.o - n.a + 60);
  const float g = power(to - is);
#pragma unroll
  for (int j = 0; j < 8; j++) z[j >> 2][j & 3] = pack<true>(U[2 * j] * g, U[2 * j + 1] * g);
  return to;
}

// Over chunks c0 to `stop` (not included) of those under way, the last of which begins at token `begin`; those before `first`
// only bring dS.
INLINE void walk(float (&S)[16][4], const BackArgs& b, int h, int begin, int end, int c0, int stop, int first, u32 base, int w,
                 int lane) {
  const Args& a = b.a;
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1;
  const int rt = (lane & 7) + (((lane >> 3) & 1) << 3), ct = lane >> 4;
  const int tile_row = w * 16 + rt, kc = (w >> 2) * 8 + (w & 3) * 2;
  const u32 adjoint = base + ADJOINT, state = base + STATE, bar_s = base + BARS_S;
  int held = 0;  // dS is, times 2^held
  for (int c = c0; c < stop; c++) {
    const int slot = c % SLOTS, t = begin + (stop - 1 - c) * C, i = c - first;
    const u32 at = base + slot * SLOT, bars = base + BARS + slot * 32, ends = base + ENDS + slot * 512;
    const bool own = uniform(c >= first);
    bar_wait(bars, (c / SLOTS) & 1);
    const Told n = told(base + NUMBERS + slot * 48);
    held = begin_chunk(S, held, n.grow, n.add, own, ends, base + AGREED, w, lane);
    const int was = held;
    int by_z;
    u32 dout[2][4], z[2][4], dv[2][4];
    {
      float X[32];
      {
        u32 f[8][4];
        as_operand<true>(f, S);
        wg_fence();
#pragma unroll
        for (int ks = 0; ks < 8; ks++)
          wgmma64<true>(X, f[ks], descriptor(at + OFF_K + (ks >> 2) * BOTH, 16, 1024) + (ks & 3) * 2, ks > 0);
        wg_commit();
        if (own) {
#pragma unroll
          for (int ks = 0; ks < 8; ks++) stm(f[ks], adjoint + state_place(tile_row, 2 * ks + ct));
        }
      }
#pragma unroll
      for (int m = 0; m < 2; m++) ldm_trans(dout[m], at + OFF_X + both_place(16 * m + rb, w * 2 + cb));
      by_z = find_Z(z, X, dout, n, held, own, at + OFF_P, base + AGREED + 32, w, lane);
      if (own) {
        const float to_o = power(n.q + n.o - was), to_z = power(n.a + by_z - n.q - n.o), out = power(-n.a - n.k - by_z);
#pragma unroll
        for (int j = 0; j < 16; j++) X[j] *= to_o;
        add_pairs_back<true>(X, dout, at + OFF_P, rt, ct);
#pragma unroll
        for (int j = 0; j < 16; j++) X[j] *= to_z;
        add_pairs_back<true>(X, z, at + OFF_P + 4096, rt, ct);
#pragma unroll
        for (int j = 0; j < 8; j++) dv[j >> 2][j & 3] = pack(X[2 * j] * out, X[2 * j + 1] * out);
#pragma unroll
        for (int m = 0; m < 2; m++) stm_trans(z[m], at + OFF_X + both_place(32 + 16 * m + rb, w * 2 + cb));
        proxy_fence();
        __syncwarp();
        if (lane == 0) bar_arrive(bars + 16);  // pairs are read, too
      }
    }
    const int of_z = fitting(S, held, n.a + by_z);
    times(z[0], power(of_z)); times(z[1], power(of_z));
    const float by_o = power(min(held - n.q - n.o, 11));  // at most 3, but where all of dO or q are 0
    times(dout[0], by_o); times(dout[1], by_o);
    if (own) {
      between_warps();  // Z and dS of all warps are there
      bar_wait(bar_s, i & 1);
    }
    float Y[32], Z[32];
    wg_fence();
    wgmma128<true>(S, dout[0], descriptor(at + OFF_A + SECOND, BOTH, 1024));
    wgmma128<true>(S, dout[1], descriptor(at + OFF_A + SECOND + 2048, BOTH, 1024));
    wgmma128<true>(S, z[0], descriptor(at + OFF_A, BOTH, 1024));
    wgmma128<true>(S, z[1], descriptor(at + OFF_A + 2048, BOTH, 1024));
    wg_commit();
    if (own) {
      const u64 sd = descriptor(state + (w >> 2) * 16384, 16, 1024), ad = descriptor(adjoint + (w >> 2) * 16384, 16, 1024);
      wg_fence();
#pragma unroll
      for (int ks = 0; ks < 8; ks++)
        wgmma64<true>(Y, sd + ks * 128, descriptor(at + OFF_X + (ks >> 2) * BOTH, 16, 1024) + (ks & 3) * 2, ks > 0);
#pragma unroll
      for (int ks = 0; ks < 8; ks++)
        wgmma64<true>(Z, ad + ks * 128, descriptor(at + OFF_W + (ks >> 2) * BOTH, 16, 1024) + (ks & 3) * 2, ks > 0);
      wg_commit();
      float trace[2];
      traces<true>(trace, state, adjoint, kc, lane);
      wg_wait(S);
      wg_settled(Y);
      wg_settled(Z);
      bar_wait(bars + 24, ((c - (first + (slot - first % SLOTS + SLOTS) % SLOTS)) / SLOTS) & 1);
      between_warps();  // nobody reads tiles of all channels any more
      if (lane == 0) bar_arrive(bar_s + 8);
#pragma unroll
      for (int m = 0; m < 2; m++) stm_trans(dv[m], at + OFF_W + both_place(16 * m + rb, w * 2 + cb));
      __syncwarp();
#pragma unroll
      for (int m = 0; m < 2; m++) {
        const int row = 16 * m + (lane >> 1), j = w * 2 + (lane & 1);
        u32 x[4];
        lds128(x, at + OFF_W + both_place(row, j));
        if (t + row < end) stg128(b.dv + ((u64)(t + row) * a.H + h) * D + j * 8, x);
      }
      key_gradients(b, Y, Z, trace, n, by_z, was, at, ends, kc, t, end, h, lane);
    } else {
      wg_wait(S);
    }
    decay(S, ends, lane);
    __syncwarp();
    if (lane == 0) bar_arrive(bars + 8);
  }
  multiply(S, power(-held));
}

INLINE void consume(const BackArgs& b, const Span& x, int s, int h, int n, int early, int passes, u32 base, int w, int lane) {
  const Args& a = b.a;
  float S[16][4];
  int c = 0;  // of those under way
  bool found = false;
#pragma unroll 1
  for (int pass = early ? -2 : 0; pass < passes; pass++) {  // below 0: over the chunks behind the span, from the identity, from zero
    const bool last = pass == passes - 1;
    const int chunks = pass < 0 ? early : n;
    if (pass == -2) {
      identity(S, w, lane);
    } else if (pass == 0 && !found) {
      if (passes > 1 || x.last)
        begin_with(S, x.last && a.S0 ? a.S0 + ((u64)x.piece * a.H + h) * (D * D) : 0, w, lane);
      else
        take(S, a, s + 1, h, w, lane);
    }
    walk(S, b, h, uniform(x.begin), uniform(x.end), c, c + chunks, last ? c : c + chunks, base, w, lane);
    c += chunks;
    if (pass == -2) {
      found = forgotten(S, a, s, h, base + AGREED, base + SAID + 8, base + OPEN + 8, w, lane);
      zero(S);
      if (!found) pass = -1;
    } else if (pass == -1) {
      pass = passes - 2;
    } else if (!last) {
      between_passes(S, a, false, pass, s, h, base, base + OPEN, w, lane);
    }
  }
  if (passes == 1 || found) leave(S, a, x.piece, x.first, s, s - 1, h, base + SAID, w, lane);
}

extern "C" __global__ void __launch_bounds__(384, 1) dplr_backward(const __grid_constant__ BackArgs b) {
  extern __shared__ __align__(1024) char smem[];
  const Args& a = b.a;
  const u32 base = (smem_addr(smem) + 1023) & ~1023u;
  const int tid = threadIdx.x;
  if (tid == 0) {
    for (int i = 0; i < SLOTS; i++) {
      bar_init(base + BARS + i * 32, 2);
      bar_init(base + BARS + i * 32 + 8, 8);
      bar_init(base + BARS + i * 32 + 16, 8);
      bar_init(base + BARS + i * 32 + 24, 2);
    }
    bar_init(base + BARS_S, 1);
    bar_init(base + BARS_S + 8, 8);
    bar_init(base + OPEN, 1);
    bar_init(base + OPEN + 8, 1);
    bars_ready();
  }
  const int w = uniform((tid >> 5) & 7), lane = tid & 31;
  const Choice mine = choose(a, false, false, base + SAID, [&](int s, const Span& x, int h) { return waiting(x.last); });
  const int s = mine.s, h = mine.h;
  const Span x = span_of(a, s);
  if (x.end <= x.begin) return;
  const int n = uniform((x.end - x.begin + C - 1) / C), passes = x.first || x.last ? 1 : 3;
  const int early = uniform(x.last ? 0 : early_by(n, (piece_end(a, x) - x.end) / C));
  if (uniform(tid >> 8)) {
    registers_down<104>();
    if (w < 2 * SLOTS) produce(b, x, h, n, early, passes, base, w, lane);
  } else {
    registers_up<200>();
    consume(b, x, s, h, n, early, passes, base, w, lane);
  }
}
