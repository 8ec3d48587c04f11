// What the fused kernels of the rule DPLR share. Chunks of 32 tokens, K = V = 128; gates in bf16.
//
// Every product is of fp16. Every tile is multiplied by a power of two that its largest element decides, and so are the state and what
// is found on the way (Y, Z) by each warp for itself, or by all where their rows meet: nothing overflows, and no bound of a state is needed.
#pragma once
#define C 32  // tokens a chunk
#define D 128 // channels of a head
#define GATE_BF16 1
#define OUTER a.outer
#include "half.cuh"

struct Args {
  const u16 *q, *k, *v;  // [tokens, HK, 128], v [tokens, H, 128], bf16
  const u16 *a, *b, *g;  // [tokens, H, 128], bf16
  u16* o;                // [tokens, H, 128], or null: nobody wants it
  const float* S0;       // [pieces, H, K, V] or null: zero
  float* S1;             // [pieces, H, K, V] or null: nobody wants it
  const int* table;      // [count, 6], see spans/runs; null: rows of T tokens, cut evenly
  const int* cu;         // [pieces + 1] beside a table
  int* flags;            // [2 * count * H + 3 + count * heads], zero at first: see `decided`, `done` and `ticket`
  float* states;         // [count, H, 128 * 128]
  float* parts;          // [count, H, 2, 128 * 128], see `combine`; null: spans do not
  u16* kept_S;           // [chunks, heads, 128 * 128], S e^M before each chunk as `state_place` lays it out
  u16* kept_Y;           // [chunks, heads, 32 * 128], Y of its tokens, see `tile_place`
  u16* kept_P;           // [chunks, heads, 4 * 32 * 32 + 8], P of k, P of b, L, M, see `pair_place`; behind them `Kept`
  int T, H, HK, count, length, pieces;
  int first_head, heads; // this launch's
  int pick;              // whether spans that wait go first, see `choose`
  int together;          // how many spans that wait combine
  int outer;             // tokens of the span that goes over its own once, see `span_of`
  float scale;
};

INLINE u64 kept_at(const Args& a, int chunk, int h) { return (u64)chunk * a.heads + h - a.first_head; }

// Where 8 channels of a token of two lie that are one operand of wgmma: the first's rows are 0 to 31, the other's 32 to 63.
#define BOTH 8192   // from 64 channels to the others
#define SECOND 4096 // from the first's rows to the other's
INLINE u32 both_place(int row, int chunk) { return (u32)((chunk >> 3) * BOTH + row * 128) + swz(row, chunk & 7); }

#define PAIRS (8 * C * C + 16)  // bytes that a chunk keeps of its pairs
#define FITS -29.5f             // log2 of the least that a chunk may leave of a channel

// By log2, what the tiles of a, q (with scale), k and b of a chunk are multiplied by: their elements are below 2 then, and times
// e^(G - M) or e^(M - G), M half of what the gates add up to, below 2^16
struct Powers { int a, q, k, b; };
// The same of the state before a chunk, Y and the inverse, which the backward is told
struct Kept { int s, y, m; };

// -- two warps make a chunk, 16 of its tokens each: `half` ------------------------------------------------------------

// By how much those tokens of N tiles may be multiplied, by log2, so that their elements are below 2; said at `said`, 64 bytes
template <int N> struct Rooms { u32 from[N]; int apart[N]; };
template <int N> INLINE void say_largest(const Rooms<N>& tiles, u32 said, int half, int lane) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    const u32 most = largest_in<8>(tiles.from[i] + half * 2048 * (tiles.apart[i] == 2048 ? 2 : 1), lane, tiles.apart[i]);
    if (lane == 0) sts32(said + half * 32 + i * 4, most);
  }
}
// Once both have said: the largest of tile i, as bits
INLINE u32 largest_said(u32 said, int i) { return max(lds32(said + i * 4), lds32(said + 32 + i * 4)); }
// and by how much it may be multiplied; 0 where all elements are
INLINE int room(u32 said, int i, int more = 0) {
  const u32 most = largest_said(said, i);
  return most ? -size_of(most, more, 0).e : 0;
}
// log2 of a bound of what a chunk adds to a state by products of tiles i and j, held times 2^by, whose elements are below 2 and 2^4
INLINE int added(u32 said, int i, int j, int by) { return largest_said(said, i) && largest_said(said, j) ? 10 - by : -100; }
INLINE Powers powers(float scale, u32 said) { return {room(said, 0), room(said, 1, exponent(scale) + 1), room(said, 2), room(said, 3)}; }

