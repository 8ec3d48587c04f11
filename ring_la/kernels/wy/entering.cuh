// What enters the delta rules' spans where states come from another rank, and what leaves a piece: each found by the program that asks for
// it, of the maps of the spans before, while what comes is on its way. So that passes one product on its way to any span, and to the next
// rank.
//
// The program of a piece's first span on this way takes what comes, tells the others where it lies, and sends what leaves. So none waits
// for a program that begins after it.
#pragma once
#include "mail.cuh"

// A piece's first span on this way, of which span s is one, and how many are before that one
template <bool FORWARD, class Args> INLINE int first_on_way(const Args& a, int s) {
  const int n = spans_a_row(a);
  return s / n * n + (FORWARD ? 0 : n - 1);
}
template <bool FORWARD, class Args> INLINE int position(const Args& a, int s) {
  return FORWARD ? s - first_on_way<FORWARD>(a, s) : first_on_way<FORWARD>(a, s) - s;
}
// Whether span s, which waits, finds what enters it of maps: not if the span before it forgets. `zeros`: see `zeros_of`.
template <bool FORWARD, class Args> INLINE bool behind_maps(const Args& a, int s, u64 zeros) {
  return !(zeros >> position<FORWARD>(a, s) - 1 & 1);
}

// S <- what enters span s: zero, unless it `waits` or is its piece's first. That one's program `sends` what leaves, if that goes from here,
// by lanes that were claimed, and finds it at all if it `ends` here. By eight warps; shared memory from `at` on, but for spans that forget
// and what comes to them. bars: two barriers.
template <bool FORWARD, class Args>
INLINE void enter_span(float (&S)[16][4], const Args& a, const Span& x, int s, int h, bool waits, u64 zeros, bool sends, bool ends, u32 at,
                       u32 bars, u32 said, int w, int lane) {
  const Mail& m = a.mail;
  const int own = position<FORWARD>(a, s), lanes = first_lane(a, x, h);
  const bool first = own == 0, comes = m.source >= 0;
  HeldMaps<FORWARD, Args> maps = {a, first_on_way<FORWARD>(a, s), h, at, bars, w, lane, 0};
  // What comes, as these warps hold it: where its lanes were, the program that takes it reads it, and leaves it for the others
  float4* const came = held(m.entering, (u64)maps.s * a.H + h, w, lane);
  int* const flag = a.arrived + maps.s * a.H + h;
  auto arrive = [&] {
    if (first) {
      take_in<8, false>(0, m, lanes, maps.stage(), w, lane);
      between_warps();
    } else {
      if (w == 0 && lane == 0)
        while (!load_acquire(flag)) {}
      between_warps();
    }
  };
  auto tile = [&](int nt) {
    if (!first) return __ldcg(came + nt * 256);
    const float4 y = staged_tile(staged(maps.stage(), w, lane), nt);
    came[nt * 256] = y;
    return y;
  };
  auto tell = [&] {
    if (!first) return;
    between_warps();
    if (w == 0 && lane == 0) store_release(flag, 1);
  };
  auto take = [&] {
    arrive();
#pragma unroll
    for (int nt = 0; nt < 16; nt++) {
      const float4 y = tile(nt);
      S[nt][0] = y.x; S[nt][1] = y.y; S[nt][2] = y.z; S[nt][3] = y.w;
    }
    tell();
  };
  auto through = [&](int from, int to) {  // maps that are held from `from` on
    maps.over(from, to, [&](int p, u32 map) {
      pass_on<FORWARD>(S, maps.adds(p), map, maps.stage(), w, lane);
      between_warps();
    });
  };
  bool there = false;
  if (first ? ends : waits) {
    const int p = first ? spans_a_row(a) : own, z = 63 - __clzll(zeros & ones(p));
    bool depends = z < 0 && (comes || m.before);  // whether anything of what comes is in it
    if (first && depends && comes) depends = uniform(left_of<FORWARD>(a, maps.s, p, h, lane) >= SMALL);
    there = depends && comes;
    if (there && m.composes) {  // first what the spans before leave of nothing, and their transitions' product on this way
      float4* const kept = first ? held(m.leaving, (u64)x.piece * a.H + h, w, lane) : held(m.entering, (u64)s * a.H + h, w, lane);
      maps.hold_first(1, p);
      begin_with(S, maps.adds(0), w, lane);
      through(1, p);
      store(S, kept);
      maps.hold_first(0, p);
      maps.over(0, p, [&](int q, u32 map) {
        if (q) pass_on<FORWARD>(S, 0, map, maps.stage(), w, lane);
        else read_map<FORWARD>(S, map, w, lane), proxy_fence();
        between_warps();
      });
      keep_map(S, at, w, lane);
      load(S, kept);
      arrive();
      add_product<true>(S, at, tile);
      tell();
    } else {
      const int from = depends ? 0 : max(z, 0) + 1;
      maps.hold_first(from, p);
      if (there) take();
      else begin_with(S, depends ? given(a, x.piece, h) : maps.adds(from - 1), w, lane);
      through(from, p);
    }
    if (!first) return;
    if (sends) put_from(S, at + MAP, m, lanes, said, w, lane);
    if (m.keeps) put_state(S, m.leaving + ((u64)x.piece * a.H + h) * (D * D), w, lane);
  }
  if (!first || !comes) {
    begin_with(S, first ? given(a, x.piece, h) : 0, w, lane);
    return;
  }
  if (there) {
    load(S, came);
  } else if (zeros & 1) {  // nobody else asks for it
    float* const to = m.entering + maps.state(0);
    take_in<8>(to, m, lanes, 0, w, lane);
    between_warps();
    begin_with(S, to, w, lane);
  } else {
    take();
  }
  if (w == 0 && lane < UNITS) give_back(m, lanes + lane);
}
