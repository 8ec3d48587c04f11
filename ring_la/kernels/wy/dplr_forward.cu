// The forward of a transition that is diagonal plus low rank (RWKV-7's) in one launch: q, k, v, a, b, g in, o and states out,
// nothing else through memory but what spans pass on. With KEEP also what dplr_backward.cu wants of every chunk.
//
// S_t = (diag(e^g) + b a^T) S_(t-1) + k v^T,  o = scale S^T q    (RWKV-7, arXiv 2503.14456, equation 16)
//
// Chunks of 32 tokens, K = V = 128. With G the running sum of g in a chunk, G' that of the token before, GL the last,
//
//   qg = scale q e^G,  ag = a e^G',  kd = k e^(GL - G),  bd = b e^(GL - G)
//   qi = scale q e^(G - GL/2),  ai = a e^(G' - GL/2),  ki = k e^(GL/2 - G),  bi = b e^(GL/2 - G)
//   P_k = tril(qi ki^T),  P_b = tril(qi bi^T),  L = tril(ai ki^T, -1),  M = (I - tril(ai bi^T, -1))^-1
//   Y = M (ag S + L V),   o = qg S + P_b Y + P_k V,   S <- e^GL S + kd^T V + bd^T Y
//
// A program works through a span of one head: three warps make the factors, a chunk each, and eight carry the state
// transposed, [V, K], as accumulators. Pairs are found from fp16 where what the gates add up to allows it (see half.cuh), and
// multiplied in two parts of bf16, but for M. A chunk whose factors do not fit (GL below log2's HARDEST) gives NaN: the caller has
// promised that none does.
//
// A span that is not a piece's first waits for the state that the one before it leaves. It meanwhile finds what its tokens leave
// of no state and of the identity (two passes without outputs), so that the state it leaves is a product once the one before
// it is there.
#include "dplr.cuh"
#include "triangle.cuh"

#define SLOTS 3 // chunks under way, one a warp that makes factors
// A slot: a and q, then ai and qi, then ag and qg; k, b, then ki, bi, then kd, bd; v, then Y and o; P of k and b, L, M; g, then
// what P of k and b and L are beyond bf16; e^GL
#define SLOT 58368
#define OFF_A 0
#define OFF_K 16384
#define OFF_B 24576
#define OFF_V 32768
#define OFF_P 40960
#define OFF_G 49152
#define OFF_E 57344
#define LOW (OFF_G - OFF_P)              // from pairs to what they are beyond bf16
#define MILD -28.f                       // log2 of the least that a chunk leaves of a channel whose pairs are found from fp16
#define STAGE (SLOTS * SLOT)             // with KEEP: the state on its way out, 4 KB a warp that carries it
#define TRIANGLES (STAGE + KEEP * 32768) // what a maker inverts
#define BARS (TRIANGLES + SLOTS * TRIANGLE) // of each slot: full, empty
#define OPEN (BARS + SLOTS * 16)         // a barrier: the last pass may begin
#define SAID (OPEN + 16)                 // the ticket, what `choose` takes again, an unused word, one of `leave`

// -- what chunks need of their own tokens: a warp a chunk ------------------------------------------------------------

// Ask for the rows of 32 tokens from t on; those from `end` on are zero, v where no `values` are wanted.
INLINE void load_chunk(const Args& a, int t, int end, int h, bool values, u32 at, int lane) {
  asm volatile("" : "+r"(lane));  // what is found from here on is not kept from chunk to chunk, for which there are no registers
  const int hk = h / (a.H / a.HK), row = lane >> 4, j = lane & 15, live = end - t - row;
  const u64 sk = (u64)a.HK * (D * 2), sv = (u64)a.H * (D * 2);
  const char* q = (const char*)a.q + (u64)(t + row) * sk + hk * (D * 2) + j * 16;
  const u64 from_v = (u64)(t + row) * sv + h * (D * 2) + j * 16;
  const u64 to_k = (const char*)a.k - (const char*)a.q;
#pragma unroll 2
  for (int i = 0; i < 16; i++) {
    const int r = 2 * i + row;
    const bool ok = 2 * i < live;
    const char* from = ok ? q : (const char*)a.q;
    const u64 at_v = ok ? from_v + i * 2 * sv : 0;
    cp16(at + OFF_A + SECOND + both_place(r, j), from, ok);
    cp16(at + OFF_K + tile_place(r, j), from + to_k, ok);
    cp16(at + OFF_A + both_place(r, j), (const char*)a.a + at_v, ok);
    cp16(at + OFF_B + tile_place(r, j), (const char*)a.b + at_v, ok);
    cp16(at + OFF_V + r * 256 + swz(r, j), (const char*)a.v + at_v, ok && values);
    cp16(at + OFF_G + r * 256 + j * 16, (const char*)a.g + at_v, ok);
    q += 2 * sk;
  }
}

