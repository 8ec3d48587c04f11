// What the fused kernels that go 32 tokens at a time share: tiles of tokens, their pairs, and the state on its way through a span.
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

// -- the state, [V, K], 16 of its rows a warp --------------------------------------------------------------------------

// The registers of a state as a left operand
template <bool FP16 = false> INLINE void as_operand(u32 (&f)[8][4], const float (&S)[16][4]) {
#pragma unroll
  for (int ks = 0; ks < 8; ks++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      f[ks][i] = pack<FP16>(S[2 * ks + (i >> 1)][2 * (i & 1)], S[2 * ks + (i >> 1)][2 * (i & 1) + 1]);
}
// The state, of which `f` are this warp's rows, as the backward reads it, by the copy engine from 4 KB of shared memory
INLINE void keep_state(const u32 (&f)[8][4], char* to, u32 stage, int w, int lane) {
  const int row = (lane & 7) + (((lane >> 3) & 1) << 3), col = lane >> 4;
  if (lane == 0) copied_out();
  __syncwarp();
#pragma unroll
  for (int ks = 0; ks < 8; ks++) stm(f[ks], stage + (ks >> 2) * 2048 + row * 128 + swz(row, (2 * ks + col) & 7));
  proxy_fence();
  __syncwarp();
  if (lane == 0) {
    copy_out(to + w * 2048, stage, 2048);
    copy_out(to + 16384 + w * 2048, stage + 2048, 2048);
    copy_out_all();
  }
}

// sum_V S dS of 16 channels of K from chunk kc on: those of rows lane / 4 and 8 more
template <bool FP16 = false> INLINE void traces(float (&out)[2], u32 state, u32 adjoint, int kc, int lane) {
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1;
  const int rt = (lane & 7) + (((lane >> 3) & 1) << 3), ct = lane >> 4, r = lane >> 2;
  float y[2][4] = {};
#pragma unroll
  for (int ks = 0; ks < 8; ks++) {
    u32 p[4], q[4];
    ldm_trans(p, state + state_place(ks * 16 + rb, kc + cb));
    ldm_trans(q, adjoint + state_place(ks * 16 + rt, kc + ct));
    mma<FP16>(y[0], p, q[0], q[1]); mma<FP16>(y[1], p, q[2], q[3]);
  }
  const int from = (lane & ~3) | (r >> 1);
  const float a0 = __shfl_sync(~0u, y[0][0], from), a1 = __shfl_sync(~0u, y[0][1], from);
  const float b0 = __shfl_sync(~0u, y[1][2], from), b1 = __shfl_sync(~0u, y[1][3], from);
  out[0] = r & 1 ? a1 : a0;
  out[1] = r & 1 ? b1 : b0;
}
