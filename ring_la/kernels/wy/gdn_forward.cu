// The gated delta rule's forward in one launch: q, k, v, g, beta in, o and states out, nothing else through memory but
// what spans pass on. Without gates (GATED 0) the delta rule's. With KEEP also what gdn_backward.cu wants of every chunk.
//
// S <- e^g (I - beta k k^T) S + beta k v^T,  o = scale S^T q    (Gated Delta Networks, arXiv 2412.06464, equation 10)
//
// Chunks of 32 tokens, K = V = 128. With G the running sum of g in a chunk and GL its last, E_ij = e^(G_i - G_j),
//
//   N = (I + tril(k k^T * E, -1) diag(beta))^-1 - I,   P = tril(q k^T * E)
//   X = V - e^G k S,   Z = X + N X,   U = diag(beta) Z,   o = scale (e^G q S + P U),   S <- e^GL S + k^T (e^(GL - G) U)
//
// so that a token's own part of U is rounded once. beta goes into P's columns and the factors of what the state takes; with
// KEEP, for the backward, N = (I + diag(beta) tril(k k^T * E, -1))^-1 - I, and beta goes into X.
//
// A program works through a span of one head: four warps ask for what chunks need, four make N and P, a chunk each, and eight
// carry the state transposed, [V, K], as accumulators. No factor is above 1, so every gate that is at most 0 is exact.
//
// A span that is not a piece's first starts up to sixteen chunks early from zero where the norm of what entered there has
// fallen below 2^-30 when the span begins (`forgetting`). Where it has not, the span waits for the state that the one
// before it leaves. So that the next need not wait for long, it meanwhile finds what its tokens leave of no state and of
// the identity (two passes without outputs): the state it leaves is a product once the one before it is there.
// Programs take spans in order, so that one which waits waits for one that runs.
//
// Where states come from other ranks, one launch with MAPS finds what spans do to a state (maps.cuh), and another, `given`
// what enters each, goes over them once, or (MAILED) finds that itself, and exchanges states with other ranks (entering.cuh).
#define WARPS 16
#define PARTS 4 // of each half what it adds, then its transition
#include "gdn.cuh"
#include "triangle.cuh"

#define MAKERS 4 // warps that make pairs

// A slot: k and q (128-byte swizzle, 64 channels a row); v; N; P. With KEEP v, then W, then o, and B = tril(k k^T * E, -1).
#if KEEP
#define SLOTS 6  // chunks under way
#define SLOT 30720
#define STAGE 32768 // the state on its way out, 4 KB a warp that carries it
#else
#define SLOTS 7
#define SLOT 28672
#define STAGE 8192 // an output on its way out, 1 KB a warp that carries the state
#endif
#define OFF_Q 4096
#define OFF_V 16384
#define OFF_N 24576
#define OFF_P 26624
#define OFF_B 28672
#define HALF 8192               // from 64 channels of k and q to the others
#define TRIANGLES (SLOTS * SLOT + STAGE)
#define FACTOR 384              // of a slot's tokens: e^G; what of Z the state takes: e^(GL - G) beta; with KEEP without beta, and beta
#define FACTORS (TRIANGLES + MAKERS * TRIANGLE)
#define BARS (FACTORS + SLOTS * FACTOR) // of each slot: full, empty
#define LOADED (BARS + SLOTS * 16) // a barrier of each slot: what memory holds of its tokens is there
#define OPEN (LOADED + (SLOTS + 1) / 2 * 16) // a barrier: the last pass may begin
#define SAID (OPEN + 16) // the ticket, what `choose` takes again, an unused word, one of `leave`; of 16 chunks, then of warps, see `forgetting`
#define HELD (SAID + 144) // two barriers: maps are there, see `enter_span`

// -- what chunks need of their own tokens: asked for by four warps, 8 tokens each, and made by four, a chunk each -------

