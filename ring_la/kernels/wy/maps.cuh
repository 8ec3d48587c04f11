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

// The maps that a program finds of span s of head h: from no state (pass 0) and, forward, from the identity (pass 1), those from pass
// `first` to `last`. `both`: one program finds the two, which is as fast where spans are as many as programs run at once, and
// spares those that forget a program that finds nothing.
struct MapsOf { int s, h, first, last; };
template <class Args> INLINE MapsOf maps_of(const Args& a, bool forward, bool both = false) {
  const int i = blockIdx.x, n = forward && !both ? i >> 1 : i, first = forward && !both ? i & 1 : 0;
  return {n / a.heads, a.first_head + n % a.heads, first, forward && both ? 1 : first};
}

// The chunks that maps are found from; none: they are zero, or nobody asks. whole: all of the span's.
struct Reach { int t0, n, whole; };
// Whether span x forgets what enters it, by how many chunks, or -1; and so y, the one behind it.
struct Forgets { int x, y; };
// By all warps that `forgetting`, the rule's, asks for; y is x where nobody asks.
template <class Args> INLINE Reach reach(const Args& a, const Span& x, const MapsOf& m, bool forward, u32 said, int lane) {
  const bool behind = !m.first && !(forward ? x.last : x.first);
  const Span y = span_of(a, behind ? (forward ? m.s + 1 : m.s - 1) : m.s);
  const Forgets found = forward ? forgetting(a, x.end, y.end, x.end - x.begin, y.end - y.begin, -1, m.h, behind, said, lane)
                                : forgetting(a, x.begin, y.begin, x.end - x.begin, y.end - y.begin, 1, m.h, behind, said, lane);
  if (found.x < 0) return {uniform(x.begin), uniform((x.end - x.begin + C - 1) / C), 1};
  if (m.first || (behind && found.y >= 0)) return {0, 0, 0};
  return {uniform(forward ? x.end - found.x * C : x.begin), found.x, 0};
}

// Say whether the transition is 0, of which nothing but the flag is written; whether that is all. By the same warps.
template <class Args> INLINE bool forgets_all(const Args& a, MapsOf& m, const Reach& r) {
  if (m.last && threadIdx.x == 0) a.flags[m.s * a.H + m.h] = !r.whole;
  if (!r.whole) m.last = 0;
  return m.last < m.first;
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

// walk(S, c): over those chunks, the first of which is the c-th of those under way
template <class Args, class Walk> INLINE void find_maps(const Args& a, const MapsOf& m, int n, int w, int lane, Walk walk) {
#pragma unroll 1
  for (int pass = m.first; pass <= m.last; pass++) {
    float S[16][4];
    if (pass) identity(S, w, lane);
    else begin_with(S, 0, w, lane);
    walk(S, (pass - m.first) * n);
    put_state(S, (pass ? a.parts : a.states) + ((u64)m.s * a.H + m.h) * (D * D), w, lane);
    if (pass) put_squares(S, a.squares + ((u64)m.s * a.H + m.h) * 8, w, lane);
  }
}
