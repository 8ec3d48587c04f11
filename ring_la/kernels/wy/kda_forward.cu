// KDA's forward in one launch: q, k, v, g, beta in, o and states out, nothing else through memory but what spans pass on.
// With KEEP: no o, but what kda_backward.cu wants of every chunk.
//
// S <- (I - beta k k^T) diag(e^g) S + beta k v^T,  o = scale S^T q    (Kimi Linear, arXiv 2510.26692, equation 1)
//
// Chunks of 16 tokens, K = V = 128. With G the running sum of g in a chunk and GL its last,
//
//   kg = k e^G,  qg = scale q e^G,  ki = k e^-G,  kd = k e^(GL - G)
//   N = (I + tril(kg ki^T, -1) diag(beta))^-1 - I,   P = tril(qg ki^T, -1),   p = scale (q . k)
//   X = V - kg S,   U = diag(beta) (X + N X),   o = qg S + P U + diag(p) U,   S <- e^GL S + kd^T U
//
// What a token writes, and what it reads of it, is most of what a gate that forgets leaves: it is added in fp32, of p that
// no factor was rounded for; only what other tokens do goes through bf16.
//
// A program works through a span of one head: eight warps make the factors, a chunk each, and eight carry the state
// transposed, [V, K], as accumulators. Where a chunk's factors would not fit (GL below -82) it goes token by token.
//
// A span that is not a piece's first starts a chunk or two early from zero where what entered there is forgotten, to
// rounding, when the span begins. The bound holds element by element: with |S| <= u in each row, a token gives
// u <- e^g u, then u <- u + beta |k| (|k| . u). Where it is not small enough, the span waits for the state that the one
// before it leaves. Programs take spans in order, so that one which waits waits for one that runs. Where states come from other
// ranks, one launch finds what spans do to a state (maps.cuh), and another goes over all of them, which is `given` what enters each; or
// (MAILED) one launch does all, and carries states from span to span and rank to rank (kda_border.cuh).
#include "kda.cuh"
#define FINDS (MAILED && !KEEP) // kda_border.cuh

#define SLOTS 8 // chunks under way, one a warp that makes factors
#define PACE 1500 // cycles from when one is asked for to the next, see `in_turn`

// A slot: k and q, then kg and qg (128-byte swizzle, 64 channels a row); g, then kd in its place; v, then o; N; P; e^GL; beta; p.
#define SLOT 22528
#define OFF_KQ 0
#define OFF_G 8192
#define OFF_V 16384
#define OFF_N 20480
#define OFF_P 20992
#define OFF_E 21504
#define OFF_B 22016
#define OFF_D 22080
#define SCRATCH (SLOTS * SLOT) // of each warp that makes factors: ki, and the triangle it inverts
#define OWN_ROOM (4096 + 1280)
#define BARS (SCRATCH + SLOTS * OWN_ROOM) // of each slot: full, empty
#define HARD (BARS + SLOTS * 16)     // of each slot: whether it goes token by token
#define SAID (HARD + SLOTS * 4)      // the ticket; what was decided; whether the next span waits; bounds, from 16 bytes on
#define OPEN (SAID + 32)             // a barrier: the last of several passes may begin
#define STAGE (OPEN + 16)            // of each warp that carries the state: 1 KB on its way out
#define TOLD STAGE                   // MAPS

// The same of row `row` of kg (rows 0 to 15) and qg (16 to 31), 16 chunks each, for wgmma
INLINE u32 kq(int row, int chunk) { return OFF_KQ + (u32)((chunk >> 3) * 4096 + row * 128) + swz(row, chunk & 7); }

// -- what chunks need of their own tokens: a warp a chunk ------------------------------------------------------------

