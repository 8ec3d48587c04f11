// What KDA's kernels share: arguments, spans, the bound that says what is forgotten. Chunks of 16 tokens, K = V = 128.
#pragma once
#define C 16  // tokens a chunk
#define D 128 // channels of a head
#define OUTER a.outer
#define A_ROW a.spans
#include "spans.cuh"
#include "maps.cuh"
#if MAILED
#include "hand_on.cuh"
#endif

#define GROUP 4 // tokens whose factors are made together
#define FORGOTTEN 9.3e-10f // 2^-30
#define HARDEST -82.f      // e^82 is the largest factor

struct Args {
  const u16 *q, *k, *v;  // [tokens, HK, 128], v [tokens, H, 128], bf16
  const void *g, *beta;  // [tokens, H, 128] and [tokens, H], fp32 or bf16
  u16* o;                // [tokens, H, 128]
  const float* S0;       // [pieces, H, K, V] or null: zero
  float* S1;             // [pieces, H, K, V] or null: nobody wants it
  const int* table;      // [count, 6], see spans/runs; null: rows of T tokens, cut evenly
  const int* cu;         // [pieces + 1] beside a table
  int* flags;            // [2 * count * H + 2], zero at first: see `decided`, `done` and `ticket`; null if `given`. MAPS:
                         // forward, whether spans' transitions are 0 and not written, [count, H]; backward null
  float* states;         // [count, H, 128 * 128]; MAPS: what each span's tokens leave of no state, [count, H, K, V]
  float* parts;          // MAPS, MAILED forward: spans' transitions, [count, H, K, K]
  float* squares;        // MAPS, forward: of these, [count, H, 8]
  int* arrived;          // MAPS backward, MAILED: whether what enters spans is there, [count, H]; zero at first; kda_border.cuh: [2, count, H]
  u16* kept_S;           // [chunks, heads, 128 * 128], the state before each chunk as `state_place` lays it out
  u16* kept_W;           // [chunks, heads, 16 * 128], W = U / beta of its tokens, see `rows_place`
  int T, H, HK, count, length, pieces;
  int first_head, heads; // this launch's
  int given;             // whether `states` holds what enters every span, as S0 holds it, so that none waits
  int side_by_side;      // whether all programs run at once
  int outer, spans;      // tokens of a row's first span, and how many it has, see `span_of`; without a table
  float scale;
#if MAILED
  Mail mail;
#endif
};

#if MAILED
// Programs behind those of spans, which send and take states for them
INLINE int beside(const Args& a) { return gridDim.x - a.count * a.heads; }
#endif
INLINE u64 kept_at(const Args& a, int chunk, int h) { return (u64)chunk * a.heads + h - a.first_head; }

// Two tokens, `step` apart, as one warp reads them, four channels a lane
struct Two {
  float4 g[2];
  uint2 k[2];
  INLINE void load(const Args& a, int t, int step, int h, int lane) {
    const int hk = h / (a.H / a.HK);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const u64 at = (u64)(t + j * step) * a.H + h;
#if GATE_BF16
      const uint2 w = ((const uint2*)a.g)[at * 32 + lane];
      g[j] = make_float4(lo(w.x), hi(w.x), lo(w.y), hi(w.y));
#else
      g[j] = ((const float4*)a.g)[at * 32 + lane];
#endif
      k[j] = ((const uint2*)a.k)[((u64)(t + j * step) * a.HK + hk) * 32 + lane];
    }
  }
  // u behind both tokens, whose |beta| are b0 and b1. Three sums over lanes at once: u with each key, and the first key with the second.
  INLINE void pass(float (&u)[4], float b0, float b1, bool back) const {
    float k0[4], k1[4], e0[4], e1[4], d0 = 0.f, d1 = 0.f, both = 0.f;
    kept(k0, e0, 0);
    kept(k1, e1, 1);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (!back) u[i] *= e0[i];
      const float between = back ? e0[i] : e1[i];
      d0 = fmaf(u[i], k0[i], d0);
      u[i] *= between;
      d1 = fmaf(u[i], k1[i], d1);
      k0[i] *= between;
      both = fmaf(k0[i], k1[i], both);
    }
