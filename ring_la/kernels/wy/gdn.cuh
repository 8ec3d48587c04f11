// What the gated delta rule's fused kernels share: arguments, and how far back a span begins. Chunks of 32 tokens,
// K = V = 128. A file that includes this says before it how many WARPS a program has.
#pragma once
#define C 32  // tokens a chunk
#define D 128 // channels of a head
#define OUTER a.outer
#include "carried.cuh"
#include "maps.cuh"
#if MAILED
#include "entering.cuh"
#endif

#define FORGOTTEN -30.f // log2 of what is left of a state that counts as forgotten
#define BACK 16         // chunks that a span may begin early

struct Args {
  const u16 *q, *k, *v;  // [tokens, HK, 128], v [tokens, H, 128], bf16
  const void *g, *beta;  // [tokens, H], fp32 or bf16; g null: no decay
  u16* o;                // [tokens, H, 128]
  const float* S0;       // [pieces, H, K, V] or null: zero
  float* S1;             // [pieces, H, K, V] or null: nobody wants it
  const int* table;      // [count, 6], see spans/runs; null: rows of T tokens, cut evenly
  const int* cu;         // [pieces + 1] beside a table
  int* flags;            // [2 * count * H + 3 + count * heads], zero at first: see `decided`, `done` and `ticket`; null if `given`.
                         // MAPS: whether spans' transitions are 0 and not written, [count, H]
  float* states;         // [count, H, 128 * 128]; MAPS: what each span's tokens leave of no state, [count, H, K, V]
  float* parts;          // [count, H, 2, 128 * 128], see `combine`; null: spans do not. MAPS: spans' transitions
  float* squares;        // MAPS, forward: of these, [count, H, 8]
  u16* half;             // MAPS: images of transitions of spans' first halves, where spans' own are not 0; null: nobody wants them
  float* extra;          // MAPS: what a half's tokens leave of no state, [count, H, 128 * 128]
  int* told;             // MAPS: the list of parts, see `Job`; zero at first
  u16* image;            // MAPS, forward: images of transitions, [count, H, 2 * 128 * 128]; null: nobody wants them
  int* arrived;          // MAPS, MAILED: of a piece's first span on this way whether what comes lies in `entering`, [count, H], zero at
                         // first; how many chunks at spans' ends forget what enters them on this way, [count, H]. Not null: MAILED
                         // finds what leaves where there are some
  u16* kept_S;           // [chunks, heads, 128 * 128], the state before each chunk as `state_place` lays it out
  u16* kept_W;           // [chunks, heads, 32 * 128], W of its tokens, see `tile_place`
  u16* kept_pairs;       // [chunks, heads, 2 * 32 * 32], N and P, see `pair_place`
  int T, H, HK, count, length, pieces;
  int first_head, heads; // this launch's
  int given;             // whether `states` holds what enters every span, as S0 holds it, so that none waits
  int pick;              // whether spans that wait go first, see `choose`; if not, programs take their own numbers. MAPS: whether all
                         // programs run at once
  int together;          // how many spans that wait combine; MAPS: 2: parts are of halves of spans
  int outer;             // tokens of the span that goes over its own once, see `span_of`
  float scale;
#if MAILED
  Mail mail;
#endif
};

#if MAILED
// How many chunks at a piece's end on this way forget what came before them, if what leaves is wanted; s is the first span.
template <bool FORWARD> INLINE int chunks_at_end(const Args& a, int s, int h) {
  if (a.mail.target < 0 && !a.mail.keeps) return 0;
  const int end = s + (FORWARD ? spans_a_row(a) - 1 : 1 - spans_a_row(a));
  return uniform(a.arrived[(a.count + end) * a.H + h]);
}
// Whether maps are held, or states sent, where chunks of span s come later; so many chunks at the piece's end forget.
template <bool FORWARD> INLINE bool takes_room(const Args& a, int s, bool first, bool waits, u64 zeros, int chunks) {
  return first ? carries(a, zeros) || (!chunks && a.mail.target >= 0) : waits && behind_maps<FORWARD>(a, s, zeros);
}
#endif

