// GLA's forward in one launch: q, k, v, g in, o and states out, nothing else through memory but what spans pass on. With
// KEEP also what gla_backward.cu wants of every chunk.
//
// S <- diag(e^g) S + k v^T,  o = scale S^T q    (Gated Linear Attention, arXiv 2312.06635, equation 3)
//
// Chunks of 32 tokens, K = V = 128. With G the running sum of g in a chunk and GL its last,
//
//   M = GL / 2,   qi = scale q e^(G - M),   ki = k e^(M - G),   P = tril(qi ki^T)
//   o = qi (e^M S) + P V,   S <- e^M (e^M S + ki^T V)
//
// A program works through a span of one head: four warps make the factors, a chunk each, and eight carry the state
// transposed, [V, K], as accumulators. Products are in fp16 where gates are gentle (see half.cuh), else in bf16. Where qi might
// not fit (GL below log2's HARDEST) it is scale q e^G, ki is k e^(GL - G), and pairs are made one by one, with factors of at
// most 1, so that every gate that is at most 0 is exact.
//
// A span that is not a piece's first starts up to 24 chunks early from zero where what entered there is forgotten in every
// channel when the span begins. Where it is not, the span finds what its tokens leave of no state, waits for the state that
// the one before it leaves, hands its own on (a decay of each channel and a sum), and goes over its tokens once more.
#define WITH_Q !MAPS
#define WITH_K 1
#include "gla.cuh"

#define MAKERS 4 // warps that make factors

// A slot: q, k, then qi, ki; v, then o; P; e^M (of a hard chunk 1); g
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
#define NUMBERS (BARS + SLOTS * 16)      // of each slot: kind, what it adds to a state at most, what it leaves, fk fv, 4 / (fq fk fv)
#define ENDS (NUMBERS + SLOTS * 32)      // of each slot that is hard: GL by log2
#define LARGEST (ENDS + SLOTS * 512)     // see `largest_of`
#define SAID (LARGEST + 32)              // the ticket, what `choose` takes again, an unused word, one of `leave`; masks

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
    if (WITH_Q) cp16(at + OFF_Q + tile_place(r, j), from, ok);
    cp16(at + OFF_K + tile_place(r, j), from + to_k, ok);
    cp16(at + OFF_V + r * 256 + swz(r, j), ok ? v : (const char*)a.v, ok);
    q += 2 * sk; v += 2 * sv;
  }
  load_gates(a, t, end, h, at + OFF_G, ROW, lane);
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

// What the state needs of a chunk, and with `pairs` P. `left`: log2 of what chunks leave is added there, and left at `sums`.
INLINE void make_chunk(float scale, bool pairs, float* left, u32 sums, u32 numbers, u32 ends, u32 at, int lane) {
  float GL[4], E[4], kept;
  Kind kind = kind_of(GL, E, kept, at + OFF_G, ROW, lane);
  if (left) {
#pragma unroll
    for (int j = 0; j < 4; j++) left[j] += GL[j];
    sts128(sums + lane * 16, left);
  }
  sts128(at + OFF_E + lane * 16, E);
  const Size q = WITH_Q ? size_of(largest_in(at + OFF_Q, lane), exponent(scale) + 1, ORDINARY) : Size{0, true};
  const Size k = size_of(largest_in(at + OFF_K, lane), 0, ORDINARY), v = size_of(largest_in(at + OFF_V, lane), 0, ORDINARY);
  if (kind == HALVES && !(q.fits && k.fits && v.fits)) kind = WIDE;
  const bool half = kind == HALVES;
  if (lane == 0) {
    const float n[4] = {__uint_as_float(kind), power(7 + k.e + v.e), kept, half ? power(7 - k.e - v.e) : 1.f};
    sts128(numbers, n);
    sts32(numbers + 16, __float_as_uint(half ? power(q.e + k.e + v.e - 9) : 1.f));
  }
  if (kind == HARD) sts128(ends + lane * 16, GL);
  if (kind == HARD && pairs) make_hard_pairs(scale, at, lane);
  if (half) {
    to_halves(at + OFF_V, power(3 - v.e), lane);
    make_factors<true>(GL, false, scale * power(4 - q.e), power(4 - k.e), at + OFF_Q, at + OFF_K, at + OFF_G, ROW, false, lane);
  } else {
    make_factors<false>(GL, kind == HARD, scale, 1.f, at + OFF_Q, at + OFF_K, at + OFF_G, ROW, false, lane);
  }
  __syncwarp();
  if (!pairs || kind == HARD) return;
  if (half) make_pairs<true>(at + OFF_Q, at + OFF_K, 0.25f, at + OFF_P, lane);
  else make_pairs<false>(at + OFF_Q, at + OFF_K, 1.f, at + OFF_P, lane);
}

