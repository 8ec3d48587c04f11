// Products in fp16, whose operands are off by an eighth of what bf16's are. Every tile is multiplied by a power of two that its
// largest element decides, so that nothing overflows and what is of use keeps its digits; results are multiplied back in
// fp32, where that is exact. Chunks whose gates or numbers do not fit take bf16.
//
// What an element is multiplied by: fq (q, with scale), fk, fv, fo (dO), fs (a state). For q and k elements times e^(G - M) and
// e^(M - G), M half of what the chunk's gates add up to, below 2^GENTLE all in all. So
//
//   |q| fq < 2^5   |k| fk < 2^5   |v| fv < 2^4   |dO| fo < 2^4   |S| fs < 2^15
//   a pair of q and k, by fq fk / 4, is below 2^15, and a pair of dO and v, by fo fv, too
#pragma once
#include "channels.cuh"

#define GENTLE -20.f  // log2 of the least that a chunk's gates may leave of a channel for its products to be in fp16
#define ORDINARY 20   // of the largest elements of q, k and v, or one over them, at most: log2
#define WIDEST 45     // the same of dO

enum Kind { WIDE, HARD, HALVES };  // how a chunk is computed: in bf16; in bf16, its pairs one by one; in fp16

INLINE float power(int e) { return __uint_as_float((u32)(min(max(e, -120), 120) + 127) << 23); }
INLINE float inverse(float power) { return __uint_as_float(0x7f000000u - __float_as_uint(power)); }  // of a power of two
INLINE int exponent(float x) { return (int)(__float_as_uint(x) >> 23 & 255) - 127; }

// The largest magnitude in a tile of N x 512 bytes in bf16, as bits, by one warp; `apart`: where its second half begins
template <int N = 16> INLINE u32 largest_in(u32 at, int lane, int apart = 4096) {
  u32 m = 0;
#pragma unroll 4
  for (int i = 0; i < N; i++) {
    u32 x[4];
    lds128(x, at + (u32)i / (N / 2) * apart + (u32)i % (N / 2) * 512 + lane * 16);
#pragma unroll
    for (int j = 0; j < 4; j++) m = larger(m, x[j] & 0x7fff7fffu);
  }
  return warp_max(max((int)(m & 0xffff), (int)(m >> 16)));
}

// e of a tile whose elements are below 2^(e + 1), from the largest of them; of one without any that is not 0, -`most`
struct Size { int e; bool fits; };
INLINE Size size_of(u32 largest, int more, int most) {
  const int e = (int)(largest >> 7) - 127 + more;
  if (largest == 0) return {-most, true};
  return {e, e >= -most && e <= most};
}

// A tile of N x 512 bytes from bf16 to fp16, times `by`, in its place; `apart` as above
template <int N = 16> INLINE void to_halves(u32 at, float by, int lane, int apart = 4096) {
#pragma unroll 2
  for (int i = 0; i < N; i++) {
    u32 x[4];
    float y[4];
    const u32 place = at + (u32)i / (N / 2) * apart + (u32)i % (N / 2) * 512 + lane * 16;
    lds128(x, place);
#pragma unroll
    for (int j = 0; j < 4; j++) y[j] = __uint_as_float(pack<true>(lo(x[j]) * by, hi(x[j]) * by));
    sts128(place, y);
  }
}

// The largest magnitude of a state that eight warps hold; `at`: 32 bytes
INLINE float largest_of(const float (&S)[16][4], u32 at, int w, int lane) {
  float m = 0.f;
#pragma unroll
  for (int nt = 0; nt < 16; nt++)
#pragma unroll
    for (int j = 0; j < 4; j++) m = fmaxf(m, fabsf(S[nt][j]));
  const u32 mine = warp_max(__float_as_uint(m));
  between_warps();  // what lay there is read
  if (lane == 0) sts32(at + w * 4, mine);
  between_warps();
  for (int i = 0; i < 8; i++) m = fmaxf(m, lds(at + i * 4));
  return m;
}