#if MAPS
// The parts of a span's maps, each found by a program: PARTS of them. A program begins with a span of its own, decides whether that
// forgets what enters it, and if not finds the first part; the others go on a list, from which all programs take. Numbers of parts are
// the span's, by heads, times PARTS, and the part's, and 1.
struct Job {
  Span x;
  int s, h, part;
  int t0, n;    // chunks
  bool halved;  // whether parts are of halves
};
INLINE Job job_of(const Args& a, int number) {
  Job j;
  const int n = (number - 1) / PARTS;
  j.s = n / a.heads; j.h = a.first_head + n % a.heads; j.part = (number - 1) % PARTS;
  j.x = span_of(a, j.s);
  j.t0 = uniform(j.x.begin); j.n = uniform((j.x.end - j.x.begin + C - 1) / C);
  j.halved = a.together == 2;
  return j;
}
// Of the list: how many parts were put on it, how many taken, how many programs have decided; then, of a span, the parts that are found.
INLINE int* found(const Args& a, const Job& j, int part) { return a.told + 3 + (part * a.count + j.s) * a.H + j.h; }
INLINE int* listed(const Args& a) { return a.told + 3 + (PARTS - 1) * a.count * a.H; }
// Say what is decided of a program's own span, and list its other parts, if there are. By one thread.
INLINE void decide(const Args& a, const Job& j, const Reach& r, int parts) {
  launch_before();
  if (a.arrived) {
    a.arrived[j.s * a.H + j.h] = 0;
    a.arrived[(a.count + j.s) * a.H + j.h] = r.forgets;
  }
  for (int i = 1; i < parts; i++) {
    int* at;
    do at = listed(a) + atomicAdd(a.told, 1);
    while (swap_anywhere(at, 0, blockIdx.x * PARTS + i + 1));  // unless nobody waits at this place any more
  }
  add_release(a.told + 2, 1);
}
// The next part on the list, or 0: there is none. Where all programs run at once, one waits for others to decide, but not for long, since
// launches of other streams may keep them out; who lists more then takes it itself. By one thread.
INLINE int next_part(const Args& a) {
  launch_before();
  int* const at = listed(a) + atomicAdd(a.told + 1, 1);
#pragma unroll 1
  for (int left = a.pick ? 64 : 0;; left--) {  // each takes a microsecond or more
    const bool all = load_acquire(a.told + 2) == a.count * a.heads;
    const int number = load_acquire(at);
    if (number || all) return number;
    if (!left) return swap_anywhere(at, 0, -1);
  }
}
// Leave what a part has found to the last one. By eight warps.
INLINE void leave_part(const float (&S)[16][4], float* to, const Args& a, const Job& j, int w, int lane) {
  store(S, held(to, (u64)j.s * a.H + j.h, w, lane));
  between_warps();
  if (w == 0 && lane == 0) store_release(found(a, j, j.part), 1);
}
INLINE void await_part(const Args& a, const Job& j, int part) {
  while (!load_acquire(found(a, j, part))) {}
}
#endif

INLINE u64 kept_at(const Args& a, int chunk, int h) { return (u64)chunk * a.heads + h - a.first_head; }

INLINE float gate_at(const Args& a, u64 i) {
#if !GATED
  return 0.f;
#elif GATE_BF16
  return __uint_as_float((u32)((const u16*)a.g)[i] << 16);
#else
  return ((const float*)a.g)[i];
#endif
}

// How many chunks before token t (`step` -1) or from it on (1) forget what enters them, or -1; of `there` tokens that are
// asked for. A token multiplies the norm of a state by e^g and by at most max(1, |1 - beta |k|^2|). Gates alone say how many that
// may be; keys are read of those, and of more where they make up for it. By all warps, all of which then know.
INLINE int forgetting(const Args& a, int t, int step, int there, int h, u32 said, int lane) {
  const int hk = h / (a.H / a.HK), w = uniform(threadIdx.x >> 5);
  auto first = [&](int i) { return step < 0 ? t - (i + 1) * C : t + i * C; };  // token of chunk i
  for (int i = w; i < BACK; i += WARPS) {
    float x = (i + 1) * C <= there ? gate_at(a, (u64)(first(i) + lane) * a.H + h) * LOG2E : 0.f;
#pragma unroll
    for (int m = 16; m; m >>= 1) x += __shfl_xor_sync(~0u, x, m);
    if (lane == 0) sts32(said + i * 4, __float_as_uint(x));
  }
  __syncthreads();
  float more = 0.f;  // log2 of what keys make of it
  for (int read = 0;;) {
    int n = -1;
    float sum = more;
    for (int i = 0; i < BACK; i++) {
      sum += lds(said + i * 4);
      if (n < 0 && sum < FORGOTTEN) n = i + 1;
    }
    n = uniform(n);
    if (n <= read) return n;
    float mine = 0.f;
#pragma unroll 4
    for (int i = read * (C / 2) + w; i < n * (C / 2); i += WARPS) {  // two tokens at a time
      const u64 token = first(i / (C / 2)) + 2 * (i % (C / 2)) + (lane >> 4);
      const uint4 y = ((const uint4*)a.k)[(token * a.HK + hk) * 16 + (lane & 15)];
      const u32 x[4] = {y.x, y.y, y.z, y.w};
      float norm = 0.f;
#pragma unroll
      for (int j = 0; j < 4; j++) norm = fmaf(lo(x[j]), lo(x[j]), fmaf(hi(x[j]), hi(x[j]), norm));
#pragma unroll
      for (int m = 8; m; m >>= 1) norm += __shfl_xor_sync(~0u, norm, m);
      mine += __log2f(fmaxf(1.f, fabsf(1.f - beta_at(a, token * a.H + h) * norm)));
    }
    mine += __shfl_xor_sync(~0u, mine, 16);
    if (lane == 0) sts32(said + (BACK + w) * 4, __float_as_uint(mine));
    __syncthreads();
    for (int i = 0; i < WARPS; i++) more += lds(said + (BACK + i) * 4);
    __syncthreads();
    read = n;
  }
}
// The same of token u, which has `here` tokens, if asked (`both`) and t's forget.
INLINE Forgets forgetting(const Args& a, int t, int u, int there, int here, int step, int h, bool both, u32 said, int lane) {
  const int x = forgetting(a, t, step, there, h, said, lane);
  __syncthreads();  // all know it
  const int y = both && x >= 0 ? forgetting(a, u, step, here, h, said, lane) : -1;
  return {x, y};
}