// What the tiles of a chunk are multiplied by, by log2: those in fp16
struct Powers { int a, q, k, b; };

// The same tiles with factors about the chunk's middle: ai, qi, ki, bi
template <bool FP16> INLINE void make_factors(const float (&GL)[4], const Powers& by, float scale, u32 at, int lane) {
  const int chunk = lane >> 1;
  const u32 half = (lane & 1) * 8;
  const float fa = power(by.a), fq = power(by.q) * scale, fk = power(by.k), fb = power(by.b);
  float G[4] = {0.f, 0.f, 0.f, 0.f}, over[4];  // over: e^(G - GL/2) of the token before
#pragma unroll
  for (int j = 0; j < 4; j++) over[j] = ex2(-0.5f * GL[j]);
#pragma unroll 1
  for (int i0 = 0; i0 < C; i0 += GROUP) {
    u32 g[GROUP][2], x[GROUP][4][2];  // a, q, k, b
#pragma unroll
    for (int l = 0; l < GROUP; l++) {
      const u32 to_a = at + OFF_A + both_place(i0 + l, chunk) + half, to_k = at + OFF_K + tile_place(i0 + l, chunk) + half;
      lds64(g[l], at + OFF_G + (i0 + l) * 256 + lane * 8);
      lds64(x[l][0], to_a);
      lds64(x[l][1], to_a + SECOND);
      lds64(x[l][2], to_k);
      lds64(x[l][3], to_k + OFF_B - OFF_K);
    }
#pragma unroll
    for (int l = 0; l < GROUP; l++) {
      const u32 to_a = at + OFF_A + both_place(i0 + l, chunk) + half, to_k = at + OFF_K + tile_place(i0 + l, chunk) + half;
      float under[4];
      auto put = [&](const u32(&z)[2], const float(&y)[4], float f, u32 to) {
        sts64(to, pack<FP16>(lo(z[0]) * (y[0] * f), hi(z[0]) * (y[1] * f)), pack<FP16>(lo(z[1]) * (y[2] * f), hi(z[1]) * (y[3] * f)));
      };
      put(x[l][0], over, fa, to_a);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        G[j] = fmaf(j & 1 ? hi(g[l][j >> 1]) : lo(g[l][j >> 1]), LOG2E, G[j]);
        over[j] = ex2(G[j] - 0.5f * GL[j]);
        under[j] = ex2(0.5f * GL[j] - G[j]);
      }
      put(x[l][1], over, fq, to_a + SECOND);
      put(x[l][2], under, fk, to_k);
      put(x[l][3], under, fb, to_k + OFF_B - OFF_K);
    }
  }
}

