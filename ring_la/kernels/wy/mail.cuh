// States [K, V] that go to another rank, and come from one, by mailboxes in the ranks' memory, in the link's place: what
// `scan/link_kernel.py` says of lanes, words and flags. A unit is 32 columns of a state; each has a lane of its own, so that none
// waits for another.
//
// For one piece of tokens, or one in each batch row, whose spans' maps are there (maps.cuh; KDA's forward finds them itself). The delta
// rules' programs each find what enters their span (entering.cuh); KDA's first one carries it from span to span (hand_on.cuh). What leaves
// is sent, and spans that wait get what enters them, while all others are under way. Who does so holds maps in shared memory by then,
// where chunks come later.
#pragma once
#include "maps.cuh"

#define UNSENT 0x7fff5a5au  // a word that has not come (comm/copy_kernel.py)
#define NEITHER 0x7fffffffu // another NaN
#define COLUMNS 32          // of a unit
#define UNITS (D / COLUMNS)

struct Mail {
  int* own;                  // this rank's mailboxes
  const long long* away;     // how far each rank's lie from them, in 16 bytes
  int *broken, *report;      // of each rank: whether it is not waited for again; the same for the host
  long long skip, patience;  // words of the mailboxes before the lanes; nanoseconds to wait for a rank
  float *adds, *squares;     // spans' maps, on this way, see `Args` of MAPS
  u16* images;
  int* zero;                 // [count, H]: whether transitions are 0, and not there; KDA, [2, count, H]: of how many chunks at spans'
                             // ends, and on the way of gradients at their beginnings, that is found
  const float* before;       // [pieces, H, K, V]: what enters where no rank sends it; null: zero
  float* entering;           // [count, H, K, V]: what enters spans; of the delta rules what comes to the first, and else what those before
                             // leave of nothing, as warps hold a state (entering.cuh)
  float* leaving;            // [pieces, H, K, V]: what leaves pieces
  int me, source, target;    // ranks; -1: none
  int ranks, lanes, room, flag; // how many ranks and lanes; words of a room and of a flag
  int keeps;                 // whether what leaves is wanted here
  int composes;              // whether what spans together do is found before anything comes
};

INLINE bool leaves(const Mail& m) { return m.target >= 0 || m.keeps; }  // what leaves pieces is wanted
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

