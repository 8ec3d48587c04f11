// GLA's gradients in one launch, from what gla_forward.cu with KEEP left: the state S before each chunk, and P.
//
// With the names of gla_forward.cu, and from right to left the gradient dS of the state after a chunk:
//
//   dV = kd dS + P^T dO        dP = tril(dO V^T)
//   Y = dO S^T + e^-GL dP kd   W = V dS^T + e^-GL dP^T qg
//   dq = scale e^G Y           dk = e^(GL - G) W
//   dS <- e^GL dS + qg^T dO
//
// The gradient of g is the sum over a chunk's tokens from its own on of qg Y - kd W, and of kd (V dS^T) over all of them, and
// e^GL S dS. Where e^-GL would not fit the pairs' parts are found one by one, from q and k and factors of at most 1.
//
// A program works through a span of one head from its end to its begin: three warps make the factors and dP of a chunk
// each, one fetches states, eight carry dS transposed, [V, K]. A span that is not a piece's last starts up to 24 chunks late
// from zero where those forget what comes from the right, or with the piece's end; else it finds what its tokens leave of no
// dS, waits for the span after it, hands its own on, and goes over its tokens once more.
#include "gla.cuh"

#define SLOTS 3 // chunks under way, one a warp that makes factors
// A slot: q, k, then qg, kd, and at last dq, dk; dO; v, then dV; g, then G by log2, then dg; P; dP; e^GL
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
#define HARD (BARS_S + 16)          // of each slot: whether pairs go one by one
#define SAID (HARD + 16)            // the ticket; three words, of which `leave` takes the last; masks

struct BackArgs {
  Args a;          // S0: the gradients of the states that leave; S1: those of the states that enter
  const u16* dout; // [tokens, H, 128]
  u16 *dq, *dk, *dv; // [tokens, H, 128]
  void* dg;        // like g
};

INLINE int piece_end(const Args& a, const Span& x) { return a.table ? a.cu[x.piece + 1] : (x.piece + 1) * a.T; }

// -- what needs a chunk's own tokens alone: a warp a chunk -----------------------------------------------------------

// Ask for the rows of 32 tokens from t on; those from `end` on are zero. v and P only for the span's `own`.
INLINE void load_chunk(const BackArgs& b, int t, int end, int chunk, int h, bool own, u32 at, int lane) {
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
    cp16(place + OFF_K, from + to_k, ok);
    cp16(place + OFF_X, from_o, ok);
    cp16(place + OFF_V, from_o + to_v, ok && own);
    q += 2 * sk; o += 2 * sv;
  }
  load_gates(a, t, end, h, at + OFF_G, ROW, lane);
  if (!own) return;
  const char* pairs = (const char*)(a.kept_P + kept_at(a, chunk, h) * (C * C)) + lane * 16;
#pragma unroll
  for (int i = 0; i < 4; i++) cp16(at + OFF_P + i * 512 + lane * 16, pairs + i * 512, true);
}

// qg and kd over q and k, G over g
INLINE void make_factors(const float (&GL)[4], float scale, u32 at, int lane) {
  const int chunk = lane >> 1;
  const u32 half = (lane & 1) * 8;
  float G[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
  for (int i0 = 0; i0 < C; i0 += GROUP) {
    float g[GROUP][4];
    u32 q[GROUP][2], k[GROUP][2];
#pragma unroll
    for (int l = 0; l < GROUP; l++) {
      gates(g[l], at + OFF_G + (i0 + l) * ROW, lane);
      lds64(q[l], at + OFF_Q + tile_place(i0 + l, chunk) + half);
      lds64(k[l], at + OFF_K + tile_place(i0 + l, chunk) + half);
    }
    __syncwarp();
#pragma unroll
    for (int l = 0; l < GROUP; l++) {
      const int i = i0 + l;
      float up[4], to_end[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        G[j] = fmaf(g[l][j], LOG2E, G[j]);
        up[j] = ex2(G[j]) * scale;
        to_end[j] = ex2(GL[j] - G[j]);
      }
      const u32 place = tile_place(i, chunk) + half;
      sts64(at + OFF_Q + place, pack(lo(q[l][0]) * up[0], hi(q[l][0]) * up[1]), pack(lo(q[l][1]) * up[2], hi(q[l][1]) * up[3]));
      sts64(at + OFF_K + place, pack(lo(k[l][0]) * to_end[0], hi(k[l][0]) * to_end[1]),
            pack(lo(k[l][1]) * to_end[2], hi(k[l][1]) * to_end[3]));
      sts128(at + OFF_G + i * ROW + lane * 16, G);
    }
  }
}

// dP
INLINE void pair_gradients(u32 at, int lane) {
  const int ra = (lane & 7) + (((lane >> 3) & 1) << 3), ca = lane >> 4;
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1;
  float P[6][4] = {};  // tiles of 8 columns: two of rows 0 to 15, four of rows 16 to 31
#pragma unroll
  for (int ks = 0; ks < 8; ks++) {
    u32 x[4], n[2][4];
    ldm(n[0], at + OFF_V + tile_place(rb, 2 * ks + cb));
    ldm(n[1], at + OFF_V + tile_place(16 + rb, 2 * ks + cb));
    ldm(x, at + OFF_X + tile_place(ra, 2 * ks + ca));
    mma(P[0], x, n[0][0], n[0][1]); mma(P[1], x, n[0][2], n[0][3]);
    ldm(x, at + OFF_X + tile_place(16 + ra, 2 * ks + ca));
#pragma unroll
    for (int j = 0; j < 2; j++) {
      mma(P[2 + 2 * j], x, n[j][0], n[j][1]); mma(P[3 + 2 * j], x, n[j][2], n[j][3]);
    }
  }
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int i = m * 16 + e * 8 + (lane >> 2);
#pragma unroll
      for (int nt = 0; nt < 2 + 2 * m; nt++) {
        const int j = nt * 8 + 2 * (lane & 3);
        const float* y = &P[2 * m + nt][2 * e];
        sts32(at + OFF_DP + pair_place(i, nt) + (lane & 3) * 4, pack(j <= i ? y[0] : 0.f, j + 1 <= i ? y[1] : 0.f));
      }
    }
}