// The chunks of `passes` over a span, n each; of two passes the first is without outputs, as is that of MAPS.
INLINE void produce(const Args& a, const Span& x, int h, int t0, int n, int passes, u32 base, int w, int lane) {
  const int total = n * passes, last = MAPS ? total : total - n;  // the first chunk of the last pass
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
    make_chunk(a.scale, c >= last, c < last ? left : 0, base + SUMS + w * 512, base + NUMBERS + c % SLOTS * 32, base + ENDS + c % SLOTS * 512,
               at, lane);
#if KEEP
    const int own = t0 + (c - last) * C - x.begin;
    if (c >= last && own >= 0) {
      __syncwarp();
      char* const to = (char*)a.kept_P + kept_at(a, x.chunk + own / C, h) * PAIRS;
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

// O, what the state gives a chunk by rows of V, and what its pairs give, to memory, times `by`
template <bool FP16> INLINE void finish(float (&O)[16], const Args& a, u32 at, float by, int t, int end, int h, int w, int lane) {
  asm volatile("" : "+r"(lane));  // what is found from here on is not kept from chunk to chunk, for which there are no registers
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1;
  u32 v[2][4];
#pragma unroll
  for (int m = 0; m < 2; m++) ldm_trans(v[m], at + OFF_V + (16 * m + rb) * 256 + swz(rb, w * 2 + cb));
  add_pairs<FP16>(O, v, at + OFF_P, rb, cb);
#pragma unroll
  for (int m = 0; m < 2; m++) {
    u32 f[4];
#pragma unroll
    for (int i = 0; i < 4; i++) f[i] = pack(O[8 * m + 2 * i] * by, O[8 * m + 2 * i + 1] * by);
    stm_trans(f, at + OFF_V + (16 * m + rb) * 256 + swz(rb, w * 2 + cb));
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

// Ask for what the state S gives a chunk's tokens (RO), and for its next value with v times `by`, at most 1. `kept`: where it is kept, or null
template <bool FP16>
INLINE void ask_products(float (&S)[16][4], float (&RO)[16], float by, bool hard, u32 ends, u32 at, char* kept, u32 stage, int w, int lane) {
  asm volatile("" : "+r"(lane));  // what is found from here on is not kept from chunk to chunk, for which there are no registers
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1;
  u32 f[8][4], v[2][4];
  as_operand<FP16>(f, S);
#pragma unroll
  for (int m = 0; m < 2; m++) {
    ldm_trans(v[m], at + OFF_V + (16 * m + rb) * 256 + swz(rb, w * 2 + cb));
    if (FP16) times(v[m], by);
  }
  if (!FP16 && hard) decay_to_end(S, ends, lane);
  wg_fence();
#pragma unroll
  for (int ks = 0; ks < 8 * WITH_Q; ks++)
    wgmma32<FP16>(RO, f[ks], descriptor(at + OFF_Q + (ks >> 2) * HALF, 16, 1024) + (ks & 3) * 2, ks > 0);
  wgmma128<FP16>(S, v[0], descriptor(at + OFF_K, HALF, 1024));
  wgmma128<FP16>(S, v[1], descriptor(at + OFF_K + 2048, HALF, 1024));
  wg_commit();
#if KEEP
  if (kept) keep_state(f, kept, stage, w, lane);
#endif
}

// The state over n chunks from token t0 on, the first of which is the c0-th of those under way; outputs from `begin` on,
// which has chunk number `chunk`. A chunk's output is finished while the products of the next are made.
INLINE void walk(float (&S)[16][4], const Args& a, int h, int t0, int begin, int end, int chunk, int c0, int n, u32 base,
                 int w, int lane) {
  const u32 bars = base + BARS;
  Unit unit = {1.f, largest_of(S, base + LARGEST, w, lane)};
  float O[16];   // of the chunk before, without its pairs
  auto finish_before = [&](int c) {
    const u32 at = base + c % SLOTS * SLOT, numbers = base + NUMBERS + c % SLOTS * 32;
    const int t = t0 + (c - c0) * C;
    if (!MAPS && t >= begin && a.o) {
      const float by = lds(numbers + 16);
      if (uniform(lds32(numbers)) == HALVES) finish<true>(O, a, at, by, t, end, h, w, lane);
      else finish<false>(O, a, at, by, t, end, h, w, lane);
    }
    __syncwarp();
    if (lane == 0) bar_arrive(bars + c % SLOTS * 16 + 8);
  };
  for (int c = c0; c < c0 + n; c++) {
    const int slot = c % SLOTS;
    const u32 at = base + slot * SLOT, numbers = base + NUMBERS + slot * 32;
    bar_wait(bars + slot * 16, (c / SLOTS) & 1);
    u32 said[4];
    lds128(said, numbers);
    const int kind = uniform(said[0]);
    const bool half = kind == HALVES, hard = kind == HARD;
    const float change = unit.next(half, __uint_as_float(said[1]), __uint_as_float(said[2]));
    const float by = half ? unit.by * inverse(__uint_as_float(said[3])) : 1.f;
    decay_by(S, at + OFF_E, change, lane);
    float RO[16];
    char* kept = 0;
#if KEEP
    const int t = t0 + (c - c0) * C;
    if (t >= begin) {
      const u64 place = kept_at(a, chunk + (t - begin) / C, h);
      kept = (char*)(a.kept_S + place * (D * D));
      if (w == 0 && lane == 0) *(float*)((char*)a.kept_P + place * PAIRS + 2 * C * C) = unit.by;
    }
#endif
    if (half) ask_products<true>(S, RO, by, false, 0, at, kept, base + STAGE + w * 4096, w, lane);
    else ask_products<false>(S, RO, by, hard, base + ENDS + slot * 512, at, kept, base + STAGE + w * 4096, w, lane);
    if (c > c0) finish_before(c - 1);
    wg_wait(S);
#if !MAPS
    wg_settled(RO);
    const float share = half ? 0.25f * inverse(by) : 1.f;
#pragma unroll
    for (int i = 0; i < 16; i++) O[i] = RO[i] * share;
#endif
    decay(S, at + OFF_E, lane);
  }
  if (n) finish_before(c0 + n - 1);
  multiply(S, inverse(unit.by));
}

INLINE void consume(const Args& a, const Span& x, int s, int h, int t0, int n, bool waits, int passes, u32 base, int w,
                    int lane) {
  float S[16][4];
  const int end = uniform(x.end);
  if (passes > 1 || !waits || a.given)
    begin_with(S, entering(a, x.piece, s, h, x.first, waits), w, lane);
  else
    take(S, a, s - 1, h, w, lane);
#pragma unroll 1
  for (int pass = 0; pass < passes; pass++) {
    const bool last = pass == passes - 1;
    walk(S, a, h, t0, last ? uniform(x.begin) : end, end, KEEP ? uniform(x.chunk) : 0, pass * n, n, base, w, lane);
    if (!last) hand_on(S, a, s - 1, s, h, base + SUMS, MAKERS, w, lane);
  }
  if (passes == 1 && !a.given) leave(S, a, x.piece, x.last, s, s + 1, h, base + SAID, w, lane);
}

// How many chunks before token t, of so many tokens there, forget what enters them, or -1. By all warps.
INLINE int forgotten_before(const Args& a, int t, int there, int h, u32 base, int lane) {
  return forgotten_after(a, t - C, -C, there / C, h, base, base + SAID + 16, lane);
}
#if MAPS
INLINE Forgets forgetting(const Args& a, int t, int next, int there, int beyond, int, int h, bool behind, u32 base, int lane) {
  const int found = uniform(forgotten_before(a, t, there, h, base, lane));
  return {found, found >= 0 && behind ? uniform(forgotten_before(a, next, beyond, h, base, lane)) : -1};
}
#endif

// How many chunks early a span begins, or -1: it waits. By all warps.
INLINE int early(const Args& a, const Span& x, int s, int h, u32 base, int lane) {
  if (x.first) return 0;
  const int before = x.begin - (a.table ? a.cu[x.piece] : x.piece * a.T);  // tokens of the piece
  const int found = forgotten_before(a, x.begin, before, h, base, lane);
  if (!a.given && threadIdx.x == 0) store_release(decided(a, s, h), found < 0 ? 2 : 1);
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
#if MAPS
  const Part p = part_of(a, true, base, lane);
  if (p.x.end <= p.x.begin) return;
  __syncthreads();  // SUMS are zero
  if (uniform(tid >> 8)) {
    registers_down<120>();
    produce(a, p.x, p.h, p.r.t0, p.r.n, 1, base, w, lane);
  } else {
    registers_up<192>();
    float S[16][4];
    begin_with(S, 0, w, lane);
    walk(S, a, p.h, p.r.t0, p.x.end, p.x.end, 0, 0, p.r.n, base, w, lane);
    const u64 i = (u64)p.s * a.H + p.h;
    put_state(S, a.states + i * (D * D), w, lane);
    if (tid < D) {
      float left = p.r.whole ? 0.f : NOTHING;
      for (int m = 0; m < MAKERS; m++) left += lds(base + SUMS + m * 512 + tid * 4);
      a.parts[i * D + tid] = left;
    }
  }
#else
  const Choice mine = chosen(a, true, base + SAID, [&](int s, const Span& x, int h) { return early(a, x, s, h, base, lane); });
  const int s = mine.s, h = mine.h, back = mine.back;
  const Span x = span_of(a, s);
  if (x.end <= x.begin) return;
  const int t0 = uniform(x.begin - max(back, 0) * C), n = uniform((x.end - t0 + C - 1) / C);
  const int passes = back < 0 && !x.last && !a.given ? 2 : 1;
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
#endif
}