// log2 of what 32 tokens leave of this lane's four channels (GL), and those before the warp's own (G), and e^M, NaN where factors do
// not fit; returns the most by which M makes anything larger, by log2.
INLINE int half_decay(float (&GL)[4], float (&G)[4], float (&E)[4], u32 at, int half, int lane) {
#pragma unroll
  for (int j = 0; j < 4; j++) G[j] = GL[j] = 0.f;
#pragma unroll 8
  for (int i = 0; i < C; i++) {
    float g[4];
    gates(g, at + i * 256, lane);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (i < half * (C / 2)) G[j] = fmaf(g[j], LOG2E, G[j]);
      GL[j] = fmaf(g[j], LOG2E, GL[j]);
    }
  }
  const float worst = fminf(fminf(GL[0], GL[1]), fminf(GL[2], GL[3]));
  const bool fits = __all_sync(~0u, worst >= FITS);
  float most = fmaxf(fmaxf(GL[0], GL[1]), fmaxf(GL[2], GL[3]));
#pragma unroll
  for (int j = 0; j < 4; j++) E[j] = fits ? ex2(0.5f * GL[j]) : __int_as_float(0x7fffffff);
#pragma unroll
  for (int m = 16; m; m >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, m));
  return (int)(0.5f * fmaxf(most, 0.f) + 0.999f);
}

// a e^(G' - M) and q e^(G - M) over a and q, k e^(M - G) and b e^(M - G) over k and b, times `by`. STEPS: that of -G by log2 left in
// 16 bits over g; 0: not. G: of the tokens before the warp's own
template <int STEPS>
INLINE void make_factors(const float (&GL)[4], float (&G)[4], const Powers& by, float scale, u32 a_at, u32 k_at, u32 g_at, int first,
                         int lane) {
  const int chunk = lane >> 1;
  const u32 half = (lane & 1) * 8;
  const float fa = power(by.a), fq = power(by.q) * scale, fk = power(by.k), fb = power(by.b);
  float over[4];  // e^(G - M) of the token before
#pragma unroll
  for (int j = 0; j < 4; j++) over[j] = ex2(G[j] - 0.5f * GL[j]);
#pragma unroll 1
  for (int i0 = first; i0 < first + C / 2; i0 += GROUP) {
    u32 g[GROUP][2], x[GROUP][4][2];  // a, q, k, b
#pragma unroll
    for (int l = 0; l < GROUP; l++) {  // loads before stores, which would wait for each
      const u32 place = both_place(i0 + l, chunk) + half;
      lds64(g[l], g_at + (i0 + l) * 256 + lane * 8);
      lds64(x[l][0], a_at + place);
      lds64(x[l][1], a_at + place + SECOND);
      lds64(x[l][2], k_at + place);
      lds64(x[l][3], k_at + place + SECOND);
    }
#pragma unroll
    for (int l = 0; l < GROUP; l++) {
      const u32 place = both_place(i0 + l, chunk) + half;
      float under[4];
      u32 left[4];
      auto put = [&](const u32(&z)[2], const float(&y)[4], float f, u32 to) {
        sts64(to, pack<true>(lo(z[0]) * (y[0] * f), hi(z[0]) * (y[1] * f)), pack<true>(lo(z[1]) * (y[2] * f), hi(z[1]) * (y[3] * f)));
      };
      put(x[l][0], over, fa, a_at + place);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        G[j] = fmaf(j & 1 ? hi(g[l][j >> 1]) : lo(g[l][j >> 1]), LOG2E, G[j]);
        over[j] = ex2(G[j] - 0.5f * GL[j]);
        under[j] = ex2(0.5f * GL[j] - G[j]);
        if (STEPS) left[j] = (u32)fminf(fmaf(-G[j], (float)STEPS, 0.5f), 65535.f);
      }
      put(x[l][1], over, fq, a_at + place + SECOND);
      put(x[l][2], under, fk, k_at + place);
      put(x[l][3], under, fb, k_at + place + SECOND);
      if (STEPS) sts64(g_at + (i0 + l) * 256 + lane * 8, left[0] | left[1] << 16, left[2] | left[3] << 16);
    }
  }
}