// The chunks of all passes over a span, n each; the last pass, that makes outputs, begins with chunk `last`. That of MAPS is not
// the last.
#if MAILED
struct Passes {  // chunks before `last` are the last ones of the piece
  int total, last, end, own;  // where they end, and the span's begin, less `last` chunks
  INLINE int token(int c) const { return (c >= last ? own : end) + c * C; }
  INLINE bool middle(int c) const { return false; }
};
#else
struct Passes {
  int t0, n, total, last;
  INLINE int token(int c) const { return t0 + (c >= last ? c - last : c >= n ? c - n : c) * C; }  // the first of chunk c
  INLINE bool middle(int c) const { return c >= n && c < last; }  // in which values are zero
};
INLINE Passes passes_of(int t0, int n, int passes) { return {t0, n, n * passes, MAPS ? n * passes : n * (passes - 1)}; }
#endif

// Ask for what chunks hold in memory, once their slots are empty; tokens from x.end on are zero, v where no `values` are wanted.
// With MAILED the span's own wait if maps are `held` where chunks come.
INLINE void ask(const Args& a, const Span& x, int h, const Passes& p, bool values, bool held, u32 base, int w, int lane) {
  const int hk = h / (a.H / a.HK), row = w * 8 + (lane >> 4), j = lane & 15;
  const u64 sk = (u64)a.HK * (D * 2), sv = (u64)a.H * (D * 2), to_q = (const char*)a.q - (const char*)a.k;
  const char* const k = (const char*)a.k + hk * (D * 2) + j * 16;
  const char* const v = (const char*)a.v + h * (D * 2) + j * 16;
  const u32 z = swz(row, j & 7), to_k = (u32)((j >> 3) * HALF + row * 128) + z, to_v = OFF_V + (u32)((j >> 3) * 128 + row * 256) + z;
  int slot = 0, phase = 1;
  for (int c = 0; c < p.total; c++) {
    if (c >= SLOTS) bar_wait(base + BARS + slot * 16 + 8, phase);
#if !MAILED
    if (c == p.last && c) bar_wait(base + OPEN, 0);
#else
    if (c == p.last && held) bar_wait(base + OPEN, 0);
#endif
    const u32 at = base + slot * SLOT;
    const int t = p.token(c) + row;
    const bool both = values && !p.middle(c);
#pragma unroll
    for (int i = 0; i < 4; i++) {  // tokens 2 apart, whose places are an exclusive-or apart
      const bool live = t + 2 * i < x.end;
      const u64 from = live ? t + 2 * i : 0;
      cp16((at + to_k ^ i << 5) + i * 256, k + from * sk, live);
      if (!MAPS) cp16((at + to_k ^ i << 5) + i * 256 + OFF_Q, k + from * sk + to_q, live);
      cp16((at + to_v ^ i << 5) + i * 512, v + from * sv, live && both);
    }
    cp_arrive(base + LOADED + slot * 8);
    if (++slot == SLOTS) { slot = 0; phase ^= 1; }
  }
  cp_wait();
}

