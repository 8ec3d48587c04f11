// KDA's forward where states meet those of other ranks, by mailboxes (mail.cuh): one launch, whose programs also find what spans do
// to a state, where that is asked for.
//
// Each looks whether the span before its own forgets what enters it, and that of a piece's first span whether its last one does. If
// all do, what leaves the piece is found of its last chunks and sent, by programs beside those of spans, on multiprocessors that are
// left. The first span is gone over from zero, since its own first chunks forget what comes, too; these are gone over again in the end,
// with what has long come. So nobody waits for a rank.
//
// Where a span does not forget, the program behind it has nothing to begin with. It finds what that span adds and its transition, and waits;
// the program of the first span, which does so for the last one, carries what comes through all of them (`carry`). Other launches may
// keep later programs out: what nobody has begun to look for after a while that of the first span finds itself.
#pragma once

#define WORDS STAGE           // two barriers for maps; orders, two at a time; bounds; which lanes are claimed; what was heard
#define ORDERS ((WORDS + 79) & ~63)
#define BOUNDS (ORDERS + 64)
#define LANES (BOUNDS + 48)
#define HEARD (LANES + 16)
#define AGAIN (HEARD + 16)    // of each warp that carries the state: how many chunks are gone over again
#define ASKED (AGAIN + 32)    // by programs beside, four words each of eight pieces' heads: what is to do
#define TURNS_OVER (ASKED + 128)                // of each of their warps `TURN` bytes
#define PICKED (TURNS_OVER + 8 * TURN)          // two words: which pieces' heads those that take have
#define ORDERED (PICKED + 8)                    // of each of two orders two barriers: it is there; all have read it
#define PATIENT 64            // times that it is asked for what others may not have begun, at each place; each takes a microsecond or more

enum Known { BY_ONE = 1, BY_TWO, SOUGHT, FOUND };  // of a span: it forgets by so many chunks; its map is being found; and is there
INLINE bool is_zero(int x) { return x == BY_ONE || x == BY_TWO; }  // its transition
INLINE int* known(const Args& a, int s, int h) { return a.arrived + (a.count + s) * a.H + h; }
enum Taking { THERE = 1, WANTED, UNWANTED, TAKEN };  // what enters a piece, by programs beside; TAKEN: one of them waits for it
INLINE int* taking(const Args& a, int s, int h) { return a.arrived + s * a.H + h; }  // s: its first span
enum { MINE = 4 };  // see `ask`
INLINE void say(int* at, int x) { *(volatile int*)at = x; }  // to readers that need nothing written before it

// -- chunks ------------------------------------------------------------------------------------------------------------
// Those who make chunks begin before anything is known, with a slot each: the span's, and where it is not first the two before it. They
// then make what is ordered.

// The span before x, the s-th; of a piece's first span its last
INLINE Span span_before(const Args& a, const Span& x, int s) { return span_of(a, x.first ? s + spans_a_row(a) - 1 : s - 1); }

// how: the second pass is without values; no order follows; behind its chunks comes what enters the piece
enum { TURNED = 1, LAST = 2, BRINGS = 4 };
// Chunks `first` to `stop` (not included) of those under way: `n` a pass, from token t0 on; tokens from `end` on are zero.
struct Order { int t0, n, first, stop, end, how; };
// Where the k-th order and its barriers lie
INLINE u32 order_at(u32 base, int k) { return base + ORDERS + (k & 1) * 32; }
INLINE u32 order_there(u32 base, int k) { return base + ORDERED + (k & 1) * 16; }
INLINE u32 order_read(u32 base, int k) { return order_there(base, k) + 8; }
// The k-th order, by eight warps: by their first thread, which has waited for copies out of the slots (`put_map`).
INLINE void order(u32 base, int& k, const Order& j) {
  const u32 to = order_at(base, k);
  if (threadIdx.x == 0) {
    if (k > 1) bar_wait(order_read(base, k), (k / 2 - 1) & 1);
    sts32(to, j.t0); sts32(to + 4, j.n); sts32(to + 8, j.first);
    sts32(to + 12, j.stop); sts32(to + 16, j.end); sts32(to + 20, j.how);
    bar_arrive(order_there(base, k));
  }
  k++;
  between_warps();  // else ptxas keeps numbers of the walk in memory
}