// The chunks of `passes` over a span, n each, the last first. `first`: the first chunk whose gradients are wanted.
INLINE void produce(const BackArgs& b, const Span& x, int h, int lim, int n, int passes, int first, u32 base, int w, int lane) {
  const u32 at = base + w * SLOT, full = base + BARS + w * 16;
  float left[4] = {0.f, 0.f, 0.f, 0.f};
  for (int c = w; c < n * passes; c += SLOTS) {
    if (c >= SLOTS) bar_wait(full + 8, (c / SLOTS - 1) & 1);
    const int m = (c / n + 1) * n - 1 - c;
    const bool own = c >= first;
    load_chunk(b, x.begin + m * C, lim, x.chunk + m, h, own, at, lane);
    cp_wait();
    __syncwarp();
    float GL[4], E[4];
    const bool hard = chunk_decay(GL, at + OFF_G, ROW, lane);
    if (lane == 0) sts32(base + HARD + w * 4, hard);
    if (c < n * (passes - 1)) {
#pragma unroll
      for (int j = 0; j < 4; j++) left[j] += GL[j];
      sts128(base + SUMS + w * 512 + lane * 16, left);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) E[j] = ex2(GL[j]);
    sts128(at + OFF_E + lane * 16, E);
    make_factors(GL, b.a.scale, at, lane);
    if (own) pair_gradients(at, lane);
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

// sum_V S dS of 16 channels of K from chunk kc on: those of rows lane / 4 and 8 more
INLINE void traces(float (&out)[2], u32 state, u32 adjoint, int kc, int lane) {
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1;
  const int rt = (lane & 7) + (((lane >> 3) & 1) << 3), ct = lane >> 4, r = lane >> 2;
  float y[2][4] = {};
#pragma unroll
  for (int ks = 0; ks < 8; ks++) {
    u32 p[4], q[4];
    ldm_trans(p, state + state_place(ks * 16 + rb, kc + cb));
    ldm_trans(q, adjoint + state_place(ks * 16 + rt, kc + ct));
    mma(y[0], p, q[0], q[1]); mma(y[1], p, q[2], q[3]);
  }
  const int from = (lane & ~3) | (r >> 1);
  const float a0 = __shfl_sync(~0u, y[0][0], from), a1 = __shfl_sync(~0u, y[0][1], from);
  const float b0 = __shfl_sync(~0u, y[1][2], from), b1 = __shfl_sync(~0u, y[1][3], from);
  out[0] = r & 1 ? a1 : a0;
  out[1] = r & 1 ? b1 : b0;
}

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

// The gradients of q, k and g of 16 channels of K, from chunk kc on. Y: dO S^T; Z: V dS^T.
INLINE void key_gradients(const BackArgs& b, float (&Y)[16], float (&Z)[16], const float (&trace)[2], bool hard, u32 at, int kc,
                          int t, int end, int h, int lane) {
  const Args& a = b.a;
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1;
  const int rt = (lane & 7) + (((lane >> 3) & 1) << 3), ct = lane >> 4, r = lane >> 2, tq = lane & 3;
  u32 q[2][4], k[2][4];
#pragma unroll
  for (int m = 0; m < 2; m++) {
    ldm_trans(q[m], at + OFF_Q + tile_place(16 * m + rb, kc + cb));
    ldm_trans(k[m], at + OFF_K + tile_place(16 * m + rb, kc + cb));
  }
  float A[16] = {}, B[16] = {};
  if (hard) {
    hard_pairs(A, B, a, t, end, h, kc, at, lane);
  } else {
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int jb = 0; jb <= m; jb++) {
        u32 p[4];
        ldm(p, at + OFF_DP + pair_place(16 * m + rb, 2 * jb + cb));
        mma(A + 8 * m, k[jb], p[0], p[1]); mma(A + 8 * m + 4, k[jb], p[2], p[3]);
        ldm_trans(p, at + OFF_DP + pair_place(16 * m + rt, 2 * jb + ct));
        mma(B + 8 * jb, q[m], p[0], p[1]); mma(B + 8 * jb + 4, q[m], p[2], p[3]);
      }
  }
#pragma unroll
  for (int e = 0; e < 2; e++) {  // rows r and r + 8
    const int channel = kc * 8 + r + 8 * e;
    const float GL = lds(at + OFF_G + (C - 1) * ROW + channel * 4), inverse = hard ? 0.f : ex2(-GL);
    float dg[8], ended = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int nt = i >> 1, j = nt * 4 + 2 * e + (i & 1), token = nt * 8 + 2 * tq + (i & 1), f = 2 * (nt & 1) + e;
      const u32 qx = q[nt >> 1][f], kx = k[nt >> 1][f];
      const float qg = i & 1 ? hi(qx) : lo(qx), kd = i & 1 ? hi(kx) : lo(kx);
      const float G = lds(at + OFF_G + token * ROW + channel * 4);
      const float y = fmaf(inverse, A[j], Y[j]), z = fmaf(inverse, B[j], Z[j]);
      ended = fmaf(kd, Z[j], ended);
      dg[i] = qg * y - kd * z;
      Y[j] = fmaf(y, ex2(G) * a.scale, hard ? A[j] : 0.f);
      Z[j] = fmaf(z, ex2(GL - G), hard ? B[j] : 0.f);
      if (hard && t + token < end) {
        const u64 from = ((u64)(t + token) * a.HK + h / (a.H / a.HK)) * D + channel;
        dg[i] += bf16_of(a.q + from) * A[j] - bf16_of(a.k + from) * B[j];
      }
    }
    ended += __shfl_xor_sync(~0u, ended, 1);
    ended += __shfl_xor_sync(~0u, ended, 2);
    ended = fmaf(lds(at + OFF_E + channel * 4), trace[e], ended);
    sum_from_right(dg, tq);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int token = (i >> 1) * 8 + 2 * tq + (i & 1);
      dg[i] += ended;
#if GATE_BF16
      A[(i >> 1) * 4 + 2 * e + (i & 1)] = dg[i];
#else
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

// Over chunks c0 to `stop` (not included) of those under way, the last of which begins at token `begin`; those before `first`
// only bring dS.
INLINE void walk(float (&S)[16][4], const BackArgs& b, int h, int begin, int end, int c0, int stop, int first, u32 base, int w,
                 int lane) {
  const Args& a = b.a;
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1;
  const int rt = (lane & 7) + (((lane >> 3) & 1) << 3), ct = lane >> 4;
  const int tile_row = w * 16 + rt, kc = (w >> 2) * 8 + (w & 3) * 2;
  const u32 adjoint = base + ADJOINT, state = base + STATE, bar_s = base + BARS_S;
  for (int c = c0; c < stop; c++) {
    const int slot = c % SLOTS, t = begin + (stop - 1 - c) * C, i = c - first;
    const u32 at = base + slot * SLOT, bars = base + BARS + slot * 16;
    const bool own = uniform(c >= first);
    bar_wait(bars, (c / SLOTS) & 1);
    u32 dout[2][4], dv[2][4];
#pragma unroll
    for (int m = 0; m < 2; m++) ldm_trans(dout[m], at + OFF_X + tile_place(16 * m + rb, w * 2 + cb));
    if (own) {
      float X[16], L[16] = {};
      {
        u32 f[8][4];
#pragma unroll
        for (int ks = 0; ks < 8; ks++)
#pragma unroll
          for (int j = 0; j < 4; j++) f[ks][j] = pack(S[2 * ks + (j >> 1)][2 * (j & 1)], S[2 * ks + (j >> 1)][2 * (j & 1) + 1]);
        wg_fence();
#pragma unroll
        for (int ks = 0; ks < 8; ks++)
          wgmma32(X, f[ks], descriptor(at + OFF_K + (ks >> 2) * HALF, 16, 1024) + (ks & 3) * 2, ks > 0);
        wg_commit();
#pragma unroll
        for (int ks = 0; ks < 8; ks++) stm(f[ks], adjoint + state_place(tile_row, 2 * ks + ct));
      }
      u32 p[4];
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int jp = 0; jp <= m; jp++) {
          ldm_trans(p, at + OFF_P + pair_place(16 * m + rt, 2 * jp + ct));
          mma(L + 8 * jp, dout[m], p[0], p[1]); mma(L + 8 * jp + 4, dout[m], p[2], p[3]);
        }
      wg_wait(X);
#pragma unroll
      for (int j = 0; j < 8; j++) dv[j >> 2][j & 3] = pack(X[2 * j] + L[2 * j], X[2 * j + 1] + L[2 * j + 1]);
      proxy_fence();
      between_warps();  // dS of all warps is there
      bar_wait(bar_s, i & 1);
    }
    decay(S, at + OFF_E, lane);
    float Y[16], Z[16];
    wg_fence();
    wgmma128(S, dout[0], descriptor(at + OFF_Q, HALF, 1024));
    wgmma128(S, dout[1], descriptor(at + OFF_Q + 2048, HALF, 1024));
    wg_commit();
    if (own) {
      const u64 sd = descriptor(state + (w >> 2) * 16384, 16, 1024), ad = descriptor(adjoint + (w >> 2) * 16384, 16, 1024);
      wg_fence();
#pragma unroll
      for (int ks = 0; ks < 8; ks++)
        wgmma32(Y, sd + ks * 128, descriptor(at + OFF_X + (ks >> 2) * HALF, 16, 1024) + (ks & 3) * 2, ks > 0);
#pragma unroll
      for (int ks = 0; ks < 8; ks++)
        wgmma32(Z, ad + ks * 128, descriptor(at + OFF_V + (ks >> 2) * HALF, 16, 1024) + (ks & 3) * 2, ks > 0);
      wg_commit();
      float trace[2];
      traces(trace, state, adjoint, kc, lane);
      wg_wait(S);
      wg_settled(Y);
      wg_settled(Z);
      const bool hard = uniform(lds32(base + HARD + slot * 4));
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
        if (t + row < end) stg128(b.dv + ((u64)(t + row) * a.H + h) * D + j * 8, z);
      }
      key_gradients(b, Y, Z, trace, hard, at, kc, t, end, h, lane);
    } else {
      wg_wait(S);
    }
    __syncwarp();
    if (lane == 0) bar_arrive(bars + 8);
  }
}