// P diag(beta) (not with MAPS), and to `triangle` tril(k k^T * E, -1) diag(beta), whose G and beta lane i has of token i; with KEEP P
// and diag(beta) tril(k k^T * E, -1)
INLINE void make_pairs(float G, float b, u32 at, u32 triangle, int lane) {
  const int ra = (lane & 7) + (((lane >> 3) & 1) << 3), ca = lane >> 4;
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1;
  float A[6][4] = {}, P[6][4] = {};  // tiles of 8 columns: two of rows 0 to 15, four of rows 16 to 31
  u32 rows[4], columns[4];
  turned(rows, at + ra * 128 + swz(ra, ca));
  turned(columns, at + rb * 128 + swz(rb, cb));
#pragma unroll
  for (int ks = 0; ks < 8; ks++) {
    const u32 row = rows[ks & 3] + (ks >> 2) * HALF, column = columns[ks & 3] + (ks >> 2) * HALF;
    u32 x[4], y[4], n[2][4];
    ldm(n[0], column);
    ldm(n[1], column + 2048);
    ldm(x, row);
    if (!MAPS) ldm(y, row + OFF_Q);
    mma(A[0], x, n[0][0], n[0][1]); mma(A[1], x, n[0][2], n[0][3]);
    if (!MAPS) { mma(P[0], y, n[0][0], n[0][1]); mma(P[1], y, n[0][2], n[0][3]); }
    ldm(x, row + 2048);
    if (!MAPS) ldm(y, row + OFF_Q + 2048);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      mma(A[2 + 2 * j], x, n[j][0], n[j][1]); mma(A[3 + 2 * j], x, n[j][2], n[j][3]);
      if (!MAPS) { mma(P[2 + 2 * j], y, n[j][0], n[j][1]); mma(P[3 + 2 * j], y, n[j][2], n[j][3]); }
    }
  }
  // Of columns 2 (lane % 4) and the one after it, row lane / 4; those of column 8 nt + j lie 64 nt (lane % 4) before a constant
  // from there. (`triangle_column` of a column that only the lane knows takes registers that there are not.)
  asm volatile("" : "+r"(lane));  // what is found from here on is not kept from chunk to chunk, for which there are no registers
  const u32 l = lane & 3, l0 = l >> 1, l1 = (l + 1) >> 1;
  const u32 even = triangle + (lane >> 2) * 4 + 256 * l - 32 * l0 * (l - l0);
  const u32 odd = triangle + (lane >> 2) * 4 + 256 * l - 32 * l1 * (l - l1) - 16 * l1;
#pragma unroll
  for (int nt = 0; nt < 4; nt++) {
    const int j = nt * 8 + 2 * (lane & 3), back = nt * 64 * l;
    const float G0 = __shfl_sync(~0u, G, j), G1 = __shfl_sync(~0u, G, j + 1);
#if !KEEP
    const float b0 = __shfl_sync(~0u, b, j), b1 = __shfl_sync(~0u, b, j + 1);
#endif
#pragma unroll
    for (int m = nt >> 1; m < 2; m++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int i = m * 16 + e * 8 + (lane >> 2), row = (m * 16 + e * 8) * 4;
        const float Gi = __shfl_sync(~0u, G, i);
        const float* x = &A[2 * m + nt][2 * e];
        const float* y = &P[2 * m + nt][2 * e];
#if KEEP
        const float e0 = ex2(Gi - G0), e1 = ex2(Gi - G1), b0 = __shfl_sync(~0u, b, i), b1 = b0;
        sts32(at + OFF_B + pair_place(i, nt) + (lane & 3) * 4, pack(j < i ? x[0] * e0 : 0.f, j + 1 < i ? x[1] * e1 : 0.f));
        const float x0 = x[0] * e0 * b0, x1 = x[1] * e1 * b1;
#else
        const float e0 = ex2(Gi - G0) * b0, e1 = ex2(Gi - G1) * b1, x0 = x[0] * e0, x1 = x[1] * e1;
#endif
        if (j < i) sts32(even - back + nt * (1024 - 128 * nt) + row, __float_as_uint(x0));
        if (j + 1 < i) sts32(odd - back + 128 + nt * (992 - 128 * nt) + row, __float_as_uint(x1));
        if (!MAPS) sts32(at + OFF_P + pair_place(i, nt) + (lane & 3) * 4, pack(j <= i ? y[0] * e0 : 0.f, j + 1 <= i ? y[1] * e1 : 0.f));
      }
  }
}

#if KEEP
// N and P to where the backward reads them
INLINE void keep_pairs(u16* to, u32 at, int lane) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    u32 z[4];
    lds128(z, at + OFF_N + i * 512 + lane * 16);
    stg128((char*)to + i * 512 + lane * 16, z);
  }
}
#endif