// ag, qg, kd and bd in bf16 over ai, qi, ki and bi
template <bool FP16> INLINE void to_state(const float (&GL)[4], const Powers& by, u32 at, int lane) {
  const int chunk = lane >> 1;
  const u32 half = (lane & 1) * 8;
  float E[4];
#pragma unroll
  for (int j = 0; j < 4; j++) E[j] = ex2(0.5f * GL[j]);
#pragma unroll 1
  for (int which = 0; which < 4; which++) {
    const float f = power(which == 0 ? -by.a : which == 1 ? -by.q : which == 2 ? -by.k : -by.b);
    float y[4];
#pragma unroll
    for (int j = 0; j < 4; j++) y[j] = E[j] * f;
#pragma unroll 1
    for (int i0 = 0; i0 < C; i0 += 8) {  // loads before stores, which would wait for each
      u32 x[8][2];
      auto place = [&](int l) {
        return at + half + (which < 2 ? OFF_A + which * SECOND + both_place(i0 + l, chunk)
                                      : OFF_K + (which - 2) * (OFF_B - OFF_K) + tile_place(i0 + l, chunk));
      };
#pragma unroll
      for (int l = 0; l < 8; l++) lds64(x[l], place(l));
#pragma unroll
      for (int l = 0; l < 8; l++)
        sts64(place(l), pack(lo<FP16>(x[l][0]) * y[0], hi<FP16>(x[l][0]) * y[1]), pack(lo<FP16>(x[l][1]) * y[2], hi<FP16>(x[l][1]) * y[3]));
    }
  }
}

// Products of rows of ai or qi (at `left`) with ki and bi: tiles of 8 columns, two of rows 0 to 15, four of rows 16 to 31
template <bool FP16> INLINE void products(float (&X)[6][4], float (&Y)[6][4], u32 left, u32 at, int lane) {
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
        ldm(n, at + (which ? OFF_B : OFF_K) + tile_place(16 * j + rb, 2 * ks + cb));
        if (j == 0) { mma<FP16>(Z[0], x[0], n[0], n[1]); mma<FP16>(Z[1], x[0], n[2], n[3]); }
        mma<FP16>(Z[2 + 2 * j], x[1], n[0], n[1]); mma<FP16>(Z[3 + 2 * j], x[1], n[2], n[3]);
      }
    }
  }
}

