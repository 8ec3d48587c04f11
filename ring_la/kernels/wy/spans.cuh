// What the fused kernels of one device's tokens share: spans of a head's tokens, each a program's, and how they hand
// states on. A file that includes this says before it how many tokens a chunk has (C) and channels a head (D), and of rows
// that are cut evenly but for one span how many tokens that has: the first, or with a minus sign the last (OUTER). The last has what is
// left.
#pragma once
#include "hopper.cuh"

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

// Where 16 bytes `chunk` of a row of 128 bytes lie, so that eight rows' do not share banks.
INLINE u32 swz(int row, int chunk) { return (u32)((chunk ^ (row & 7)) << 4); }
// Where the next chunks 0, 2, 4 and 6 of such a row lie, given where its chunk 0 or 1 does (`at`): one bit pattern each, found once
INLINE void turned(u32 (&to)[4], u32 at) {
#pragma unroll
  for (int ks = 0; ks < 4; ks++) to[ks] = at ^ (ks << 5);
}

// Where 8 channels of K, chunk 0 to 15, of row v of a state [V, K] lie: an operand of wgmma as it is.
INLINE u32 state_place(int v, int chunk) { return (u32)((chunk >> 3) * 16384 + v * 128) + swz(v, chunk & 7); }

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

// -- a state on its way, [V, K] by eight warps, 16 of its rows a warp ------------------------------------------------
// S [16 tiles of 8 columns][4]: rows v0 + lane / 4 (and 8 more), columns 2 (lane % 4) and 1 more of each tile

INLINE void begin_with(float (&S)[16][4], const float* from, int w, int lane) {  // [K, V]; null: zero
  const int tq = lane & 3, v = w * 16 + (lane >> 2);
#pragma unroll
  for (int nt = 0; nt < 16; nt++)
#pragma unroll
    for (int e = 0; e < 4; e++) S[nt][e] = from ? from[(nt * 8 + 2 * tq + (e & 1)) * D + v + (e >> 1) * 8] : 0.f;
}

INLINE void put_state(const float (&S)[16][4], float* to, int w, int lane) {  // [K, V]
  const int tq = lane & 3, v = w * 16 + (lane >> 2);
#pragma unroll
  for (int nt = 0; nt < 16; nt++)
#pragma unroll
    for (int e = 0; e < 4; e++) to[(nt * 8 + 2 * tq + (e & 1)) * D + v + (e >> 1) * 8] = S[nt][e];
}

// Where state i of many lies, as these warps hold it
INLINE float4* held(const float* all, u64 i, int w, int lane) { return (float4*)(all + i * (D * D)) + w * 32 + lane; }
INLINE void store(const float (&S)[16][4], float4* to) {
#pragma unroll
  for (int nt = 0; nt < 16; nt++) to[nt * 256] = make_float4(S[nt][0], S[nt][1], S[nt][2], S[nt][3]);
}
INLINE void load(float (&S)[16][4], const float4* from) {
#pragma unroll
  for (int nt = 0; nt < 16; nt++) {
    const float4 y = __ldcg(from + nt * 256);
    S[nt][0] = y.x; S[nt][1] = y.y; S[nt][2] = y.z; S[nt][3] = y.w;
  }
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

INLINE void identity(float (&S)[16][4], int w, int lane) {
  const int row = w * 16 + (lane >> 2), column = 2 * (lane & 3);
#pragma unroll
  for (int nt = 0; nt < 16; nt++)
#pragma unroll
    for (int e = 0; e < 4; e++) S[nt][e] = row + (e >> 1) * 8 == nt * 8 + column + (e & 1);
}
// Phi^T, [K, K] in two bf16 parts of 32 KB, to `at`, where nothing else lies as yet
INLINE void keep_map(const float (&S)[16][4], u32 at, int w, int lane) {
  between_warps();  // all slots are empty
#pragma unroll
  for (int nt = 0; nt < 16; nt++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int r = w * 16 + (lane >> 2) + e * 8;
      const u32 to = at + (nt >> 3) * 16384 + r * 128 + swz(r, nt & 7) + (lane & 3) * 4;
      const u32 high = pack(S[nt][2 * e], S[nt][2 * e + 1]);
      sts32(to, high);
      sts32(to + 32768, pack(S[nt][2 * e] - lo(high), S[nt][2 * e + 1] - hi(high)));
    }
  proxy_fence();
  between_warps();
}

// S += what lies at `from`, a state or a map, times the map at `at`
INLINE void add_mapped(float (&S)[16][4], const float4* from, u32 at) {
#pragma unroll
  for (int half = 0; half < 2; half++) {  // of what lies there: registers do not hold all of it
    u32 high[4][4], low[4][4];
#pragma unroll
    for (int nt = 0; nt < 8; nt++) {
      const float4 y = __ldcg(from + (8 * half + nt) * 256);
      u32 *x = high[nt >> 1] + 2 * (nt & 1), *z = low[nt >> 1] + 2 * (nt & 1);
      x[0] = pack(y.x, y.y); x[1] = pack(y.z, y.w);
      z[0] = pack(y.x - lo(x[0]), y.y - hi(x[0])); z[1] = pack(y.z - lo(x[1]), y.w - hi(x[1]));
    }
    wg_fence();
#pragma unroll
    for (int ks = 0; ks < 4; ks++) {
      const u64 first = descriptor(at + (4 * half + ks) * 2048, 16384, 1024);
      wgmma128(S, high[ks], first);
      wgmma128(S, low[ks], first);
      wgmma128(S, high[ks], descriptor(at + 32768 + (4 * half + ks) * 2048, 16384, 1024));
    }
    wg_commit();
    wg_wait(S);
  }
}

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