// -- by what a warp's rows of a state are multiplied ------------------------------------------------------------------

// e such that none is above 2^(e + 1), of a warp
template <int N> INLINE int size_in_warp(const float (&x)[N]) {
  float m = 0.f;
#pragma unroll
  for (int i = 0; i < N; i++) m = fmaxf(m, fabsf(x[i]));
  return exponent(__uint_as_float(warp_max(__float_as_uint(m))));
}
INLINE int size_in_warp(const float (&S)[16][4]) {
  float m = 0.f;
#pragma unroll
  for (int nt = 0; nt < 16; nt++)
#pragma unroll
    for (int j = 0; j < 4; j++) m = fmaxf(m, fabsf(S[nt][j]));
  return exponent(__uint_as_float(warp_max(__float_as_uint(m))));
}

// The largest of eight warps' numbers, if `all` are to agree; else a warp's own. `at`: 32 bytes, which are written again behind
// another call alone
INLINE int agree(int mine, bool all, u32 at, int w, int lane) {
  if (!all) return mine;
  if (lane == 0) sts32(at + w * 4, (u32)mine);
  between_warps();
  u32 x[8];
  lds128(x, at);
  lds128(x + 4, at + 16);
#pragma unroll
  for (int i = 0; i < 8; i++) mine = max(mine, (int)x[i]);
  return mine;
}

// S, held times 2^held, becomes S e^M times the power that is returned: below 2^14, and what 2^add bounds below 2^13. E: e^M
INLINE int begin_chunk(float (&S)[16][4], int held, int grow, int add, bool all, u32 E, u32 at, int w, int lane) {
  const int most = agree(size_in_warp(S) - held + grow, all, at, w, lane);
  const int to = 13 - max(max(most, add), -100);
  decay_by(S, E, power(to - held), lane);
  return to;
}
// What a part of S of factors times x (below 2^4, held times 2^y) is multiplied by, and first S where that were too much
INLINE int fitting(float (&S)[16][4], int& held, int y) {
  const int over = uniform(max(held - y - 11, 0));
  if (over) {
    multiply(S, power(-over));
    held -= over;
  }
  return held - y;
}

// -- spans that start early -------------------------------------------------------------------------------------------
// Nothing bounds what a token leaves of a state. So a span first finds what the chunks before it (backward: behind it) leave of the
// identity. If that is nothing it goes over them once more from zero, and over its own; else it waits for the span before it.

#define FORGOTTEN -37  // log2 of what is left of each channel in each that counts as forgotten: of 128 together 2^-30

// How many chunks those are of the span's n, if as many are `there`; 0: the span begins (or, back, ends) a piece, or waits
INLINE int early_by(int n, int there) {
  const int j = min(max(n / 8, 4), 8);
  return there >= j && n > j ? j : 0;
}
// Whether S, what they leave of the identity, is nothing; tells makers, and spans that would hand a state on. By eight warps.
INLINE bool forgotten(const float (&S)[16][4], const Args& a, int s, int h, u32 agreed, u32 said, u32 decided_bar, int w, int lane) {
  const bool found = uniform(agree(size_in_warp(S), true, agreed, w, lane) < FORGOTTEN);
  between_warps();  // all have read it
  if (w == 0 && lane == 0) {
    store_release(decided(a, s, h), found ? 1 : 2);
    sts32(said, found);
    bar_arrive(decided_bar);
  }
  return found;
}
INLINE int waiting(bool outer) { return outer ? 0 : -1; }
INLINE void zero(float (&S)[16][4]) {
#pragma unroll
  for (int nt = 0; nt < 16; nt++)
#pragma unroll
    for (int j = 0; j < 4; j++) S[nt][j] = 0.f;
}

// What the i-th chunk of makers is, of a span of n that begins `early` and has so many `passes` if it waits: its number from
// the span's begin on (back: from its end), whether it has values (dO), whether it is the span's own
struct Turn { int m; bool live, values, own; int pass; };
INLINE Turn turn(int i, int early, bool found, int n, int passes) {
  if (i < early) return {i - early, true, false, false, 0};
  i -= early;
  if (found) return {i - early, i < early + n, true, i >= early, 0};
  const int pass = i / n;
  return {i - pass * n, pass < passes, pass != 1, pass == passes - 1, pass};
}
