// The forward of a transition that is diagonal plus low rank (RWKV-7's) in one launch: q, k, v, a, b, g in, o and states out,
// nothing else through memory but what spans pass on. With KEEP also what dplr_backward.cu wants of every chunk.
//
// S_t = (diag(e^g) + b a^T) S_(t-1) + k v^T,  o = scale S^T q    (RWKV-7, arXiv 2503.14456, equation 16)
//
// Chunks of 32 tokens, K = V = 128. With G the running sum of g in a chunk, G' that of the token before, GL the last,
//
//   qi = scale q e^(G - GL/2),  ai = a e^(G' - GL/2),  ki = k e^(GL/2 - G),  bi = b e^(GL/2 - G)
//   P_k = tril(qi ki^T),  P_b = tril(qi bi^T),  L = tril(ai ki^T, -1),  M = (I - tril(ai bi^T, -1))^-1
//   S' = e^(GL/2) S,  Y = M (ai S' + L V),   o = qi S' + P_b Y + P_k V,   S <- e^(GL/2) (S' + ki^T V + bi^T Y)
//
// A program works through a span of one head: two pairs of warps make the factors, a chunk each, and eight carry the state
// transposed, [V, K], as accumulators. A chunk whose factors do not fit (GL below log2's FITS) gives NaN: the caller has promised that
// none does.
//
// A span that is not a piece's first starts some chunks early from zero where those leave nothing of the identity. Else it waits for the
// state that the one before it leaves, and meanwhile finds what its tokens leave of no state and of the identity (two passes
// without outputs), so that the state it leaves is a product once the one before it is there.
#include "dplr.cuh"
#include "triangle.cuh"

#define SLOTS 3 // chunks under way
#define MAKERS 2 // pairs of warps that make factors, each a chunk
// A slot: a and q, then ai and qi; k and b, then ki and bi; v, then Y and o; P of k and b, L, M; g; e^(GL/2)
#define SLOT 58368
#define OFF_A 0
#define OFF_K 16384
#define OFF_V 32768
#define OFF_P 40960
#define OFF_G 49152
#define OFF_E 57344
#define STAGE (SLOTS * SLOT)             // with KEEP: the state on its way out, 4 KB a warp that carries it
#define TRIANGLES (STAGE + KEEP * 32768) // what makers invert
#define NUMBERS (TRIANGLES + MAKERS * TRIANGLE) // of each slot: see `Told`
#define LARGEST (NUMBERS + SLOTS * 32) // of makers: see `say_largest`
#define AGREED (LARGEST + MAKERS * 64)    // twice 32 bytes, see `agree`
#define BARS (AGREED + 64)               // of each slot: full, empty
#define OPEN (BARS + SLOTS * 16)         // barriers: the last pass may begin; it is known whether the span waits
#define SAID (OPEN + 16)                 // the ticket, what `choose` takes again, whether the span starts early, one of `leave`

// What a maker says of a chunk: powers of its tiles, of v and of M, the most by which e^M makes the state larger, and a bound of what
// k and v add to it
struct Told { int a, q, k, b, v, m, grow, add; };
INLINE Told told(u32 at) {
  u32 x[8];
  lds128(x, at);
  lds128(x + 4, at + 16);
  return {(int)x[0], (int)x[1], (int)x[2], (int)x[3], (int)x[4], (int)x[5], (int)x[6], (int)x[7]};
}

// -- what chunks need of their own tokens: two warps a chunk, each 16 of them, and then the products of a or of q ------------------------------------------------------------

// Ask for the rows of this half's 16 tokens of those from t on; those from `end` on are zero, v where no `values` are wanted.
INLINE void load_chunk(const Args& a, int t, int end, int h, bool values, u32 at, int half, int lane) {
  asm volatile("" : "+r"(lane));  // what is found from here on is not kept from chunk to chunk, for which there are no registers
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
    cp16(at + OFF_A + SECOND + both_place(r, j), from, ok);
    cp16(at + OFF_K + both_place(r, j), from + to_k, ok);
    cp16(at + OFF_A + both_place(r, j), (const char*)a.a + at_v, ok);
    cp16(at + OFF_K + SECOND + both_place(r, j), (const char*)a.b + at_v, ok);
    cp16(at + OFF_V + r * 256 + swz(r, j), (const char*)a.v + at_v, ok && values);
    cp16(at + OFF_G + r * 256 + j * 16, (const char*)a.g + at_v, ok);
    q += 2 * sk;
  }
}

