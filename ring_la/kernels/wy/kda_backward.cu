// KDA's gradients in one launch, from what kda_forward.cu with KEEP left: the state S before each chunk, and W = U / beta.
//
// With the names of kda_forward.cu, but N = (I + diag(beta) tril(kg ki^T, -1))^-1 - I, and from right to left the gradient dS
// of the state after a chunk:
//
//   dU = kd dS + P^T dO + diag(p) dO        L = dU + N^T dU        dbeta = sum_V L W        dV = dR = diag(beta) L
//   dP = tril(dO U^T, -1)      dp = diag(dO U^T)           dA = -tril(dR U^T, -1)
//   dqg = dO S^T + dP ki       dkg = -dR S^T + dA ki       dki = dA^T kg + dP^T qg       dkd = U dS^T
//   dS <- e^GL dS + qg^T dO - kg^T dR
//
// and q, k, g get theirs by the factors; q and k those of p in fp32, which no gate touches.
//
// A program works through a span of one head from its end to its begin: three warps make the factors of a chunk each, one
// fetches states and finds dP and dA, eight carry dS transposed, [V, K]. A span that is not a piece's last starts one or two
// chunks late from zero where those forget what comes from the right (the bound of kda.cuh), else it waits for the span
// after it. A chunk whose factors would not fit gives NaN.
#include "kda.cuh"

#define SLOTS 3
// A slot: q, k, then qg, kg; kd; ki; g, then its running sum; dO and dR; W; k; P, N, dP, dA; e^GL; beta, p, dp
#define SLOT 44032
#define OFF_QG 0
#define OFF_KG 4096
#define OFF_KD 8192
#define OFF_KI 12288
#define OFF_G 16384
#define OFF_X 24576
#define OFF_W 32768
#define OFF_K 36864
#define OFF_P 40960
#define OFF_N 41472
#define OFF_DP 41984
#define OFF_DA 42496
#define OFF_E 43008
#define OFF_B 43520
#define OFF_D 43584
#define OFF_DD 43648
#define PAIRS (OFF_X + 2048)           // what is inverted, where dR comes later
#define STATES (SLOTS * SLOT)          // two, [K half][V row][64 channels]
#define ADJOINT (STATES + 2 * 32768)   // dS the same way
#define SUMS (ADJOINT + 32768)         // of each warp that carries dS: its part of dbeta
#define BARS (SUMS + 8 * 64)           // of each slot: full, empty, dR there, dP and dA there
#define BARS_S (BARS + SLOTS * 32)     // of each state: full, empty
#define HARD (BARS_S + 2 * 16)
#define OPEN (HARD + 16)               // a barrier: the last of several passes may begin
#define SAID (OPEN + 16)
#define HELD (SAID + 64)               // two barriers: maps are there, see `carry`
#define TOLD STATES                    // MAPS

struct BackArgs {
  Args a;          // S0: the gradients of the states that leave; S1: those of the states that enter
  const u16* dout; // [tokens, H, 128]
  u16 *dq, *dk, *dv;
  void* dg;        // like g
  float* dbeta;    // [tokens, H]
};

// Where 16 bytes `chunk` of token `row` lie in qg and kg, which wgmma reads as [k][n]
INLINE u32 by_token(int row, int chunk) {
  return (u32)((row >> 3) * 2048 + (chunk >> 3) * 1024 + (row & 7) * 128) + swz(row, chunk & 7);
}
#if GATE_BF16
typedef u16 Gate;
INLINE Gate as_gate(float x) { return (u16)(pack(x, 0.f) & 0xffff); }
#else
typedef float Gate;
INLINE Gate as_gate(float x) { return x; }
#endif
// In dO (rows 0 to 15) and dR (16 to 31), which it reads as [n][k]
INLINE u32 by_value(int row, int chunk) { return (u32)((chunk >> 3) * 4096 + row * 128) + swz(row, chunk & 7); }

// How many chunks behind a span's end, y being the span after it, its program begins with
INLINE int late_chunks(const Span& x, const Span& y) {
  return x.last ? 0 : (min(x.end + 2 * C, y.end) - x.end + C - 1) / C;
}

// -- a chunk's factors: a warp a chunk -------------------------------------------------------------------------------

// Asks for the rows of 16 tokens from t on; those from `end` on are zero, dO where it is not `wanted`.
INLINE void load_chunk(const BackArgs& b, int t, int end, int chunk, int h, bool wanted, u32 at, int lane) {
  const Args& a = b.a;
  const int hk = h / (a.H / a.HK), row = lane >> 4, j = lane & 15, live = end - t - row;
  const u64 sk = (u64)a.HK * (D * 2), sv = (u64)a.H * (D * 2);
  const char* q = (const char*)a.q + (u64)(t + row) * sk + hk * (D * 2) + j * 16;
  const char* o = (const char*)b.dout + (u64)(t + row) * sv + h * (D * 2) + j * 16;
  const u64 to_k = (const char*)a.k - (const char*)a.q;
#pragma unroll 2
  for (int i = 0; i < 8; i++) {
    const int r = 2 * i + row;
    const bool ok = 2 * i < live;
    const char* from = ok ? q : (const char*)a.q;
    cp16(at + OFF_QG + by_token(r, j), from, ok);
    cp16(at + OFF_K + r * 256 + swz(r, j), from + to_k, ok);
    cp16(at + OFF_X + by_value(r, j), ok ? o : (const char*)b.dout, ok && wanted);
    q += 2 * sk; o += 2 * sv;
  }
  load_gates(a, t, end, h, at + OFF_G, lane);
#if !MAPS
  const char* w = (const char*)(a.kept_W + kept_at(a, chunk, h) * (C * D)) + lane * 16;
#pragma unroll 2
  for (int i = 0; i < 8; i++) cp16(at + OFF_W + i * 512 + lane * 16, w + i * 512, true);
#endif
}