// Take lane `i` to the target, where it is `wanted`, in time or not; whether it is this thread's. By a warp.
INLINE bool take_lane(const Mail& m, int i, bool wanted, int lane) {
  int* const flag = flag_of(m, m.me, m.target, i);
  bool mine = !wanted || swap_anywhere(flag, 0, 1) == 0;
  u64 start = 0;
  while (__any_sync(~0u, !mine) && !is_late(m, m.target, start, lane))
    if (!mine) mine = swap_anywhere(flag, 0, 1) == 0;
  return mine && wanted;
}
// The lanes from `first` on, which is said in four words of shared memory. By a warp.
INLINE void claim(const Mail& m, int first, u32 said, int lane) {
  const bool mine = take_lane(m, first + (lane & (UNITS - 1)), lane < UNITS, lane);
  if (lane < UNITS) sts32(said + lane * 4, mine);
}
// Four words as they are sent
INLINE void as_sent(u32 (&x)[4]) {
#pragma unroll
  for (int e = 0; e < 4; e++)
    if (x[e] == UNSENT) x[e] = NEITHER;
}
// Send a state by lanes that were claimed: read(x, i) gives 16 bytes of it, see `place`. By eight warps, which know what was said.
template <class Read> INLINE void put(const Mail& m, int first, u32 said, int w, int lane, Read read) {
#pragma unroll 8
  for (int j = 0; j < 16; j++) {
    const int i = j * 256 + w * 32 + lane, unit = i >> 10;
    u32 x[4];
    read(x, i);
    as_sent(x);
    stg128_if(room_of(m, m.me, m.target, first + unit) + (i & 1023) * 4, x, lds32(said + unit * 4));
  }
}
// Claim the lanes, and send the state `from`. By eight warps that `sync`.
template <class Sync> INLINE void send(const float* from, const Mail& m, int first, u32 said, int w, int lane, Sync sync) {
  if (w == 0) claim(m, first, said, lane);
  sync();
  put(m, first, said, w, lane, [&](u32* x, int i) {
    const float4 y = *(const float4*)(from + place(i));
    x[0] = __float_as_uint(y.x); x[1] = __float_as_uint(y.y); x[2] = __float_as_uint(y.z); x[3] = __float_as_uint(y.w);
  });
}
// The same of a state in registers, by way of 64 KB of shared memory; its lanes were claimed.
INLINE void put_from(const float (&S)[16][4], u32 at, const Mail& m, int first, u32 said, int w, int lane) {
#pragma unroll
  for (int nt = 0; nt < 16; nt++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int k = nt * 8 + 2 * (lane & 3) + (e & 1), v = w * 16 + (lane >> 2) + (e >> 1) * 8;
      sts32(at + (v >> 5) * 16384 + k * 128 + ((v & 31) ^ ((k >> 1 & 3) << 3)) * 4, __float_as_uint(S[nt][e]));
    }
  between_warps();
  put(m, first, said, w, lane, [&](u32* x, int i) {
    const int k = i >> 3 & 127;
    lds128(x, at + (i >> 10) * 16384 + k * 128 + ((i & 7) ^ ((k >> 1 & 3) << 1)) * 16);
  });
}
#define TURN 640 // bytes of shared memory by way of which a warp sends its rows: eight of K, padded so that no two share banks
// The same by warps that do not wait for each other, each by way of `TURN` bytes at `turn`, where its lane is `mine`.
INLINE void put_rows(const float (&S)[16][4], u32 turn, const Mail& m, int first, bool mine, int w, int lane) {
  const int row = lane >> 2, column = lane & 3;
  u32* const to = room_of(m, m.me, m.target, first + (w >> 1)) + row * COLUMNS + (w & 1) * 16 + column * 4;
#pragma unroll
  for (int nt = 0; nt < 16; nt++) {
    u32 x[4];
#pragma unroll
    for (int e = 0; e < 4; e++)
      sts32(turn + (2 * column + (e & 1)) * 80 + (row + (e >> 1) * 8) * 4, __float_as_uint(S[nt][e]));
    __syncwarp();
    lds128(x, turn + row * 80 + column * 16);
    as_sent(x);
    stg128_if(to + nt * 8 * COLUMNS, x, mine);
    __syncwarp();
  }
}

// Take a state `to` its place, as soon as all of it has come: what has not in time is NaN. By eight warps. stage: shared memory where it is
// put, too, as `pass_on` finds it, or (not STORED) nowhere else; 0: it is not. EACH: in how many registers of 16 bytes at a time.
template <int EACH, bool STORED = true> INLINE void take_in(float* to, const Mail& m, int first, u32 stage, int w, int lane) {
  u64 start = 0;
#pragma unroll 1
  for (int j = 0; j < 16; j += EACH) {
    u32 x[EACH][4];
    for (bool late = false;;) {
      bool missing = false;
#pragma unroll
      for (int n = 0; n < EACH; n++) {
        const int i = (j + n) * 256 + w * 32 + lane;
        load_anywhere(x[n], room_of(m, m.source, m.me, first + (i >> 10)) + (i & 1023) * 4);
#pragma unroll
        for (int e = 0; e < 4; e++) missing |= x[n][e] == UNSENT;
      }
      if (!__any_sync(~0u, missing) || late) break;  // a warp agrees
      late = is_late(m, m.source, start, lane);
    }
#pragma unroll
    for (int n = 0; n < EACH; n++) {
      const int i = (j + n) * 256 + w * 32 + lane;
      const u32 none[4] = {UNSENT, UNSENT, UNSENT, UNSENT};
      stg128(room_of(m, m.source, m.me, first + (i >> 10)) + (i & 1023) * 4, none);
      as_sent(x[n]);
      if (STORED) stg128(to + place(i), x[n]);
      if (!stage) continue;
      const int k = i >> 3 & 127;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int v = (i >> 10) * COLUMNS + (i & 7) * 4 + e, thread = (v >> 4) * 32 + (v & 7) * 4 + (k >> 1 & 3);
        sts32(stage + (k >> 3) * 4096 + thread * 16 + ((v >> 3 & 1) * 2 + (k & 1)) * 4, x[n][e]);
      }
    }
  }
}
INLINE void give_back(const Mail& m, int i) { store_release_anywhere(flag_of(m, m.source, m.me, i), 0); }  // a lane, when all is taken in
// Both, by eight warps that `sync`, which may read it then.
template <class Sync> INLINE void receive(float* to, const Mail& m, int first, u32 stage, int w, int lane, Sync sync) {
  take_in<8>(to, m, first, stage, w, lane);
  sync();
  if (w == 0 && lane < UNITS) give_back(m, first + lane);
}