// Ask for the rows of 16 tokens from t on; those from `end` on are zero, v where no `values` are wanted.
INLINE void load_chunk(const Args& a, int t, int end, int h, bool values, u32 at, int lane) {
  const int hk = h / (a.H / a.HK), row = lane >> 4, j = lane & 15, live = end - t - row;
  const u32 jr = (u32)((j ^ row) & 7) << 4;
  const u32 to = at + (u32)((j >> 3) * 4096 + row * 128), to_v = at + OFF_V + (u32)((j >> 3) * 128 + row * 256);
  const u64 sk = (u64)a.HK * (D * 2), sv = (u64)a.H * (D * 2);
  const char* q = (const char*)a.q + (u64)(t + row) * sk + hk * (D * 2) + j * 16;
  const char* v = (const char*)a.v + (u64)(t + row) * sv + h * (D * 2) + j * 16;
  const u64 to_k = (const char*)a.k - (const char*)a.q;
#pragma unroll 2
  for (int i = 0; i < 8; i++) {
    const u32 z = jr ^ ((2 * i & 6) << 4);
    const bool ok = 2 * i < live;
    const char* from = ok ? q : (const char*)a.q;
    cp16(to + z + i * 256 + 2048, from, ok);
    cp16(to + z + i * 256, from + to_k, ok);
    cp16(to_v + z + i * 512, ok ? v : (const char*)a.v, ok && values);
    q += 2 * sk; v += 2 * sv;
  }
  load_gates(a, t, end, h, at + OFF_G, lane);
}

