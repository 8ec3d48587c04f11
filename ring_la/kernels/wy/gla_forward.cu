// GLA's forward in one launch: q, k, v, g in, o and states out, nothing else through memory but what spans pass on. With
// KEEP also what gla_backward.cu wants of every chunk.
//
// S <- diag(e^g) S + k v^T,  o = scale S^T q    (Gated Linear Attention, arXiv 2312.06635, equation 3)
//
// Chunks of 32 tokens, K = V = 128. With G the running sum of g in a chunk and GL its last,
//
//   qg = scale q e^G,  qi = scale q e^(G - GL),  kd = k e^(GL - G),  P = tril(qi kd^T)
//   o = qg S + P V,   S <- e^GL S + kd^T V
//
// A program works through a span of one head: four warps make the factors, a chunk each, and eight carry the state
// transposed, [V, K], as accumulators. Where qi would not fit (GL below log2's HARDEST) pairs are made one by one, with
// factors of at most 1, so that every gate that is at most 0 is exact.
//
// A span that is not a piece's first starts up to 24 chunks early from zero where what entered there is forgotten in every
// channel when the span begins. Where it is not, the span finds what its tokens leave of no state, waits for the state that
// the one before it leaves, hands its own on (a decay of each channel and a sum), and goes over its tokens once more.
#include "gla.cuh"

#define MAKERS 4 // warps that make factors

// A slot: q, k, then qg, kd; v, then o; P; e^GL; g, then qi in its place
#define OFF_Q 0
#define OFF_K 8192
#define OFF_V 16384
#define OFF_P 24576
#define OFF_E 26624
#define OFF_G 27136
#if GATE_BF16
#define ROW 256        // bytes of a token's gates
#define SLOT 35840
#define SLOTS (6 - KEEP) // chunks under way
#else
#define ROW 512
#define SLOT 44032
#define SLOTS (5 - KEEP)
#endif
#define STAGE (SLOTS * SLOT)             // with KEEP: the state on its way out, 4 KB a warp that carries it
#define SUMS (STAGE + KEEP * 32768)      // of each maker: log2 of what its chunks leave of each channel, of a span that waits
#define BARS (SUMS + MAKERS * 512)       // of each slot: full, empty
#define SAID (BARS + SLOTS * 16)         // the ticket, what `choose` takes again, an unused word, one of `leave`; masks

// -- what chunks need of their own tokens: a warp a chunk ------------------------------------------------------------

// Ask for the rows of 32 tokens from t on; those from `end` on are zero.
INLINE void load_chunk(const Args& a, int t, int end, int h, u32 at, int lane) {
  const int hk = h / (a.H / a.HK), row = lane >> 4, j = lane & 15, live = end - t - row;
  const u64 sk = (u64)a.HK * (D * 2), sv = (u64)a.H * (D * 2);
  const char* q = (const char*)a.q + (u64)(t + row) * sk + hk * (D * 2) + j * 16;
  const char* v = (const char*)a.v + (u64)(t + row) * sv + h * (D * 2) + j * 16;
  const u64 to_k = (const char*)a.k - (const char*)a.q;
#pragma unroll 2
  for (int i = 0; i < 16; i++) {
    const int r = 2 * i + row;
    const bool ok = 2 * i < live;
    const char* from = ok ? q : (const char*)a.q;
    cp16(at + OFF_Q + tile_place(r, j), from, ok);
    cp16(at + OFF_K + tile_place(r, j), from + to_k, ok);
    cp16(at + OFF_V + r * 256 + swz(r, j), ok ? v : (const char*)a.v, ok);
    q += 2 * sk; v += 2 * sv;
  }
  load_gates(a, t, end, h, at + OFF_G, ROW, lane);
}

// qg and kd over q and k, qi over g. E: e^GL.
INLINE void make_factors(const float (&GL)[4], const float (&E)[4], bool hard, float scale, u32 at, int lane) {
  const int chunk = lane >> 1;
  const u32 half = (lane & 1) * 8;
  float G[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
  for (int i0 = 0; i0 < C; i0 += GROUP) {  // qi takes no place of g that a later group reads
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
      float up[4], over[4], to_end[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        G[j] = fmaf(g[l][j], LOG2E, G[j]);
        to_end[j] = ex2(GL[j] - G[j]);
        over[j] = hard ? 0.f : ex2(G[j] - GL[j]);
        up[j] = hard ? ex2(G[j]) : E[j] * over[j];
      }
      const float q0 = lo(q[l][0]) * scale, q1 = hi(q[l][0]) * scale;
      const float q2 = lo(q[l][1]) * scale, q3 = hi(q[l][1]) * scale;
      const float k0 = lo(k[l][0]), k1 = hi(k[l][0]), k2 = lo(k[l][1]), k3 = hi(k[l][1]);
      const u32 place = tile_place(i, chunk) + half;
      sts64(at + OFF_Q + place, pack(q0 * up[0], q1 * up[1]), pack(q2 * up[2], q3 * up[3]));
      sts64(at + OFF_K + place, pack(k0 * to_end[0], k1 * to_end[1]), pack(k2 * to_end[2], k3 * to_end[3]));
      sts64(at + OFF_G + i * 256 + swz(i, chunk) + half, pack(q0 * over[0], q1 * over[1]), pack(q2 * over[2], q3 * over[3]));
    }
  }
}