// What enters a piece, as if it were the next four chunks, in slots as they are free: the part-th 32 rows of K. By the warp whose next
// chunk that is. Programs beside take it; if they are kept out for long, the first of these warps does.
#define BROUGHT 528  // bytes of a row, padded so that no two that are read at once share banks
INLINE void bring(const Args& a, int part, int c, u32 base, int w, int lane) {
  int s, h;
  const Span x = work_of(a, base + SAID, s, h);
  float* const entering = a.mail.entering + ((u64)s * a.H + h) * (D * D);
  int* const at = taking(a, s, h);
  const int lanes = first_lane(a, x, h);
  const u32 full = base + BARS + w * 16;
  bar_wait(full + 8, (c / SLOTS - 1) & 1);
  for (int left = PATIENT; __shfl_sync(~0u, load_acquire(at), 0) != THERE; left--) {
    if (left || part) continue;
    if (__shfl_sync(~0u, lane == 0 && swap_anywhere(at, WANTED, UNWANTED) == WANTED, 0)) {
#pragma unroll 1
      for (int i = 0; i < 8; i++) take_in<4>(entering, a.mail, lanes, 0, i, lane);
      __syncwarp();
      if (lane < UNITS) give_back(a.mail, lanes + lane);
      if (lane == 0) store_release(at, THERE);
    }
  }
  copies_fence();
  if (lane == 0) bar_expect(full, 32 * D * 4);
  __syncwarp();
  copy_in(base + w * SLOT + lane * BROUGHT, entering + (part * 32 + lane) * D, D * 4, full);
}
INLINE void begin_with_brought(float (&S)[16][4], int c, u32 base, int w, int lane) {  // the c-th is the first of the four
  const u32 row = 2 * (lane & 3) * BROUGHT + (w * 16 + (lane >> 2)) * 4;
#pragma unroll
  for (int part = 0; part < 4; part++, c++) {
    bar_wait(base + BARS + c % SLOTS * 16, c / SLOTS & 1);
    const u32 at = base + c % SLOTS * SLOT + row;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) S[part * 4 + i][e] = lds(at + (i * 8 + (e & 1)) * BROUGHT + (e >> 1) * 32);
  }
}

// -- states ------------------------------------------------------------------------------------------------------------

// A piece's n spans begin with the s0-th. One before its last whose map nobody looks for, though that was waited for, and which is this
// program's to find now; -1: all are there. zeros: which forget; left: how often it is still asked. By eight warps.
INLINE int unsought(const Args& a, int s0, int n, int h, u64& zeros, int& left, u32 said, int w, int lane) {
  if (w == 0) {
    int s = -1;
    u64 zero;
    for (;; left--) {
      int x[2];
#pragma unroll
      for (int i = 0; i < 2; i++) x[i] = lane + 32 * i < n - 1 ? load_acquire(known(a, s0 + lane + 32 * i, h)) : BY_ONE;
      auto which = [&](auto is) { return (u64)__ballot_sync(~0u, is(x[1])) << 32 | __ballot_sync(~0u, is(x[0])); };
      const u64 none = which([](int y) { return !y; });
      zero = which(is_zero);
      if (!none && !which([](int y) { return y == SOUGHT; })) break;
      if (left > 0 || !none) continue;
      const int z = s0 + 63 - __clzll(none);
      if (__any_sync(~0u, lane == 0 && swap_anywhere(known(a, z, h), 0, SOUGHT) == 0)) {
        s = z;
        break;
      }
    }
    if (~zero & ones(n - 1)) copies_fence();  // maps are copied in
    if (lane == 0) {
      sts32(said, s);
      sts64(said + 8, (u32)zero, (u32)(zero >> 32));
    }
  }
  between_warps();
  u32 zero[2];
  lds64(zero, said + 8);
  zeros = ((u64)(u32)uniform(zero[1]) << 32 | (u32)uniform(zero[0])) & ones(n - 1);
  return uniform(lds32(said));
}

// Free the slots of chunks `c` to `stop` (not included), which are not wanted
INLINE void discard(int c, int stop, u32 base, int lane) {
#pragma unroll 1
  for (; c < stop; c++) {
    bar_wait(base + BARS + c % SLOTS * 16, c / SLOTS & 1);
    __syncwarp();
    if (lane == 0) bar_arrive(base + BARS + c % SLOTS * 16 + 8);
  }
}