// A state on its way: what its elements are multiplied by, and a bound of them without that.
struct Unit {
  float by, bound;
  // The state is read by a chunk that adds at most `add` to each element and leaves at most `left` of what was there: what
  // it is to be multiplied by first.
  INLINE float next(bool halves, float add, float left) {
    const float to = halves ? power(14 - exponent(fmaxf(bound, add))) : 1.f, change = to * inverse(by);
    by = to;
    bound = fminf(fmaf(bound, left, add), 1e30f);
    return change;
  }
};

// S <- S e^H by, by columns of K; `at`: e^H of each
INLINE void decay_by(float (&S)[16][4], u32 at, float by, int lane) {
#pragma unroll
  for (int nt = 0; nt < 16; nt++) {
    u32 e[2];
    lds64(e, at + (nt * 8 + 2 * (lane & 3)) * 4);
    const float e0 = __uint_as_float(e[0]) * by, e1 = __uint_as_float(e[1]) * by;
    S[nt][0] *= e0; S[nt][1] *= e1; S[nt][2] *= e0; S[nt][3] *= e1;
  }
}
INLINE void multiply(float (&S)[16][4], float by) {
#pragma unroll
  for (int nt = 0; nt < 16; nt++)
#pragma unroll
    for (int j = 0; j < 4; j++) S[nt][j] *= by;
}
// S <- S e^GL, by columns of K; `at`: GL by log2
INLINE void decay_to_end(float (&S)[16][4], u32 at, int lane) {
#pragma unroll
  for (int nt = 0; nt < 16; nt++) {
    u32 e[2];
    lds64(e, at + (nt * 8 + 2 * (lane & 3)) * 4);
    const float e0 = ex2(__uint_as_float(e[0])), e1 = ex2(__uint_as_float(e[1]));
    S[nt][0] *= e0; S[nt][1] *= e1; S[nt][2] *= e0; S[nt][3] *= e1;
  }
}

// x in fp16 times a power of two
INLINE void times(u32 (&x)[4], float by) {
  const u32 two = pack<true>(by, by);
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = times_half(x[i], two);
}

// Tiles of 8 columns (two of rows 0 to 15, four of rows 16 to 31) of the products of the rows of two tiles: those of the lower
// triangle, times `by`, to `to`
template <bool FP16> INLINE void make_pairs(u32 left, u32 right, float by, u32 to, int lane) {
  const int ra = (lane & 7) + (((lane >> 3) & 1) << 3), ca = lane >> 4;
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1;
  float P[6][4] = {};
#pragma unroll
  for (int ks = 0; ks < 8; ks++) {
    u32 x[4], n[2][4];
    ldm(n[0], right + tile_place(rb, 2 * ks + cb));
    ldm(n[1], right + tile_place(16 + rb, 2 * ks + cb));
    ldm(x, left + tile_place(ra, 2 * ks + ca));
    mma<FP16>(P[0], x, n[0][0], n[0][1]); mma<FP16>(P[1], x, n[0][2], n[0][3]);
    ldm(x, left + tile_place(16 + ra, 2 * ks + ca));
#pragma unroll
    for (int j = 0; j < 2; j++) {
      mma<FP16>(P[2 + 2 * j], x, n[j][0], n[j][1]); mma<FP16>(P[3 + 2 * j], x, n[j][2], n[j][3]);
    }
  }
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int i = m * 16 + e * 8 + (lane >> 2);
#pragma unroll
      for (int nt = 0; nt < 2 + 2 * m; nt++) {
        const int j = nt * 8 + 2 * (lane & 3);
        const float* y = &P[2 * m + nt][2 * e];
        sts32(to + pair_place(i, nt) + (lane & 3) * 4, pack<FP16>(j <= i ? y[0] * by : 0.f, j + 1 <= i ? y[1] * by : 0.f));
      }
    }
}