// Pairs and factors of chunks, once what was asked for is there
INLINE void produce(const Args& a, const Span& x, int h, const Passes& p, u32 base, int w, int lane) {
  float b, G;
  auto look_up = [&](int c) {  // beta and the gates
    const int t = p.token(c) + lane;
    const u64 i = (u64)t * a.H + h;
    b = t < x.end ? beta_at(a, i) : 0.f;
    G = t < x.end ? gate_at(a, i) : 0.f;
  };
  if (w < p.total) look_up(w);
  for (int c = w; c < p.total; c += MAKERS) {
    const int slot = c % SLOTS;
    const u32 at = base + slot * SLOT, factors = base + FACTORS + slot * FACTOR, triangle = base + TRIANGLES + w * TRIANGLE;
    G *= LOG2E;  // not where it is looked up, which would wait for it
#pragma unroll
    for (int m = 1; m < C; m *= 2) {
      const float before = __shfl_up_sync(~0u, G, m);
      if (lane >= m) G += before;
    }
    const float to_end = ex2(__shfl_sync(~0u, G, C - 1) - G);
    bar_wait(base + LOADED + slot * 8, c / SLOTS & 1);
    sts32(factors + lane * 4, __float_as_uint(ex2(G)));
    sts32(factors + 128 + lane * 4, __float_as_uint(KEEP ? to_end : to_end * b));
#if KEEP
    sts32(factors + 256 + lane * 4, __float_as_uint(b));
#endif
    asm volatile("" : "+r"(lane));  // what is found from here on is not kept from chunk to chunk, for which there are no registers
    make_pairs(G, b, at, triangle, lane);
    __syncwarp();
    if (c + MAKERS < p.total) look_up(c + MAKERS);
    asm volatile("" : "+r"(w));
    invert(at + OFF_N, base + TRIANGLES + w * TRIANGLE, lane);
#if KEEP
    __syncwarp();
    const int own = p.token(c) - x.begin;
    if (c >= p.last && own >= 0) keep_pairs(a.kept_pairs + kept_at(a, x.chunk + own / C, h) * (2 * C * C), at, lane);
#endif
    proxy_fence();  // also of what was asked for, which this warp has waited for
    __syncwarp();
    if (lane == 0) bar_arrive(base + BARS + slot * 16);
  }
}

// -- the state, from chunk to chunk: 16 of its rows, [V, K], a warp --------------------------------------------------

// What the state gives a chunk's tokens before the pairs do: RO = S^T k^T, then (not with MAPS) S^T q^T; S <- e^GL S meanwhile. With KEEP
// the state goes out to `kept`, unless that is null.
#if MAPS
#define READ 16
#define read_product wgmma32
#else
#define READ 32
#define read_product wgmma64
#endif
INLINE void read_state(float (&RO)[READ], float (&S)[16][4], u32 at, u32 factors, char* kept, u32 stage, int w, int lane) {
  const u64 b0 = descriptor(at, 16, 1024), b1 = descriptor(at + HALF, 16, 1024);
  const float to_end = lds(factors + (C - 1) * 4);
  u32 f[8][4];
#pragma unroll
  for (int ks = 0; ks < 8; ks++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float(&y)[4] = S[2 * ks + i];
      f[ks][2 * i] = pack(y[0], y[1]);
      f[ks][2 * i + 1] = pack(y[2], y[3]);
#pragma unroll
      for (int j = 0; j < 4; j++) y[j] *= to_end;
    }
  wg_fence();
#pragma unroll
  for (int ks = 0; ks < 8; ks++) read_product(RO, f[ks], (ks < 4 ? b0 : b1) + (ks & 3) * 2, ks > 0);
  wg_commit();
#if KEEP
  if (kept) keep_state(f, kept, stage, w, lane);
#endif
}

// Where 8 channels of a token lie in a warp's 32 tokens of an output, 32 bytes each, so that eight tokens' do not share banks
INLINE u32 output_place(int token, int half) { return (u32)(token * 32 + ((half ^ (token >> 2) & 1) << 4)); }