INLINE int chunks_of(const Span& x) { return uniform((x.end - x.begin + C - 1) / C); }
// By how many chunks the span that ends before token t forgets what enters it, or -1
INLINE int forgets_before(const Args& a, int t, int h, u32 base, int w, int lane) {
  between_warps();  // words are read
  return forgetting(a, t, -1, h, base + BOUNDS, w, lane);
}

// Passes of a program before its own span: what a span adds to what enters it; its transition; what the span before it adds, if that
// forgets what enters it
enum { ADDS, TURNS, BEFORE };

// What span z, the s-th, does to a state. `c` chunks are done.
INLINE void find(const Args& a, const Span& z, int s, int h, int& c, int& k, u32 base, int w, int lane) {
  const Mail& m = a.mail;
  const int before = z.first ? -1 : forgets_before(a, z.begin, h, base, w, lane);
  if (c < SLOTS) discard(c, SLOTS, base, lane);
  c = max(c, SLOTS);
  const int all = chunks_of(z);
  order(base, k, {z.begin, all, c, c + 2 * all, z.end, TURNED});
#pragma unroll 1
  for (int pass = ADDS; pass < (before < 0 ? BEFORE : BEFORE + 1); pass++) {
    asm volatile("" : "+r"(lane));  // places are found anew for each, for which there are no registers
    const int t = pass == BEFORE ? z.begin - before * C : z.begin, n = pass == BEFORE ? before : chunks_of(z);
    float S[16][4];
    if (pass == TURNS) identity(S, w, lane);
    else begin_with(S, 0, w, lane);
    if (pass == BEFORE) order(base, k, {t, before, c, c + before, z.begin, 0});
    walk(S, a, h, t, z.end, z.end, 0, c, c + n, 0, base, w, lane);
    c += n;
    asm volatile("" : "+r"(lane));
    const u64 i = (u64)(s - (pass == BEFORE)) * a.H + h;
    put_state(S, (pass == TURNS ? a.parts : m.adds) + i * (D * D), w, lane);
    if (pass == TURNS) {
      put_squares(S, m.squares + i * 8, w, lane);
      put_map(S, m.images + i * (MAP / 2), base, w, lane);
    }
  }
}

// Whether the map of span s is this program's to find: nobody looks for it yet. By eight warps.
INLINE bool seek(const Args& a, int s, int h, u32 said, int w, int lane) {
  if (w == 0 && lane == 0) sts32(said, swap_anywhere(known(a, s, h), 0, SOUGHT));
  between_warps();
  return !uniform(lds32(said));
}

// Say of span z by how many chunks it forgets what enters it, or that its map is there (-1). By eight warps.
INLINE void tell(const Args& a, int z, int h, int forgets, int w, int lane) {
  if (w == 7 && lane == 0) {  // another one asks meanwhile
    if (forgets < 0) store_release(known(a, z, h), FOUND);
    else say(known(a, z, h), forgets);
    a.mail.zero[z * a.H + h] = max(forgets, 0);  // for launches behind this one
  }
}

// Whether all of a piece's n spans but its last, which begin with the s0-th, forget what enters them, and say so before long. By eight warps.
INLINE bool others_forget(const Args& a, int s0, int n, int h, u32 said, int w, int lane) {
  if (w == 0) {
    bool waits, other;
    for (int left = PATIENT;; left--) {
      waits = other = false;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int x = lane + 32 * i < n - 1 ? load_acquire(known(a, s0 + lane + 32 * i, h)) : BY_ONE;
        waits |= !x;
        other |= x && !is_zero(x);
      }
      waits = __any_sync(~0u, waits);
      other = __any_sync(~0u, other);
      if (other || !waits || !left) break;
    }
    if (lane == 0) sts32(said, !waits && !other);
  }
  between_warps();
  return uniform(lds32(said));
}

