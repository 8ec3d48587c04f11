// What GLA's fused kernels share: arguments, and how far back a span begins. Chunks of 32 tokens, K = V = 128.
#pragma once
#define C 32  // tokens a chunk
#define D 128 // channels of a head
#define OUTER a.length
#include "channels.cuh"

#define FORGOTTEN -30.f // log2 of what is left of a state that counts as forgotten
#define BACK 24         // chunks that a span may begin early

struct Args {
  const u16 *q, *k, *v;  // [tokens, HK, 128], v [tokens, H, 128], bf16
  const void* g;         // [tokens, H, 128], fp32 or bf16
  u16* o;                // [tokens, H, 128], or null: nobody wants it
  const float* S0;       // [pieces, H, K, V] or null: zero
  float* S1;             // [pieces, H, K, V] or null: nobody wants it
  const int* table;      // [count, 6], see spans/runs; null: rows of T tokens, cut evenly
  const int* cu;         // [pieces + 1] beside a table
  int* flags;            // [2 * count * H + 3 + count * heads], zero at first: see `decided`, `done` and `ticket`
  float* states;         // [count, H, 128 * 128]
  u16* kept_S;           // [chunks, heads, 128 * 128], the state before each chunk as `state_place` lays it out
  u16* kept_P;           // [chunks, heads, 32 * 32], see `pair_place`
  int T, H, HK, count, length, pieces;
  int first_head, heads; // this launch's
  int pick;              // whether spans that wait go first, see `choose`
  float scale;
};

INLINE u64 kept_at(const Args& a, int chunk, int h) { return (u64)chunk * a.heads + h - a.first_head; }

// After how many chunks of those that begin at `from`, `from` + `step`, ... what enters is forgotten in all channels; -1: not
// within the `most` that there are. By all twelve warps; `scratch`: 512 bytes for each of twelve chunks, and 16.
INLINE int forgotten_after(const Args& a, int from, int step, int most, int h, u32 scratch, u32 masks, int lane) {
  const int w = uniform(threadIdx.x >> 5);
  float sum = 0.f;  // of channel threadIdx.x
  for (int i0 = 0; i0 < min(most, BACK); i0 += 12) {
    if (i0 + w < most) {
      const int t = from + (i0 + w) * step;
      float x[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 8
      for (int i = 0; i < C; i++) {
        const u64 at = ((u64)(t + i) * a.H + h) * 32 + lane;
#if GATE_BF16
        const uint2 y = ((const uint2*)a.g)[at];
        x[0] += lo(y.x); x[1] += hi(y.x); x[2] += lo(y.y); x[3] += hi(y.y);
#else
        const float4 y = ((const float4*)a.g)[at];
        x[0] += y.x; x[1] += y.y; x[2] += y.z; x[3] += y.w;
#endif
      }
      sts128(scratch + w * 512 + lane * 16, x);
    }
    __syncthreads();
    if (w < 4) {
      u32 mask = 0;
      for (int i = 0; i < 12 && i0 + i < most; i++) {
        sum += lds(scratch + i * 512 + threadIdx.x * 4);
        if (__all_sync(~0u, sum * LOG2E < FORGOTTEN)) mask |= 1u << i;
      }
      if (lane == 0) sts32(masks + w * 4, mask);
    }
    __syncthreads();
    const u32 all = lds32(masks) & lds32(masks + 4) & lds32(masks + 8) & lds32(masks + 12);
    for (int i = 0; i < 12; i++)
      if (all >> i & 1) return i0 + i + 1;
  }
  return -1;
}

// S, what a span's tokens leave of no state, becomes what they leave of that which span `from` leaves, and is handed on; then
// S is what `from` left. `sums`: log2 of what the tokens leave of each channel, in parts of 512 bytes.
INLINE void hand_on(float (&S)[16][4], const Args& a, int from, int s, int h, u32 sums, int parts, int w, int lane) {
  while (load_acquire(done(a, from, h)) <= 0) {}
  const float4* const before = held(a.states, (u64)from * a.H + h, w, lane);
#pragma unroll
  for (int nt = 0; nt < 16; nt++) {
    float x[2] = {0.f, 0.f};
    for (int i = 0; i < parts; i++) {
      u32 r[2];
      lds64(r, sums + i * 512 + (nt * 8 + 2 * (lane & 3)) * 4);
      x[0] += __uint_as_float(r[0]); x[1] += __uint_as_float(r[1]);
    }
    x[0] = ex2(x[0]); x[1] = ex2(x[1]);
    const float4 y = __ldcg(before + nt * 256);
    S[nt][0] = fmaf(y.x, x[0], S[nt][0]); S[nt][1] = fmaf(y.y, x[1], S[nt][1]);
    S[nt][2] = fmaf(y.z, x[0], S[nt][2]); S[nt][3] = fmaf(y.w, x[1], S[nt][3]);
  }
  store(S, held(a.states, (u64)s * a.H + h, w, lane));
  between_warps();
  if (w == 0 && lane == 0) store_release(done(a, s, h), 1);
  load(S, before);
}