INLINE void consume(const BackArgs& b, const Span& x, int s, int h, int n, int first, bool known, bool waits, int passes, u32 base,
                    int w, int lane) {
  const Args& a = b.a;
  float S[16][4];
  if (passes == 1 && waits)
    take(S, a, s + 1, h, w, lane);
  else
    begin_with(S, known && a.S0 ? a.S0 + ((u64)x.piece * a.H + h) * (D * D) : 0, w, lane);
#pragma unroll 1
  for (int pass = 0; pass < passes; pass++) {
    walk(S, b, h, uniform(x.begin), uniform(x.end), pass * n, (pass + 1) * n, min(first, (pass + 1) * n), base, w, lane);
    if (pass < passes - 1) hand_on(S, a, s + 1, s, h, base + SUMS, SLOTS, w, lane);
  }
  if (passes == 1) leave(S, a, x.piece, x.first, s, s - 1, h, base + SAID, w, lane);
}

// How many chunks late a span begins, or -1: it waits. By all warps.
INLINE int late(const Args& a, const Span& x, int s, int h, u32 base, int lane) {
  if (x.last) return 0;
  const int behind = piece_end(a, x) - x.end;
  int found = forgotten_after(a, x.end, C, behind / C, h, base, base + SAID + 16, lane);
  if (found < 0 && behind <= BACK * C) found = (behind + C - 1) / C;  // begins with the piece's end
  if (threadIdx.x == 0) store_release(decided(a, s, h), found < 0 ? 2 : 1);
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
  const Choice mine = choose(a, false, base + SAID, [&](int s, const Span& x, int h) { return late(a, x, s, h, base, lane); });
  const int s = mine.s, h = mine.h, behind = mine.back;
  const Span x = span_of(a, s);
  if (x.end <= x.begin) return;
  const int lim = piece_end(a, x);
  const bool known = x.last || (behind >= 0 && behind * C >= lim - x.end);
  const int own = uniform((x.end - x.begin + C - 1) / C), n = own + max(behind, 0);
  const int passes = uniform(behind < 0 && !x.first ? 2 : 1), first = n * passes - own;
  __syncthreads();  // SUMS are zero
  if (uniform(tid >> 8)) {
    registers_down<104>();
    if (w < SLOTS) produce(b, x, h, lim, n, passes, first, base, w, lane);
    else fetch(b, x, h, own, base, lane);
  } else {
    registers_up<200>();
    consume(b, x, s, h, n, first, known, behind < 0, passes, base, w, lane);
  }
}
