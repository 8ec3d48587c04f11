// Where KDA's spans that wait get what enters them: the program of a piece's first span on this way takes what comes from another rank, carries
// it from map to map, as far as it goes, hands each span that waits what enters it, and sends what leaves. Spans that wait make chunks
// meanwhile.
//
// KDA's gradients have two launches before: one makes chunks' states, and takes what no map passes on, by those of its warps that make
// factors, when they have made all; the other one, beside it, finds maps, and sends what waits for nothing.
#pragma once
#include "mail.cuh"

// What enters a piece on the way of gradients, if the span that it enters passes none of that on; x, the s-th, is its first by tokens.
// By eight warps that `sync`.
template <class Args, class Sync> INLINE void take_back(const Args& a, const Span& x, int s, int h, int w, int lane, Sync sync) {
  const Mail& m = a.mail;
  const u64 at = (u64)(s + spans_a_row(a) - 1) * a.H + h;
  if (m.source >= 0 && uniform(m.zero[at])) receive(m.entering + at * (D * D), m, first_lane(a, x, h), 0, w, lane, sync);
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
  HeldMaps<FORWARD, Args> maps = {a, s, h, at, bars, w, lane, 0};
  float* const leaving = m.leaving + ((u64)x.piece * a.H + h) * (D * D);
  float* const entering = m.entering + maps.state(0);
  // Through the maps from `from` to `to` (not included), held from `from` on; `then` sees what enters each behind them
  auto through = [&](float (&S)[16][4], int from, int to, bool adds, auto then) {
    maps.over(from, to, [&](int p, u32 map) {
      pass_on<FORWARD>(S, adds ? maps.adds(p) : 0, map, maps.stage(), w, lane);
      then(p + 1);
    });
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
      maps.hold_first(1, n);
      begin_with(S, maps.adds(0), w, lane);
      through(S, 1, n, true, [&](int) { between_warps(); });
      put_state(S, leaving, w, lane);
      maps.hold_first(0, n);
      identity(S, w, lane);
      through(S, 0, n, false, [&](int) { between_warps(); });
      keep_map(S, at, w, lane);
    } else {
      maps.hold_first(from, to);
    }
    if (begins) {
      if (m.source < 0)
        enter(a, x.piece, s, h, w, lane);
      else if (!there)
        receive(entering, m, lanes, composed ? maps.stage() : 0, w, lane, [] { between_warps(); });
      there = true;
      between_warps();  // what enters is there
    }
    if (composed) {
      float S[16][4];
      pass_on<true, true>(S, leaving, at, maps.stage(), w, lane);
      if (m.keeps) put_state(S, leaving, w, lane);
      put_from(S, at + MAP, m, lanes, said, w, lane);
      ends = false;
      continue;  // and what enters the spans
    }
    if (from < to || leaves || (begins && nothing && end)) {
      float S[16][4];
      auto hand_on = [&](int p) {  // what enters the span at position p
        const bool wanted = p < n && !small;
        if (wanted) put_state(S, m.entering + maps.state(p), w, lane);
        between_warps();
        if (wanted && w == 0 && lane == 0) store_release(a.arrived + (FORWARD ? s + p : s - p) * a.H + h, 1);
      };
      begin_with(S, begins && !nothing ? entering : maps.adds(from - 1), w, lane);
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