// qg over q, G (by log2) over g, kg, ki and kd to their places. E: e^GL.
INLINE void make_factors(const float (&E)[4], float scale, u32 at, int lane) {
  const u32 column = ((lane >> 1) & 7) * 16 + (lane & 1) * 8, half = lane >> 4;
  const u32 tokens = at + half * 1024 + column, wide = at + half * 128 + column, rows = at + OFF_KD + half * 2048 + column;
  float G[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 2
  for (int i0 = 0; i0 < C; i0 += GROUP) {
    float g[GROUP][4];
    u32 q[GROUP][2], k[GROUP][2];
#pragma unroll
    for (int l = 0; l < GROUP; l++) {
      const int i = i0 + l;
      const u32 turn = (i & 7) << 4;
      gates(g[l], at + OFF_G, i, lane);
      lds64(q[l], (tokens ^ turn) + (i >> 3) * 2048 + (i & 7) * 128 + OFF_QG);
      lds64(k[l], (wide ^ turn) + i * 256 + OFF_K);
    }
    __syncwarp();
#pragma unroll
    for (int l = 0; l < GROUP; l++) {
      const int i = i0 + l;
      const u32 turn = (i & 7) << 4, place = (tokens ^ turn) + (i >> 3) * 2048 + (i & 7) * 128;
      float up[4], down[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        G[j] = fmaf(g[l][j], LOG2E, G[j]);
        up[j] = ex2(G[j]); down[j] = ex2(-G[j]);
      }
      const float q0 = lo(q[l][0]) * scale, q1 = hi(q[l][0]) * scale;
      const float q2 = lo(q[l][1]) * scale, q3 = hi(q[l][1]) * scale;
      const float k0 = lo(k[l][0]), k1 = hi(k[l][0]), k2 = lo(k[l][1]), k3 = hi(k[l][1]);
      sts64(place + OFF_QG, pack(q0 * up[0], q1 * up[1]), pack(q2 * up[2], q3 * up[3]));
      sts64(place + OFF_KG, pack(k0 * up[0], k1 * up[1]), pack(k2 * up[2], k3 * up[3]));
      down[0] *= k0; down[1] *= k1; down[2] *= k2; down[3] *= k3;
      sts64((wide ^ turn) + i * 256 + OFF_KI, pack(down[0], down[1]), pack(down[2], down[3]));
      sts64((rows ^ turn) + i * 128, pack(down[0] * E[0], down[1] * E[1]), pack(down[2] * E[2], down[3] * E[3]));
      sts128(at + OFF_G + i * 512 + lane * 16, G);
    }
  }
}

// P to its place, and diag(beta) kg ki^T (rows of 80 bytes) to the place of dR; b: the beta of token lane % 16
INLINE void make_pairs(float b, u32 at, int lane) {
  const u32 pairs = at + PAIRS;
  float A[2][4] = {}, P[2][4] = {};
  const int ra = (lane & 7) + (((lane >> 3) & 1) << 3), ca = lane >> 4;
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1;
  u32 to[4], wide[4];
  turned(to, at + by_token(ra, ca));
  turned(wide, at + rb * 256 + swz(rb, cb));
#pragma unroll
  for (int ks = 0; ks < 8; ks++) {
    u32 kg[4], qg[4], ki[4];
    ldm(kg, to[ks & 3] + (ks >> 2) * 1024 + OFF_KG);
    ldm(qg, to[ks & 3] + (ks >> 2) * 1024 + OFF_QG);
    ldm(ki, wide[ks & 3] + (ks >> 2) * 128 + OFF_KI);
    mma(A[0], kg, ki[0], ki[1]); mma(A[1], kg, ki[2], ki[3]);
    mma(P[0], qg, ki[0], ki[1]); mma(P[1], qg, ki[2], ki[3]);
  }
  const int r = lane >> 2;
  const float b0 = __shfl_sync(~0u, b, r), b1 = __shfl_sync(~0u, b, r + 8);
#pragma unroll
  for (int nt = 0; nt < 2; nt++) {
    const int j = nt * 8 + 2 * (lane & 3);
    sts32(at + OFF_P + r * 32 + j * 2, pack(j < r ? P[nt][0] : 0.f, j + 1 < r ? P[nt][1] : 0.f));
    sts32(at + OFF_P + (r + 8) * 32 + j * 2, pack(j < r + 8 ? P[nt][2] : 0.f, j + 1 < r + 8 ? P[nt][3] : 0.f));
    sts64(pairs + r * 80 + j * 4, __float_as_uint(A[nt][0] * b0), __float_as_uint(A[nt][1] * b0));
    sts64(pairs + (r + 8) * 80 + j * 4, __float_as_uint(A[nt][2] * b1), __float_as_uint(A[nt][3] * b1));
  }
}

// p to its place, of q and k before factors take theirs
INLINE void read_own(float scale, u32 at, int lane) {
  float p[2][4] = {};
  const int ra = (lane & 7) + (((lane >> 3) & 1) << 3), ca = lane >> 4;
  u32 to[4], wide[4];
  turned(to, at + by_token(ra, ca));
  turned(wide, at + ra * 256 + swz(ra, ca));
#pragma unroll
  for (int ks = 0; ks < 8; ks++) {
    u32 q[4], k[4];
    ldm(q, to[ks & 3] + (ks >> 2) * 1024 + OFF_QG);
    ldm(k, wide[ks & 3] + (ks >> 2) * 128 + OFF_K);
    mma(p[0], q, k[0], k[2]); mma(p[1], q, k[1], k[3]);
  }
  put_diagonal(p, scale, at + OFF_D, lane);
}

// The chunks of `passes` over a span, n each: of one, or of three, the second of which is without dO. MAPS, MAILED: the first is the
// c0-th of those under way.
INLINE void produce(const BackArgs& b, const Span& x, int h, int lim, int n, int passes, u32 base, int w, int lane, int c0 = 0) {
  const Args& a = b.a;
  const u32 at = base + w * SLOT, full = base + BARS + w * 32;
#if MAPS && !MAILED
  const int pass = 0, before = early(x);
  for (int c = w;; c += SLOTS) {
    int m = before - 1 - c;
    if (c >= before) {
      if (c < before + SLOTS) {
        const Told found = hear(base + TOLD);
        n = found.n, passes = found.passes;
      }
      if (c >= before + n * passes) break;
      m = before + n - 1 - c;
    }
    const int t = x.begin + m * C;
    if (c >= SLOTS) bar_wait(full + 8, (c / SLOTS - 1) & 1);
#elif MAPS
  const int pass = 0;
  for (int c = c0 + (w + SLOTS - c0 % SLOTS) % SLOTS; c < c0 + n; c += SLOTS) {
    const int m = c0 + n - 1 - c, t = x.begin + m * C;
    if (c >= SLOTS) bar_wait(full + 8, (c / SLOTS - 1) & 1);
#else
  for (int c = w; c < n * passes; c += SLOTS) {
    if (c >= SLOTS) bar_wait(full + 8, (c / SLOTS - 1) & 1);
    const int pass = c / n, m = (pass + 1) * n - 1 - c, t = x.begin + m * C;
    if (pass == 2) bar_wait(base + OPEN, 0);
#endif
    load_chunk(b, t, lim, x.chunk + m, h, pass != 1, at, lane);
    float beta = 0.f;
    if (lane < C && t + lane < lim) beta = beta_at(a, (u64)(t + lane) * a.H + h);
    beta = __shfl_sync(~0u, beta, lane & 15);
    cp_wait();
    __syncwarp();
    float E[4];
    const int hard = sum_gates(E, at + OFF_G, lane);
    if (lane == 0) sts32(base + HARD + w * 4, hard);
    if (lane < C) sts32(at + OFF_B + lane * 4, __float_as_uint(beta));
    if (!hard) {
#pragma unroll
      for (int j = 0; j < 4; j++) E[j] = ex2(E[j] * LOG2E);
      read_own(a.scale, at, lane);
      make_factors(E, a.scale, at, lane);
      sts128(at + OFF_E + lane * 16, E);
      __syncwarp();
      make_pairs(beta, at, lane);
      __syncwarp();
      asm volatile("" : "+r"(lane));  // what is found from here on is not kept from chunk to chunk, for which there are no registers
      invert(at + OFF_N, at + PAIRS, lane);
    }
    proxy_fence();
    __syncwarp();
    if (lane == 0) bar_arrive(full);
  }
}

// -- one warp: states on their way in, dP, dp and dA ---------------------------------------------------------------------

INLINE void pair_gradients(u32 at, int lane) {
  const int ra = (lane & 7) + (((lane >> 3) & 1) << 3), ca = lane >> 4;
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1, r = lane >> 2;
  float P[2][4] = {}, A[2][4] = {};
  u32 to[4], rows[4];
  turned(to, at + OFF_X + by_value(ra, ca));
  turned(rows, at + OFF_W + rows_place(rb, cb));
#pragma unroll
  for (int ks = 0; ks < 8; ks++) {
    u32 o[4], dr[4], w[4];
    ldm(o, to[ks & 3] + (ks >> 2) * 4096);
    ldm(dr, to[ks & 3] + (ks >> 2) * 4096 + 2048);
    ldm(w, rows[ks & 3] + (ks >> 2) * 2048);
    mma(P[0], o, w[0], w[1]); mma(P[1], o, w[2], w[3]);
    mma(A[0], dr, w[0], w[1]); mma(A[1], dr, w[2], w[3]);
  }
#pragma unroll
  for (int nt = 0; nt < 2; nt++) {
    const int j = nt * 8 + 2 * (lane & 3);
    const float b0 = lds(at + OFF_B + j * 4), b1 = lds(at + OFF_B + j * 4 + 4);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int i = r + 8 * e;
      P[nt][2 * e] *= b0, P[nt][2 * e + 1] *= b1;
      const float a0 = -A[nt][2 * e] * b0, a1 = -A[nt][2 * e + 1] * b1;
      sts32(at + OFF_DP + i * 32 + j * 2, pack(j < i ? P[nt][2 * e] : 0.f, j + 1 < i ? P[nt][2 * e + 1] : 0.f));
      sts32(at + OFF_DA + i * 32 + j * 2, pack(j < i ? a0 : 0.f, j + 1 < i ? a1 : 0.f));
    }
  }
  put_diagonal(P, 1.f, at + OFF_DD, lane);
}

// Chunks from `first` on are the span's own; those before it only bring dS.
INLINE void fetch(const BackArgs& b, const Span& x, int h, int n, int first, u32 base, int lane) {
  auto ask = [&](int i) {  // for the state of the i-th chunk of the span's own
    const int c = first + i, m = n - 1 - c;
    const u32 bar = base + BARS_S + (i & 1) * 16;
    if (i >= 2) bar_wait(bar + 8, ((i >> 1) - 1) & 1);
    if (lane == 0) {
      bar_expect(bar, 32768);
      copy_in(base + STATES + (i & 1) * 32768, b.a.kept_S + kept_at(b.a, x.chunk + m, h) * (D * D), 32768, bar);
    }
  };
  if (first < n) ask(0);
  for (int c = first; c < n; c++) {
    const int slot = c % SLOTS;
    const u32 at = base + slot * SLOT, bars = base + BARS + slot * 32;
    if (c + 1 < n) ask(c + 1 - first);
    bar_wait(bars + 16, 0 + (((c / SLOTS) - (first > slot ? (first - slot + SLOTS - 1) / SLOTS : 0)) & 1));
    if (!__any_sync(~0u, lds32(base + HARD + slot * 4))) pair_gradients(at, lane);
    __syncwarp();
    if (lane == 0) bar_arrive(bars + 24);
  }
}

// -- dS, from chunk to chunk: 16 of its rows, [V, K], a warp; and the gradients of 16 channels of K ----------------------

// Whether what leaves the piece is where a span's program starts, y being the span after it
INLINE bool starts_known(const Args& a, const Span& x, const Span& y) { return x.last || (!a.given && y.last && y.end <= x.end + 2 * C); }
// How many of a span's chunks, which begin two late, come before it starts from zero or from what leaves the piece; 2: it
// does neither. By eight warps.
INLINE int decide(const Args& a, const Span& x, const Span& y, int s, int h, u32 said, int w, int lane) {
  if (x.last) return 0;
  int skip = 0;
  if (!starts_known(a, x, y)) {
    skip = y.end < x.end + 2 * C ? 2 : chunks_to_skip(forgetting(a, x.end, 1, h, said + 16, w, lane));
  }
  if (w == 0 && lane == 0) {
    sts32(said + 4, skip);
    decide_on(a, s, h, skip == 2);
  }
  return skip;
}

// Where a lane of a warp that carries dS finds what it reads in the first slot
struct Places {
  u32 pairs, turned;            // of P, N, dP, dA; of the same as they stand
  u32 firsts;                   // the first numbers of its channels and tokens
  u32 values, value_row;        // dO, as an operand and by rows; dR 2048 bytes on
  u32 written;                  // W
  u32 tokens, wide, keys;       // of its channels of K: qg and kg; ki and k; kd
  u32 wide_row, keys_row;       // of ki and kd, by rows
};
INLINE Places places_of(u32 base, int kc, int w, int lane) {
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1, rt = (lane & 7) + (((lane >> 3) & 1) << 3);
  const int row = lane >> 1, j = lane & 1;
  Places p;
  p.turned = base + rt * 32 + (lane >> 4) * 16;
  p.pairs = base + rb * 32 + cb * 16;
  p.firsts = base + 8 * (lane & 3);
  p.values = base + OFF_X + by_value(rb, w * 2 + cb);
  p.value_row = base + OFF_X + by_value(row, w * 2 + j);
  p.written = base + OFF_W + rows_place(rb, w * 2 + cb);
  p.tokens = base + by_token(rb, kc + cb);
  p.wide = base + rb * 256 + swz(rb, kc + cb);
  p.keys = base + OFF_KD + rows_place(rb, kc + cb);
  p.wide_row = base + OFF_KI + row * 256 + swz(row, kc + j);
  p.keys_row = base + OFF_KD + rows_place(row, kc + j);
  asm volatile("" : "+r"(p.turned), "+r"(p.pairs), "+r"(p.firsts), "+r"(p.values), "+r"(p.value_row), "+r"(p.written));
  asm volatile("" : "+r"(p.tokens), "+r"(p.wide), "+r"(p.keys), "+r"(p.wide_row), "+r"(p.keys_row));
  return p;
}

// The gradient of what was solved for, by columns of V: L from kd dS, over it; `shift`: where the slot begins
INLINE void solve(float (&L)[8], const u32 (&dout)[4], const Places& at, u32 shift) {
  u32 p[4], n[4];
  float own[4];
  ldm_trans(p, at.turned + shift + OFF_P);
  ldm_trans(n, at.turned + shift + OFF_N);
  of_tokens(own, at.firsts + shift + OFF_D);
#pragma unroll
  for (int f = 0; f < 4; f++) {
    L[2 * f] = fmaf(own[f & 2], lo(dout[f]), L[2 * f]);
    L[2 * f + 1] = fmaf(own[(f & 2) + 1], hi(dout[f]), L[2 * f + 1]);
  }
  mma(L, dout, p[0], p[1]); mma(L + 4, dout, p[2], p[3]);
  const u32 f[4] = {pack(L[0], L[1]), pack(L[2], L[3]), pack(L[4], L[5]), pack(L[6], L[7])};
  mma(L, f, n[0], n[1]); mma(L + 4, f, n[2], n[3]);
}

// Sums over tokens to the right and including: x of tokens 2t, 2t + 1, 8 + 2t, 9 + 2t of lane t of four
INLINE void sum_from_right(float (&x)[4], int t) {
  const float a = x[0] + x[1], b = x[2] + x[3];
  float ea = 0.f, eb = 0.f, all = b;
#pragma unroll
  for (int m = 1; m < 4; m++) {
    const float ya = __shfl_down_sync(~0u, a, m, 4), yb = __shfl_down_sync(~0u, b, m, 4);
    if (t + m < 4) ea += ya, eb += yb;
  }
  all += __shfl_xor_sync(~0u, all, 1);
  all += __shfl_xor_sync(~0u, all, 2);
  x[3] += eb; x[2] += x[3];
  x[1] += ea + all; x[0] += x[1];
}

// The gradients of q, k and g of 16 channels of K, from chunk kc on. Y: dO S^T, then dR S^T; Z: W dS^T; to: where those of row lane / 2
// go, and dg: that of token 2 (lane % 4).
INLINE void key_gradients(const BackArgs& b, float (&Y)[16], float (&Z)[8], const float (&trace)[2], const float (&beta)[4],
                          const Places& at, u32 shift, int kc, int live, u64 to, u64 dg, int lane) {
  const Args& a = b.a;
  const int r = lane >> 2, tq = lane & 3;
  u32 qg[4], kg[4], ki[4], kd[4], k_[4];
  ldm_trans(qg, at.tokens + shift + OFF_QG);
  ldm_trans(kg, at.tokens + shift + OFF_KG);
  ldm_trans(ki, at.wide + shift + OFF_KI);
  ldm_trans(kd, at.keys + shift);
  ldm_trans(k_, at.wide + shift + OFF_K);
#pragma unroll
  for (int j = 8; j < 16; j++) Y[j] = -Y[j];
  float I[8] = {};
  {
    u32 p[4];
    ldm(p, at.pairs + shift + OFF_DP);
    mma(Y, ki, p[0], p[1]); mma(Y + 4, ki, p[2], p[3]);
    ldm(p, at.pairs + shift + OFF_DA);
    mma(Y + 8, ki, p[0], p[1]); mma(Y + 12, ki, p[2], p[3]);
    ldm_trans(p, at.turned + shift + OFF_DP);
    mma(I, qg, p[0], p[1]); mma(I + 4, qg, p[2], p[3]);
    ldm_trans(p, at.turned + shift + OFF_DA);
    mma(I, kg, p[0], p[1]); mma(I + 4, kg, p[2], p[3]);
  }
  u32 dq[4], dk[4];
  float own[4];
  of_tokens(own, at.firsts + shift + OFF_DD);
  const u32 gates = at.firsts + shift + OFF_G + tq * (1024 - 8) + (kc * 8 + r) * 4, ends = at.firsts + shift + OFF_E - tq * 8 + (kc * 8 + r) * 4;
  const u64 next = (u64)a.H * (D * sizeof(Gate)), far = dg + 8 * next, rows[4] = {dg, dg + next, far, far + next};
#pragma unroll
  for (int e = 0; e < 2; e++) {  // rows r and r + 8
    const float E = lds(ends + 32 * e);
    float dG[4], ended = 0.f, q[4], k[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int nt = i >> 1, j = nt * 4 + 2 * e + (i & 1), token = nt * 8 + (i & 1), f = 2 * nt + e;
      auto of = [&](const u32(&x)[4]) { return i & 1 ? hi(x[f]) : lo(x[f]); };
      const float G = lds(gates + token * 512 + 32 * e), up = ex2(G), down = ex2(-G);
      const float dkd = Z[j] * beta[i], last = of(kd) * dkd;
      dG[i] = of(qg) * Y[j] + of(kg) * Y[8 + j] - of(ki) * I[j] - last;
      ended += last;
      q[i] = a.scale * fmaf(Y[j], up, own[i] * of(k_));
      k[i] = fmaf(Y[8 + j], up, fmaf(own[i], of(qg), fmaf(dkd, E, I[j])) * down);
    }
    ended += __shfl_xor_sync(~0u, ended, 1);
    ended += __shfl_xor_sync(~0u, ended, 2);
    ended += E * trace[e];
    sum_from_right(dG, tq);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if ((i >> 1) * 8 + (i & 1) + 2 * tq < live) ((Gate*)rows[i])[8 * e] = as_gate(dG[i] + ended);
    }
    dq[e] = pack(q[0], q[1]); dq[2 + e] = pack(q[2], q[3]);
    dk[e] = pack(k[0], k[1]); dk[2 + e] = pack(k[2], k[3]);
  }
  __syncwarp();  // this warp alone reads its channels of ki and kd now
  stm_trans(dq, at.wide + shift + OFF_KI);
  stm_trans(dk, at.keys + shift);
  __syncwarp();
  u32 y[4], z[4];
  lds128(y, at.wide_row + shift);
  lds128(z, at.keys_row + shift);
  if (lane >> 1 < live) {
    stg128((char*)b.dq + to + kc * 16, y);
    stg128((char*)b.dk + to + kc * 16, z);
  }
}

// A chunk whose factors do not fit: NaN for its gradients, and for all that dS reaches
INLINE void refuse_chunk(const BackArgs& b, float (&S)[16][4], int t, int end, int h, int i) {
  const float nan = __int_as_float(0x7fffffff);
#pragma unroll
  for (int nt = 0; nt < 16; nt++)
#pragma unroll
    for (int e = 0; e < 4; e++) S[nt][e] = nan;
  for (int j = i; j < C * D; j += 256) {
    const int token = t + j / D;
    const u64 to = ((u64)token * b.a.H + h) * D + j % D;
    if (token >= end) continue;
    b.dq[to] = b.dk[to] = b.dv[to] = 0x7fff;
    ((Gate*)b.dg)[to] = as_gate(nan);
    if (j % D == 0) b.dbeta[(u64)token * b.a.H + h] = nan;
  }
}

// dS over chunks c0 to `stop` (not included) of those under way, the last of which begins at token `begin`. Up to `skip` they
// are passed over; those before `first` only bring dS.
INLINE void walk(float (&S)[16][4], const BackArgs& b, int h, int begin, int end, int c0, int stop, int skip, int first,
                 u32 base, int w, int lane) {
  const int kc = (w >> 2) * 8 + (w & 3) * 2;
  const Places p = places_of(base, kc, w, lane);
  const u32 adjoint = base + ADJOINT;
  u32 tile[4];
  turned(tile, adjoint + state_place(w * 16 + (lane & 7) + (((lane >> 3) & 1) << 3), lane >> 4));
  for (int c = c0; c < stop; c++) {
    const int slot = c % SLOTS, t = begin + (stop - 1 - c) * C, i = c - first;
    const u32 shift = slot * SLOT, at = base + shift, bars = base + BARS + slot * 32, state = base + STATES + (i & 1) * 32768,
              bar_s = base + BARS_S + (i & 1) * 16;
    const bool own = !MAPS && c >= first;
    bar_wait(bars, (c / SLOTS) & 1);
    const bool hard = __any_sync(~0u, lds32(base + HARD + slot * 4));
    if (hard && (own || c >= skip)) {
      if (own) {
        refuse_chunk(b, S, t, end, h, w * 32 + lane);
        __syncwarp();
        if (lane == 0) bar_arrive(bars + 16);
        bar_wait(bar_s, (i >> 1) & 1);
        bar_wait(bars + 24, (i / SLOTS) & 1);
        __syncwarp();
        if (lane == 0) bar_arrive(bar_s + 8);
      } else {
        refuse_chunk(b, S, t, 0, h, w * 32 + lane);
      }
    } else if (own || c >= skip) {
      float L[8], beta[4];
      u32 dout[4], dr[4];
      {
        u32 f[8][4];
        as_operand(f, S);
        wg_fence();
#pragma unroll
        for (int ks = 0; ks < 8; ks++)
          wgmma16(L, f[ks], descriptor(at + OFF_KD + (ks >> 2) * 2048, 16, 1024) + (ks & 3) * 2, ks > 0);
        wg_commit();
        if (own) {
#pragma unroll
          for (int ks = 0; ks < 8; ks++) stm(f[ks], tile[ks & 3] + (ks >> 2) * 16384);
        }
      }
      ldm_trans(dout, p.values + shift);
      wg_wait(L);
      solve(L, dout, p, shift);
      of_tokens(beta, p.firsts + shift + OFF_B);
#pragma unroll
      for (int f = 0; f < 4; f++) dr[f] = pack(L[2 * f] * beta[f & 2], L[2 * f + 1] * beta[(f & 2) + 1]);
      const u64 to = (((u64)(t + (lane >> 1)) * b.a.H + h) * D + (lane & 1) * 8) * 2;
      if (own) {
        u32 v[4];
        ldm_trans(v, p.written + shift);
        float sums[4] = {L[0] * lo(v[0]) + L[2] * lo(v[1]), L[1] * hi(v[0]) + L[3] * hi(v[1]),
                         L[4] * lo(v[2]) + L[6] * lo(v[3]), L[5] * hi(v[2]) + L[7] * hi(v[3])};
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
          for (int m = 4; m < 32; m *= 2) sums[j] += __shfl_xor_sync(~0u, sums[j], m);
        if (lane < 4) {
          sts64(base + SUMS + w * 64 + 2 * lane * 4, __float_as_uint(sums[0]), __float_as_uint(sums[1]));
          sts64(base + SUMS + w * 64 + (8 + 2 * lane) * 4, __float_as_uint(sums[2]), __float_as_uint(sums[3]));
        }
        stm_trans(dr, p.values + shift + 2048);
        __syncwarp();
        u32 z[4];
        lds128(z, p.value_row + shift + 2048);
        if (t + (lane >> 1) < end) stg128((char*)b.dv + to + w * 32, z);
        proxy_fence();
        __syncwarp();
        if (lane == 0) bar_arrive(bars + 16);
      }
#pragma unroll
      for (int nt = 0; nt < 16; nt++) {
        u32 e[2];
        lds64(e, p.firsts + shift + OFF_E + nt * 32);
#pragma unroll
        for (int j = 0; j < 4; j++) S[nt][j] *= __uint_as_float(e[j & 1]);
      }
      float Y[16], Z[8], trace[2];
      if (own) {
        between_warps();
        bar_wait(bar_s, (i >> 1) & 1);
      }
#pragma unroll
      for (int f = 0; f < 4; f++) dr[f] ^= 0x80008000u;
      wg_settled(S);  // and operands: what is made behind the fence makes the compiler wait for each product
      wg_settled(dout);
      wg_settled(dr);
      wg_fence();
      wgmma128(S, dout, descriptor(at + OFF_QG, 1024, 2048));
      wgmma128(S, dr, descriptor(at + OFF_KG, 1024, 2048));
      wg_commit();
      if (own) {
        wg_fence();
        const u64 sd = descriptor(state + (w >> 2) * 16384, 16, 1024), ad = descriptor(adjoint + (w >> 2) * 16384, 16, 1024);
#pragma unroll
        for (int ks = 0; ks < 8; ks++)
          wgmma32(Y, sd + ks * 128, descriptor(at + OFF_X + (ks >> 2) * 4096, 16, 1024) + (ks & 3) * 2, ks > 0);
#pragma unroll
        for (int ks = 0; ks < 8; ks++)
          wgmma16(Z, ad + ks * 128, descriptor(at + OFF_W + (ks >> 2) * 2048, 16, 1024) + (ks & 3) * 2, ks > 0);
        wg_commit();
        wg_wait(S);
        wg_settled(Y);
        wg_settled(Z);
        traces(trace, state, adjoint, kc, lane);
        if (w == 0 && lane < C && t + lane < end) {
          float sum = 0.f;
#pragma unroll
          for (int j = 0; j < 8; j++) sum += lds(base + SUMS + j * 64 + lane * 4);
          b.dbeta[(u64)(t + lane) * b.a.H + h] = sum;
        }
        bar_wait(bars + 24, (i / SLOTS) & 1);
        const u64 dg = (u64)b.dg + (((u64)(t + 2 * (lane & 3)) * b.a.H + h) * D + kc * 8 + (lane >> 2)) * sizeof(Gate);
        key_gradients(b, Y, Z, trace, beta, p, shift, kc, end - t, to, dg, lane);
        between_warps();  // before the tile of dS is written anew
        if (lane == 0) bar_arrive(bar_s + 8);
      } else {
        wg_wait(S);
      }
    }
    __syncwarp();
    if (lane == 0) bar_arrive(bars + 8);
  }
}

#if MAPS && MAILED
// Beside the launch that makes chunks' states, on multiprocessors that are left: so a few programs find what leaves pieces where few chunks
// tell, one head after the other; all others have a span each, whose map may be asked for, too. run(x, s, h, r), for each of this program's.
template <class Run> INLINE void each_map(const Args& a, Run run) {
  const int few = beside(a), own = (int)blockIdx.x - few;
  auto look = [&](int s, int h) {
    const Span x = span_of(a, s);
    const Reach r = reach(a, x, s, h, false, leaves(a.mail), 0, 0, a.mail.zero + a.count * a.H);
    if (r.n && (own < 0) == (x.first && !r.whole)) run(x, s, h, r);
  };
  if (own < 0)
#pragma unroll 1
    for (int i = blockIdx.x; i < a.pieces * a.H; i += few) look(i / a.H * spans_a_row(a), i % a.H);
  else
    look(own / a.heads, a.first_head + own % a.heads);
}
// What span x, the s-th, adds to the gradient of the state that enters it. What leaves a piece is sent, if nothing that comes is in it.
INLINE void find_adjoint(const BackArgs& b, const Span& x, int s, int h, int n, int c, u32 base, int w, int lane) {
  const Args& a = b.a;
  const Mail& m = a.mail;
  const int lanes = first_lane(a, x, h), said = base + SAID + 16;
  const bool sends = x.first && m.target >= 0 && uniform(m.zero[s * a.H + h]);
  between_warps();  // what was said is read
  if (sends && w == 0) claim(m, lanes, said, lane);
  float S[16][4];
  begin_with(S, 0, w, lane);
  walk(S, b, h, x.begin, x.end, c, c + n, c, c + n, base, w, lane);
  put_state(S, a.states + ((u64)s * a.H + h) * (D * D), w, lane);
  between_warps();  // it is said which lanes are this program's
  if (sends) put_rows(S, base + ADJOINT + w * TURN, m, lanes, lds32(said + (w >> 1) * 4), w, lane);
}
#elif DEFERRED
// A span that waits, in three passes, the first of a piece in one. Its span and head are read again for each, so that no
// register holds them meanwhile.
INLINE void consume(const BackArgs& b, bool alone, int n, u32 base, int w, int lane) {
  const Args& a = b.a;
  float S[16][4];
  begin_with(S, 0, w, lane);
#pragma unroll 1
  for (int pass = alone ? 2 : 0; pass < 3; pass++) {
    int s, h;
    {
      const Span x = work_of(a, base + SAID, s, h);
      const int stop = (alone ? 1 : pass + 1) * n;
      if (alone) take(S, a, s + 1, h, w, lane);
      walk(S, b, h, uniform(x.begin), uniform(x.end), stop - n, stop, 0, pass == 2 ? stop - n : stop, base, w, lane);
    }
    const Span x = work_of(a, base + SAID, s, h);
    if (pass == 0) {
      store(S, held(a.states, (u64)s * a.H + h, w, lane));
      identity(S, w, lane);
    } else if (pass == 1) {
      keep_map(S, base, w, lane);
      leave_early(S, a, held(a.states, (u64)s * a.H + h, w, lane), s + 1, s + 1, s, h, base, base + OPEN, w, lane);
    } else if (alone) {
      leave(S, a, x.piece, x.first, s, s - 1, h, base + SAID, w, lane);
    }
  }
}
#else
INLINE void consume(const BackArgs& b, const Span& x, const Span& y, int s, int h, int n, int first, u32 base, int w, int lane) {
  const Args& a = b.a;
  float S[16][4];
  launch_before();  // flags are there
  const bool known = starts_known(a, x, y);
#if MAILED
  if (x.last) {
    const u64 zeros = zeros_of<false>(a, s, h, lane);
    const bool sends = a.mail.target >= 0 && !(zeros >> (spans_a_row(a) - 1) & 1);  // else the launch before has
    if (sends && w == 0) claim(a.mail, first_lane(a, x, h), base + SAID + 16, lane);
    carry<false>(a, x, s, h, zeros, sends, sends || a.mail.keeps, zeros & 1, base, base + HELD, base + SAID + 16, w, lane);
    between_warps();  // nobody reads maps any more, or words that were said
    if (carries(a, zeros) && w == 0 && lane == 0) bar_arrive(base + OPEN);
  }
#endif
#if LEAVES
  const int skip = x.last ? 0 : uniform(lds32(base + SAID + 4));
#elif MAILED
  const int skip = x.last ? 0 : chunks_to_skip(uniform(a.mail.zero[(a.count + s + 1) * a.H + h]));  // as the forward found
#else
  const int skip = decide(a, x, y, s, h, base + SAID, w, lane);
#endif
  if (skip == 2 && !a.given)
    take(S, a, s + 1, h, w, lane);
  else
#if MAILED
    begin_with(S, skip == 2 ? carried(a, s, s + 1, h) : entering(a, x.piece, s, h, known, false), w, lane);
#else
    begin_with(S, entering(a, x.piece, s, h, known, skip == 2), w, lane);
#endif
  walk(S, b, h, uniform(x.begin), uniform(x.end), 0, n, skip, first, base, w, lane);
  if (!a.given) leave(S, a, x.piece, x.first, s, s - 1, h, base + SAID, w, lane);
}
#endif

extern "C" __global__ void __launch_bounds__(384, 1) kda_backward(const __grid_constant__ BackArgs b) {
  extern __shared__ __align__(1024) char smem[];
  const Args& a = b.a;
  const u32 base = (smem_addr(smem) + 1023) & ~1023u;
  const int tid = threadIdx.x;
#if MAPS && MAILED
  const bool waits = blockIdx.x + 1 == gridDim.x;  // so that what follows waits for the launch before, too
  const int own = (int)blockIdx.x - beside(a);
  if (own >= 0 && tid == 0) a.arrived[own / a.heads * a.H + a.first_head + own % a.heads] = 0;
  bool asked = false;
  each_map(a, [&](const Span&, int, int, const Reach&) { asked = true; });
  if (!asked) {
    if (waits) launch_before();
    return;
  }
#endif
  if (tid == 0) {
    for (int i = 0; i < SLOTS; i++) {
      bar_init(base + BARS + i * 32, 1);
      bar_init(base + BARS + i * 32 + 8, 8);
      bar_init(base + BARS + i * 32 + 16, 8);
      bar_init(base + BARS + i * 32 + 24, 1);
    }
    for (int i = 0; i < 2; i++) {
      bar_init(base + BARS_S + i * 16, 1);
      bar_init(base + BARS_S + i * 16 + 8, 8);
    }
    bar_init(base + OPEN, 1);
#if MAILED
    for (int i = 0; i < 2; i++) bar_init(base + HELD + i * 8, 1);
#endif
    bars_ready();
#if !MAPS
    sts32(base + SAID, a.count * a.heads - 1 - number(a, a.given || a.side_by_side, DEFERRED));
#endif
  }
  __syncthreads();
#if MAPS
  const int w = uniform((tid >> 5) & 7), lane = tid & 31;
#if MAILED
  int c = 0;
  if (uniform(tid >> 8)) {
    registers_down<104>();
    each_map(a, [&](const Span& x, int s, int h, const Reach& r) {
      if (w < SLOTS) produce(b, x, h, x.end, r.n, 1, base, w, lane, c);
      c += r.n;
    });
  } else {
    registers_up<200>();
    each_map(a, [&](const Span& x, int s, int h, const Reach& r) {
      find_adjoint(b, x, s, h, r.n, c, base, w, lane);
      c += r.n;
    });
  }
  if (waits) launch_before();
#else
  const int s = blockIdx.x / a.heads, h = a.first_head + blockIdx.x % a.heads;
  const Span x = span_of(a, s);
  if (x.end <= x.begin) return;
  if (uniform(tid >> 8)) {
    registers_down<104>();
    if (w < SLOTS) produce(b, x, h, x.end, 0, 0, base, w, lane);
    else hear(base + TOLD);
  } else {
    registers_up<200>();
    const Reach r = reach(a, x, s, h, false, true, base + SAID, lane);
    tell(r, 1, base + TOLD);
    const int stop = r.whole ? early(x) + r.n : r.n ? early(x) : 0;
    find_maps(a, s, h, 1, r.n, w, lane, [&](float (&S)[16][4], int c) {
      walk(S, b, h, x.begin, x.end, c, stop, unwanted(x, r), stop, base, w, lane);
    });
  }
#endif
#else
  int s, h;
  const Span x = work_of(a, base + SAID, s, h);
  if (x.end <= x.begin) return;
  const int w = uniform((tid >> 5) & 7), lane = tid & 31;
#if DEFERRED
  if (x.last || load_acquire(decided(a, s, h)) != 2) return;
  const int lim = x.end, n = uniform((x.end - x.begin + C - 1) / C), first = x.first ? 0 : 2 * n, passes = x.first ? 1 : 3;
#else
  const Span y = x.last ? x : span_of(a, s + 1);
#if LEAVES
  if (!x.last) {
    if (uniform(tid >> 8) == 0) decide(a, x, y, s, h, base + SAID, w, lane);
    __syncthreads();
    if (lds32(base + SAID + 4) == 2) return;
  }
#endif
  const int lim = x.last ? x.end : min(x.end + 2 * C, y.end), passes = 1;
  const int first = uniform(late_chunks(x, y)), n = first + uniform((x.end - x.begin + C - 1) / C);
#endif
  if (uniform(tid >> 8)) {
    registers_down<104>();
#if MAILED
    if (x.last && carries(a, zeros_of<false>(a, s, h, lane))) bar_wait(base + OPEN, 0);  // maps lie where chunks come
#endif
    if (w < SLOTS) produce(b, x, h, lim, n, passes, base, w, lane);
    else fetch(b, x, h, n * passes, first, base, lane);
  } else {
    registers_up<200>();
#if DEFERRED
    consume(b, x.first, n, base, w, lane);
#else
    consume(b, x, y, s, h, n, first, base, w, lane);
#endif
  }
#endif
}
