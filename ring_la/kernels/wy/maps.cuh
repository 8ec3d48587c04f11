// Where states meet those of other ranks.
//
// Compiled with MAPS a kernel finds what each span's tokens leave of no state and, forward, of the identity: the span's transition,
// which is that of the way back, too. A scan over spans and ranks finds of them what enters each span, and a launch that is `given`
// it goes over all spans once.
//
// Beside a transition stand the squares of its elements, summed by eight parts: the root of their sum bounds what it leaves of a state.
//
// A span whose last chunks (backward: first ones) forget all that came before has the transition 0, which a flag says forward, and
// nothing else. What it adds is found from those chunks alone, and only where that is asked for: at the piece's end, or by a span
// behind it that does not forget so.
#pragma once
#include "spans.cuh"

// What enters span s: the state of its piece if that is `known`, or what it is `given` where it waits or knows it; else zero.
template <class Args> INLINE const float* entering(const Args& a, int piece, int s, int h, bool known, bool waits) {
  if (a.given) return known || waits ? a.states + ((u64)s * a.H + h) * (D * D) : 0;
  return known && a.S0 ? a.S0 + ((u64)piece * a.H + h) * (D * D) : 0;
}

// Say whether span s waits, where another may ask. By one thread.
template <class Args> INLINE void decide_on(const Args& a, int s, int h, bool waits) {
  if (a.given) return;
  launch_before();
  store_release(decided(a, s, h), waits ? 2 : 1);
}

// The chunks that maps are found from; none: nobody asks. whole: all of the span's; else how many forget what enters.
struct Reach { int t0, n, whole, forgets; };
// Whether span x forgets what enters it, by how many chunks, or -1; and so y, the one behind it.
struct Forgets { int x, y; };
// Of x, the s-th, by all warps that `forgetting`, the rule's, asks for. `ends`: whether what leaves a piece is asked for here. known: not
// null: how many chunks of each span forget, or 0.
template <class Args>
INLINE Reach reach(const Args& a, const Span& x, int s, int h, bool forward, bool ends, u32 said, int lane, const int* known = 0) {
  const bool behind = !(forward ? x.last : x.first);
  const int next = behind ? (forward ? s + 1 : s - 1) : s;
  const Span y = span_of(a, next);
  auto of = [&](int i) { return uniform(known[i * a.H + h]) ? uniform(known[i * a.H + h]) : -1; };
  const Forgets found = known     ? Forgets{of(s), of(next)}
                        : forward ? forgetting(a, x.end, y.end, x.end - x.begin, y.end - y.begin, -1, h, behind, said, lane)
                                  : forgetting(a, x.begin, y.begin, x.end - x.begin, y.end - y.begin, 1, h, behind, said, lane);
  if (found.x < 0) return {uniform(x.begin), uniform((x.end - x.begin + C - 1) / C), 1, 0};
  if (behind ? found.y >= 0 : !ends) return {0, 0, 0, found.x};
  return {uniform(forward ? x.end - found.x * C : x.begin), found.x, 0, found.x};
}

// The squares of this warp's rows, summed, to its place of eight
INLINE void put_squares(const float (&S)[16][4], float* to, int w, int lane) {
  float sum = 0.f;
#pragma unroll
  for (int nt = 0; nt < 16; nt++)
#pragma unroll
    for (int e = 0; e < 4; e++) sum = fmaf(S[nt][e], S[nt][e], sum);
#pragma unroll
  for (int m = 16; m; m >>= 1) sum += __shfl_xor_sync(~0u, sum, m);
  if (lane == 0) to[w] = sum;
}

#define MAP 65536 // bytes of a transition as `keep_map` lays it out: its image

// The image of a transition to memory, by way of shared memory from `at` on. By eight warps.
INLINE void put_map(const float (&S)[16][4], u16* to, u32 at, int w, int lane) {
  keep_map(S, at, w, lane);
  if (w == 0 && lane == 0) {
    copy_out(to, at, MAP);
    copy_out_all();
    written_out();
  }
}

// S <- what a span `adds` + S times the map at `at`, on the way of gradients its transpose; by way of 64 KB of shared memory, since
// registers do not hold all operands beside it. STAGED: S lies there already.
template <bool FORWARD, bool STAGED = false> INLINE void pass_on(float (&S)[16][4], const float* adds, u32 at, u32 stage, int w, int lane) {
  const u32 own = stage + (w * 32 + lane) * 16;
#pragma unroll
  for (int nt = 0; nt < 16; nt++)
    if (!STAGED) sts128(own + nt * 4096, S[nt]);
  begin_with(S, adds, w, lane);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 high[4][4], low[4][4];
#pragma unroll
    for (int ks = 0; ks < 4; ks++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        u32 r[4];
        lds128(r, own + (8 * half + 2 * ks + i) * 4096);
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const float x = __uint_as_float(r[2 * j]), y = __uint_as_float(r[2 * j + 1]);
          u32& first = high[ks][2 * i + j];
          first = pack(x, y);
          low[ks][2 * i + j] = pack(x - lo(first), y - hi(first));
        }
      }
    wg_fence();
#pragma unroll
    for (int ks = 0; ks < 4; ks++) {
      auto place = [&](u32 part) {
        return FORWARD ? descriptor(part + (4 * half + ks) * 2048, 16384, 1024) : descriptor(part + half * 16384, 16, 1024) + ks * 2;
      };
      auto add = [&](const u32* x, u64 y) {
        if (FORWARD) wgmma128(S, x, y);
        else wgmma128_back(S, x, y);
      };
      add(high[ks], place(at));
      add(low[ks], place(at));
      add(high[ks], place(at + 32768));
    }
    wg_commit();
    wg_wait(S);
  }
}
