// States [K, V] that go to another rank, and come from one, by mailboxes in the ranks' memory, in the link's place: what
// `scan/link_kernel.py` says of lanes, words and flags. A unit is 32 columns of a state; each has a lane of its own, so that none
// waits for another.
//
// For one piece of tokens, or one in each batch row, whose spans' maps are there (maps.cuh; KDA's forward finds them itself). The program
// of its first span on this way carries what comes from map to map, as far as it goes: so what leaves is sent, and spans that wait get
// what enters them, while all others are under way. It holds maps in shared memory by then, where chunks come later, and has none to
// begin early with.
//
// KDA's gradients have two launches before: one makes chunks' states, and takes what no map passes on, by those of its warps that make
// factors, when they have made all; the other one, beside it, finds maps, and sends what waits for nothing.
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
  float* entering;           // [count, H, K, V]: what enters spans
  float* leaving;            // [pieces, H, K, V]: what leaves pieces
  int me, source, target;    // ranks; -1: none
  int ranks, lanes, room, flag; // how many ranks and lanes; words of a room and of a flag
  int keeps;                 // whether what leaves is wanted here
  int composes;              // whether what all spans together do is found before anything comes
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
// put, too, as `pass_on` finds it; 0: it is not. EACH: in how many registers of 16 bytes at a time.
template <int EACH> INLINE void take_in(float* to, const Mail& m, int first, u32 stage, int w, int lane) {
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
      stg128(to + place(i), x[n]);
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

// What enters a piece on the way of gradients, if the span that it enters passes none of that on; x, the s-th, is its first by tokens.
// By eight warps that `sync`.
template <class Args, class Sync> INLINE void take_back(const Args& a, const Span& x, int s, int h, int w, int lane, Sync sync) {
  const Mail& m = a.mail;
  const u64 at = (u64)(s + spans_a_row(a) - 1) * a.H + h;
  if (m.source >= 0 && uniform(m.zero[at])) receive(m.entering + at * (D * D), m, first_lane(a, x, h), 0, w, lane, sync);
}

// -- what comes, from span to span -------------------------------------------------------------------------------------
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

// Whether the program of a piece's first span on this way takes shared memory to carry what comes: not where all spans forget.
template <class Args> INLINE bool carries(const Args& a, u64 zeros) { return zeros != ones(spans_a_row(a)); }

// What enters a piece where no rank sends it; null: zero
template <class Args> INLINE const float* given(const Args& a, int piece, int h) {
  return a.mail.before ? a.mail.before + ((u64)piece * a.H + h) * (D * D) : 0;
}
// To the place of what enters its first span, the s-th. By eight warps.
template <class Args> INLINE void enter(const Args& a, int piece, int s, int h, int w, int lane) {
  const float4* const from = (const float4*)given(a, piece, h);
  float4* const to = (float4*)(a.mail.entering + ((u64)s * a.H + h) * (D * D));
  for (int i = w * 32 + lane; i < D * D / 4; i += 256) to[i] = from ? from[i] : make_float4(0.f, 0.f, 0.f, 0.f);
}

// Take what comes to a piece, carry it through its spans, and send what leaves; span s is its first on this way. What waits for nothing
// goes first. `zeros`: see `zeros_of`. `sends`, `ends`: whether what leaves is sent from here, by lanes that were claimed, or to be found
// at all; `there`: what enters was taken. By eight warps; shared memory from `at` on, if it `carries` or sends. bars: two barriers.
template <bool FORWARD, class Args>
INLINE void carry(const Args& a, const Span& x, int s, int h, u64 zeros, bool sends, bool ends, bool there, u32 at, u32 bars, u32 said,
                  int w, int lane) {
  const Mail& m = a.mail;
  const int n = spans_a_row(a), lanes = first_lane(a, x, h);
  auto state = [&](int p) { return ((u64)(FORWARD ? s + p : s - p) * a.H + h) * (D * D); };  // of the span at position p
  float* const leaving = m.leaving + ((u64)x.piece * a.H + h) * (D * D);
  float* const entering = m.entering + state(0);
  auto hold = [&](int p, int slot) {
    if (w || lane) return;
    bar_expect(bars + slot * 8, MAP);
    copy_in(at + slot * MAP, m.images + 2 * state(p), MAP, bars + slot * 8);
  };
  u32 phases = 0;
  // Through the maps from `from` to `to` (not included), held from `from` on; `then` sees what enters each behind them
  auto through = [&](float (&S)[16][4], int from, int to, bool adds, auto then) {
#pragma unroll 1
    for (int p = from; p < to; p++) {
      const int slot = (p - from) % MAPS_HELD;
      bar_wait(bars + slot * 8, phases >> slot & 1);
      phases ^= 1 << slot;
      pass_on<FORWARD>(S, adds ? m.adds + state(p) : 0, at + slot * MAP, at + MAPS_HELD * MAP, w, lane);
      then(p + 1);
      if (p + MAPS_HELD < to) hold(p + MAPS_HELD, slot);
    }
  };
  auto hold_first = [&](int from, int to) {
    proxy_fence();
    between_warps();  // nobody reads maps any more, or writes there
    for (int p = from; p < min(from + MAPS_HELD, to); p++) hold(p, p - from);
  };
  for (int end = n;;) {  // from the last span before `end` that forgets what enters it, or from what comes
    const int z = 63 - __clzll(zeros & ones(end));
    const bool leaves = end == n && ends;
    const bool nothing = z < 0 && m.source < 0 && !m.before;  // comes
    bool small = false;  // whether what leaves goes first, since nothing of what comes is in it; where nobody waits for others it need not
    if (z < 0 && leaves) small = nothing ? m.composes : m.source >= 0 && uniform(left_of<FORWARD>(a, s, n, h, lane) < SMALL);
    const bool begins = z < 0 && !small;
    const int from = small || nothing ? 1 : z + 1, to = end == n && !ends ? n - 1 : end;
    const bool composed = begins && leaves && sends && m.source >= 0 && m.composes;
    if (composed) {  // what all spans add, to `leaving`, and their transitions' product on this way, where the first map is held
      float S[16][4];
      hold_first(1, n);
      begin_with(S, m.adds + state(0), w, lane);
      through(S, 1, n, true, [&](int) { between_warps(); });
      put_state(S, leaving, w, lane);
      hold_first(0, n);
      identity(S, w, lane);
      through(S, 0, n, false, [&](int) { between_warps(); });
      keep_map(S, at, w, lane);
    } else {
      hold_first(from, to);
    }
    if (begins) {
      if (m.source < 0)
        enter(a, x.piece, s, h, w, lane);
      else if (!there)
        receive(entering, m, lanes, composed ? at + MAPS_HELD * MAP : 0, w, lane, [] { between_warps(); });
      there = true;
      between_warps();  // what enters is there
    }
    if (composed) {
      float S[16][4];
      pass_on<true, true>(S, leaving, at, at + MAPS_HELD * MAP, w, lane);
      if (m.keeps) put_state(S, leaving, w, lane);
      put_from(S, at + MAP, m, lanes, said, w, lane);
      ends = false;
      continue;  // and what enters the spans
    }
    if (from < to || leaves || (begins && nothing && end)) {
      float S[16][4];
      auto hand_on = [&](int p) {  // what enters the span at position p
        const bool wanted = p < n && !small;
        if (wanted) put_state(S, m.entering + state(p), w, lane);
        between_warps();
        if (wanted && w == 0 && lane == 0) store_release(a.arrived + (FORWARD ? s + p : s - p) * a.H + h, 1);
      };
      begin_with(S, begins && !nothing ? entering : m.adds + state(from - 1), w, lane);
      if (begins && nothing) hand_on(1);
      through(S, from, to, true, hand_on);
      if (leaves && m.keeps) put_state(S, leaving, w, lane);
      if (leaves && sends) put_from(S, at + MAP, m, lanes, said, w, lane);
    }
    if (leaves) ends = false;
    if (begins) return;
    if (!small) end = z;
  }
}

// What enters span s, which waits, from span `before`, once it is there
template <class Args> INLINE const float* carried(const Args& a, int s, int before, int h) {
  launch_before();  // flags are there
  if (uniform(a.mail.zero[before * a.H + h])) return a.mail.adds + ((u64)before * a.H + h) * (D * D);
  while (!load_acquire(a.arrived + s * a.H + h)) {}
  return a.mail.entering + ((u64)s * a.H + h) * (D * D);
}
