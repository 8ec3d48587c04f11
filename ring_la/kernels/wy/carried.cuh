// What the fused kernels that go 32 tokens at a time share: tiles of tokens and their pairs.
#pragma once
#include "spans.cuh"

// Where 16 bytes `chunk` of a row of 32 pairs lie, so that eight rows' do not share banks
INLINE u32 pair_place(int row, int chunk) { return (u32)(row * 64 + ((chunk ^ (row >> 1) & 3) << 4)); }
// Where 8 channels of a token lie in a tile of 32 x 128: an operand of wgmma as it is, of 128-byte swizzle.
INLINE u32 tile_place(int token, int chunk) { return (u32)((chunk >> 3) * 4096 + token * 128) + swz(token, chunk & 7); }

template <class Args> INLINE int piece_end(const Args& a, const Span& x) {
  return a.table ? a.cu[x.piece + 1] : (x.piece + 1) * a.T;
}

// Pairs (lower triangle, at `p_at`) of 32 tokens, as a right operand's three blocks of 16
INLINE void load_pairs(u32 (&p)[3][4], u32 p_at, int rb, int cb) {
  ldm(p[0], p_at + pair_place(rb, cb));
  ldm(p[1], p_at + pair_place(16 + rb, cb));
  ldm(p[2], p_at + pair_place(16 + rb, 2 + cb));
}
// X += pairs times what `x` holds
template <bool FP16 = false> INLINE void add_pairs(float* X, const u32 (&x)[2][4], const u32 (&p)[3][4]) {
  mma<FP16>(X, x[0], p[0][0], p[0][1]); mma<FP16>(X + 4, x[0], p[0][2], p[0][3]);
  mma<FP16>(X + 8, x[0], p[1][0], p[1][1]); mma<FP16>(X + 12, x[0], p[1][2], p[1][3]);
  mma<FP16>(X + 8, x[1], p[2][0], p[2][1]); mma<FP16>(X + 12, x[1], p[2][2], p[2][3]);
}
template <bool FP16 = false> INLINE void add_pairs(float* X, const u32 (&x)[2][4], u32 p_at, int rb, int cb) {
  u32 p[3][4];
  load_pairs(p, p_at, rb, cb);
  add_pairs<FP16>(X, x, p);
}

// The same of their transpose
template <bool FP16 = false> INLINE void add_pairs_back(float* X, const u32 (&x)[2][4], u32 p_at, int rt, int ct) {
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int jb = 0; jb <= m; jb++) {
      u32 p[4];
      ldm_trans(p, p_at + pair_place(16 * m + rt, 2 * jb + ct));
      mma<FP16>(X + 8 * jb, x[m], p[0], p[1]); mma<FP16>(X + 8 * jb + 4, x[m], p[2], p[3]);
    }
}