// Say of the span before this one, of a piece's first span of its last, by how many chunks it `forgets`, and find its map if it does not;
// the first span's program waits until that is known of all. Which of a piece's spans forget; other programs know of one.
INLINE u64 settle(const Args& a, const Span& x, int s, int h, int forgets, int& c, int& k, u32 base, int w, int lane) {
  const Mail& m = a.mail;
  const int spans = spans_a_row(a), s0 = x.piece * spans;
  u64 zeros = 0;
  int z = x.first ? s0 + spans - 1 : s - 1, left = PATIENT, of = forgets;  // of: by how many chunks span z forgets
  if (forgets < 0 && !x.first && !seek(a, z, h, base + HEARD, w, lane)) return 0;  // the first span's program does
  const u64 mine = forgets < 0 ? 0 : 1ull << (z - s0);
  if (forgets < 0 && x.first && w == 0 && lane == 0) say(known(a, z, h), SOUGHT);  // those beside have nothing to do
#pragma unroll 1
  for (bool own = true; z >= 0; own = false) {
    const bool wanted = !x.first || !own || leaves(m) || m.composes;  // nobody reads a last span's map where nothing leaves
    if (of < 0 && wanted) find(a, span_of(a, z), z, h, c, k, base, w, lane);
    if (of < 0) between_warps();  // all is written
    tell(a, z, h, of, w, lane);
    if (!x.first) break;
    z = unsought(a, s0, spans, h, zeros, left, base + HEARD, w, lane);
    if (z >= 0) of = forgets_before(a, span_of(a, z).end, h, base, w, lane);
  }
  return zeros | mine;
}

// o of a chunk, the c-th of those under way, with factors, from token t on: nobody needs the state behind it.
INLINE void last_out(float (&S)[16][4], const Args& a, int h, int t, int end, int c, u32 base, int w, int lane) {
  const u32 at = base + (u32)c % SLOTS * SLOT, firsts = at + 8 * (lane & 3);
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1, row = lane >> 1, j = w * 2 + (lane & 1);
  const u32 values = at + OFF_V + rb * 256 + swz(rb, w * 2 + cb), pairs = at + OFF_N + rb * 32 + cb * 16;
  float RO[16], U[8], beta[4];
  u32 v[4], n[4], u[4];
  read_state<false>(RO, S, at, 0);
  ldm_trans(v, values);
  ldm(n, pairs);
  of_tokens(beta, firsts + OFF_B);
  wg_wait(RO);
  solve(U, RO, v, n);
#pragma unroll
  for (int i = 0; i < 8; i++) U[i] *= beta[(i >> 1 & 2) + (i & 1)];
#pragma unroll
  for (int i = 0; i < 4; i++) u[i] = pack(U[2 * i], U[2 * i + 1]);
  read_out(v, U, u, RO, pairs + (OFF_P - OFF_N), firsts + OFF_D);
  stm_trans(v, values);
  __syncwarp();
  lds128(n, at + OFF_V + row * 256 + swz(row, j));
  if (t + row < end) stg128((char*)(a.o + ((u64)(t + row) * a.H + h) * D + j * 8), n);
}

// The first chunks of a piece again, with what comes; the program's span and head are read again, so that no register holds them meanwhile.
INLINE void go_again(float (&S)[16][4], const Args& a, int c, u32 base, int w, int lane) {
  asm volatile("" : "+r"(lane));
  int s, h;
  const Span x = work_of(a, base + SAID, s, h);
  const int t = uniform(x.begin), n = uniform(lds32(base + AGAIN + w * 4)), last = c + n - 1;
  begin_with_brought(S, c + n, base, w, lane);
  between_warps();  // else ptxas keeps numbers of the walk in memory
  bar_wait(base + BARS + last % SLOTS * 16, last / SLOTS & 1);
  const bool hard = uniform(lds32(base + HARD + last % SLOTS * 4));
  if (n > 1 || hard) walk(S, a, h, t, t, t + n * C, 0, c, last + hard, 0, base, w, lane);
  if (!hard) last_out(S, a, h, t + (n - 1) * C, t + n * C, last, base, w, lane);
}

// Go over chunks `done` to `stop` (not included) of those under way, from token t and a state on, then over the span's first ones `again`
INLINE void go_over(const float* from, const Args& a, const Span& x, int h, int t, int again, int done, int stop, u32 base, int w,
                    int lane) {
  float S[16][4];
  begin_with(S, from, w, lane);
  walk(S, a, h, t, uniform(x.begin) + again * C, uniform(x.end), 0, done, stop, 0, base, w, lane);
  if (uniform(lds32(base + AGAIN + w * 4))) go_again(S, a, stop, base, w, lane);
}

