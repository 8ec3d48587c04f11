// A weight's gradient, sum of dy^T x over blocks of 64 tokens, each block's product rounded to the grid as it is added
// (see weight.py, whose kernels do the same): [N, tokens] by [tokens, K] in tiles of 128 x 192.
//
// A program works through tiles. Four warps bring dy and x of a block after the other, and two groups of four have half
// of a tile each: while one adds its block's product to its sum, the other one multiplies.
#include "hopper.cuh"

#define BN 128
#define BK 192
#define ROW 128                    // bytes of 64 channels of a token, swizzled by token
#define GROUP (64 * ROW)           // 64 channels of a block
#define OFF_X (BN / 64 * GROUP)    // behind dy's
#define SLOT ((BN + BK) / 64 * GROUP)
#define SLOTS 5
#define BEHIND 3                   // blocks on their way behind which one is known to be there
#define BARS (SLOTS * SLOT)        // of each slot: full, empty
#define START 384.f                // C in units of above_y above_x
#define LEAST 8.271806125530277e-25f  // 2^-80

struct Args {
  const u16* dy;         // [rows, N]
  const u16* x;          // [rows, K]
  const int* places;     // [count, 2]
  const float* norms_y;  // [N]
  const float* norms_x;  // [K]
  void* out;             // [N, K]
  int count, N, K, programs;
};

INLINE int tiles_across(const Args& a) { return (a.K + BK - 1) / BK; }
INLINE int tiles(const Args& a) { return (a.N + BN - 1) / BN * tiles_across(a); }

// The power of two above x >= 0, at least LEAST; NaN for what is not finite
INLINE float power_above(float x) {
  const float up = __uint_as_float((__float_as_uint(x) & 0x7f800000u) + 0x00800000u);
  return x < __uint_as_float(0x7f800000u) ? (up > LEAST ? up : LEAST) : __uint_as_float(0x7fffffffu);
}

// -- bringing --------------------------------------------------------------------------------------------------------

// 64 channels from `column` on of 64 tokens, of a row of `width`: a thread 4 times 16 bytes
INLINE void bring(const u16* from, int column, int width, u32 to, int t) {
  const int j = t & 7;
  const bool live = column + j * 8 < width;
  const u16* at = from + (live ? column + j * 8 : 0);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int token = (t >> 3) + 16 * i;
    cp16(to + token * ROW + ((j ^ (token & 7)) << 4), at + (u64)token * width, live);
  }
}

INLINE void produce(const Args& a, u32 base, int t) {
  const int across = tiles_across(a), all = tiles(a);
  int step = 0;
  for (int tile = program(); tile < all; tile += a.programs) {
    const int n = tile / across * BN, k = tile % across * BK;
#pragma unroll 1
    for (int i = 0; i < a.count; i++, step++) {
      const int s = step % SLOTS;
      const u64 start = a.places[2 * i];
      if (step >= SLOTS) bar_wait(base + BARS + s * 16 + 8, (step / SLOTS - 1) & 1);
#pragma unroll
      for (int g = 0; g < BN / 64; g++) bring(a.dy + start * a.N, n + 64 * g, a.N, base + s * SLOT + g * GROUP, t);
#pragma unroll
      for (int g = 0; g < BK / 64; g++) bring(a.x + start * a.K, k + 64 * g, a.K, base + s * SLOT + OFF_X + g * GROUP, t);
      cp_commit();
      if (step >= BEHIND) {
        cp_wait_but<BEHIND>();
        proxy_fence();
        bar_arrive(base + BARS + (step - BEHIND) % SLOTS * 16);
      }
    }
  }
  cp_wait();
  proxy_fence();
  for (int i = step < BEHIND ? 0 : step - BEHIND; i < step; i++) bar_arrive(base + BARS + i % SLOTS * 16);
}

// -- multiplying and adding ------------------------------------------------------------------------------------------

INLINE float above_x(const Args& a, int k) { return k < a.K ? power_above(a.norms_x[k]) : 1.f; }

INLINE void put(const Args& a, int n, int k, float first, float second) {
  if (n >= a.N || k >= a.K) return;
  const u64 at = (u64)n * a.K + k;
#if WIDE
  float* to = (float*)a.out + at;
#if ADD
  first += to[0]; second += to[1];
#endif
  to[0] = first; to[1] = second;
#else
  *(u32*)((u16*)a.out + at) = pack<HALVES>(first, second);
#endif
}

INLINE void consume(const Args& a, u32 base, int group, int warp, int lane) {
  const int across = tiles_across(a), all = tiles(a);
  int step = 0;
  for (int tile = program(); tile < all; tile += a.programs) {
    const int n = tile / across * BN + group * 64 + warp * 16 + (lane >> 2), k = tile % across * BK + (lane & 3) * 2;
    const float top = (n < a.N ? power_above(a.norms_y[n]) : 1.f) * START;
    const float bottom = (n + 8 < a.N ? power_above(a.norms_y[n + 8]) : 1.f) * START;
    float sum[24][4], part[24][4];
#pragma unroll
    for (int j = 0; j < 24; j++) {
      const float left = above_x(a, k + 8 * j), right = above_x(a, k + 8 * j + 1);
      sum[j][0] = top * left; sum[j][1] = top * right;
      sum[j][2] = bottom * left; sum[j][3] = bottom * right;
    }
#pragma unroll 1
    for (int i = 0; i < a.count; i++, step++) {
      const u32 slot = base + step % SLOTS * SLOT;
      bar_wait(base + BARS + step % SLOTS * 16, (step / SLOTS) & 1);
      wg_fence();
#pragma unroll
      for (int c = 0; c < 4; c++) {  // 16 tokens
        const u64 y = descriptor(slot + group * GROUP + c * 16 * ROW, GROUP, 8 * ROW);
        const u64 x = descriptor(slot + OFF_X + c * 16 * ROW, GROUP, 8 * ROW);
        wgmma192<HALVES>(part, y, x, c > 0);
      }
      wg_commit();
      wg_wait(part);
      if (lane == 0) bar_arrive(base + BARS + step % SLOTS * 16 + 8);
#pragma unroll
      for (int j = 0; j < 24; j++) {
#pragma unroll
        for (int e = 0; e < 4; e++) sum[j][e] += __uint_as_float(__float_as_uint(part[j][e]) | 1u);
      }
    }
#pragma unroll
    for (int j = 0; j < 24; j++) {
      const float left = above_x(a, k + 8 * j), right = above_x(a, k + 8 * j + 1);
      put(a, n, k + 8 * j, sum[j][0] - top * left, sum[j][1] - top * right);
      put(a, n + 8, k + 8 * j, sum[j][2] - bottom * left, sum[j][3] - bottom * right);
    }
  }
}

extern "C" __global__ void __launch_bounds__(384, 1) weight(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) char smem[];
  const u32 base = (smem_addr(smem) + 1023) & ~1023u;
  const int tid = threadIdx.x;
  if (tid == 0) {
    for (int i = 0; i < SLOTS; i++) {
      bar_init(base + BARS + i * 16, 128);
      bar_init(base + BARS + i * 16 + 8, 8);
    }
    bars_ready();
  }
  __syncthreads();
  const int group = uniform(tid >> 7);
  if (group == 2) {
    registers_down<40>();
    produce(a, base, tid & 127);
  } else {
    registers_up<232>();
    consume(a, base, group, uniform(tid >> 5) & 3, tid & 31);
  }
}
