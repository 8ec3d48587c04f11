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
// The same to bf16
INLINE void invert(float b, u32 to, u32 triangle, int lane) {
  substitute(b, triangle, lane, [&](int j, float y) {
    sts16(to + pair_place(j, lane >> 3) + (lane & 7) * 2, (u16)(pack(y, 0.f) & 0xffff));
  });
}