// kg and qg over k and q, kd over g, ki to its place. E: e^GL.
INLINE void make_factors(const float (&E)[4], float scale, u32 at, u32 ki_at, int lane) {
  const u32 column = ((lane >> 1) & 7) * 16 + (lane & 1) * 8, row0 = at + (lane >> 4) * 4096 + column,
            ki0 = ki_at + (lane >> 4) * 128 + column, kd0 = at + OFF_G + (lane >> 4) * 1024 + column;
  float G[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 2
  for (int i0 = 0; i0 < C; i0 += GROUP) {  // kd takes no place of g that a later group reads
    float g[GROUP][4];
    u32 q[GROUP][2], k[GROUP][2];
#pragma unroll
    for (int l = 0; l < GROUP; l++) {
      const u32 place = (row0 ^ (((i0 + l) & 7) << 4)) + (i0 + l) * 128;
      gates(g[l], at + OFF_G, i0 + l, lane);
      lds64(q[l], place + 2048);
      lds64(k[l], place);
    }
    __syncwarp();
#pragma unroll
    for (int l = 0; l < GROUP; l++) {
      const int i = i0 + l;
      const u32 turn = (i & 7) << 4, place = (row0 ^ turn) + i * 128;
      float up[4], down[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        G[j] = fmaf(g[l][j], LOG2E, G[j]);
        up[j] = ex2(G[j]); down[j] = ex2(-G[j]);
      }
      const float q0 = lo(q[l][0]) * scale, q1 = hi(q[l][0]) * scale;
      const float q2 = lo(q[l][1]) * scale, q3 = hi(q[l][1]) * scale;
      const float k0 = lo(k[l][0]), k1 = hi(k[l][0]), k2 = lo(k[l][1]), k3 = hi(k[l][1]);
      sts64(place + 2048, pack(q0 * up[0], q1 * up[1]), pack(q2 * up[2], q3 * up[3]));
      sts64(place, pack(k0 * up[0], k1 * up[1]), pack(k2 * up[2], k3 * up[3]));
      down[0] *= k0; down[1] *= k1; down[2] *= k2; down[3] *= k3;
      sts64((ki0 ^ turn) + i * 256, pack(down[0], down[1]), pack(down[2], down[3]));
      sts64((kd0 ^ turn) + (i >> 3) * 2048 + (i & 7) * 128, pack(down[0] * E[0], down[1] * E[1]),
            pack(down[2] * E[2], down[3] * E[3]));
    }
  }
}

// p to its place, of q and k before factors take theirs
INLINE void read_own(float scale, u32 at, int lane) {
  float p[2][4] = {};
  u32 to[4];
  turned(to, at + kq((lane & 7) + (((lane >> 3) & 1) << 3), lane >> 4));
#pragma unroll
  for (int ks = 0; ks < 8; ks++) {
    u32 q[4], k[4];
    ldm(q, to[ks & 3] + (ks >> 2) * 4096 + 2048);
    ldm(k, to[ks & 3] + (ks >> 2) * 4096);
    mma(p[0], q, k[0], k[2]); mma(p[1], q, k[1], k[3]);
  }
  put_diagonal(p, scale, at + OFF_D, lane);
}

// P to its place, and kg ki^T diag(beta) (rows of 80 bytes) to `pairs`. b: the beta of token lane % 16.
INLINE void make_pairs(float b, u32 at, u32 ki_at, u32 pairs, int lane) {
  float A[2][4] = {}, P[2][4] = {};
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1;
  u32 to[4], ki_to[4];
  turned(to, at + kq((lane & 7) + (((lane >> 3) & 1) << 3), lane >> 4));
  turned(ki_to, ki_at + rb * 256 + swz(rb, cb));
#pragma unroll
  for (int ks = 0; ks < 8; ks++) {
    u32 kg[4], qg[4], ki[4];
    ldm(kg, to[ks & 3] + (ks >> 2) * 4096);
    ldm(qg, to[ks & 3] + (ks >> 2) * 4096 + 2048);
    ldm(ki, ki_to[ks & 3] + (ks >> 2) * 128);
    mma(A[0], kg, ki[0], ki[1]); mma(A[1], kg, ki[2], ki[3]);
    mma(P[0], qg, ki[0], ki[1]); mma(P[1], qg, ki[2], ki[3]);
  }
  asm volatile("" : "+r"(lane));  // what is found from here on is not kept from chunk to chunk, for which there are no registers
  const int r = lane >> 2;
#pragma unroll
  for (int nt = 0; nt < 2; nt++) {
    const int j = nt * 8 + 2 * (lane & 3);
    const float b0 = __shfl_sync(~0u, b, j), b1 = __shfl_sync(~0u, b, j + 1);
    sts64(pairs + r * 80 + j * 4, __float_as_uint(A[nt][0] * b0), __float_as_uint(A[nt][1] * b1));
    sts64(pairs + (r + 8) * 80 + j * 4, __float_as_uint(A[nt][2] * b0), __float_as_uint(A[nt][3] * b1));
#if !KEEP
    sts32(at + OFF_P + r * 32 + j * 2, pack(j < r ? P[nt][0] : 0.f, j + 1 < r ? P[nt][1] : 0.f));
    sts32(at + OFF_P + (r + 8) * 32 + j * 2, pack(j < r + 8 ? P[nt][2] : 0.f, j + 1 < r + 8 ? P[nt][3] : 0.f));
#endif
  }
}

// All that is needed of 16 tokens from t on, as `load_chunk` has them: to this warp's slot, which is free.
INLINE void make_chunk(const Args& a, int t, int end, int h, bool values, u32 base, int w, int& lane) {
  const u32 ki_at = base + SCRATCH + w * OWN_ROOM, pairs = ki_at + 4096, full = base + BARS + w * 16, at = base + w * SLOT;
  load_chunk(a, t, end, h, values, at, lane);
  float b = 0.f;
  if (lane < C && t + lane < end) b = beta_at(a, (u64)(t + lane) * a.H + h);
  cp_wait();
  __syncwarp();
  float E[4];
  const int hard = sum_gates(E, at + OFF_G, lane);
  if (lane == 0) sts32(base + HARD + w * 4, hard);
  if (lane < C) sts32(at + OFF_B + lane * 4, __float_as_uint(b));
  if (!hard) {
#pragma unroll
    for (int j = 0; j < 4; j++) E[j] = ex2(E[j] * LOG2E);
#if !KEEP
    read_own(a.scale, at, lane);
#endif
    make_factors(E, a.scale, at, ki_at, lane);
    sts128(at + OFF_E + lane * 16, E);
    __syncwarp();
    make_pairs(b, at, ki_at, pairs, lane);
    __syncwarp();
    asm volatile("" : "+r"(lane));
    invert(at + OFF_N, pairs, lane);
    proxy_fence();
  }
  __syncwarp();
  if (lane == 0) bar_arrive(full);
}

// Programs that begin together ask for eight chunks each: more than memory gives while one is made. So chunks that are wanted later are
// asked for later. The first three are asked for at once; the span's first chunk is one of them. MAPS makes two at first.
INLINE void in_turn(int w) { pause((w - 2) * PACE); }

#if !FINDS
// The chunks of `passes` over a span, n each, one to three; the second is without values, the third waits for OPEN. MAPS: see `early`.
INLINE void produce(const Args& a, const Span& x, int h, int t0, int n, int passes, u32 base, int w, int lane) {
  const u32 full = base + BARS + w * 16;
#if MAPS
  const int before = early(x);
  for (int c = w;; c += SLOTS) {
    int pass = 0, t = x.end - (before - c) * C;
    if (c >= before) {
      if (c < before + SLOTS) {
        const Told found = hear(base + TOLD);
        t0 = found.t0, n = found.n, passes = found.passes;
      }
      if (c >= before + n * passes) break;
      pass = (c - before) / n;
      t = t0 + (c - before - pass * n) * C;
    }
    if (c >= SLOTS) bar_wait(full + 8, (c / SLOTS - 1) & 1);
    make_chunk(a, t, x.end, h, pass != 1, base, w, lane);
  }
#else
  in_turn(w);
  for (int c = w; c < n * passes; c += SLOTS) {
    if (c >= SLOTS) bar_wait(full + 8, (c / SLOTS - 1) & 1);
    const int pass = c / n;
    if (pass == 2) bar_wait(base + OPEN, 0);
    make_chunk(a, t0 + (c - pass * n) * C, x.end, h, pass != 1, base, w, lane);
  }
#endif
}
#endif

// -- the state, from chunk to chunk: 16 of its rows, [V, K], a warp --------------------------------------------------

// S [16 tiles of 8 columns][4]: rows v0 + lane / 4 (and 8 more), columns 2 (lane % 4) and 1 more of each tile
INLINE void token_by_token(float (&S)[16][4], u32 at, int lane, int v0, bool write, const Args& a, int t, int end,
                           int h) {
  int tq = lane & 3, r = lane >> 2;
  for (int i = 0; i < C; i++) {
    if (t + i >= end) return;
    float b = lds(at + OFF_B + i * 4);
    float s[2] = {}, oo[2] = {};
#pragma unroll
    for (int nt = 0; nt < 16; nt++) {
      int col = nt * 8 + 2 * tq;
#if GATE_BF16
      u32 gw = lds32(at + OFF_G + i * 512 + col * 2);
      float g0 = ex2(lo(gw) * LOG2E), g1 = ex2(hi(gw) * LOG2E);
#else
      u32 gw[2]; lds64(gw, at + OFF_G + i * 512 + col * 4);
      float g0 = ex2(__uint_as_float(gw[0]) * LOG2E), g1 = ex2(__uint_as_float(gw[1]) * LOG2E);
#endif
      u32 kw = lds32(at + kq(i, nt) + tq * 4);
      S[nt][0] *= g0; S[nt][1] *= g1; S[nt][2] *= g0; S[nt][3] *= g1;
      s[0] += S[nt][0] * lo(kw) + S[nt][1] * hi(kw);
      s[1] += S[nt][2] * lo(kw) + S[nt][3] * hi(kw);
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
      s[e] += __shfl_xor_sync(~0u, s[e], 1);
      s[e] += __shfl_xor_sync(~0u, s[e], 2);
      int col = v0 + e * 8 + r;
      u32 vw = lds32(at + OFF_V + i * 256 + swz(i, col >> 3) + (col & 6) * 2);
      s[e] = b * ((col & 1 ? hi(vw) : lo(vw)) - s[e]);
    }
#pragma unroll
    for (int nt = 0; nt < 16; nt++) {
      u32 kw = lds32(at + kq(i, nt) + tq * 4), qw = lds32(at + kq(16 + i, nt) + tq * 4);
      S[nt][0] += s[0] * lo(kw); S[nt][1] += s[0] * hi(kw);
      S[nt][2] += s[1] * lo(kw); S[nt][3] += s[1] * hi(kw);
      oo[0] += S[nt][0] * lo(qw) + S[nt][1] * hi(qw);
      oo[1] += S[nt][2] * lo(qw) + S[nt][3] * hi(qw);
    }
#pragma unroll
    for (int e = 0; e < 2; e++) {
      oo[e] += __shfl_xor_sync(~0u, oo[e], 1);
      oo[e] += __shfl_xor_sync(~0u, oo[e], 2);
      if (write && tq == 0)
        a.o[((u64)(t + i) * a.H + h) * D + v0 + e * 8 + r] = (u16)(pack(oo[e] * a.scale, 0.f) & 0xffff);
    }
  }
}

// How many of a span's chunks, which begin two early, come before it starts from zero; 2: it does not. By eight warps.
INLINE int decide(const Args& a, const Span& x, int s, int h, u32 said, int w, int lane) {
  if (x.first) return 0;
  const int skip = chunks_to_skip(forgetting(a, x.begin, -1, h, said + 16, w, lane));
  if (w == 0 && lane == 0) {
    sts32(said + 4, skip);
    decide_on(a, s, h, skip == 2);
  }
  return skip;
}

// What the state gives a chunk's tokens before the pairs do: RO = S^T kg^T, then S^T qg^T; S <- e^GL S meanwhile, if it `goes_on`. ends:
// where this lane's first e^GL lies.
template <bool goes_on> INLINE void read_state(float (&RO)[16], float (&S)[16][4], u32 at, u32 ends) {
  const u64 b0 = descriptor(at + OFF_KQ, 16, 1024), b1 = descriptor(at + OFF_KQ + 4096, 16, 1024);
  u32 f[8][4];
#pragma unroll
  for (int ks = 0; ks < 8; ks++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float(&y)[4] = S[2 * ks + i];
      f[ks][2 * i] = pack(y[0], y[1]);
      f[ks][2 * i + 1] = pack(y[2], y[3]);
      if constexpr (!goes_on) continue;
      u32 e[2];
      lds64(e, ends + (2 * ks + i) * 32);
#pragma unroll
      for (int j = 0; j < 4; j++) y[j] *= __uint_as_float(e[j & 1]);
    }
  }
  wg_fence();
#pragma unroll
  for (int ks = 0; ks < 8; ks++) wgmma32(RO, f[ks], (ks < 4 ? b0 : b1) + (ks & 3) * 2, ks > 0);
  wg_commit();
}