// y: the span before this one, or of a piece's first span the last
INLINE void consume(const Args& a, const Span& x, const Span& y, int s, int h, u32 base, int w, int lane) {
  const Mail& m = a.mail;
  const bool comes = m.source >= 0;
  const int spans = spans_a_row(a), s0 = x.piece * spans, own = chunks_of(x), lanes = first_lane(a, x, h);
  float* const entering = m.entering + ((u64)s * a.H + h) * (D * D);
  int forgets[3];  // of y's last chunks, of the span's first two, and of these on the way of gradients
  forgetting(forgets, a, {{y.end, y.end - y.begin >= 2 * C, false}, {x.begin + 2 * C, x.first && comes && own >= SLOTS, false},
                          {x.begin, m.composes && x.end - x.begin >= 2 * C, true}}, h, base + BOUNDS, w, lane, [] { between_warps(); });
  const int firsts = lds(base + BOUNDS + 20) < FORGOTTEN ? 1 : 2;  // of these two, by the bound of the first alone
  if (m.composes && w == 6 && lane == 0) m.zero[(a.count + s) * a.H + h] = max(forgets[2], 0);
  launch_before();  // flags are there
  // Where all forgets, what is run lies in one piece, apart from the rest: code is fetched again after other launches.
  if (forgets[0] > 0 && (!x.first || (comes ? forgets[1] > 0 : !m.before))) {
    tell(a, x.first ? s0 + spans - 1 : s - 1, h, forgets[0], w, lane);
    if (!x.first || others_forget(a, s0, spans, h, base + HEARD + 4, w, lane)) {
      const int again = x.first && comes ? firsts : 0, before = x.first ? 0 : forgets[0], done = x.first ? 0 : 2 - before;
      if (lane == 0) sts32(base + AGAIN + w * 4, again);
      if (x.first && w == 0 && lane == 0) say(taking(a, s, h), again ? WANTED : UNWANTED);
      discard(0, done, base, lane);
      const int t = uniform(x.begin) - before * C, stop = done + before + own;
      int k = 0;
      order(base, k, {t, before + own, done, stop + again, x.end, again ? LAST | BRINGS : LAST});
      go_over(0, a, x, h, t, again, done, stop, base, w, lane);
      return;
    }
  }
  int c = 0, k = 0;  // chunks that are done; orders
  const u64 zeros = settle(a, x, s, h, forgets[0], c, k, base, w, lane);
  const bool whole = x.first ? carries(a, zeros) : forgets[0] < 0;  // it begins with what is carried, to here or from here
  int again = 0, before = 0, done = max(c, SLOTS);  // chunks of it that are gone over again; of those before it; that are done by then
  if (!whole) {
    if (x.first && comes && forgets[1] > 0) again = firsts;
    if (!x.first) before = forgets[0];
    done = x.first ? 0 : 2 - before;
  }
  discard(c, done, base, lane);
  if (lane == 0) sts32(base + AGAIN + w * 4, again);
  if (x.first && w == 0 && lane == 0) say(taking(a, s, h), again ? WANTED : UNWANTED);
  if (whole && x.first) {
    const bool sends = forgets[0] < 0 && m.target >= 0, ends = sends || (forgets[0] < 0 && m.keeps);
    if (sends && w == 0) claim(m, lanes, base + LANES, lane);
    carry<true>(a, x, s, h, zeros, sends, ends, false, base, base + WORDS, base + LANES, w, lane);
    between_warps();  // nobody reads maps any more
  }
  const int t = uniform(x.begin) - before * C, stop = done + before + own;
  order(base, k, {t, before + own, done, stop + again, x.end, again ? LAST | BRINGS : LAST});
  const float* from = entering;
  if (whole) {
    while (!x.first && !load_acquire(a.arrived + s * a.H + h)) {}
  } else if (!x.first || again) {
    from = 0;
  } else if (comes) {
    receive(entering, m, lanes, 0, w, lane, [] { between_warps(); });
  } else {
    from = given(a, x.piece, h);
  }
  go_over(from, a, x, h, t, again, done, stop, base, w, lane);
}

// -- programs beside ------------------------------------------------------------------------------------------------------
// The `who`-th of `all` has every `all`-th of the pieces' heads, from its own on: first what leaves them, then what comes, where that is
// wanted. Of eight heads at a time the last chunks are made before it is known what forgets; where one chunk does not, both are made then,
// four heads' at a time. So all slots are used each time.

