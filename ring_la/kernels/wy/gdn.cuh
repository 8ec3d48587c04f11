// What the gated delta rule's fused kernels share: arguments, and how far back a span begins. Chunks of 32 tokens,
// K = V = 128. A file that includes this says before it how many WARPS a program has.
#pragma once
#define C 32  // tokens a chunk
#define D 128 // channels of a head
#define OUTER a.outer
#include "carried.cuh"
#include "maps.cuh"

#define FORGOTTEN -30.f // log2 of what is left of a state that counts as forgotten
#define BACK 16         // chunks that a span may begin early

struct Args {
  const u16 *q, *k, *v;  // [tokens, HK, 128], v [tokens, H, 128], bf16
  const void *g, *beta;  // [tokens, H], fp32 or bf16; g null: no decay
  u16* o;                // [tokens, H, 128]
  const float* S0;       // [pieces, H, K, V] or null: zero
  float* S1;             // [pieces, H, K, V] or null: nobody wants it
  const int* table;      // [count, 6], see spans/runs; null: rows of T tokens, cut evenly
  const int* cu;         // [pieces + 1] beside a table
  int* flags;            // [2 * count * H + 3 + count * heads], zero at first: see `decided`, `done` and `ticket`; null if `given`.
                         // MAPS, forward: whether spans' transitions are 0 and not written, [count, H]
  float* states;         // [count, H, 128 * 128]; MAPS: what each span's tokens leave of no state, [count, H, K, V]
  float* parts;          // [count, H, 2, 128 * 128], see `combine`; null: spans do not. MAPS: spans' transitions
  u16* kept_S;           // [chunks, heads, 128 * 128], the state before each chunk as `state_place` lays it out
  u16* kept_W;           // [chunks, heads, 32 * 128], W of its tokens, see `tile_place`
  u16* kept_pairs;       // [chunks, heads, 2 * 32 * 32], N and P, see `pair_place`
  int T, H, HK, count, length, pieces;
  int first_head, heads; // this launch's
  int given;             // 0, or `states` holds what enters every span, as S0 holds it, so that none waits: of so many spans of its own a span
  int pick;              // whether spans that wait go first, see `choose`; if not, programs take their own numbers
  int together;          // how many spans that wait combine
  int outer;             // tokens of the span that goes over its own once, see `span_of`
  float scale;
};

INLINE u64 kept_at(const Args& a, int chunk, int h) { return (u64)chunk * a.heads + h - a.first_head; }

INLINE float gate_at(const Args& a, u64 i) {
#if !GATED
  return 0.f;
#elif GATE_BF16
  return __uint_as_float((u32)((const u16*)a.g)[i] << 16);
#else
  return ((const float*)a.g)[i];
#endif
}

// log2 of a bound of what 32 tokens from t on leave of a state, by one warp: a token multiplies its norm by e^g and by
// at most max(1, |1 - beta |k|^2|).
INLINE float left_over(const Args& a, int t, int h, int lane) {
  const int hk = h / (a.H / a.HK);
  float mine = 0.f;
#pragma unroll 8
  for (int i = 0; i < 16; i++) {
    u32 x[4];
    const uint4 y = ((const uint4*)a.k)[((u64)(t + 2 * i + (lane >> 4)) * a.HK + hk) * 16 + (lane & 15)];
    x[0] = y.x; x[1] = y.y; x[2] = y.z; x[3] = y.w;
    float n = 0.f;
#pragma unroll
    for (int j = 0; j < 4; j++) n = fmaf(lo(x[j]), lo(x[j]), fmaf(hi(x[j]), hi(x[j]), n));
#pragma unroll
    for (int m = 8; m; m >>= 1) n += __shfl_xor_sync(~0u, n, m);
    n = __shfl_sync(~0u, n, (lane & 1) * 16);  // of token 2 i + lane % 2
    if (lane >> 1 == i) mine = n;
  }
  const u64 at = (u64)(t + lane) * a.H + h;
  float x = gate_at(a, at) * LOG2E + __log2f(fmaxf(1.f, fabsf(1.f - beta_at(a, at) * mine)));
#pragma unroll
  for (int m = 16; m; m >>= 1) x += __shfl_xor_sync(~0u, x, m);
  return x;
}

// How many chunks before token t (`step` -1) or from it on (1) forget what enters them, or -1; of `there` tokens that are
// asked for. By all warps.
INLINE int forgetting(const Args& a, int t, int step, int there, int h, u32 said, int lane) {
  for (int i = uniform(threadIdx.x >> 5); i < BACK; i += WARPS) {
    const int from = step < 0 ? t - (i + 1) * C : t + i * C;
    const float left = (i + 1) * C <= there ? left_over(a, from, h, lane) : 0.f;
    if (lane == 0) sts32(said + i * 4, __float_as_uint(left));
  }
  __syncthreads();
  int found = -1;
  float sum = 0.f;
  for (int i = 0; i < BACK; i++) {
    sum += lds(said + i * 4);
    if (found < 0 && sum < FORGOTTEN) found = i + 1;
  }
  return uniform(found);
}
// The same of token u, which has `here` tokens, if asked (`both`) and t's forget.
INLINE Forgets forgetting(const Args& a, int t, int u, int there, int here, int step, int h, bool both, u32 said, int lane) {
  const int x = forgetting(a, t, step, there, h, said, lane);
  __syncthreads();  // all know it
  const int y = both && x >= 0 ? forgetting(a, u, step, here, h, said, lane) : -1;
  return {x, y};
}
