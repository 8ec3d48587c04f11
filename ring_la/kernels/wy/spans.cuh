// What the fused kernels of one device's tokens share: spans of a head's tokens, each a program's, and how they hand
// states on. A file that includes this says before it how many tokens a chunk has (C) and channels a head (D), and of rows
// that are cut evenly but for one span how many tokens that has: the first, or with a minus sign the last (OUTER). The last has what is
// left.
#pragma once
#include "state.cuh"

#ifndef A_ROW // of spans, where there is no table
#define A_ROW (a.count / a.pieces)
#endif
template <class Args> INLINE int spans_a_row(const Args& a) { return A_ROW; }

struct Span { int begin, end, piece, chunk, first, last; };  // chunk: the number of its first

template <class Args> INLINE Span span_of(const Args& a, int s) {
  Span x;
  if (a.table) {
    const int* row = a.table + s * 6;
    x.begin = row[0]; x.end = row[1]; x.piece = row[2]; x.chunk = row[3]; x.first = row[4]; x.last = row[5];
  } else {
    const int before = OUTER < 0 ? 0 : OUTER - a.length, each = spans_a_row(a), n = s % each;
    x.piece = s / each; x.first = n == 0; x.last = n == each - 1;
    const int begin = x.first ? 0 : before + n * a.length;
    x.chunk = x.piece * ((a.T + C - 1) / C) + begin / C;
    x.begin = x.piece * a.T + begin; x.end = x.piece * a.T + (x.last ? a.T : before + (n + 1) * a.length);
  }
  return x;
}

// 1: a span starts from zero; 2: it waits
template <class Args> INLINE int* decided(const Args& a, int s, int h) { return a.flags + s * a.H + h; }
// 1: `states` holds what a span leaves; -1: `parts` holds what it leaves early, see `combine`
template <class Args> INLINE int* done(const Args& a, int s, int h) { return a.flags + (a.count + s) * a.H + h; }
// The number of the next program; what `choose` keeps follows.
template <class Args> INLINE int* ticket(const Args& a) { return a.flags + 2 * a.count * a.H; }
// This program's number in launch `which` of a call: its own where no span waits, or all can run at once (`own`), else in the order
// that programs begin in. Blocks begin in the order of their numbers, also where other launches hold multiprocessors, so that a span
// waits for one that has begun. Where it takes a ticket, flags are there from then on (`launch_before`).
template <class Args> INLINE int number(const Args& a, bool own, int which = 0) {
  if (own) return blockIdx.x;
  launch_before();
  return atomicAdd(ticket(a) + which, 1);
}
template <class Args> INLINE float beta_at(const Args& a, u64 i) {
#if BETA_BF16
  return __uint_as_float((u32)((const u16*)a.beta)[i] << 16);
#else
  return ((const float*)a.beta)[i];
#endif
}


// A program's span s of head h; back: how many chunks more it begins with from zero, or -1: it waits.
struct Choice { int s, h, back; };

// The next span, or with `pick` one that waits, or that one waits for, before all others: those take longest, and come
// last otherwise. A program that finds another leaves it on a list, from which programs take once all are looked at. So a span
// that waits begins when it is found, and so has the one it waits for.
// `forward`: the order of spans is that of tokens. `own`: see `number`. bound(s, x, h): how many chunks, by all warps. A span without tokens: back 0.
template <class Args, class Bound> INLINE Choice choose(const Args& a, bool forward, bool own, u32 said, Bound bound) {
  const int total = a.count * a.heads;
  int* const left = ticket(a) + 1;  // how many were left, how many taken again, which
  for (;;) {
    if (threadIdx.x == 0) sts32(said, number(a, own));
    __syncthreads();
    int i = uniform(lds32(said)), back = -1;
    const bool again = i >= total;
    if (again) {
      if (threadIdx.x == 0) {
        const int* const at = left + 2 + atomicAdd(left + 1, 1);
        int x;
        while (!(x = load_acquire(at))) {}
        sts32(said + 4, x);
      }
      __syncthreads();
      i = uniform(lds32(said + 4));
      back = i & 31;
      i = (i >> 5) - 1;
    }
    const int n = i / a.heads, s = forward ? n : a.count - 1 - n, h = a.first_head + i % a.heads, next = forward ? s + 1 : s - 1;
    if (again) return {s, h, back};
    const Span x = span_of(a, s);
    if (x.end <= x.begin) return {s, h, 0};
    back = bound(s, x, h);
    if (!a.pick || back < 0) return {s, h, back};
    __syncthreads();  // all know the bound
    if (!(forward ? x.last : x.first) && bound(next, span_of(a, next), h) < 0) return {s, h, back};
    if (threadIdx.x == 0) store_release(left + 2 + atomicAdd(left, 1), (i + 1) << 5 | back);
    __syncthreads();
  }
}

// Empty pieces, which no span sees: those behind a piece, and before the first, leave what enters. By 256 threads.
template <class Args> INLINE void leave_empty(const Args& a, int piece, int h, int i) {
  if (!a.table) return;
  auto copy = [&](int p) {
    const u64 at = ((u64)p * a.H + h) * D * D;
    for (int j = i; j < D * D; j += 256) a.S1[at + j] = a.S0 ? a.S0[at + j] : 0.f;
  };
  if (a.cu[piece] == 0) for (int p = piece - 1; p >= 0; p--) copy(p);
  for (int p = piece + 1; p < a.pieces && a.cu[p] == a.cu[p + 1]; p++) copy(p);
}