// W = U / beta of this warp's 16 columns of V: X + N X, X = v - kg S
INLINE void solve(float (&W)[8], const float (&RO)[16], const u32 (&v)[4], const u32 (&n)[4]) {
  u32 x[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    W[2 * i] = lo(v[i]) - RO[2 * i];
    W[2 * i + 1] = hi(v[i]) - RO[2 * i + 1];
    x[i] = pack(W[2 * i], W[2 * i + 1]);
  }
  mma(W, x, n[0], n[1]); mma(W + 4, x, n[2], n[3]);
}

#if !KEEP
// O = qg S + P U + diag(p) U of this warp's 16 columns of V, as `stm_trans` stores it. U goes in, and u, the same in bf16; RO: of
// `read_state`. pairs, own: where this lane's part of P and its first p lie.
INLINE void read_out(u32 (&o)[4], float (&U)[8], const u32 (&u)[4], const float (&RO)[16], u32 pairs, u32 own) {
  float p[4];
  u32 n[4];
  ldm(n, pairs);
  of_tokens(p, own);
#pragma unroll
  for (int i = 0; i < 8; i++) U[i] = fmaf(p[(i >> 2) * 2 + (i & 1)], U[i], RO[8 + i]);
  mma(U, u, n[0], n[1]); mma(U + 4, u, n[2], n[3]);
#pragma unroll
  for (int i = 0; i < 4; i++) o[i] = pack(U[2 * i], U[2 * i + 1]);
}
#endif

