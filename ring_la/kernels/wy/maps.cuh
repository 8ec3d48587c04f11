// Maps of spans, for kernels whose states meet those of other ranks.
//
// Compiled with MAPS a kernel finds what each span's tokens leave of no state and of the identity (its transition), for a scan
// over spans and ranks; a launch that is `given` what enters each of them then goes over them once. A span whose last chunks
// forget everything, so that the next one begins early, has nothing to say, or its piece's last one what these chunks leave.
#pragma once
#include "spans.cuh"

// What enters span s: the state of its piece if that is `known`, or what it is `given` where it waits or knows it; else zero.
template <class Args> INLINE const float* entering(const Args& a, int piece, int s, int h, bool known, bool waits) {
  if (a.given) return known || waits ? a.states + ((u64)s * a.H + h) * (D * D) : 0;
  return known && a.S0 ? a.S0 + ((u64)piece * a.H + h) * (D * D) : 0;
}

// Where a program's tokens begin, how many chunks it goes over and how often: from no state, and then from the identity.
struct Reach { int t0, n, passes; };

// A state as the caller has states, or (`transposed`) the other way round
INLINE void put_map(const float (&S)[16][4], float* to, bool transposed, int w, int lane) {
  asm volatile("" : "+r"(lane));  // no address is kept from pass to pass, for which there are no registers
  const int tq = lane & 3, v = w * 16 + (lane >> 2);
#pragma unroll
  for (int nt = 0; nt < 16; nt++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int row = v + (e >> 1) * 8, column = nt * 8 + 2 * tq + (e & 1);
      to[transposed ? row * D + column : column * D + row] = S[nt][e];
    }
}
// Both passes, or what is left out as zeros. walk(S, pass): one of them; transitions go out as those of the way forward.
template <class Args, class Walk>
INLINE void find_maps(const Args& a, int s, int h, int passes, bool forward, int w, int lane, Walk walk) {
  const u64 at = ((u64)s * a.H + h) * (D * D);
  float S[16][4];
#pragma unroll 1
  for (int pass = 0; pass < 2; pass++) {
    if (pass && pass < passes) identity(S, w, lane);
    else begin_with(S, 0, w, lane);
    if (pass < passes) walk(S, pass);
    put_map(S, (pass ? a.parts : a.states) + at, pass && !forward, w, lane);
  }
}
