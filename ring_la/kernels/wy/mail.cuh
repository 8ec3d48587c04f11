// States [K, V] that go to another rank or come from one by mailboxes in the ranks' memory, without a launch between: what
// `scan/link_kernel.py` says of lanes, words and flags. A unit is 32 columns of a state; a lane has one, so that no program waits
// for another's.
#pragma once
#include "spans.cuh"

#define UNSENT 0x7fff5a5au // a word that has not come (comm/copy_kernel.py)
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
// This warp's first words of a lane's room, in the memory of who receives
INLINE u32* words_of(const Mail& m, int sender, int receiver, int i, int w, int lane) {
  const u64 room = (u64)m.ranks * m.lanes * m.flag + (u64)(sender * m.lanes + i) * m.room;
  return (u32*)m.own + m.away[receiver] * 4 + m.skip + room + 2 * (lane & 3) * COLUMNS + (w & 1) * 16 + (lane >> 2);
}
// Word j of tile nt of a state as warps hold it
INLINE constexpr int word(int nt, int j) { return (nt * 8 + (j & 1)) * COLUMNS + (j >> 1) * 8; }

INLINE void mark_late(const Mail& m) {
  m.broken[m.peer] = 1;
  m.report[m.peer] = 1;
}
INLINE u64 patience_of(const Mail& m) { return *(volatile int*)&m.broken[m.peer] ? 0 : (u64)m.patience; }

// Take the lanes from `first` on, of a state that `send` puts there; by eight warps. To `said`: which were given back in time.
INLINE void claim(const Mail& m, int first, u32 said, int w, int lane) {
  if ((w & 1) || lane) return;
  int* const flag = flag_of(m, m.me, m.peer, first + (w >> 1));
  const u64 start = nanoseconds(), patience = patience_of(m);
  bool mine = swap_anywhere(flag, 0, 1) == 0;
  while (!mine && nanoseconds() - start < patience) mine = swap_anywhere(flag, 0, 1) == 0;
  if (!mine) mark_late(m);
  sts32(said + (w >> 1) * 4, mine);
}
INLINE void send(const float (&S)[16][4], const Mail& m, int first, u32 said, int w, int lane) {
  between_warps();  // lanes are taken
  if (!lds32(said + (w >> 1) * 4)) return;
  u32* const to = words_of(m, m.me, m.peer, first + (w >> 1), w, lane);
#pragma unroll
  for (int nt = 0; nt < 16; nt++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const u32 x = __float_as_uint(S[nt][j]);
      to[word(nt, j)] = x == UNSENT ? 0x7fffffffu : x;
    }
}

// A state, as soon as all of it has come: what has not in time is NaN. Its lanes are given back. By eight warps.
INLINE void receive(float (&S)[16][4], const Mail& m, int first, int w, int lane) {
  u32* const from = words_of(m, m.peer, m.me, first + (w >> 1), w, lane);
  const u64 start = nanoseconds(), patience = patience_of(m);
  for (bool late = false, missing = true; missing;) {
    missing = false;
#pragma unroll
    for (int nt = 0; nt < 16; nt++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const u32 x = load_anywhere(from + word(nt, j));
        missing |= x == UNSENT;
        S[nt][j] = __uint_as_float(x == UNSENT ? 0x7fffffffu : x);
      }
    if (missing && late) {
      mark_late(m);
      break;
    }
    late = nanoseconds() - start >= patience;
  }
#pragma unroll
  for (int nt = 0; nt < 16; nt++)
#pragma unroll
    for (int j = 0; j < 4; j++) from[word(nt, j)] = UNSENT;
  between_warps();
  if (!(w & 1) && lane == 0) store_release_anywhere(flag_of(m, m.peer, m.me, first + (w >> 1)), 0);
}