INLINE int heads_of(const Args& a, int who, int all) { return (a.pieces * a.H - who + all - 1) / all; }
INLINE int first_span(const Args& a, int i) { return i / a.H * spans_a_row(a); }  // of the i-th piece's head
INLINE int last_span(const Args& a, int i) { return first_span(a, i) + spans_a_row(a) - 1; }

// Of eight heads, those that forget by `chunks`
INLINE u32 heads_by(int chunks, u32 asked, int lane) {
  return __ballot_sync(~0u, lane < 8 && (lds32(asked + (lane & 7) * 16) & (MINE - 1)) == chunks);
}
INLINE int nth_of(u32 bits, int n) {  // or -1
  for (; n; n--) bits &= bits - 1;
  return 63 - __clzll(bits & -bits);
}

// How many chunks are gone over of eight heads from the j-th on: none where the last span does not forget, and another program sends; and
// whether lanes are this program's, which were claimed (MINE). By eight warps.
INLINE void ask(const Args& a, int j, int who, int all, u32 asked, int w, int lane) {
  if (w == 0) {
    const int k = j + lane / UNITS, n = heads_of(a, who, all), i = who + min(k, n - 1) * all, s = last_span(a, i);
    int found;
    while (!(found = load_acquire(known(a, s, i % a.H)))) {}
    const bool wanted = is_zero(found) && k < n;
    const bool mine = a.mail.target >= 0 && take_lane(a.mail, i * UNITS + lane % UNITS, wanted, lane);
    sts32(asked + lane * 4, wanted ? found + mine * MINE : 0);
  }
  between_all();
}

// What leaves the pieces; and what enters, where it is kept and nothing comes. By eight warps.
INLINE void send_ends(const Args& a, int who, int all, u32 base, int w, int lane) {
  const Mail& m = a.mail;
  const int n = leaves(m) ? heads_of(a, who, all) : 0;
  if (m.composes && m.source < 0)
    for (int i = who; i < a.pieces * a.H; i += all) enter(a, i / a.H, first_span(a, i), i % a.H, w, lane);
  int c = 0;
#pragma unroll 1
  for (int j = 0; j < n; j += 8) {
    if (j) between_all();
    ask(a, j, who, all, base + ASKED, w, lane);
    const u32 one = heads_by(1, base + ASKED, lane), two = heads_by(2, base + ASKED, lane);
#pragma unroll 1
    for (int k = 0; k < 8 + (__popc(two) + 3 & ~3); k++) {
      const int room = k < 8 ? 1 : 2, head = k < 8 ? one >> k & 1 ? k : -1 : nth_of(two, k - 8);
      c += room;
      if (head < 0) {
        discard(c - room, c, base, lane);
        continue;
      }
      const int i = who + (j + head) * all, end = uniform(span_of(a, last_span(a, i)).end);
      float S[16][4];
      begin_with(S, 0, w, lane);
      walk(S, a, i % a.H, end - room * C, end, end, 0, c - room, c, 0, base, w, lane);
      asm volatile("" : "+r"(lane));
      if (m.keeps) put_state(S, m.leaving + (u64)i * (D * D), w, lane);
      const bool mine = lds32(base + ASKED + head * 16 + (w >> 1) * 4) >= MINE;
      if (m.target >= 0) put_rows(S, base + TURNS_OVER + w * TURN, m, i * UNITS, mine, w, lane);
    }
  }
}

// What comes, by two times eight warps that `sync`, which have every other one (`odd`); EACH: see `take_in`. Lanes are given back late,
// since that waits for all that was written.
template <int EACH, class Sync> INLINE void take_all(const Args& a, int who, int all, int odd, u32 picked, int w, int lane, Sync sync) {
  const Mail& m = a.mail;
  const int n = m.source >= 0 ? heads_of(a, who, all) : 0;
#pragma unroll 1
  for (int j = 0; j < n; j += 8) {
    if (w == 0) {
      const bool own = lane < 8 && (lane & 1) == odd && j + lane < n;
      const int i = who + (own ? j + lane : 0) * all;
      int* const at = taking(a, first_span(a, i), i % a.H);
      while (own && !load_acquire(at)) {}
      const u32 mine = __ballot_sync(~0u, own && swap_anywhere(at, WANTED, TAKEN) == WANTED);
      if (lane == 0) sts32(picked, mine);
    }
    sync();
    const u32 mine = uniform(lds32(picked));
#pragma unroll 1
    for (int k = odd; k < 8; k += 2) {
      if (!(mine >> k & 1)) continue;
      const int i = who + (j + k) * all, s = first_span(a, i), h = i % a.H;
      take_in<EACH>(m.entering + ((u64)s * a.H + h) * (D * D), m, i * UNITS, 0, w, lane);
      sync();
      if (w == 1 && lane == 0) store_release(taking(a, s, h), THERE);
    }
    if (w == 0 && mine >> lane / UNITS & 1) give_back(m, (who + (j + lane / UNITS) * all) * UNITS + lane % UNITS);
    sync();  // what stands there is read
  }
}