// P from qi and kd
INLINE void make_pairs(u32 at, int lane) {
  const int ra = (lane & 7) + (((lane >> 3) & 1) << 3), ca = lane >> 4;
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1;
  float P[6][4] = {};  // tiles of 8 columns: two of rows 0 to 15, four of rows 16 to 31
#pragma unroll
  for (int ks = 0; ks < 8; ks++) {
    u32 x[4], n[2][4];
    ldm(n[0], at + OFF_K + tile_place(rb, 2 * ks + cb));
    ldm(n[1], at + OFF_K + tile_place(16 + rb, 2 * ks + cb));
    ldm(x, at + OFF_G + ra * 256 + swz(ra, 2 * ks + ca));
    mma(P[0], x, n[0][0], n[0][1]); mma(P[1], x, n[0][2], n[0][3]);
    ldm(x, at + OFF_G + (16 + ra) * 256 + swz(ra, 2 * ks + ca));
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
        sts32(at + OFF_P + pair_place(i, nt) + (lane & 3) * 4, pack(j <= i ? y[0] : 0.f, j + 1 <= i ? y[1] : 0.f));
      }
    }
}

// P from q, k and g, one pair after another
INLINE void make_hard_pairs(float scale, u32 at, int lane) {
  const int chunk = lane >> 1;
  const u32 half = (lane & 1) * 8;
#pragma unroll 1
  for (int i = 0; i < C; i++) {
    u32 q[2];
    float since[4] = {0.f, 0.f, 0.f, 0.f};
    lds64(q, at + OFF_Q + tile_place(i, chunk) + half);
    const u32 row = at + OFF_P + pair_place(i, lane >> 3) + (lane & 7) * 2;
    if (lane > i) sts16(row, 0);
#pragma unroll 1
    for (int j = i; j >= 0; j--) {
      u32 k[2];
      lds64(k, at + OFF_K + tile_place(j, chunk) + half);
      float x = lo(q[0]) * lo(k[0]) * ex2(since[0]) + hi(q[0]) * hi(k[0]) * ex2(since[1]) +
                lo(q[1]) * lo(k[1]) * ex2(since[2]) + hi(q[1]) * hi(k[1]) * ex2(since[3]);
#pragma unroll
      for (int m = 16; m; m >>= 1) x += __shfl_xor_sync(~0u, x, m);
      if (lane == j) sts16(row, (u16)(pack(x * scale, 0.f) & 0xffff));
      float g[4];
      gates(g, at + OFF_G + j * ROW, lane);
#pragma unroll
      for (int l = 0; l < 4; l++) since[l] = fmaf(g[l], LOG2E, since[l]);
    }
  }
  __syncwarp();
}