#if KEEP
// The state as the backward reads it, by way of 1 KB of shared memory a warp: 32 channels of K at a time
INLINE void keep_state(const float (&S)[16][4], char* to, u32 stage, int w, int lane) {
  const int m = lane >> 3, row = (lane & 7) + ((m & 1) << 3), col = m >> 1;
#pragma unroll
  for (int part = 0; part < 4; part++) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float(&x)[4] = S[4 * part + 2 * i], (&y)[4] = S[4 * part + 2 * i + 1];
      const u32 f[4] = {pack(x[0], x[1]), pack(x[2], x[3]), pack(y[0], y[1]), pack(y[2], y[3])};
      stm(f, stage + row * 64 + (((2 * i + col) ^ (row >> 1)) & 3) * 16);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; i++) {
#if MAILED
      asm volatile("" : "+r"(lane));  // places are found anew, for which there are no registers
#endif
      const int r = i * 8 + (lane >> 2), c = lane & 3;
      u32 z[4];
      lds128(z, stage + r * 64 + ((c ^ (r >> 1)) & 3) * 16);
      stg128(to + state_place(w * 16 + r, 4 * part + c), z);
    }
    __syncwarp();
  }
}
#endif

// The state over chunks c to `stop` (not included) of those under way, from token t on: the first, up to `skip`, are not the
// span's. What is wanted of chunks goes out from token `begin` on, which has chunk number `chunk`.
INLINE void walk(float (&S)[16][4], const Args& a, int h, int t, int begin, int end, int chunk, int c, int stop, int skip,
                 u32 base, int w, int lane) {
  const u32 bars = base + BARS;
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1, row = lane >> 1, j = w * 2 + (lane & 1);
  // Places in the first slot: v and o as operands, and by rows; N; the first numbers of this lane's channels and tokens
  const u32 values = base + OFF_V + rb * 256 + swz(rb, w * 2 + cb), rows = base + OFF_V + row * 256 + swz(row, j);
  const u32 pairs = base + OFF_N + rb * 32 + cb * 16, firsts = base + 8 * (lane & 3);
#if !KEEP
  char* out = (char*)(a.o + ((u64)(t - C + row) * a.H + h) * D + j * 8);  // of the chunk before
  const u64 step = (u64)a.H * (C * D * 2);
#endif
  u32 before = 0;
  bool left = false;  // o, or W, in the slot before
  auto finish = [&]() {
    const int from = t - C;
    if (from >= begin) {
      u32 z[4];
      lds128(z, rows + before);
#if KEEP
      stg128((char*)(a.kept_W + kept_at(a, chunk + (from - begin) / C, h) * (C * D)) + rows_place(row, j), z);
#else
      if (from + row < end) stg128(out, z);
#endif
    }
    __syncwarp();
    if (lane == 0) bar_arrive(bars + (u32)(c - 1) % SLOTS * 16 + 8);
    left = false;
  };
  for (; c < stop; c++, t += C) {
    const u32 slot = (u32)c % SLOTS, shift = slot * SLOT, at = base + shift;
    bar_wait(bars + slot * 16, (u32)c / SLOTS & 1);
    const int way = c < skip ? 2 : lds32(base + HARD + slot * 4);
    if (__any_sync(~0u, way)) {
      if (left) finish();
      if (c >= skip) token_by_token(S, at, lane, w * 16, !KEEP && t >= begin, a, t, end, h);
      __syncwarp();
      if (lane == 0) bar_arrive(bars + slot * 16 + 8);
    } else {
      float RO[16], U[8], beta[4];
      u32 v[4], n[4], u[4], f[4];
#if KEEP
      if (t >= begin)
        keep_state(S, (char*)(a.kept_S + kept_at(a, chunk + (t - begin) / C, h) * (D * D)), base + STAGE + w * 1024, w, lane);
#endif
      read_state<true>(RO, S, at, firsts + shift + OFF_E);
      if (left) finish();
      ldm_trans(v, values + shift);
      ldm(n, pairs + shift);
      of_tokens(beta, firsts + shift + OFF_B);
      wg_wait(RO);
      solve(U, RO, v, n);
#pragma unroll
      for (int i = 0; i < 4; i++) {
#if KEEP
        f[i] = pack(U[2 * i], U[2 * i + 1]);
#endif
        U[2 * i] *= beta[i & 2];
        U[2 * i + 1] *= beta[(i & 2) + 1];
        u[i] = pack(U[2 * i], U[2 * i + 1]);
      }
      wg_fence();
      wgmma128(S, u, descriptor(at + OFF_G, 1024, 2048));
      wg_commit();
#if !KEEP
      read_out(f, U, u, RO, pairs + shift + (OFF_P - OFF_N), firsts + shift + OFF_D);
#endif
      stm_trans(f, values + shift);
      __syncwarp();
      before = shift;
      left = true;
      wg_wait(S);
    }
#if !KEEP
    out += step;
#endif
  }
  if (left) finish();
}