// The state over n chunks from token t0 on, the first of which is the c0-th of those under way; outputs from `begin` on, which has chunk
// number `chunk`. A chunk's output waits in shared memory (with KEEP in its slot) until the tensor cores read the state for the next one.
INLINE void walk(float (&S)[16][4], const Args& a, int h, int t0, int begin, int end, int chunk, int c0, int n, u32 base, int w,
                 int lane) {
  const u32 bars = base + BARS, stage = base + SLOTS * SLOT + w * (STAGE / 8);
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1, j = w * 2 + cb;
  const u32 column = (u32)((lane & 3) * 8), values = OFF_V + rb * 256 + swz(rb, j);
  const u64 stride = (u64)a.H * D;
  u16* out = a.o + (u64)(begin + (lane >> 1)) * stride + h * D + (w * 2 + (lane & 1)) * 8;  // of the next output: a lane takes 8
  int live = end - begin - (lane >> 1);                                                      // channels of a token and of the 16th behind
  bool left = false;  // an output that waits
#if KEEP
  const int apart = 4096;
  const u32 own = OFF_V + (lane >> 1) * 256 + swz(lane >> 1, w * 2 + (lane & 1));
#else
  const int apart = 512;
  const u32 own = stage + output_place(lane >> 1, lane & 1), put = stage + output_place(rb, cb);
#endif
  auto leave_slot = [&](int slot) {
    if (lane == 0) bar_arrive(bars + slot * 16 + 8);
  };
  auto put_out = [&](int next) {  // of the chunk before the one in slot `next`
    const int slot = next ? next - 1 : SLOTS - 1;
    const u32 from = KEEP ? base + slot * SLOT + own : own;
    u32 z[2][4];
#pragma unroll
    for (int m = 0; m < 2; m++) lds128(z[m], from + m * apart);
#pragma unroll
    for (int m = 0; m < 2; m++) stg128_if(out + 16 * m * stride, z[m], 16 * m < live);
    out += C * stride;
    live -= C;
    __syncwarp();
    if (KEEP) leave_slot(slot);
  };
  int next = c0 % SLOTS, phase = c0 / SLOTS & 1;  // the next chunk's slot
  for (int t = t0; t < t0 + n * C; t += C) {
    const int slot = uniform(next);
    const u32 at = base + slot * SLOT, factors = base + FACTORS + slot * FACTOR;
    bar_wait(bars + slot * 16, phase);
    float RO[READ];
    char* kept = 0;
#if KEEP
    const u64 place = kept_at(a, chunk + (t - begin) / C, h);
    if (t >= begin) kept = (char*)(a.kept_S + place * (D * D));
#endif
    read_state(RO, S, at, factors, kept, stage, w, lane);
    // what needs no product, while it is under way
    u32 v[2][4], u[2][4], at_end[2][4], N[3][4];
    float E[4][2], to_end[4][2];
    auto of_tokens = [&](float (&x)[4][2], u32 from) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 r[2];
        lds64(r, from + i * 32 + column);
        x[i][0] = __uint_as_float(r[0]); x[i][1] = __uint_as_float(r[1]);
      }
    };
    of_tokens(E, factors);
#pragma unroll
    for (int m = 0; m < 2; m++) ldm_trans(v[m], at + values + m * 4096);
#if !KEEP
    load_pairs(N, at + OFF_N, rb, cb);
#endif
    if (left) put_out(slot);
    left = !MAPS && t >= begin;
    wg_wait(RO);
#if KEEP
    load_pairs(N, at + OFF_N, rb, cb);  // not before, for which there are no registers
#endif
#if !MAPS
    u32 P[3][4];
    load_pairs(P, at + OFF_P, rb, cb);
#endif
    of_tokens(to_end, factors + 128);
    float U[4][4];  // X for now; then Z, with KEEP U
#if KEEP
    float beta[4][2];
    of_tokens(beta, factors + 256);
    float W[16];  // V - e^G k S for now
#endif
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float* r = RO + 8 * m + 2 * i;
        const float(&e)[2] = E[2 * m + (i >> 1)];
        float* x = U[0] + 8 * m + 2 * i;
        x[0] = fmaf(-e[0], r[0], lo(v[m][i])); x[1] = fmaf(-e[1], r[1], hi(v[m][i]));
#if KEEP
        W[8 * m + 2 * i] = x[0]; W[8 * m + 2 * i + 1] = x[1];
        x[0] *= beta[2 * m + (i >> 1)][0]; x[1] *= beta[2 * m + (i >> 1)][1];
