// The triangle of 32 x 32 below a diagonal that a warp inverts, in fp32, by columns. What includes this has `pair_place`.
#pragma once
#define TRIANGLE 2304  // bytes of one

// Where column j of the triangle lies: its rows from a multiple of 4 at most j + 1 on
INLINE constexpr int triangle_from(int j) { return (j + 1) & ~3; }
INLINE constexpr int triangle_column(int j) {
  const int b = (j + 1) >> 2;
  return 4 * ((b ? 96 + 4 * (b - 1) * (32 - 2 * b) : 0) + (j - (b ? 4 * b - 1 : 0)) * (32 - 4 * b) - 4 * b);
}

// (I + triangle)^-1 diag(b) by forward substitution in fp32, a column a lane; b: the lane's. put(j, y): its row j
template <class Put> INLINE void substitute(float b, u32 triangle, int lane, Put put) {
  float y[C];
#pragma unroll
  for (int i = 0; i < C; i++) y[i] = i == lane ? b : 0.f;
#pragma unroll
  for (int j = 0; j < C; j++) {
#pragma unroll
    for (int i = triangle_from(j); i < C; i += 4) {
      u32 r[4];
      lds128(r, triangle + triangle_column(j) + i * 4);
#pragma unroll
      for (int l = 0; l < 4; l++)
        if (i + l > j) y[i + l] = fmaf(-__uint_as_float(r[l]), y[j], y[i + l]);
    }
    put(j, y[j]);
  }
}

// (I + triangle)^-1 - I to bf16, by blocks of 16: those on the diagonal side by side, a column a lane, and then
//
//   (I + L)^-1 = [[N1, 0], [-N2 L21 N1, N2]]
//
// whose last block is two products of tf32, of factors that are rounded to it. `to`, 2 KB, holds N1 and N2 meanwhile; what
// is above the diagonal blocks is not written.
INLINE u32 block_place(int block, int row, int column) { // of N1, N2
  return (u32)(block * 1024 + row * 64 + ((column ^ ((row >> 1 & 3) << 2)) << 2));
}
INLINE void invert(u32 to, u32 triangle, int lane) {
  asm volatile("" : "+r"(lane));  // no address is kept from chunk to chunk, for which there are no registers
  const int half = lane >> 4, c = lane & 15, r = lane >> 2, l = lane & 3;
  float y[16];
#pragma unroll
  for (int i = 0; i < 16; i++) y[i] = i == c ? 1.f : 0.f;
#pragma unroll
  for (int j = 0; j < 16; j++) {
    const u32 from = triangle + (half ? triangle_column(16 + j) + 64 : triangle_column(j));
#pragma unroll
    for (int i = triangle_from(j); i < 16; i += 4) {
      u32 x[4];
      lds128(x, from + i * 4);
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (i + e > j) y[i + e] = fmaf(-__uint_as_float(x[e]), y[j], y[i + e]);
    }
  }
#pragma unroll
  for (int i = 0; i < 16; i++) sts32(to + block_place(half, i, c), as_tf32(y[i]));
  __syncwarp();
  // columns of the triangle that this lane takes, n and 8 + n with n = lane / 4, from row 16 on
  const u32 near = triangle + 64 + (u32)triangle_column(r), far = triangle + 64 + (u32)triangle_column(8 + r);
  float X[2][4] = {}, Y[2][4] = {};  // N2 L21; that times N1
#pragma unroll
  for (int s = 0; s < 2; s++) {
    u32 f[4];
#pragma unroll
    for (int e = 0; e < 4; e++) f[e] = __float_as_uint(lds(to + block_place(1, r + 8 * (e & 1), 8 * s + 4 * (e >> 1) + l)));
    const int k = (8 * s + l) * 4;
    mma_tf32(X[0], f, as_tf32(lds(near + k)), as_tf32(lds(near + k + 16)));
    mma_tf32(X[1], f, as_tf32(lds(far + k)), as_tf32(lds(far + k + 16)));
  }
#pragma unroll
  for (int s = 0; s < 2; s++) {  // in this order of the channels that are summed: 0, 2, 4, 6, 1, 3, 5, 7
    const u32 f[4] = {as_tf32(X[s][0]), as_tf32(X[s][2]), as_tf32(X[s][1]), as_tf32(X[s][3])};
#pragma unroll
    for (int n = 0; n <= s; n++)
      mma_tf32(Y[n], f, __float_as_uint(lds(to + block_place(0, 8 * s + 2 * l, 8 * n + r))),
               __float_as_uint(lds(to + block_place(0, 8 * s + 2 * l + 1, 8 * n + r))));
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16; i++)
    sts16(to + pair_place(16 * half + i, lane >> 3) + (lane & 7) * 2, (u16)(pack(i == c ? 0.f : y[i], 0.f) & 0xffff));
#pragma unroll
  for (int n = 0; n < 2; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) sts32(to + pair_place(16 + r + 8 * e, n) + l * 4, pack(-Y[n][2 * e], -Y[n][2 * e + 1]));
}