// The chunks of `passes` over a span, n each; of two passes the first is without outputs.
INLINE void produce(const Args& a, const Span& x, int h, int t0, int n, int passes, u32 base, int w, int lane) {
  const int total = n * passes, last = total - n;  // the first chunk of the last pass
  float left[4] = {0.f, 0.f, 0.f, 0.f};
  auto is_empty = [&](int c) { return c < SLOTS || bar_passed(base + BARS + c % SLOTS * 16 + 8, (c / SLOTS - 1) & 1); };
  auto ask = [&](int c) {
    if (c >= SLOTS) bar_wait(base + BARS + c % SLOTS * 16 + 8, (c / SLOTS - 1) & 1);
    load_chunk(a, t0 + (c >= last ? c - last : c) * C, x.end, h, base + c % SLOTS * SLOT, lane);
  };
  if (w < total) ask(w);
  for (int c = w; c < total; c += MAKERS) {
    const u32 at = base + c % SLOTS * SLOT;
    cp_wait();
    __syncwarp();
    const bool more = c + MAKERS < total, now = more && uniform(is_empty(c + MAKERS));
    if (now) ask(c + MAKERS);
    float GL[4], E[4];
    const bool hard = chunk_decay(GL, at + OFF_G, ROW, lane);
    if (c < last) {
#pragma unroll
      for (int j = 0; j < 4; j++) left[j] += GL[j];
      sts128(base + SUMS + w * 512 + lane * 16, left);
    }
#pragma unroll
    for (int j = 0; j < 4; j++) E[j] = ex2(GL[j]);
    if (hard && c >= last) make_hard_pairs(a.scale, at, lane);
    sts128(at + OFF_E + lane * 16, E);
    make_factors(GL, E, hard, a.scale, at, lane);
    __syncwarp();
    if (!hard && c >= last) make_pairs(at, lane);
#if KEEP
    const int own = t0 + (c - last) * C - x.begin;
    if (c >= last && own >= 0) {
      __syncwarp();
      char* const to = (char*)(a.kept_P + kept_at(a, x.chunk + own / C, h) * (C * C));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 z[4];
        lds128(z, at + OFF_P + i * 512 + lane * 16);
        stg128(to + i * 512 + lane * 16, z);
      }
    }
#endif
    proxy_fence();
    __syncwarp();
    if (lane == 0) bar_arrive(base + BARS + c % SLOTS * 16);
    if (more && !now) ask(c + MAKERS);
  }
}

// -- the state, from chunk to chunk: 16 of its rows, [V, K], a warp --------------------------------------------------

#if KEEP
// The state, of which `f` are this warp's rows, as the backward reads it, by the copy engine from 4 KB of shared memory
INLINE void keep_state(const u32 (&f)[8][4], char* to, u32 stage, int w, int lane) {
  const int row = (lane & 7) + (((lane >> 3) & 1) << 3), col = lane >> 4;
  if (lane == 0) copied_out();
  __syncwarp();
#pragma unroll
  for (int ks = 0; ks < 8; ks++) stm(f[ks], stage + (ks >> 2) * 2048 + row * 128 + swz(row, (2 * ks + col) & 7));
  proxy_fence();
  __syncwarp();
  if (lane == 0) {
    copy_out(to + w * 2048, stage, 2048);
    copy_out(to + 16384 + w * 2048, stage + 2048, 2048);
    copy_out_all();
  }
}
#endif

// The state over n chunks from token t0 on, the first of which is the c0-th of those under way; outputs from `begin` on,
// which has chunk number `chunk`. A chunk's output is finished while the products of the next are made.
INLINE void walk(float (&S)[16][4], const Args& a, int h, int t0, int begin, int end, int chunk, int c0, int n, u32 base,
                 int w, int lane) {
  const u32 bars = base + BARS;
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1, j = w * 2 + cb;
  float O[16];   // of the chunk before, without its pairs
  u32 u[2][4];   // its v
  auto finish = [&](int c) {
    const u32 at = base + c % SLOTS * SLOT;
    const int t = t0 + (c - c0) * C;
    if (t >= begin && a.o) {
      u32 p[4];
      ldm(p, at + OFF_P + pair_place(rb, cb));
      mma(O, u[0], p[0], p[1]); mma(O + 4, u[0], p[2], p[3]);
      ldm(p, at + OFF_P + pair_place(16 + rb, cb));
      mma(O + 8, u[0], p[0], p[1]); mma(O + 12, u[0], p[2], p[3]);
      ldm(p, at + OFF_P + pair_place(16 + rb, 2 + cb));
      mma(O + 8, u[1], p[0], p[1]); mma(O + 12, u[1], p[2], p[3]);
#pragma unroll
      for (int m = 0; m < 2; m++) {
        u32 f[4];
#pragma unroll
        for (int i = 0; i < 4; i++) f[i] = pack(O[8 * m + 2 * i], O[8 * m + 2 * i + 1]);
        stm_trans(f, at + OFF_V + (16 * m + rb) * 256 + swz(rb, j));
      }
      __syncwarp();
#pragma unroll
      for (int m = 0; m < 2; m++) {
        const int row = 16 * m + (lane >> 1), to = w * 2 + (lane & 1);
        u32 z[4];
        lds128(z, at + OFF_V + row * 256 + swz(row, to));
        if (t + row < end) stg128(a.o + ((u64)(t + row) * a.H + h) * D + to * 8, z);
      }
    }
    __syncwarp();
    if (lane == 0) bar_arrive(bars + c % SLOTS * 16 + 8);
  };
  for (int c = c0; c < c0 + n; c++) {
    const int slot = c % SLOTS, t = t0 + (c - c0) * C;
    const u32 at = base + slot * SLOT;
    bar_wait(bars + slot * 16, (c / SLOTS) & 1);
    float RO[16];
    u32 f[8][4], v[2][4];
#pragma unroll
    for (int m = 0; m < 2; m++) ldm_trans(v[m], at + OFF_V + (16 * m + rb) * 256 + swz(rb, j));
#pragma unroll
    for (int ks = 0; ks < 8; ks++)
#pragma unroll
      for (int i = 0; i < 4; i++) f[ks][i] = pack(S[2 * ks + (i >> 1)][2 * (i & 1)], S[2 * ks + (i >> 1)][2 * (i & 1) + 1]);
    decay(S, at + OFF_E, lane);
    wg_fence();
#pragma unroll
    for (int ks = 0; ks < 8; ks++)
      wgmma32(RO, f[ks], descriptor(at + OFF_Q + (ks >> 2) * HALF, 16, 1024) + (ks & 3) * 2, ks > 0);
    wgmma128(S, v[0], descriptor(at + OFF_K, HALF, 1024));
    wgmma128(S, v[1], descriptor(at + OFF_K + 2048, HALF, 1024));
    wg_commit();
#if KEEP
    if (t >= begin)
      keep_state(f, (char*)(a.kept_S + kept_at(a, chunk + (t - begin) / C, h) * (D * D)), base + STAGE + w * 4096, w, lane);
#endif
    if (c > c0) finish(c - 1);
    wg_wait(S);
    wg_settled(RO);
#pragma unroll
    for (int i = 0; i < 16; i++) O[i] = RO[i];
#pragma unroll
    for (int i = 0; i < 8; i++) u[i >> 2][i & 3] = v[i >> 2][i & 3];
  }
  if (n) finish(c0 + n - 1);
}