// What lies below the diagonal, and on it if `diagonal`, times `by`, in two parts of bf16
INLINE void put_pairs(const float (&X)[6][4], float by, bool diagonal, u32 to, int lane) {
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
        const u32 place = to + pair_place(i, nt) + (lane & 3) * 4;
        const float y0 = j <= last ? y[0] * by : 0.f, y1 = j + 1 <= last ? y[1] * by : 0.f;
        const u32 high = pack(y0, y1);
        sts32(place, high);
        sts32(place + LOW, pack(y0 - lo(high), y1 - hi(high)));
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

// A chunk's pairs, of which those that outputs want only with `outputs`, and what the state needs of its tokens
template <bool FP16>
INLINE void make_chunk(const float (&GL)[4], const Powers& by, float scale, bool outputs, u32 triangle, u32 at, int lane) {
  make_factors<FP16>(GL, by, scale, at, lane);
  __syncwarp();
  float X[6][4], Y[6][4];
  products<FP16>(X, Y, at + OFF_A, at, lane);
  put_pairs(X, power(-by.a - by.k), false, at + OFF_P + 4096, lane);
  put_triangle(Y, power(-by.a - by.b), triangle, lane);
  if (outputs) {
    products<FP16>(X, Y, at + OFF_A + SECOND, at, lane);
    put_pairs(X, power(-by.q - by.k), true, at + OFF_P, lane);
    put_pairs(Y, power(-by.q - by.b), true, at + OFF_P + 2048, lane);
  }
  __syncwarp();
  to_state<FP16>(GL, by, at, lane);
}

// The chunks of `passes` over a span, n each: of one, or of three, the second of which is without v.
INLINE void produce(const Args& a, const Span& x, int h, int n, int passes, u32 base, int w, int lane) {
  const u32 at = base + w * SLOT, full = base + BARS + w * 16, triangle = base + TRIANGLES + w * TRIANGLE;
  for (int c = w; c < n * passes; c += SLOTS) {
    if (c >= SLOTS) bar_wait(full + 8, (c / SLOTS - 1) & 1);
    const int pass = c / n, m = c - pass * n;
    if (pass == 2) bar_wait(base + OPEN, 0);
    load_chunk(a, x.begin + m * C, x.end, h, pass != 1, at, lane);
    cp_wait();
    __syncwarp();
    float GL[4], E[4];
    const bool hard = chunk_decay(GL, at + OFF_G, 256, lane);
#pragma unroll
    for (int j = 0; j < 4; j++) E[j] = hard ? __int_as_float(0x7fffffff) : ex2(GL[j]);
    sts128(at + OFF_E + lane * 16, E);
    if (__all_sync(~0u, fminf(fminf(GL[0], GL[1]), fminf(GL[2], GL[3])) >= MILD)) {
      auto room = [&](u32 from, int more, int apart) { return -size_of(largest_in(from, lane, apart), more, 50).e; };
      const Powers by = {room(at + OFF_A, 0, BOTH), room(at + OFF_A + SECOND, exponent(a.scale) + 1, BOTH),
                         room(at + OFF_K, 0, HALF), room(at + OFF_B, 0, HALF)};
      make_chunk<true>(GL, by, a.scale, pass == passes - 1, triangle, at, lane);
    } else {
      make_chunk<false>(GL, {0, 0, 0, 0}, a.scale, pass == passes - 1, triangle, at, lane);
    }
    __syncwarp();
    invert(1.f, at + OFF_P + 6144, triangle, lane);
#if KEEP
    __syncwarp();
    if (pass == passes - 1) {
      char* const to = (char*)(a.kept_P + kept_at(a, x.chunk + m, h) * (4 * C * C));
#pragma unroll 4
      for (int i = 0; i < 16; i++) {
        u32 z[4];
        lds128(z, at + OFF_P + i * 512 + lane * 16);
        stg128(to + i * 512 + lane * 16, z);
      }
    }
#endif
    proxy_fence();
    __syncwarp();
    if (lane == 0) bar_arrive(full);
  }
}

// -- the state, from chunk to chunk: 16 of its rows, [V, K], a warp --------------------------------------------------

// The state over a span's n chunks, the first of which is the c0-th of those under way; what is wanted of chunks goes out if
// this is the `last` pass.
INLINE void walk(float (&S)[16][4], const Args& a, int h, int begin, int end, int chunk, int c0, int n, bool last, u32 base,
                 int w, int lane) {
  const u32 bars = base + BARS;
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1, j = w * 2 + cb;
  for (int c = c0; c < c0 + n; c++) {
    const int slot = c % SLOTS, t = begin + (c - c0) * C;
    const u32 at = base + slot * SLOT;
    bar_wait(bars + slot * 16, (c / SLOTS) & 1);
    float RO[32];
    u32 v[2][4], y[2][4];
    {
      u32 f[8][4];
#pragma unroll
      for (int m = 0; m < 2; m++) ldm_trans(v[m], at + OFF_V + (16 * m + rb) * 256 + swz(rb, j));
      as_operand(f, S);
      decay(S, at + OFF_E, lane);
      wg_fence();
#pragma unroll
      for (int ks = 0; ks < 8; ks++)
        wgmma64(RO, f[ks], descriptor(at + OFF_A + (ks >> 2) * BOTH, 16, 1024) + (ks & 3) * 2, ks > 0);
      wg_commit();
#if KEEP
      if (last)
        keep_state(f, (char*)(a.kept_S + kept_at(a, chunk + (t - begin) / C, h) * (D * D)), base + STAGE + w * 4096, w, lane);
#endif
    }
    float R[16] = {};
    add_pairs(R, v, at + OFF_P + 4096, rb, cb);
    add_pairs(R, v, at + OFF_P + LOW + 4096, rb, cb);
    wg_wait(RO);
#pragma unroll
    for (int i = 0; i < 8; i++) y[i >> 2][i & 3] = pack(RO[2 * i] + R[2 * i], RO[2 * i + 1] + R[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < 16; i++) R[i] = 0.f;
    add_pairs(R, y, at + OFF_P + 6144, rb, cb);
#pragma unroll
    for (int i = 0; i < 8; i++) y[i >> 2][i & 3] = pack(R[2 * i], R[2 * i + 1]);
    wg_fence();
    wgmma128(S, v[0], descriptor(at + OFF_K, HALF, 1024));
    wgmma128(S, v[1], descriptor(at + OFF_K + 2048, HALF, 1024));
    wgmma128(S, y[0], descriptor(at + OFF_B, HALF, 1024));
    wgmma128(S, y[1], descriptor(at + OFF_B + 2048, HALF, 1024));
    wg_commit();
    if (last) {
      float* O = RO + 16;
#pragma unroll
      for (int low = 0; low <= LOW; low += LOW) {
        add_pairs(O, v, at + OFF_P + low, rb, cb);
        add_pairs(O, y, at + OFF_P + low + 2048, rb, cb);
      }
      const int to = w * 2 + (lane & 1);
#if KEEP
      u16* const kept = a.kept_Y + kept_at(a, chunk + (t - begin) / C, h) * (C * D);
#pragma unroll
      for (int m = 0; m < 2; m++) stm_trans(y[m], at + OFF_V + (16 * m + rb) * 256 + swz(rb, j));
      __syncwarp();
#pragma unroll
      for (int m = 0; m < 2; m++) {
        const int row = 16 * m + (lane >> 1);
        u32 z[4];
        lds128(z, at + OFF_V + row * 256 + swz(row, to));
        stg128((char*)kept + tile_place(row, to), z);
      }
      __syncwarp();
#endif
      if (a.o) {
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
          const int row = 16 * m + (lane >> 1);
          u32 z[4];
          lds128(z, at + OFF_V + row * 256 + swz(row, to));
          if (t + row < end) stg128(a.o + ((u64)(t + row) * a.H + h) * D + to * 8, z);
        }
      }
    }
    wg_wait(S);
    __syncwarp();
    if (lane == 0) bar_arrive(bars + slot * 16 + 8);
  }
}

INLINE void consume(const Args& a, const Span& x, int s, int h, int n, int passes, u32 base, int w, int lane) {
  float S[16][4];
  if (passes > 1 || x.first)
    begin_with(S, x.first && a.S0 ? a.S0 + ((u64)x.piece * a.H + h) * (D * D) : 0, w, lane);
  else
    take(S, a, s - 1, h, w, lane);
#pragma unroll 1
  for (int pass = 0; pass < passes; pass++) {
    const bool last = pass == passes - 1;
    walk(S, a, h, uniform(x.begin), uniform(x.end), uniform(x.chunk), pass * n, n, last, base, w, lane);
    if (!last) between_passes(S, a, true, pass, s, h, base, base + OPEN, w, lane);
  }
  if (passes == 1) leave(S, a, x.piece, x.last, s, s + 1, h, base + SAID, w, lane);
}

extern "C" __global__ void __launch_bounds__(384, 1) dplr_forward(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) char smem[];
  const u32 base = (smem_addr(smem) + 1023) & ~1023u;
  const int tid = threadIdx.x;
  if (tid == 0) {
    for (int i = 0; i < SLOTS; i++) {
      bar_init(base + BARS + i * 16, 1);
      bar_init(base + BARS + i * 16 + 8, 8);
    }
    bar_init(base + OPEN, 1);
    bars_ready();
  }
  const int w = uniform((tid >> 5) & 7), lane = tid & 31;
  const Choice mine = choose(a, true, base + SAID, [&](int s, const Span& x, int h) { return waiting(a, x.first, s, h); });
  const int s = mine.s, h = mine.h;
  const Span x = span_of(a, s);
  if (x.end <= x.begin) return;
  const int n = uniform((x.end - x.begin + C - 1) / C), passes = x.first || x.last ? 1 : 3;
  if (uniform(tid >> 8)) {
    registers_down<120>();
    if (w < SLOTS) produce(a, x, h, n, passes, base, w, lane);
  } else {
    registers_up<192>();
    consume(a, x, s, h, n, passes, base, w, lane);
#if KEEP
    if (lane == 0) copied_out();
#endif
  }
}