#pragma unroll
    for (int m = 16; m; m >>= 1) {
      d0 += __shfl_xor_sync(~0u, d0, m);
      d1 += __shfl_xor_sync(~0u, d1, m);
      both += __shfl_xor_sync(~0u, both, m);
    }
    d0 *= b0;
    d1 = b1 * fmaf(d0, both, d1);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u[i] = fmaf(d1, k1[i], fmaf(d0, k0[i], u[i]));
      if (back) u[i] *= e1[i];
    }
  }
  INLINE void kept(float (&x)[4], float (&e)[4], int j) const {
    x[0] = fabsf(lo(k[j].x)); x[1] = fabsf(hi(k[j].x)); x[2] = fabsf(lo(k[j].y)); x[3] = fabsf(hi(k[j].y));
    e[0] = ex2(g[j].x * LOG2E); e[1] = ex2(g[j].y * LOG2E); e[2] = ex2(g[j].z * LOG2E); e[3] = ex2(g[j].w * LOG2E);
  }
};
// Prefetch the gates and keys of the 16 tokens from t on. By one warp.
INLINE void prefetch_chunk(const Args& a, int t, int h, int lane) {
  const u64 g = ((u64)(t + (lane >> 1)) * a.H + h) * D, k = ((u64)(t + (lane >> 1)) * a.HK + h / (a.H / a.HK)) * D;
#if GATE_BF16
  prefetch((const u16*)a.g + g + (lane & 1) * 64);
#else
  prefetch((const float*)a.g + g + (lane & 1) * 64);
  prefetch((const float*)a.g + g + (lane & 1) * 64 + 32);
#endif
  prefetch(a.k + k + (lane & 1) * 64);
}

// What is left of u over the 16 tokens from `begin` on, going right or, for gradients of states, left (`back`), and its largest
// element to `at`; by one warp. Two tokens at a time, so that there is little code: it is fetched again after other launches.
INLINE void bound(float (&u)[4], const Args& a, int begin, int h, bool back, u32 at, int lane) {
  const int t = back ? begin + C - 1 : begin, step = back ? -1 : 1;
  const float b = lane < C ? fabsf(beta_at(a, (u64)(t + lane * step) * a.H + h)) : 0.f;
  prefetch_chunk(a, begin, h, lane);
  Two next;
  next.load(a, t, step, h, lane);
#pragma unroll 1
  for (int i = 0; i < C; i += 2) {
    const Two x = next;
    if (i + 2 < C) next.load(a, t + (i + 2) * step, step, h, lane);
    x.pass(u, __shfl_sync(~0u, b, i), __shfl_sync(~0u, b, i + 1), back);
  }
  float most = fmaxf(fmaxf(u[0], u[1]), fmaxf(u[2], u[3]));
#pragma unroll
  for (int m = 16; m; m >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, m));
  if (lane == 0) sts32(at, __float_as_uint(most));
}