INLINE void consume(const Args& a, const Span& x, int s, int h, int t0, int n, bool waits, int passes, u32 base, int w,
                    int lane) {
  float S[16][4];
  const int end = uniform(x.end);
  if (passes > 1 || !waits)
    begin_with(S, x.first && a.S0 ? a.S0 + ((u64)x.piece * a.H + h) * (D * D) : 0, w, lane);
  else
    take(S, a, s - 1, h, w, lane);
#pragma unroll 1
  for (int pass = 0; pass < passes; pass++) {
    const bool last = pass == passes - 1;
    walk(S, a, h, t0, last ? uniform(x.begin) : end, end, KEEP ? uniform(x.chunk) : 0, pass * n, n, base, w, lane);
    if (!last) hand_on(S, a, s - 1, s, h, base + SUMS, MAKERS, w, lane);
  }
  if (passes == 1) leave(S, a, x.piece, x.last, s, s + 1, h, base + SAID, w, lane);
}

// How many chunks early a span begins, or -1: it waits. By all warps.
INLINE int early(const Args& a, const Span& x, int s, int h, u32 base, int lane) {
  if (x.first) return 0;
  const int before = x.begin - (a.table ? a.cu[x.piece] : x.piece * a.T);  // tokens of the piece
  const int found = forgotten_after(a, x.begin - C, -C, before / C, h, base, base + SAID + 16, lane);
  if (threadIdx.x == 0) store_release(decided(a, s, h), found < 0 ? 2 : 1);
  return uniform(found);
}

extern "C" __global__ void __launch_bounds__(384, 1) gla_forward(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) char smem[];
  const u32 base = (smem_addr(smem) + 1023) & ~1023u;
  const int tid = threadIdx.x;
  if (tid == 0) {
    for (int i = 0; i < SLOTS; i++) {
      bar_init(base + BARS + i * 16, 1);
      bar_init(base + BARS + i * 16 + 8, 8);
    }
    bars_ready();
  }
  for (int i = tid; i < MAKERS * 128; i += 384) sts32(base + SUMS + i * 4, 0);
  const int w = uniform((tid >> 5) & 7), lane = tid & 31;
  const Choice mine = choose(a, true, base + SAID, [&](int s, const Span& x, int h) { return early(a, x, s, h, base, lane); });
  const int s = mine.s, h = mine.h, back = mine.back;
  const Span x = span_of(a, s);
  if (x.end <= x.begin) return;
  const int t0 = uniform(x.begin - max(back, 0) * C), n = uniform((x.end - t0 + C - 1) / C);
  const int passes = back < 0 && !x.last ? 2 : 1;
  __syncthreads();  // SUMS are zero
  if (uniform(tid >> 8)) {
    registers_down<120>();
    produce(a, x, h, t0, n, passes, base, w, lane);
  } else {
    registers_up<192>();
    consume(a, x, s, h, t0, n, back < 0, passes, base, w, lane);
#if KEEP
    if (lane == 0) copied_out();
#endif
  }
}
