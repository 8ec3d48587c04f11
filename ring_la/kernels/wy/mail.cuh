// States [K, V] that go to another rank or come from one by mailboxes in the ranks' memory, without a launch between: what
// `scan/link_kernel.py` says of lanes, words and flags. A unit is 32 columns of a state; a lane has one, so that no program waits
// for another's.
#pragma once
#include "spans.cuh"

#define UNSENT 0x7fff5a5au // a word that has not come (comm/copy_kernel.py)
#define NEITHER 0x7fffffffu // another NaN
#define COLUMNS 32         // of a unit

struct Mail {
  int* own;                  // this rank's mailboxes
  const long long* away;     // how far each rank's lie from them, in 16 bytes
  int *broken, *report;      // of each rank: whether it is not waited for again; the same for the host
  long long skip, patience;  // words of the mailboxes before the lanes; nanoseconds to wait for a rank
  int me, peer, piece;       // who sends to `peer` or takes from it, and of which piece where there is a table
  int ranks, lanes, room, flag, unused; // how many ranks and lanes; words of a room and of a flag
};

template <class Args> INLINE bool is_mailed(const Args& a, const Span& x) { return !a.table || x.piece == a.mail.piece; }
// The first lane of a state: a batch row's, or the only row's pieces one behind the other
template <class Args> INLINE int lane_of(const Args& a, const Span& x, int h) { return ((a.table ? 0 : x.piece) * a.H + h) * (D / COLUMNS); }

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

INLINE void mark_late(const Mail& m) {
  m.broken[m.peer] = 1;
  m.report[m.peer] = 1;
}
INLINE u64 patience_of(const Mail& m) { return *(volatile int*)&m.broken[m.peer] ? 0 : (u64)m.patience; }

// Take the lanes from `first` on, of a state that `send` puts there; by eight warps. To `said`: which were given back in time.
INLINE void claim(const Mail& m, int first, u32 said, int w, int lane) {
  if (w) return;
  int* const flag = flag_of(m, m.me, m.peer, first + (lane & 3));
  const u64 start = nanoseconds(), patience = patience_of(m);
  bool mine = lane >= D / COLUMNS || swap_anywhere(flag, 0, 1) == 0;
  while (__any_sync(~0u, !mine && nanoseconds() - start < patience))  // a warp agrees
    if (!mine) mine = swap_anywhere(flag, 0, 1) == 0;
  if (!mine) mark_late(m);
  if (lane < D / COLUMNS) sts32(said + lane * 4, mine);
}
// A state [K, V] that these warps have stored.
INLINE void send(const float* from, const Mail& m, int first, u32 said, int w, int lane) {
  between_warps();  // it is there, and lanes are taken
#pragma unroll 4
  for (int j = 0; j < 16; j++) {
    const int i = j * 256 + w * 32 + lane, unit = i >> 10;
    const float4 y = *(const float4*)(from + place(i));
    u32 x[4] = {__float_as_uint(y.x), __float_as_uint(y.y), __float_as_uint(y.z), __float_as_uint(y.w)};
#pragma unroll
    for (int e = 0; e < 4; e++)
      if (x[e] == UNSENT) x[e] = NEITHER;
    if (lds32(said + unit * 4)) stg128(room_of(m, m.me, m.peer, first + unit) + (i & 1023) * 4, x);
  }
}

// A state [K, V], as soon as all of it has come, for these warps to read: what has not in time is NaN. Its lanes are given back. By
// eight warps.
INLINE void receive(float* to, const Mail& m, int first, int w, int lane) {
  const u64 start = nanoseconds(), patience = patience_of(m);
#pragma unroll 1
  for (int j = 0; j < 16; j += 8) {
    u32 x[8][4];
    for (bool late = false, missing = true; missing;) {
      missing = false;
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const int i = (j + n) * 256 + w * 32 + lane;
        load_anywhere(x[n], room_of(m, m.peer, m.me, first + (i >> 10)) + (i & 1023) * 4);
#pragma unroll
        for (int e = 0; e < 4; e++) missing |= x[n][e] == UNSENT;
      }
      missing = __any_sync(~0u, missing);  // a warp agrees
      if (missing && late) {
        if (lane == 0) mark_late(m);
        break;
      }
      late = __any_sync(~0u, nanoseconds() - start >= patience);
    }
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const int i = (j + n) * 256 + w * 32 + lane;
      const u32 none[4] = {UNSENT, UNSENT, UNSENT, UNSENT};
      stg128(room_of(m, m.peer, m.me, first + (i >> 10)) + (i & 1023) * 4, none);
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (x[n][e] == UNSENT) x[n][e] = NEITHER;
      stg128(to + place(i), x[n]);
    }
  }
  between_warps();
  if (w == 0 && lane < D / COLUMNS) store_release_anywhere(flag_of(m, m.peer, m.me, first + lane), 0);
}
