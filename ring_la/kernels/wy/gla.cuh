// What GLA's fused kernels share: arguments, and how far back a span begins. Chunks of 32 tokens, K = V = 128.
//
// Where states come from other ranks, a launch with MAPS finds what spans do to a state (maps.cuh): what their tokens leave of no state
// and, forward, how much they leave of each channel of K. One that is GIVEN what enters each then goes over all of them. A file that
// includes this says before it whether chunks' q and k are wanted (WITH_Q, WITH_K).
#pragma once
#define C 32  // tokens a chunk
#define D 128 // channels of a head
#define OUTER a.length
#include "half.cuh"
#include "maps.cuh"

#define FORGOTTEN -30.f // log2 of what is left of a state that counts as forgotten
#define BACK 24         // chunks that a span may begin early
#define NOTHING -1e4f   // log2 of what is left where all is forgotten

struct Args {
  const u16 *q, *k, *v;  // [tokens, HK, 128], v [tokens, H, 128], bf16
  const void* g;         // [tokens, H, 128], fp32 or bf16
  u16* o;                // [tokens, H, 128], or null: nobody wants it
  const float* S0;       // [pieces, H, K, V] or null: zero
  float* S1;             // [pieces, H, K, V] or null: nobody wants it
  const int* table;      // [count, 6], see spans/runs; null: rows of T tokens, cut evenly
  const int* cu;         // [pieces + 1] beside a table
  int* flags;            // [2 * count * H + 3 + count * heads], zero at first: see `decided`, `done` and `ticket`; null if GIVEN, and
                         // for MAPS
  float* states;         // [count, H, 128 * 128]; GIVEN: what enters every span, as S0 holds it, so that none waits; MAPS: what each
                         // span's tokens leave of no state, [count, H, K, V]
  u16* kept_S;           // [chunks, heads, 128 * 128], the state before each chunk as `state_place` lays it out
  u16* kept_P;           // [chunks, heads, 32 * 32 + 8], see `pair_place`; behind them what the state was multiplied by
  int T, H, HK, count, length, pieces;
  int first_head, heads; // this launch's
  int pick;              // whether spans that wait go first, see `choose`; if not, programs take their own numbers
  float scale;
#if MAPS
  float* parts;          // forward: log2 of what spans leave of each channel, [count, H, K]
#endif
  static constexpr int given = GIVEN;
};

#define PAIRS (2 * C * C + 16)  // bytes that a chunk keeps of its pairs

INLINE u64 kept_at(const Args& a, int chunk, int h) { return (u64)chunk * a.heads + h - a.first_head; }

// How a chunk is computed, from the gates that lie at `at` in rows of `bytes`; G: log2 of what they leave of this lane's four channels,
// E: what half of that leaves, or where pairs go one by one 1; `left`: the most that a channel keeps.
INLINE Kind kind_of(float (&G)[4], float (&E)[4], float& left, u32 at, int bytes, int lane) {
  const bool hard = chunk_decay(G, at, bytes, lane);
  const bool gentle = __all_sync(~0u, fminf(fminf(G[0], G[1]), fminf(G[2], G[3])) >= GENTLE);
#pragma unroll
  for (int j = 0; j < 4; j++) E[j] = hard ? 1.f : ex2(0.5f * G[j]);
  float most = fmaxf(fmaxf(G[0], G[1]), fmaxf(G[2], G[3]));
#pragma unroll
  for (int m = 16; m; m >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, m));
  left = ex2(fminf(most, 0.f));
  return hard ? HARD : gentle ? HALVES : WIDE;
}

// q e^(G - M) times fq and k e^(M - G) times fk over q and k, M = GL / 2; of a hard chunk q e^G and k e^(GL - G). G: where
// to leave G by log2, or 0.
template <bool FP16>
INLINE void make_factors(const float (&GL)[4], bool hard, float fq, float fk, u32 q_at, u32 k_at, u32 g_at, int bytes, bool leave_G,
                         int lane) {
  const int chunk = lane >> 1;
  const u32 half = (lane & 1) * 8;
  float G[4] = {0.f, 0.f, 0.f, 0.f}, up[4], down[4];  // from where factors are counted
#pragma unroll
  for (int j = 0; j < 4; j++) { up[j] = hard ? 0.f : 0.5f * GL[j]; down[j] = hard ? GL[j] : 0.5f * GL[j]; }
#pragma unroll 1
  for (int i0 = 0; i0 < C; i0 += GROUP) {
    float g[GROUP][4];
    u32 q[GROUP][2], k[GROUP][2];
#pragma unroll
    for (int l = 0; l < GROUP; l++) {
      gates(g[l], g_at + (i0 + l) * bytes, lane);
      if (WITH_Q) lds64(q[l], q_at + tile_place(i0 + l, chunk) + half);
      if (WITH_K) lds64(k[l], k_at + tile_place(i0 + l, chunk) + half);
    }
    __syncwarp();
#pragma unroll
    for (int l = 0; l < GROUP; l++) {
      const int i = i0 + l;
      float x[4], y[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        G[j] = fmaf(g[l][j], LOG2E, G[j]);
        x[j] = ex2(G[j] - up[j]) * fq;
        y[j] = ex2(down[j] - G[j]) * fk;
      }
      const u32 place = tile_place(i, chunk) + half;
      if (WITH_Q) sts64(q_at + place, pack<FP16>(lo(q[l][0]) * x[0], hi(q[l][0]) * x[1]), pack<FP16>(lo(q[l][1]) * x[2], hi(q[l][1]) * x[3]));
      if (WITH_K) sts64(k_at + place, pack<FP16>(lo(k[l][0]) * y[0], hi(k[l][0]) * y[1]), pack<FP16>(lo(k[l][1]) * y[2], hi(k[l][1]) * y[3]));
      if (leave_G) sts128(g_at + i * bytes + lane * 16, G);
    }
  }
}

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

#if MAPS
// A program's span, and the chunks that its map is found from.
struct Part { Span x; int s, h; Reach r; };
INLINE Part part_of(const Args& a, bool forward, u32 base, int lane) {
  const int s = blockIdx.x / a.heads, h = a.first_head + blockIdx.x % a.heads;
  const Span x = span_of(a, s);
  return {x, s, h, x.end > x.begin ? reach(a, x, s, h, forward, true, base, lane) : Reach{0, 0, 0, 0}};
}
#else
// A program's span, and how many chunks more it begins with, see `choose`; by its number if GIVEN, since none waits.
template <class Bound> INLINE Choice chosen(const Args& a, bool forward, u32 said, Bound bound) {
#if GIVEN
  const int s = blockIdx.x / a.heads, h = a.first_head + blockIdx.x % a.heads;
  const Span x = span_of(a, s);
  return {s, h, x.end > x.begin ? bound(s, x, h) : 0};
#else
  return choose(a, forward, !a.pick, said, bound);
#endif
}
#endif
