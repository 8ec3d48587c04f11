// What kernels of gates by key channel share: chunks of 32 tokens (C), 128 channels a head (D).
#pragma once
#include "carried.cuh"

#define GROUP 4         // tokens whose factors are made together
#define HARDEST -86.f   // log2 of the smallest factor whose inverse is used

#define HALF 4096  // from 64 channels of a tile to the others

INLINE float bf16_of(const u16* x) { return __uint_as_float((u32)*x << 16); }

// The gates of a token and this lane's four channels, of a row at `at`
INLINE void gates(float (&g)[4], u32 at, int lane) {
#if GATE_BF16
  u32 r[2];
  lds64(r, at + lane * 8);
  g[0] = lo(r[0]); g[1] = hi(r[0]); g[2] = lo(r[1]); g[3] = hi(r[1]);
#else
  u32 r[4];
  lds128(r, at + lane * 16);
#pragma unroll
  for (int j = 0; j < 4; j++) g[j] = __uint_as_float(r[j]);
#endif
}

// Ask for the gates of 32 tokens from t on, rows of `bytes`; those from `end` on are zero.
template <class Args> INLINE void load_gates(const Args& a, int t, int end, int h, u32 to, int bytes, int lane) {
#if GATE_BF16
  const int row = lane >> 4, j = lane & 15;
  const u64 step = (u64)a.H * (D * 2);
  const char* g = (const char*)a.g + (u64)(t + row) * step + h * (D * 2) + j * 16;
#pragma unroll 4
  for (int i = 0; i < C; i += 2) {
    const bool ok = t + i + row < end;
    cp16(to + (i + row) * bytes + j * 16, ok ? g : (const char*)a.g, ok);
    g += 2 * step;
  }
#else
  const u64 step = (u64)a.H * (D * 4);
  const char* g = (const char*)a.g + (u64)t * step + h * (D * 4) + lane * 16;
#pragma unroll 4
  for (int i = 0; i < C; i++) {
    const bool ok = t + i < end;
    cp16(to + i * bytes + lane * 16, ok ? g : (const char*)a.g, ok);
    g += step;
  }
#endif
}

// log2 of what 32 tokens, whose gates lie at `at` in rows of `bytes`, leave of this lane's four channels; whether the
// inverse is too large for a factor.
INLINE bool chunk_decay(float (&GL)[4], u32 at, int bytes, int lane) {
#pragma unroll
  for (int j = 0; j < 4; j++) GL[j] = 0.f;
#pragma unroll 8
  for (int i = 0; i < C; i++) {
    float g[4];
    gates(g, at + i * bytes, lane);
#pragma unroll
    for (int j = 0; j < 4; j++) GL[j] = fmaf(g[j], LOG2E, GL[j]);
  }
  const float worst = fminf(fminf(GL[0], GL[1]), fminf(GL[2], GL[3]));
  return __any_sync(~0u, !(worst >= HARDEST));
}

// S <- S e^GL, by columns of K; `at`: e^GL of each
INLINE void decay(float (&S)[16][4], u32 at, int lane) {
#pragma unroll
  for (int nt = 0; nt < 16; nt++) {
    u32 e[2];
    lds64(e, at + (nt * 8 + 2 * (lane & 3)) * 4);
#pragma unroll
    for (int j = 0; j < 4; j++) S[nt][j] *= __uint_as_float(e[j & 1]);
  }
}