#if FINDS
#include "kda_border.cuh"
#elif DEFERRED
// A span that waits, in three passes, the last of a piece in one. Its span and head are read again for each, so that no
// register holds them meanwhile.
INLINE void consume(const Args& a, bool alone, int n, u32 base, int w, int lane) {
  float S[16][4];
  begin_with(S, 0, w, lane);
#pragma unroll 1
  for (int pass = alone ? 2 : 0; pass < 3; pass++) {
    int s, h;
    {
      const Span x = work_of(a, base + SAID, s, h);
      const int stop = (alone ? 1 : pass + 1) * n;
      if (alone) take(S, a, s - 1, h, w, lane);
      walk(S, a, h, uniform(x.begin), uniform(pass == 2 ? x.begin : x.end), uniform(x.end), x.chunk, stop - n, stop, 0, base, w,
           lane);
    }
    const Span x = work_of(a, base + SAID, s, h);
    if (pass == 0) {
      store(S, held(a.states, (u64)s * a.H + h, w, lane));
      identity(S, w, lane);
    } else if (pass == 1) {
      keep_map(S, base, w, lane);
      leave_early(S, a, held(a.states, (u64)s * a.H + h, w, lane), s - 1, s - 1, s, h, base, base + OPEN, w, lane);
    } else if (alone) {
      leave(S, a, x.piece, x.last, s, s + 1, h, base + SAID, w, lane);
    }
  }
}
#else
INLINE void consume(const Args& a, const Span& x, int s, int h, int t0, int n, u32 base, int w, int lane) {
  float S[16][4];
#if !MAILED
  launch_before();  // flags are there
#endif
#if LEAVES
  const int skip = x.first ? 0 : uniform(lds32(base + SAID + 4));
#elif MAILED
  const int skip = x.first ? 0 : chunks_to_skip(uniform(a.mail.zero[(s - 1) * a.H + h]));  // as the forward found
#else
  const int skip = decide(a, x, s, h, base + SAID, w, lane);
#endif
  if (skip == 2 && !a.given)
    take(S, a, s - 1, h, w, lane);
  else
    begin_with(S, entering(a, x.piece, s, h, x.first, skip == 2), w, lane);
  walk(S, a, h, t0, uniform(x.begin), uniform(x.end), x.chunk, 0, n, skip, base, w, lane);
  if (!a.given) leave(S, a, x.piece, x.last, s, s + 1, h, base + SAID, w, lane);
}
#endif