// Products of rows of ai or qi (at `left`) with ki and bi: tiles of 8 columns, two of rows 0 to 15, four of rows 16 to 31
INLINE void products(float (&X)[6][4], float (&Y)[6][4], u32 left, u32 at, int lane) {
  asm volatile("" : "+r"(lane));  // what is found from here on is not kept from chunk to chunk, for which there are no registers
  const int ra = (lane & 7) + (((lane >> 3) & 1) << 3), ca = lane >> 4;
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1;
#pragma unroll
  for (int i = 0; i < 6; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) X[i][j] = Y[i][j] = 0.f;
#pragma unroll
  for (int ks = 0; ks < 8; ks++) {
    u32 x[2][4];
    ldm(x[0], left + both_place(ra, 2 * ks + ca));
    ldm(x[1], left + both_place(16 + ra, 2 * ks + ca));
#pragma unroll
    for (int which = 0; which < 2; which++) {
      float(&Z)[6][4] = which ? Y : X;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        u32 n[4];
        ldm(n, at + OFF_K + which * SECOND + both_place(16 * j + rb, 2 * ks + cb));
        if (j == 0) { mma<true>(Z[0], x[0], n[0], n[1]); mma<true>(Z[1], x[0], n[2], n[3]); }
        mma<true>(Z[2 + 2 * j], x[1], n[0], n[1]); mma<true>(Z[3 + 2 * j], x[1], n[2], n[3]);
      }
    }
  }
}

// What lies below the diagonal, and on it if `diagonal`
INLINE void put_pairs(const float (&X)[6][4], bool diagonal, u32 to, int lane) {
  asm volatile("" : "+r"(lane));  // what is found from here on is not kept from chunk to chunk, for which there are no registers
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int i = m * 16 + e * 8 + (lane >> 2), last = diagonal ? i : i - 1;
#pragma unroll
      for (int nt = 0; nt < 2 + 2 * m; nt++) {
        const int j = nt * 8 + 2 * (lane & 3);
        const float* y = &X[2 * m + nt][2 * e];
        sts32(to + pair_place(i, nt) + (lane & 3) * 4, pack<true>(j <= last ? y[0] : 0.f, j + 1 <= last ? y[1] : 0.f));
      }
    }
}

// -X times `by` below the diagonal to `triangle`
INLINE void put_triangle(const float (&X)[6][4], float by, u32 triangle, int lane) {
  asm volatile("" : "+r"(lane));  // what is found from here on is not kept from chunk to chunk, for which there are no registers
  const u32 l = lane & 3, l0 = l >> 1, l1 = (l + 1) >> 1;
  const u32 even = triangle + (lane >> 2) * 4 + 256 * l - 32 * l0 * (l - l0);
  const u32 odd = triangle + (lane >> 2) * 4 + 256 * l - 32 * l1 * (l - l1) - 16 * l1;
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int i = m * 16 + e * 8 + (lane >> 2), row = (m * 16 + e * 8) * 4;
#pragma unroll
      for (int nt = 0; nt < 2 + 2 * m; nt++) {
        const int j = nt * 8 + 2 * (lane & 3), back = nt * 64 * l;
        const float* y = &X[2 * m + nt][2 * e];
        if (j < i) sts32(even - back + nt * (1024 - 128 * nt) + row, __float_as_uint(-by * y[0]));
        if (j + 1 < i) sts32(odd - back + 128 + nt * (992 - 128 * nt) + row, __float_as_uint(-by * y[1]));
      }
    }
}

// The inverse of I + triangle to fp16, times a power of two by which all are below 2^4; returns its log2
INLINE int invert_half(u32 to, u32 triangle, int lane) {
  float y[C], most = 0.f;
  substitute(1.f, triangle, lane, [&](int j, float x) {
    y[j] = x;
    most = fmaxf(most, fabsf(x));
  });
  const int by = 3 - exponent(__uint_as_float(warp_max(__float_as_uint(most))));
  const float f = power(by);
#pragma unroll
  for (int j = 0; j < C; j++) sts16(to + pair_place(j, lane >> 3) + (lane & 7) * 2, (u16)(pack<true>(y[j] * f, 0.f) & 0xffff));
  return by;
}