template <class Args> INLINE int first_lane(const Args& a, const Span& x, int h) { return (x.piece * a.H + h) * UNITS; }
INLINE u64 ones(int n) { return n ? ~(u64)0 >> 64 - n : 0; }

// Which of a piece's spans, 64 at most, have transitions that are 0, from span s on in the order of this way. By a warp.
template <bool FORWARD, class Args> INLINE u64 zeros_of(const Args& a, int s, int h, int lane) {
  auto half = [&](int p) { return __ballot_sync(~0u, p < spans_a_row(a) && a.mail.zero[(FORWARD ? s + p : s - p) * a.H + h]); };
  const u32 low = half(lane);
  return (u64)half(lane + 32) << 32 | low;
}

// -- maps, on the way of what comes -----------------------------------------------------------------------------------
#define SMALL -30.f // log2 of what is left of a state that counts as nothing
#define MAPS_HELD 2 // beside a state

// log2 of a bound of what n spans from s on together leave of a state: the product of their transitions' Frobenius norms. By a warp.
template <bool FORWARD, class Args> INLINE float left_of(const Args& a, int s, int n, int h, int lane) {
  float all = 0.f;
  for (int p = lane; p < n; p += 32) {
    const float4* const x = (const float4*)(a.mail.squares + ((u64)(FORWARD ? s + p : s - p) * a.H + h) * 8);
    const float4 y = x[0], z = x[1];
    const float sum = y.x + y.y + y.z + y.w + z.x + z.y + z.z + z.w;
    all += 0.5f * lg2(fmaxf(sum, 1e-30f));  // squares may vanish where elements do not
  }
#pragma unroll
  for (int m = 16; m; m >>= 1) all += __shfl_xor_sync(~0u, all, m);
  return all;
}

// What enters a piece where no rank sends it; null: zero
template <class Args> INLINE const float* given(const Args& a, int piece, int h) {
  return a.mail.before ? a.mail.before + ((u64)piece * a.H + h) * (D * D) : 0;
}

// Whether not all spans of a piece forget: then programs of spans hold maps where chunks come.
template <class Args> INLINE bool carries(const Args& a, u64 zeros) { return zeros != ones(spans_a_row(a)); }

// Maps of a piece's spans in shared memory, one after the other, in MAPS_HELD places of MAP bytes from `at` on, which have a barrier each;
// `stage` is behind them. Span s is the first on this way.
template <bool FORWARD, class Args> struct HeldMaps {
  const Args& a;
  int s, h;
  u32 at, bars;
  int w, lane;
  u32 phases;
  INLINE u64 state(int p) const { return ((u64)(FORWARD ? s + p : s - p) * a.H + h) * (D * D); }  // of the span at position p
  INLINE const float* adds(int p) const { return a.mail.adds + state(p); }
  INLINE u32 stage() const { return at + MAPS_HELD * MAP; }
  INLINE void hold(int p, int slot) const {
    if (w || lane) return;
    bar_expect(bars + slot * 8, MAP);
    copy_in(at + slot * MAP, a.mail.images + 2 * state(p), MAP, bars + slot * 8);
  }
  INLINE void hold_first(int from, int to) const {
    proxy_fence();
    between_warps();  // nobody reads maps any more, or writes there
    for (int p = from; p < min(from + MAPS_HELD, to); p++) hold(p, p - from);
  }
  // Maps `from` to `to` (not included), held from `from` on: step(p, where it lies), after which no warp reads it any more
  template <class Step> INLINE void over(int from, int to, Step step) {
#pragma unroll 1
    for (int p = from; p < to; p++) {
      const int slot = (p - from) % MAPS_HELD;
      bar_wait(bars + slot * 8, phases >> slot & 1);
      phases ^= 1 << slot;
      step(p, at + slot * MAP);
      if (p + MAPS_HELD < to) hold(p + MAPS_HELD, slot);
    }
  }
};