extern "C" __global__ void __launch_bounds__(512, 1) kda_forward(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) char smem[];
  const u32 base = (smem_addr(smem) + 1023) & ~1023u;
  const int tid = threadIdx.x;
  if (tid == 0) {
    for (int i = 0; i < SLOTS; i++) {
      bar_init(base + BARS + i * 16, 1);
      bar_init(base + BARS + i * 16 + 8, 8);
    }
    bar_init(base + OPEN, 1);
#if FINDS
    for (int i = 0; i < 2; i++) {
      bar_init(base + WORDS + i * 8, 1);
      bar_init(order_there(base, i), 1);
      bar_init(order_read(base, i), SLOTS);
    }
#endif
    bars_ready();
#if !MAPS
    sts32(base + SAID, number(a, a.given || a.side_by_side, DEFERRED));
#endif
  }
  __syncthreads();
#if MAPS
  const int w = uniform((tid >> 5) & 7), lane = tid & 31;
  const int s = blockIdx.x / a.heads, h = a.first_head + blockIdx.x % a.heads;
  const Span x = span_of(a, s);
  if (x.end <= x.begin) return;
  if (uniform(tid >> 8)) {
    registers_down<104>();
    produce(a, x, h, 0, 0, 0, base, w, lane);
  } else {
    registers_up<152>();
    const Reach r = reach(a, x, s, h, true, true, base + SAID, lane);
    if (tid == 0) a.flags[s * a.H + h] = !r.whole;
    tell(r, 2, base + TOLD);
    const int before = early(x), skip = unwanted(x, r);
    find_maps(a, s, h, 1 + r.whole, r.n, w, lane, [&](float (&S)[16][4], int c) {
      const int from = c ? before + c : 0, stop = r.whole ? before + c + r.n : r.n ? before : 0;
      walk(S, a, h, r.t0 - (c ? 0 : skip * C), x.end, x.end, 0, from, stop, skip, base, w, lane);
    });
  }