// A chunk's pairs, of which those that outputs want only with `outputs`, and what the state needs of its tokens
INLINE void make_chunk(float scale, bool outputs, u32 numbers, u32 said, u32 triangle, u32 at, int pair, int half, int lane) {
  say_largest<5>({{at + OFF_A, at + OFF_A + SECOND, at + OFF_K, at + OFF_K + SECOND, at + OFF_V}, {BOTH, BOTH, BOTH, BOTH, 2048}}, said,
                 half, lane);
  between_two(pair);
  const Powers by = powers(scale, said);
  const int v = room(said, 4) + 3;
  const int add = added(said, 2, 4, by.k + v);  // before the other half, which may have less to do, says what its next chunk has
  float GL[4], G[4], E[4];
  const int grow = half_decay(GL, G, E, at + OFF_G, half, lane);
  to_halves<8>(at + OFF_V + half * 4096, power(v), lane, 2048);
  make_factors<0>(GL, G, by, scale, at + OFF_A, at + OFF_K, at + OFF_G, half * (C / 2), lane);
  between_two(pair);
  float X[6][4], Y[6][4];
  if (half == 0) {
    products(X, Y, at + OFF_A, at, lane);
    put_pairs(X, false, at + OFF_P + 4096, lane);
    put_triangle(Y, power(-by.a - by.b), triangle, lane);
    __syncwarp();
    const int m = invert_half(at + OFF_P + 6144, triangle, lane);
    sts128(at + OFF_E + lane * 16, E);
    if (lane == 0) {
      sts64(numbers, by.a, by.q);
      sts64(numbers + 8, by.k, by.b);
      sts64(numbers + 16, v, m);
      sts64(numbers + 24, grow, add);
    }
  } else if (outputs) {
    products(X, Y, at + OFF_A + SECOND, at, lane);
    put_pairs(X, true, at + OFF_P, lane);
    put_pairs(Y, true, at + OFF_P + 2048, lane);
  }
}

// The chunks of a span: those before it, if it may begin `early`, and then those again and its own n, or if it waits these in as many
// `passes`, the second of three without v.
INLINE void produce(const Args& a, const Span& x, int h, int n, int early, int passes, u32 base, int w, int lane) {
  const int pair = w >> 1, half = w & 1, lim = piece_end(a, x);
  bool found = false;
  for (int c = pair;; c += MAKERS) {
    if (early && c >= early && c < early + MAKERS) {
      bar_wait(base + OPEN + 8, 0);
      found = lds32(base + SAID + 8);
    }
    const Turn now = turn(c, early, found, n, passes);
    if (!now.live) break;
    const int slot = c % SLOTS;
    const u32 at = base + slot * SLOT, full = base + BARS + slot * 16;
    if (c >= SLOTS) bar_wait(full + 8, (c / SLOTS - 1) & 1);
    if (now.pass == 2) bar_wait(base + OPEN, 0);
    load_chunk(a, x.begin + now.m * C, lim, h, now.values, at, half, lane);
    cp_wait();
    __syncwarp();
    make_chunk(a.scale, now.own, base + NUMBERS + slot * 32, base + LARGEST + pair * 64, base + TRIANGLES + pair * TRIANGLE, at, pair, half,
               lane);
#if KEEP
    __syncwarp();
    if (now.own) {  // L and M, or P of k and b
      const u32 from = (1 - half) * 4096 + lane * 16;
      char* const to = (char*)a.kept_P + kept_at(a, x.chunk + now.m, h) * PAIRS + from;
#pragma unroll
      for (int i = 0; i < 8; i++) {
        u32 z[4];
        lds128(z, at + OFF_P + from + i * 512);
        stg128(to + i * 512, z);
      }
    }
#endif
    proxy_fence();
    __syncwarp();
    if (lane == 0) bar_arrive(full);
  }
}

// -- the state, from chunk to chunk: 16 of its rows, [V, K], a warp --------------------------------------------------

// Y of a chunk times 2^(what is returned), from RO, on their way to ai S' and qi S', and v, times what `n` says and 2^held
INLINE int find_Y(u32 (&y)[2][4], float (&RO)[32], const u32 (&v)[2][4], const Told& n, int held, bool all, u32 pairs, u32 at,
                  int w, int lane) {
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1;
  float R[16] = {};
  add_pairs<true>(R, v, pairs + 4096, rb, cb);
  wg_wait(RO);
  const float in = power(n.k + n.v - held);
#pragma unroll
  for (int i = 0; i < 16; i++) R[i] = fmaf(RO[i], in, R[i]);
  const int by = min(3 - size_in_warp(R), 60);
  const float f = power(by);
#pragma unroll
  for (int i = 0; i < 8; i++) y[i >> 2][i & 3] = pack<true>(R[2 * i] * f, R[2 * i + 1] * f);
#pragma unroll
  for (int i = 0; i < 16; i++) R[i] = 0.f;
  add_pairs<true>(R, y, pairs + 6144, rb, cb);
  const int is = n.m + by + n.a + n.k + n.v;
  const int to = min(3 - agree(size_in_warp(R) - is, all, at, w, lane), n.k + n.v - n.b + 60);
  const float g = power(to - is);
#pragma unroll
  for (int i = 0; i < 8; i++) y[i >> 2][i & 3] = pack<true>(R[2 * i] * g, R[2 * i + 1] * g);
  return to;
}