#endif
        v[m][i] = pack(x[0], x[1]);
      }
    add_pairs(U[0], v, N);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float(&e)[2] = to_end[i];
      u[i >> 1][2 * (i & 1)] = pack(U[i][0], U[i][1]);
      u[i >> 1][2 * (i & 1) + 1] = pack(U[i][2], U[i][3]);
      at_end[i >> 1][2 * (i & 1)] = pack(U[i][0] * e[0], U[i][1] * e[1]);
      at_end[i >> 1][2 * (i & 1) + 1] = pack(U[i][2] * e[0], U[i][3] * e[1]);
    }
#if !MAPS
    float* O = RO + 16;
    if (left) {  // before the state's products, which the tensor cores would finish first
#pragma unroll
      for (int i = 0; i < 16; i++) O[i] *= E[i >> 2][i & 1];
      add_pairs(O, u, P);
    }
#endif
    wg_fence();
    wgmma128(S, at_end[0], descriptor(at, HALF, 1024));
    wgmma128(S, at_end[1], descriptor(at + 2048, HALF, 1024));
    wg_commit();
#if !MAPS
    if (left) {
#if KEEP
      u32 y[2][4];  // W = V - e^G k S - B U
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) v[m][i] = u[m][i] ^ 0x80008000u;
      load_pairs(P, at + OFF_B, rb, cb);
      add_pairs(W, v, P);
      const u32 put = at + values;
#pragma unroll
      for (int m = 0; m < 2; m++) {
        u32 f[4];
#pragma unroll
        for (int i = 0; i < 4; i++) f[i] = pack(W[8 * m + 2 * i], W[8 * m + 2 * i + 1]);
        stm_trans(f, put + m * apart);
      }
      __syncwarp();
#pragma unroll
      for (int m = 0; m < 2; m++) lds128(y[m], at + own + m * apart);
      __syncwarp();
#endif
#pragma unroll
      for (int m = 0; m < 2; m++) {
        u32 f[4];
#pragma unroll
        for (int i = 0; i < 4; i++) f[i] = pack(O[8 * m + 2 * i] * a.scale, O[8 * m + 2 * i + 1] * a.scale);
        stm_trans(f, put + m * apart);
      }
#if KEEP
#pragma unroll
      for (int m = 0; m < 2; m++)
        stg128((char*)(a.kept_W + place * (C * D)) + tile_place(16 * m + (lane >> 1), w * 2 + (lane & 1)), y[m]);
#endif
    }
#endif
    wg_wait(S);
    __syncwarp();
    if (!KEEP || !left) leave_slot(slot);
    next = slot + 1 == SLOTS ? 0 : slot + 1;
    phase ^= !next;
  }
  if (left) put_out(next);
}

#if MAILED
// What leaves the piece, of its last n chunks, which forget what came before. By the first span's program.
INLINE void end_piece(float (&S)[16][4], const Args& a, const Span& x, int h, int n, u32 base, int w, int lane) {
  const Mail& m = a.mail;
  const int end = uniform(piece_end(a, x));
  float* const leaving = m.leaving + ((u64)x.piece * a.H + h) * (D * D);
  begin_with(S, 0, w, lane);
  walk(S, a, h, end - n * C, end, end, 0, 0, n, base, w, lane);  // without outputs
  put_state(S, leaving, w, lane);
  between_warps();
  if (m.target >= 0) send(leaving, m, first_lane(a, x, h), base + SAID + 16, w, lane, [] { between_warps(); });
}