#else
  const int w = uniform((tid >> 5) & 7), lane = tid & 31;
#if MAILED && KEEP
  next_launch();  // which finds what leaves, and sends it
#endif
#if FINDS
  const int who = (int)blockIdx.x - a.count * a.heads;
  if (uniform(tid >> 8)) {
    registers_down<96>();
    produce(a, who, base, w, lane);
  } else {
    registers_up<160>();
    if (who < 0) {
      int s, h;
      const Span x = work_of(a, base + SAID, s, h);
      consume(a, x, span_before(a, x, s), s, h, base, w, lane);
    } else {
      consume_beside(a, who, base, w, lane);
    }
  }
#else
  int s, h;
  const Span x = work_of(a, base + SAID, s, h);
  if (x.end <= x.begin) return;
#if DEFERRED
  if (x.first || load_acquire(decided(a, s, h)) != 2) return;
  const int t0 = uniform(x.begin), n = uniform((x.end - t0 + C - 1) / C);
#else
#if LEAVES
  if (!x.first) {
    if (uniform(tid >> 8) == 0) decide(a, x, s, h, base + SAID, w, lane);
    __syncthreads();
    if (lds32(base + SAID + 4) == 2) return;
  }
#endif
  const int t0 = uniform(x.begin - (x.first ? 0 : 2 * C)), n = uniform((x.end - t0 + C - 1) / C);
#endif
  if (uniform(tid >> 8)) {
    registers_down<104>();
    produce(a, x, h, t0, n, DEFERRED && !x.last ? 3 : 1, base, w, lane);
#if MAILED
    if (uniform(x.first)) take_back(a, x, s, h, w, lane, [] { between_others(); });
#endif
  } else {
    registers_up<152>();
#if DEFERRED
    consume(a, x.last, n, base, w, lane);
#else
    consume(a, x, s, h, t0, n, base, w, lane);
#endif
  }
#endif
#endif
}