// What span s leaves, once it has
template <class Args> INLINE void take(float (&S)[16][4], const Args& a, int s, int h, int w, int lane) {
  while (load_acquire(done(a, s, h)) <= 0) {}
  load(S, held(a.states, (u64)s * a.H + h, w, lane));
}

// Hand the state that span s leaves on: to span `next` if that waits or has not decided yet, or where the piece is `over` to
// the caller.
template <class Args>
INLINE void leave(const float (&S)[16][4], const Args& a, int piece, int over, int s, int next, int h, u32 said, int w, int lane) {
  if (!over) {
    if (w == 0 && lane == 0) sts32(said + 12, load_acquire(decided(a, next, h)) != 1);
    between_warps();  // one thread asks, so that all do the same
    if (lds32(said + 12)) {
      store(S, held(a.states, (u64)s * a.H + h, w, lane));
      between_warps();
      if (w == 0 && lane == 0) store_release(done(a, s, h), 1);
    }
  } else if (a.S1) {
    leave_empty(a, piece, h, w * 32 + lane);
    put_state(S, a.S1 + ((u64)piece * a.H + h) * (D * D), w, lane);
  }
}

// -- several passes --------------------------------------------------------------------------------------------------
// A span that waits goes over its tokens from zero (what it leaves then is S') and from the identity (Phi) before the state
// that enters is there, so that the state it leaves is a product once it is.

// What span s leaves, S' (at `own`) + S Phi (Phi at `at`), to `states`, S being what span `from` leaves; `open` then lets the
// last pass begin, from what span `before` leaves, which S is then.
template <class Args>
INLINE void leave_early(float (&S)[16][4], const Args& a, const float4* own, int from, int before, int s, int h, u32 at, u32 open,
                        int w, int lane) {
  load(S, own);  // while it waits
  while (load_acquire(done(a, from, h)) <= 0) {}
  add_mapped(S, held(a.states, (u64)from * a.H + h, w, lane), at);
  store(S, held(a.states, (u64)s * a.H + h, w, lane));
  between_warps();
  if (w == 0 && lane == 0) {
    store_release(done(a, s, h), 1);
    bar_arrive(open);
  }
  take(S, a, before, h, w, lane);
}

// -- spans that combine ----------------------------------------------------------------------------------------------
// Of spans that wait one behind another, those with one s / a.together combine S' and Phi first, each with those before it, beside
// all others. So a state is handed on once for all of them, and each finds what it leaves of the state that enters the first.

template <class Args> INLINE bool waits(const Args& a, bool forward, int s, int h) {
  const Span x = span_of(a, s);
  if (forward ? x.first : x.last) return false;
  int found;
  while (!(found = load_acquire(decided(a, s, h)))) {}
  return found == 2;
}
// The span whose state enters those that combine with span s, which waits.
template <class Args> INLINE int enters(const Args& a, bool forward, int s, int h) {
  const int step = forward ? -1 : 1;
  int i = s + step;
  while (i / a.together == s / a.together && waits(a, forward, i, h)) i += step;
  return i;
}
// Span s, whose Phi is S, with those before it (`joins`: there are): S' and Phi of all of them to `parts`, Phi also to `at`.
template <class Args>
INLINE void combine(float (&S)[16][4], const Args& a, bool joins, int before, int s, int h, u32 at, int w, int lane) {
  float4* const own = held(a.parts, 2 * ((u64)s * a.H + h), w, lane);
  const int map = D * D / 4;  // from S' to Phi
  if (joins) {
    const float4* const others = held(a.parts, 2 * ((u64)before * a.H + h), w, lane);
    keep_map(S, at, w, lane);
    load(S, own);
    while (!load_acquire(done(a, before, h))) {}
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
      add_mapped(S, others + i * map, at);
      if (i == 0) {
        store(S, own);
#pragma unroll
        for (int nt = 0; nt < 16; nt++)
#pragma unroll
          for (int e = 0; e < 4; e++) S[nt][e] = 0.f;
      }
    }
  }
  store(S, own + map);
  keep_map(S, at, w, lane);
  if (w == 0 && lane == 0) store_release(done(a, s, h), -1);
}

// A span that waits, between its passes: S goes in as what its tokens leave of no state (pass 0) or of the identity, and is what the
// next pass begins with. Order of spans: `forward` or back.
template <class Args>
INLINE void between_passes(float (&S)[16][4], const Args& a, bool forward, int pass, int s, int h, u32 at, u32 open, int w, int lane) {
  const u64 i = (u64)s * a.H + h;
  float4* const own = a.parts ? held(a.parts, 2 * i, w, lane) : held(a.states, i, w, lane);
  if (pass == 0) {
    store(S, own);
    identity(S, w, lane);
    return;
  }
  const int before = forward ? s - 1 : s + 1;
  int from = before;
  if (a.parts) {
    from = uniform(enters(a, forward, s, h));
    combine(S, a, from != before, before, s, h, at, w, lane);
  } else {
    keep_map(S, at, w, lane);
  }
  leave_early(S, a, own, from, before, s, h, at, open, w, lane);
}