// early: chunks under way before the span's; held: whether these wait
INLINE void consume(const Args& a, const Span& x, int s, int h, int t0, int n, bool waits, int early, u64 zeros, bool held, u32 base, int w,
                    int lane) {
  float S[16][4];
  const bool ends = x.first && !early, sends = ends && a.mail.target >= 0;
  if (early) end_piece(S, a, x, h, early, base, w, lane);
  if (sends && w == 0) claim(a.mail, first_lane(a, x, h), base + SAID + 16, lane);
  enter_span<true>(S, a, x, s, h, waits, zeros, sends, ends && leaves(a.mail), base, base + HELD, base + SAID + 16, w, lane);
  between_warps();  // nobody reads maps any more
  if (held && w == 0 && lane == 0) bar_arrive(base + OPEN);
  wg_settled(S);  // in one place, where the walk has it
  walk(S, a, h, t0, uniform(x.begin), uniform(x.end), KEEP ? uniform(x.chunk) : 0, early, n, base, w, lane);
}
#else
INLINE void consume(const Args& a, const Span& x, int s, int h, int t0, int n, bool waits, int passes, u32 base, int w,
                    int lane) {
  float S[16][4];
  launch_before();  // flags are there
  const int end = uniform(x.end);
  if (passes > 1 || !waits || a.given)
    begin_with(S, entering(a, x.piece, s, h, x.first, waits), w, lane);
  else
    take(S, a, s - 1, h, w, lane);
#pragma unroll 1
  for (int pass = 0; pass < passes; pass++) {
    const bool last = pass == passes - 1;
    walk(S, a, h, t0, last ? uniform(x.begin) : end, end, KEEP ? uniform(x.chunk) : 0, pass * n, n, base, w, lane);
    if (last) break;
    between_passes(S, a, true, pass, s, h, base, base + OPEN, w, lane);
  }
  if (passes == 1 && !a.given) leave(S, a, x.piece, x.last, s, s + 1, h, base + SAID, w, lane);
}
#endif

// How many chunks early a span begins, or -1: it waits. By all warps.
INLINE int early(const Args& a, const Span& x, int s, int h, u32 base, int lane) {
  if (x.first) return 0;
  const int found = forgetting(a, x.begin, -1, x.begin - (a.table ? a.cu[x.piece] : x.piece * a.T), h, base + SAID + 16, lane);
  if (threadIdx.x == 0) decide_on(a, s, h, found < 0);
  return found;
}

extern "C" __global__ void __launch_bounds__(512, 1) gdn_forward(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) char smem[];
  const u32 base = (smem_addr(smem) + 1023) & ~1023u;
  const int tid = threadIdx.x;
  if (tid == 0) {
    for (int i = 0; i < SLOTS; i++) {
      bar_init(base + BARS + i * 16, 1);
      bar_init(base + BARS + i * 16 + 8, 8);
      bar_init(base + LOADED + i * 8, 128);
    }
    bar_init(base + OPEN, 1);
#if MAILED
    for (int i = 0; i < 2; i++) bar_init(base + HELD + i * 8, 1);
#endif
    bars_ready();
  }
  const int role = uniform(tid >> 7), w = uniform(role < 2 ? tid >> 5 : (tid >> 5) & 3), lane = tid & 31;