// The state over a span's n chunks, the first of which is the c0-th of those under way; what is wanted of chunks goes out if
// this is the `last` pass.
INLINE void walk(float (&S)[16][4], const Args& a, int h, int begin, int end, int chunk, int c0, int n, bool last, u32 base,
                 int w, int lane) {
  const u32 bars = base + BARS;
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1, j = w * 2 + cb;
  const bool all = KEEP && last;  // tell what tiles are multiplied by
  int held = 0;                   // S is, times 2^held
  for (int c = c0; c < c0 + n; c++) {
    const int slot = c % SLOTS, t = begin + (c - c0) * C;
    const u32 at = base + slot * SLOT;
    bar_wait(bars + slot * 16, (c / SLOTS) & 1);
    const Told x = told(base + NUMBERS + slot * 32);
    float RO[32];
    u32 v[2][4], y[2][4];
    held = begin_chunk(S, held, x.grow, x.add, all, at + OFF_E, base + AGREED, w, lane);
    {
      u32 f[8][4];
#pragma unroll
      for (int m = 0; m < 2; m++) ldm_trans(v[m], at + OFF_V + (16 * m + rb) * 256 + swz(rb, j));
      as_operand<true>(f, S);
      wg_fence();
#pragma unroll
      for (int ks = 0; ks < 8; ks++)
        wgmma64<true>(RO, f[ks], descriptor(at + OFF_A + (ks >> 2) * BOTH, 16, 1024) + (ks & 3) * 2, ks > 0);
      wg_commit();
#if KEEP
      if (last)
        keep_state(f, (char*)(a.kept_S + kept_at(a, chunk + (t - begin) / C, h) * (D * D)), base + STAGE + w * 4096, w, lane);
#endif
    }
    const int was = held, by_y = find_Y(y, RO, v, x, held, all, at + OFF_P, base + AGREED + 32, w, lane);
    {
      u32 f[4][4];
      const int by = fitting(S, held, x.b + by_y);
#pragma unroll
      for (int i = 0; i < 8; i++) { f[i >> 2][i & 3] = v[i >> 2][i & 3]; f[2 + (i >> 2)][i & 3] = y[i >> 2][i & 3]; }
      const float by_v = power(min(held - x.k - x.v, 11));  // at most 3, but where all of v or k are 0
      times(f[0], by_v); times(f[1], by_v);
      times(f[2], power(by)); times(f[3], power(by));
      wg_fence();
      wgmma128<true>(S, f[0], descriptor(at + OFF_K, BOTH, 1024));
      wgmma128<true>(S, f[1], descriptor(at + OFF_K + 2048, BOTH, 1024));
      wgmma128<true>(S, f[2], descriptor(at + OFF_K + SECOND, BOTH, 1024));
      wgmma128<true>(S, f[3], descriptor(at + OFF_K + SECOND + 2048, BOTH, 1024));
      wg_commit();
    }
    if (last) {
      float* O = RO + 16;
      const float to_v = power(x.k + x.v - was), to_y = power(x.b + by_y - x.k - x.v), out = power(-x.q - x.b - by_y);
#pragma unroll
      for (int i = 0; i < 16; i++) O[i] *= to_v;
      add_pairs<true>(O, v, at + OFF_P, rb, cb);
#pragma unroll
      for (int i = 0; i < 16; i++) O[i] *= to_y;
      add_pairs<true>(O, y, at + OFF_P + 2048, rb, cb);
      const int to = w * 2 + (lane & 1);
#if KEEP
      const u64 kept = kept_at(a, chunk + (t - begin) / C, h);
      if (w == 0 && lane == 0) {
        const u32 numbers[4] = {(u32)was, (u32)by_y, (u32)x.m, 0};
        stg128((char*)a.kept_P + kept * PAIRS + 8 * C * C, numbers);
      }
#pragma unroll
      for (int m = 0; m < 2; m++) stm_trans(y[m], at + OFF_V + (16 * m + rb) * 256 + swz(rb, j));
      __syncwarp();
#pragma unroll
      for (int m = 0; m < 2; m++) {
        const int row = 16 * m + (lane >> 1);
        u32 z[4];
        lds128(z, at + OFF_V + row * 256 + swz(row, to));
        stg128((char*)(a.kept_Y + kept * (C * D)) + tile_place(row, to), z);
      }
      __syncwarp();
#endif
      if (a.o) {
#pragma unroll
        for (int m = 0; m < 2; m++) {
          u32 f[4];
#pragma unroll
          for (int i = 0; i < 4; i++) f[i] = pack(O[8 * m + 2 * i] * out, O[8 * m + 2 * i + 1] * out);
          stm_trans(f, at + OFF_V + (16 * m + rb) * 256 + swz(rb, j));
        }
        __syncwarp();
#pragma unroll
        for (int m = 0; m < 2; m++) {
          const int row = 16 * m + (lane >> 1);
          u32 z[4];
          lds128(z, at + OFF_V + row * 256 + swz(row, to));
          if (t + row < end) stg128(a.o + ((u64)(t + row) * a.H + h) * D + to * 8, z);
        }
      }
    }
    wg_wait(S);
    decay(S, at + OFF_E, lane);
    __syncwarp();
    if (lane == 0) bar_arrive(bars + slot * 16 + 8);
  }
  multiply(S, power(-held));
}

