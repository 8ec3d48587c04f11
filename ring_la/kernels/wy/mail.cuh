// States [K, V] that go to another rank, and come from one, by mailboxes in the ranks' memory, in the link's place: what
// `scan/link_kernel.py` says of lanes, words and flags. A unit is 32 columns of a state; each has a lane of its own, so that none
// waits for another.
//
// For one piece of tokens, or one in each batch row. Its first span has no chunks to begin early with, so that its program has the time.
// Forward it sends, and takes what it begins from. Gradients go by the launch before theirs, which makes chunks' states: its program
// sends as it begins, and those of its warps that make factors take what comes when they have made all. Where a head's link has
// waited for what comes, links have sent before: no rank's message stands behind another's.
#pragma once
#include "spans.cuh"

#define UNSENT 0x7fff5a5au  // a word that has not come (comm/copy_kernel.py)
#define NEITHER 0x7fffffffu // another NaN
#define COLUMNS 32          // of a unit
#define UNITS (D / COLUMNS)

struct Mail {
  int* own;                  // this rank's mailboxes
  const long long* away;     // how far each rank's lie from them, in 16 bytes
  int *broken, *report;      // of each rank: whether it is not waited for again; the same for the host
  long long skip, patience;  // words of the mailboxes before the lanes; nanoseconds to wait for a rank
  const int* forgets;        // [count, H]: whether spans forget what enters them, on this way; `Args.flags`: whether transitions are 0
  float* entering;           // [count, H, K, V]: what enters spans on this way, where the launch that is `given` it reads it from
  int me, source, target;    // ranks; -1: none
  int ranks, lanes, room, flag; // how many ranks and lanes; words of a room and of a flag
};

// A lane's flag, in the memory of who sends: whether it is taken
INLINE int* flag_of(const Mail& m, int sender, int receiver, int i) {
  return m.own + m.away[sender] * 4 + m.skip + (u64)(receiver * m.lanes + i) * m.flag;
}
// A lane's room, in the memory of who receives
INLINE u32* room_of(const Mail& m, int sender, int receiver, int i) {
  return (u32*)m.own + m.away[receiver] * 4 + m.skip + (u64)m.ranks * m.lanes * m.flag + (u64)(sender * m.lanes + i) * m.room;
}
// Of 16 bytes i of a state [K, V], as 256 threads go over them: unit i / 1024, where in that, and where in the state
INLINE int place(int i) { return (i >> 3 & 127) * D + (i >> 10) * COLUMNS + (i & 7) * 4; }

// Nanoseconds since `start`, which is found when first asked for, have passed the patience for a rank; marks it then. A warp agrees.
INLINE bool is_late(const Mail& m, int peer, u64& start, int lane) {
  const u64 now = nanoseconds();
  if (!start) start = now;
  const bool late = __any_sync(~0u, *(volatile int*)&m.broken[peer] || now - start >= (u64)m.patience);
  if (late && lane == 0) {
    m.broken[peer] = 1;
    m.report[peer] = 1;
  }
  return late;
}

// Send the state `from` by lanes from `first` on, which are taken in time, or not; by eight warps. said: four words of shared memory.
INLINE void send(const float* from, const Mail& m, int first, u32 said, int w, int lane) {
  if (w == 0) {
    int* const flag = flag_of(m, m.me, m.target, first + (lane & (UNITS - 1)));
    bool mine = lane >= UNITS || swap_anywhere(flag, 0, 1) == 0;
    u64 start = 0;
    while (__any_sync(~0u, !mine) && !is_late(m, m.target, start, lane))
      if (!mine) mine = swap_anywhere(flag, 0, 1) == 0;
    if (lane < UNITS) sts32(said + lane * 4, mine);
  }
  between_warps();
#pragma unroll 8
  for (int j = 0; j < 16; j++) {
    const int i = j * 256 + w * 32 + lane, unit = i >> 10;
    const float4 y = *(const float4*)(from + place(i));
    u32 x[4] = {__float_as_uint(y.x), __float_as_uint(y.y), __float_as_uint(y.z), __float_as_uint(y.w)};
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (x[e] == UNSENT) x[e] = NEITHER;
    stg128_if(room_of(m, m.me, m.target, first + unit) + (i & 1023) * 4, x, lds32(said + unit * 4));
  }
}

// Take a state `to` its place, as soon as all of it has come: what has not in time is NaN. The lanes are given back. By eight warps
// that `sync`, which may read it then.
template <class Sync> INLINE void receive(float* to, const Mail& m, int first, int w, int lane, Sync sync) {
  u64 start = 0;
#pragma unroll 1
  for (int j = 0; j < 16; j += 8) {
    u32 x[8][4];
    for (bool late = false;;) {
      bool missing = false;
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const int i = (j + n) * 256 + w * 32 + lane;
        load_anywhere(x[n], room_of(m, m.source, m.me, first + (i >> 10)) + (i & 1023) * 4);
#pragma unroll
        for (int e = 0; e < 4; e++) missing |= x[n][e] == UNSENT;
      }
      if (!__any_sync(~0u, missing) || late) break;  // a warp agrees
      late = is_late(m, m.source, start, lane);
    }
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const int i = (j + n) * 256 + w * 32 + lane;
      const u32 none[4] = {UNSENT, UNSENT, UNSENT, UNSENT};
      stg128(room_of(m, m.source, m.me, first + (i >> 10)) + (i & 1023) * 4, none);
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (x[n][e] == UNSENT) x[n][e] = NEITHER;
      stg128(to + place(i), x[n]);
    }
  }
  sync();
  if (w == 0 && lane < UNITS) store_release_anywhere(flag_of(m, m.source, m.me, first + lane), 0);
}

template <class Args> INLINE int spans_a_row(const Args& a) { return (a.T + a.length - 1) / a.length; }
// Whether no head's link has waited for what comes: it is for these programs. By a warp.
template <class Args> INLINE bool nobody_waited(const Args& a, bool forward, int lane) {
  const int each = spans_a_row(a), row = min(lane, a.pieces * a.H - 1);
  const int first = row / a.H * each + (forward ? 0 : each - 1);
  return a.mail.source < 0 || __all_sync(~0u, a.flags[first * a.H + row % a.H]);
}

template <class Args> INLINE int first_lane(const Args& a, const Span& x, int h) { return (x.piece * a.H + h) * UNITS; }

// What leaves a piece, if its end on this way forgets what enters; x, the s-th, is its first span. By eight warps.
template <class Args> INLINE void send_leaving(const Args& a, const Span& x, int s, int h, bool forward, u32 said, int w, int lane) {
  const Mail& m = a.mail;
  const int end = forward ? s + spans_a_row(a) - 1 : s;
  if (m.target >= 0 && nobody_waited(a, forward, lane) && uniform(m.forgets[end * a.H + h]))
    send(a.parts + ((u64)end * a.H + h) * (D * D), m, first_lane(a, x, h), said, w, lane);
}
// What enters it, if the span that it enters passes none of that on.
template <class Args, class Sync>
INLINE void take_entering(const Args& a, const Span& x, int s, int h, bool forward, int w, int lane, Sync sync) {
  const Mail& m = a.mail;
  const int begin = forward ? s : s + spans_a_row(a) - 1;
  if (m.source >= 0 && uniform(a.flags[begin * a.H + h]))
    receive(m.entering + ((u64)begin * a.H + h) * (D * D), m, first_lane(a, x, h), w, lane, sync);
}
