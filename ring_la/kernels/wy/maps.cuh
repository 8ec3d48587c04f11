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

// The map at `at` itself, on the way of gradients its transpose
template <bool FORWARD> INLINE void read_map(float (&S)[16][4], u32 at, int w, int lane) {
#pragma unroll
  for (int nt = 0; nt < 16; nt++) {
    u32 x[4];  // two parts of two tiles of eight rows
    const int row = FORWARD ? w * 16 + ((lane >> 3) & 1) * 8 + (lane & 7) : nt * 8 + (lane & 7);
    const int chunk = FORWARD ? nt : 2 * w + ((lane >> 3) & 1);
    const u32 from = at + (lane >> 4) * 32768 + (chunk >> 3) * 16384 + row * 128 + swz(row, chunk & 7);
    if (FORWARD) ldm(x, from);
    else ldm_trans(x, from);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      S[nt][2 * e] = lo(x[e]) + lo(x[2 + e]);
      S[nt][2 * e + 1] = hi(x[e]) + hi(x[2 + e]);
    }
  }
}

// What this thread has of a state in 64 KB of shared memory
INLINE u32 staged(u32 stage, int w, int lane) { return stage + (w * 32 + lane) * 16; }
INLINE float4 staged_tile(u32 own, int nt) {
  u32 r[4];
  lds128(r, own + nt * 4096);
  return make_float4(__uint_as_float(r[0]), __uint_as_float(r[1]), __uint_as_float(r[2]), __uint_as_float(r[3]));
}

// S <- what a span `adds` + S times the map at `at`, on the way of gradients its transpose; by way of 64 KB of shared memory, since
// registers do not hold all operands beside it. STAGED: S lies there already.
template <bool FORWARD, bool STAGED = false> INLINE void pass_on(float (&S)[16][4], const float* adds, u32 at, u32 stage, int w, int lane) {
  const u32 own = staged(stage, w, lane);
#pragma unroll
  for (int nt = 0; nt < 16; nt++)
    if (!STAGED) sts128(own + nt * 4096, S[nt]);
  begin_with(S, adds, w, lane);
  add_product<FORWARD>(S, at, [&](int nt) { return staged_tile(own, nt); });
}