INLINE void consume(const Args& a, const Span& x, int s, int h, int n, int early, int passes, u32 base, int w, int lane) {
  float S[16][4];
  int c = 0;  // of those under way
  bool found = false;
#pragma unroll 1
  for (int pass = early ? -2 : 0; pass < passes; pass++) {  // below 0: over the chunks before the span, from the identity, from zero
    const bool last = pass == passes - 1;
    const int chunks = pass < 0 ? early : n;
    if (pass == -2) {
      identity(S, w, lane);
    } else if (pass == 0 && !found) {
      if (passes > 1 || x.first)
        begin_with(S, x.first && a.S0 ? a.S0 + ((u64)x.piece * a.H + h) * (D * D) : 0, w, lane);
      else
        take(S, a, s - 1, h, w, lane);
    }
    walk(S, a, h, uniform(x.begin), uniform(x.end), uniform(x.chunk), c, chunks, last, base, w, lane);
    c += chunks;
    if (pass == -2) {
      found = forgotten(S, a, s, h, base + AGREED, base + SAID + 8, base + OPEN + 8, w, lane);
      zero(S);
      if (!found) pass = -1;
    } else if (pass == -1) {
      pass = passes - 2;
    } else if (!last) {
      between_passes(S, a, true, pass, s, h, base, base + OPEN, w, lane);
    }
  }
  if (passes == 1 || found) leave(S, a, x.piece, x.last, s, s + 1, h, base + SAID, w, lane);
}

extern "C" __global__ void __launch_bounds__(384, 1) dplr_forward(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) char smem[];
  const u32 base = (smem_addr(smem) + 1023) & ~1023u;
  const int tid = threadIdx.x;
  if (tid == 0) {
    for (int i = 0; i < SLOTS; i++) {
      bar_init(base + BARS + i * 16, 2);
      bar_init(base + BARS + i * 16 + 8, 8);
    }
    bar_init(base + OPEN, 1);
    bar_init(base + OPEN + 8, 1);
    bars_ready();
  }
  const int w = uniform((tid >> 5) & 7), lane = tid & 31;
  const Choice mine = choose(a, true, false, base + SAID, [&](int s, const Span& x, int h) { return waiting(x.first); });
  const int s = mine.s, h = mine.h;
  const Span x = span_of(a, s);
  if (x.end <= x.begin) return;
  const int n = uniform((x.end - x.begin + C - 1) / C), passes = x.first || x.last ? 1 : 3;
  const int before = x.begin - (a.table ? a.cu[x.piece] : x.piece * a.T), early = uniform(x.first ? 0 : early_by(n, before / C));
  if (uniform(tid >> 8)) {
    registers_down<120>();
    if (w < 2 * MAKERS) produce(a, x, h, n, early, passes, base, w, lane);
  } else {
    registers_up<192>();
    consume(a, x, s, h, n, early, passes, base, w, lane);
#if KEEP
    if (lane == 0) copied_out();
#endif
  }
}