// Whether chunks before token t, or (`back`) from it on, forget what enters them, if that is asked
struct Question { int t; bool asked, back; };
// How many chunks do, one or two, or -1. Two warps a question find the bounds of both chunks at once, from ones; their product bounds
// what both leave. Where that is not small enough, the farther one's goes on through the nearer chunk. By all warps that `sync`, the w-th
// of which this is.
template <int N, class Sync>
INLINE void forgetting(int (&found)[N], const Args& a, const Question (&asked)[N], int h, u32 said, int w, int lane, Sync sync) {
  bool open = false;
#pragma unroll
  for (int i = 0; i < N; i++) {
    found[i] = asked[i].asked ? 0 : -1;
    open |= asked[i].asked;
  }
  float left[4] = {1.f, 1.f, 1.f, 1.f};
#pragma unroll 1
  for (int round = 0; open; round++) {
    const int part = w & 1, chunk = part - round;  // 0: the nearer one
    int t = 0;
    bool mine = false, back = false;
#pragma unroll
    for (int i = 0; i < N; i++)
      if (w >> 1 == i) t = asked[i].t, back = asked[i].back, mine = !found[i];
    const u32 to = said + (w >> 1) * 16 + (part + round) * 4;
    if (mine && chunk >= 0) bound(left, a, back ? t + chunk * C : t - (chunk + 1) * C, h, back, to, lane);
    sync();
    open = false;
#pragma unroll
    for (int i = 0; i < N; i++) {
      if (found[i]) continue;
      const u32 at = said + i * 16;
      const float near = lds(at), far = lds(at + 4);
      found[i] = uniform(round ? (lds(at + 8) < FORGOTTEN ? 2 : -1) : near < FORGOTTEN ? 1 : near * far < FORGOTTEN ? 2 : 0);
      open |= !found[i];
    }
  }
}
// The same by eight warps of token t, which has `there` tokens that count, and of u, which has `here`, if asked (`both`).
INLINE Forgets forgetting(const Args& a, int t, int u, int there, int here, int step, int h, bool both, u32 said, int lane) {
  const bool back = step > 0;
  int found[2];
  forgetting(found, a, {{t, there >= 2 * C, back}, {u, both && here >= 2 * C, back}}, h, said, uniform(threadIdx.x >> 5), lane,
             [] { between_warps(); });
  return {found[0], found[1]};
}
// The same by eight warps of one question.
INLINE int forgetting(const Args& a, int t, int step, int h, u32 said, int w, int lane) {
  int found[1];
  forgetting(found, a, {{t, true, step > 0}}, h, said, w, lane, [] { between_warps(); });
  return found[0];
}
// Of two chunks that a span begins early (backward: late), how many come before it starts from zero, if those forget by so many; 2: it
// does not.
INLINE int chunks_to_skip(int forgets) { return forgets > 0 ? 2 - forgets : 2; }

// Ask for the gates of 16 tokens from t on, in rows of 512 bytes; those from `end` on are zero. By one warp.
INLINE void load_gates(const Args& a, int t, int end, int h, u32 at, int lane) {
#if GATE_BF16
  const int row = lane >> 4, j = lane & 15, live = end - t - row;
  const u64 sv = (u64)a.H * (D * 2);
  const char* g = (const char*)a.g + (u64)(t + row) * sv + h * (D * 2) + j * 16;
#pragma unroll 2
  for (int i = 0; i < 8; i++) {
    const bool ok = 2 * i < live;
    cp16(at + (2 * i + row) * 512 + j * 16, ok ? g : (const char*)a.g, ok);
    g += 2 * sv;
  }
#else
  const u64 sv = (u64)a.H * (D * 4);
  const char* g = (const char*)a.g + (u64)t * sv + h * (D * 4) + lane * 16;
#pragma unroll 4
  for (int i = 0; i < 16; i++) {
    const bool ok = t + i < end;
    cp16(at + i * 512 + lane * 16, ok ? g : (const char*)a.g, ok);
    g += sv;
  }
#endif
}
// The gates of token i and this lane's four channels, where they lie then
INLINE void gates(float (&g)[4], u32 at, int i, int lane) {
#if GATE_BF16
  u32 r[2];
  lds64(r, at + i * 512 + lane * 8);
  g[0] = lo(r[0]); g[1] = hi(r[0]); g[2] = lo(r[1]); g[3] = hi(r[1]);
#else
  u32 r[4];
  lds128(r, at + i * 512 + lane * 16);
#pragma unroll
  for (int j = 0; j < 4; j++) g[j] = __uint_as_float(r[j]);
#endif
}

// The sums of a chunk's gates; whether factors do not fit, for they fall below HARDEST
INLINE int sum_gates(float (&E)[4], u32 at, int lane) {
#pragma unroll
  for (int j = 0; j < 4; j++) E[j] = 0.f;
#pragma unroll
  for (int i = 0; i < C; i++) {
    float g[4];
    gates(g, at, i, lane);
#pragma unroll
    for (int j = 0; j < 4; j++) E[j] += g[j];
  }
  return __any_sync(~0u, !(fminf(fminf(E[0], E[1]), fminf(E[2], E[3])) >= HARDEST));
}

