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
  float* squares;        // MAPS, forward: of these, [count, H, 8]
  u16* kept_S;           // [chunks, heads, 128 * 128], the state before each chunk as `state_place` lays it out
  u16* kept_W;           // [chunks, heads, 32 * 128], W of its tokens, see `tile_place`
  u16* kept_pairs;       // [chunks, heads, 2 * 32 * 32], N and P, see `pair_place`
  int T, H, HK, count, length, pieces;
  int first_head, heads; // this launch's
  int given;             // whether `states` holds what enters every span, as S0 holds it, so that none waits
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

// How many chunks before token t (`step` -1) or from it on (1) forget what enters them, or -1; of `there` tokens that are
// asked for. A token multiplies the norm of a state by e^g and by at most max(1, |1 - beta |k|^2|). Gates alone say how many that
// may be; keys are read of those, and of more where they make up for it. By all warps, all of which then know.
INLINE int forgetting(const Args& a, int t, int step, int there, int h, u32 said, int lane) {
  const int hk = h / (a.H / a.HK), w = uniform(threadIdx.x >> 5);
  auto first = [&](int i) { return step < 0 ? t - (i + 1) * C : t + i * C; };  // token of chunk i
  for (int i = w; i < BACK; i += WARPS) {
    float x = (i + 1) * C <= there ? gate_at(a, (u64)(first(i) + lane) * a.H + h) * LOG2E : 0.f;
#pragma unroll
    for (int m = 16; m; m >>= 1) x += __shfl_xor_sync(~0u, x, m);
    if (lane == 0) sts32(said + i * 4, __float_as_uint(x));
  }
  __syncthreads();
  float more = 0.f;  // log2 of what keys make of it
  for (int read = 0;;) {
    int n = -1;
    float sum = more;
    for (int i = 0; i < BACK; i++) {
      sum += lds(said + i * 4);
      if (n < 0 && sum < FORGOTTEN) n = i + 1;
    }
    n = uniform(n);
    if (n <= read) return n;
    float mine = 0.f;
#pragma unroll 4
    for (int i = read * (C / 2) + w; i < n * (C / 2); i += WARPS) {  // two tokens at a time
      const u64 token = first(i / (C / 2)) + 2 * (i % (C / 2)) + (lane >> 4);
      const uint4 y = ((const uint4*)a.k)[(token * a.HK + hk) * 16 + (lane & 15)];
      const u32 x[4] = {y.x, y.y, y.z, y.w};
      float norm = 0.f;
#pragma unroll
      for (int j = 0; j < 4; j++) norm = fmaf(lo(x[j]), lo(x[j]), fmaf(hi(x[j]), hi(x[j]), norm));
#pragma unroll
      for (int m = 8; m; m >>= 1) norm += __shfl_xor_sync(~0u, norm, m);
      mine += __log2f(fmaxf(1.f, fabsf(1.f - beta_at(a, token * a.H + h) * norm)));
    }
    mine += __shfl_xor_sync(~0u, mine, 16);
    if (lane == 0) sts32(said + (BACK + w) * 4, __float_as_uint(mine));
    __syncthreads();
    for (int i = 0; i < WARPS; i++) more += lds(said + (BACK + i) * 4);
    __syncthreads();
    read = n;
  }
}
// The same of token u, which has `here` tokens, if asked (`both`) and t's forget.
INLINE Forgets forgetting(const Args& a, int t, int u, int there, int here, int step, int h, bool both, u32 said, int lane) {
  const int x = forgetting(a, t, step, there, h, said, lane);
  __syncthreads();  // all know it
  const int y = both && x >= 0 ? forgetting(a, u, step, here, h, said, lane) : -1;
  return {x, y};
}