#if MAPS
  Job j = job_of(a, blockIdx.x * PARTS + 1);
  Reach r = {0, 0, 0, 0};
  __syncthreads();
  if (j.n > 0) r = reach(a, j.x, j.s, j.h, true, !a.arrived, base + SAID + 16, lane);
  if (tid == 0) {
    if (j.n > 0) a.flags[j.s * a.H + j.h] = !r.whole;
    decide(a, j, r, r.whole ? j.halved ? 4 : 2 : 1);
  }
  if (!r.whole) {  // what its last chunks add, if that is wanted
    j.halved = false;
    j.t0 = uniform(r.t0); j.n = uniform(r.n);
  }
  auto next = [&](bool again) {  // whether there is another part
    __syncthreads();
    if (tid == 0) {
      sts32(base + SAID, next_part(a));
      for (int i = 0; again && i < SLOTS; i++) {
        bar_over(base + BARS + i * 16); bar_over(base + BARS + i * 16 + 8); bar_over(base + LOADED + i * 8);
        bar_init(base + BARS + i * 16, 1); bar_init(base + BARS + i * 16 + 8, 8); bar_init(base + LOADED + i * 8, 128);
      }
      bars_ready();
    }
    __syncthreads();
    const int number = uniform(lds32(base + SAID));
    if (number) j = job_of(a, number);
    return number != 0;
  };
  if (!j.n && !next(false)) return;
  auto half = [&] {  // the chunks of this part
    if (!j.halved) return;
    const int first = j.n / 2;
    if (j.part < 2) j.n = first;
    else j.t0 += first * C, j.n -= first;
  };
  if (role == 3) {
    registers_down<24>();
    do {
      half();
      ask(a, j.x, j.h, passes_of(j.t0, j.n, 1), !(j.part & 1), false, base, w, lane);
    } while (next(true));
  } else if (role == 2) {
    registers_down<104>();
    do {
      half();
      produce(a, j.x, j.h, passes_of(j.t0, j.n, 1), base, w, lane);
    } while (next(true));
  } else {
    registers_up<192>();
    do {
      half();
      const int end = uniform(j.x.end);
      const bool transition = j.part & 1;
      float S[16][4];
      if (transition) identity(S, w, lane);
      else begin_with(S, 0, w, lane);
      walk(S, a, j.h, j.t0, end, end, 0, 0, j.n, base, w, lane);
      const u64 i = (u64)j.s * a.H + j.h;
      if (j.halved && j.part < 3) {
        if (j.part == 1 && a.half) put_map(S, a.half + i * (MAP / 2), base, w, lane);
        leave_part(S, j.part == 0 ? a.states : j.part == 1 ? a.parts : a.extra, a, j, w, lane);
        continue;
      }
      if (j.halved) {  // the other half's, through this one
        keep_map(S, base, w, lane);
        for (int other = 0; other < 3; other++) await_part(a, j, other);
        load(S, held(a.extra, i, w, lane));
        add_mapped(S, held(a.states, i, w, lane), base);
        between_warps();  // it is written anew
        put_state(S, a.states + i * (D * D), w, lane);
        begin_with(S, 0, w, lane);
        add_mapped(S, held(a.parts, i, w, lane), base);
        between_warps();
      }
      put_state(S, (transition ? a.parts : a.states) + i * (D * D), w, lane);
      if (transition) {
        put_squares(S, a.squares + i * 8, w, lane);
        if (a.image) put_map(S, a.image + i * (MAP / 2), base, w, lane);
      }
    } while (next(true));
  }
#else
  const Choice mine = choose(a, true, a.given || !a.pick, base + SAID, [&](int s, const Span& x, int h) { return early(a, x, s, h, base, lane); });
  const int s = mine.s, h = mine.h, back = mine.back;
  Span x = span_of(a, s);
  if (x.end <= x.begin) return;
  const int t0 = uniform(x.begin - max(back, 0) * C), n = uniform((x.end - t0 + C - 1) / C);
#if MAILED
  u64 zeros = 0;
  int early = 0;
  if (x.first || back < 0) zeros = zeros_of<true>(a, first_on_way<true>(a, s), h, lane);
  if (x.first) {
    early = chunks_at_end<true>(a, s, h);
    x.end = piece_end(a, x);  // whose last chunks it goes over, too
  }
  const Passes p = {early + n, early, uniform(x.end) - early * C, t0 - early * C};
  const bool held = takes_room<true>(a, s, x.first, back < 0, zeros, early);
#else
  const int passes = back < 0 && !x.last && !a.given ? 3 : 1;
  const Passes p = passes_of(t0, n, passes);
  const bool held = false;
#endif
  if (role == 3) {
    registers_down<24>();
    ask(a, x, h, p, true, held, base, w, lane);
  } else if (role == 2) {
    registers_down<104>();
    produce(a, x, h, p, base, w, lane);
  } else {
    registers_up<192>();
#if MAILED
    consume(a, x, s, h, t0, n, back < 0, early, zeros, held, base, w, lane);
#else
    consume(a, x, s, h, t0, n, back < 0, passes, base, w, lane);
#endif
#if KEEP
    if (lane == 0) copied_out();
#endif
  }
#endif
}