// -- who makes chunks, by eight warps, a chunk each ------------------------------------------------------------------------
// Of a span and what is ordered (who < 0), or the last ones of pieces' heads, as `send_ends` takes them: in one loop, so that there is
// one place where chunks are made: programs of both kinds share the instruction cache.
INLINE void make_chunks(const Args& a, int who, u32 base, int w, int lane) {
  const u32 full = base + BARS + w * 16;
  const int heads = who < 0 ? 0 : leaves(a.mail) ? heads_of(a, who, beside(a)) : 0;
  int t = 0, end = 0, h = 0, c = w;
  int stop = 0, k = -1;                     // of a span: what is ordered ends there; the k-th order
  int eight = 0, round = 0;                 // of heads: the first of eight, and how often chunks of these were made
  u32 two = 0;                              // which of them forget by two chunks
  bool made = true, values = true;
  auto read = [&](int i) { return uniform(lds32(order_at(base, k) + i * 4)); };
  auto aim = [&](int n, int back) {  // at the n-th of eight heads, so many chunks before its end
    made = n >= 0;
    if (!made) return;
    const int i = who + (eight + n) * beside(a);
    end = uniform(span_of(a, last_span(a, i)).end), t = max(end - back * C, 0), h = i % a.H;
  };
  if (who < 0) {
    int s;
    const Span x = work_of(a, base + SAID, s, h);
    t = x.begin + (w - (x.first ? 0 : 2)) * C, end = x.end;
    in_turn(w);
  } else {
    if (!heads) return;
    aim(w < heads ? w : -1, 1);
  }
#pragma unroll 1
  for (;;) {
    if (made) make_chunk(a, t, end, h, values, base, w, lane);
    else if (lane == 0) bar_arrive(full);
    c += SLOTS;
    if (who < 0) {
      while (c >= stop) {
        if (stop && read(5) & LAST) {
          if (read(5) & BRINGS && c < stop + 4) bring(a, c - stop, c, base, w, lane);
          return;
        }
        __syncwarp();  // all lanes have read it
        if (stop && lane == 0) bar_arrive(order_read(base, k));
        k++;
        bar_wait(order_there(base, k), k / 2 & 1);
        stop = read(3);
      }
      const int i = c - read(2), n = read(1), pass = i / n;
      t = read(0) + (i - pass * n) * C, end = read(4);
      values = !pass || !(read(5) & TURNED);
    } else {
      if (!round) {
        between_all();  // it is known which chunks count
        two = heads_by(2, base + ASKED, lane);
      }
      if (4 * round++ < __popc(two)) {
        aim(nth_of(two, 4 * (round - 1) + (w >> 1)), 2 - (w & 1));
      } else {
        eight += 8, round = 0;
        if (eight >= heads) return;
        between_all();  // what was asked is read
        aim(eight + w < heads ? w : -1, 1);
      }
    }
    bar_wait(full + 8, (c / SLOTS - 1) & 1);
  }
}
INLINE void produce(const Args& a, int who, u32 base, int w, int lane) {
  make_chunks(a, who, base, w, lane);
  if (who >= 0) {
    launch_before();  // flags are there
    take_all<4>(a, who, beside(a), 0, base + PICKED + 4, w, lane, [] { between_others(); });
  }
}
INLINE void consume_beside(const Args& a, int who, u32 base, int w, int lane) {
  launch_before();
  send_ends(a, who, beside(a), base, w, lane);
  take_all<8>(a, who, beside(a), 1, base + PICKED, w, lane, [] { between_warps(); });
}