// Where 8 channels of V of a token lie: an operand of wgmma as it is, of 128-byte swizzle.
INLINE u32 rows_place(int token, int chunk) { return (u32)((chunk >> 3) * 2048 + token * 128) + swz(token, chunk & 7); }

// (I + pairs)^-1 - I by forward substitution in fp32, a column a lane (both halves of the warp find the same). `pairs`:
// rows of 80 bytes, of which what lies below the diagonal is read. To bf16 rows of 32 bytes.
INLINE void invert(u32 to, u32 pairs, int lane) {
  const int j = lane & 15;
  float y[C];
#pragma unroll
  for (int i = 0; i < C; i++) {
    y[i] = i == j ? 1.f : 0.f;
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      u32 r[4];
      lds128(r, pairs + i * 80 + m * 4);
#pragma unroll
      for (int l = 0; l < 4; l++)
        if (m + l < i) y[i] = fmaf(-__uint_as_float(r[l]), y[m + l], y[i]);
    }
  }
  if (lane < C) {
#pragma unroll
    for (int i = 0; i < C; i++) sts16(to + i * 32 + j * 2, (u16)(pack(y[i], 0.f) & 0xffff));
    sts16(to + j * 34, 0);
  }
}

// The diagonal of a product of 16 rows and columns, as `mma` leaves it, times `scale`: to 16 floats
INLINE void put_diagonal(const float (&x)[2][4], float scale, u32 to, int lane) {
  const int r = lane >> 2;
  if ((lane & 3) != r >> 1) return;
  sts32(to + r * 4, __float_as_uint((r & 1 ? x[0][1] : x[0][0]) * scale));
  sts32(to + (r + 8) * 4, __float_as_uint((r & 1 ? x[1][3] : x[1][2]) * scale));
}

// Numbers of tokens 2t, 2t + 1, 8 + 2t, 9 + 2t of lane t of four; that of token 2t lies at `at`
INLINE void of_tokens(float (&x)[4], u32 at) {
  u32 y[2][2];
  lds64(y[0], at);
  lds64(y[1], at + 32);
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = __uint_as_float(y[i >> 1][i & 1]);
}

// MAPS: the maps of span s over n chunks: what they leave of no state, and with two `passes` of the identity. walk(S, c): over those chunks,
// the first of which is the c-th of those under way. By eight warps.
template <class Walk> INLINE void find_maps(const Args& a, int s, int h, int passes, int n, int w, int lane, Walk walk) {
  const u64 i = (u64)s * a.H + h;
#pragma unroll 1
  for (int pass = 0; pass < passes; pass++) {
    float S[16][4];
    if (pass) identity(S, w, lane);
    else begin_with(S, 0, w, lane);
    walk(S, pass * n);
    put_state(S, (pass ? a.parts : a.states) + i * (D * D), w, lane);
    if (pass) put_squares(S, a.squares + i * 8, w, lane);
  }
}

// MAPS: which chunks are wanted is not known at first. Those who make chunks begin with the two that count if a span forgets, `early`;
// those who decide tell them at `told` how many more, and from which token on.
INLINE int early(const Span& x) { return x.end - x.begin >= 2 * C ? 2 : 0; }
INLINE void tell(const Reach& r, int passes, u32 told) {  // by eight warps
  if (threadIdx.x == 0) {
    sts32(told, r.t0);
    sts32(told + 4, r.n);
    sts32(told + 8, r.whole ? passes : 0);
  }
  __syncthreads();
}
struct Told { int t0, n, passes; };
INLINE Told hear(u32 told) {
  __syncthreads();
  return {uniform(lds32(told)), uniform(lds32(told + 4)), uniform(lds32(told + 8))};
}
// How many of the early ones are not wanted
INLINE int unwanted(const Span& x, const Reach& r) { return r.whole ? early(x) : early(x) - r.n; }

// The span and head of this program, whose number stands at `said`. Read again for every pass, so that no register holds
// them meanwhile.
INLINE Span work_of(const Args& a, u32 said, int& s, int& h) {
  const int i = uniform(lds32(said));
  s = i / a.heads;
  h = a.first_head + i % a.heads;
  return span_of(a, s);
}
