// What ring_la/kernels/cuda/hopper.cuh has, on the machine of machine.hpp: the same names, and what the PTX ISA says they do.
#pragma once

typedef uint32_t u32;
typedef uint64_t u64;
typedef uint16_t u16;

#define INLINE inline
#define LOG2E 1.4426950408889634f

// -- numbers -------------------------------------------------------------------------------------------------------

INLINE int uniform(int x) {
  Passed<int> mine{x, 0, x};
  machine::together("uniform", mine, [](Passed<int>** g) {
    for (int i = 0; i < 32; i++) {
      if (g[i]->value != g[0]->value) machine::fail("uniform: the threads of a warp differ");
    }
  });
  return x;
}
INLINE float from_half(u16 x) { _Float16 y; memcpy(&y, &x, 2); return (float)y; }
INLINE u32 to_half(float x) { const _Float16 y = (_Float16)x; u16 z; memcpy(&z, &y, 2); return z; }
template <bool FP16 = false> INLINE float lo(u32 x) { return FP16 ? from_half((u16)x) : __uint_as_float(x << 16); }
template <bool FP16 = false> INLINE float hi(u32 x) { return FP16 ? from_half((u16)(x >> 16)) : __uint_as_float(x & 0xffff0000u); }
INLINE float ex2(float x) {
  const float y = exp2f(x);
  return y < 1.17549435e-38f ? 0.f : y;
}
INLINE float lg2(float x) { return log2f(x); }
INLINE u32 rounded(float x) {
  const u32 bits = __float_as_uint(x);
  if (x != x) return 0x7fff;
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
template <bool FP16 = false> INLINE u32 pack(float first, float second) {
  return FP16 ? to_half(first) | to_half(second) << 16 : rounded(first) | rounded(second) << 16;
}
INLINE u32 times_half(u32 x, u32 y) { return pack<true>(lo<true>(x) * lo<true>(y), hi<true>(x) * hi<true>(y)); }
INLINE u32 larger(u32 x, u32 y) {
  const u32 low = (x & 0xffff) > (y & 0xffff) ? x & 0xffff : y & 0xffff;
  return low | ((x >> 16) > (y >> 16) ? x >> 16 : y >> 16) << 16;
}
INLINE u32 warp_max(u32 x) {
  for (int m = 16; m; m >>= 1) {
    const u32 y = __shfl_xor_sync(~0u, x, m);
    x = x > y ? x : y;
  }
  return x;
}
template <bool FP16> INLINE void eight_at(u32 a, float* to, int step) {
  u16 x[8];
  memcpy(x, machine::at(a, 16, 16), 16);
  for (int i = 0; i < 8; i++) to[i * step] = lo<FP16>(x[i]);
}

// -- shared memory -------------------------------------------------------------------------------------------------

INLINE u32 smem_addr(const void*) { return machine::BASE; }
INLINE u32 lds32(u32 a) { u32 x; memcpy(&x, machine::at(a, 4, 4), 4); return x; }
INLINE float lds(u32 a) { return __uint_as_float(lds32(a)); }
INLINE void lds64(u32* r, u32 a) { memcpy(r, machine::at(a, 8, 8), 8); }
INLINE void lds128(u32* r, u32 a) { memcpy(r, machine::at(a, 16, 16), 16); }
INLINE void sts16(u32 a, u16 x) { memcpy(machine::at(a, 2, 2), &x, 2); }
INLINE void sts32(u32 a, u32 x) { memcpy(machine::at(a, 4, 4), &x, 4); }
INLINE void sts64(u32 a, u32 x, u32 y) { const u32 z[2] = {x, y}; memcpy(machine::at(a, 8, 8), z, 8); }
INLINE void sts128(u32 a, const float* x) { memcpy(machine::at(a, 16, 16), x, 16); }
INLINE void sts128(u32 a, const u32* x) { memcpy(machine::at(a, 16, 16), x, 16); }
INLINE void stg128(void* p, const u32* x) { memcpy(p, x, 16); }
INLINE void stg128_if(void* p, const u32* x, bool live) {
  if (live) stg128(p, x);
}
INLINE void cp16(u32 to, const void* from, bool live) {
  char* place = machine::at(to, 16, 16);
  if (live) memcpy(place, from, 16); else memset(place, 0, 16);
}
INLINE void cp_wait() {}
INLINE void proxy_fence() {}

struct Tiles { u32* r; u32 address; };
// Four 8 x 8 tiles of 16-bit numbers: lane 8 i + j has the address of row j of tile i.
INLINE void load_tiles(Tiles** g, bool turned) {
  for (int tile = 0; tile < 4; tile++)
    for (int lane = 0; lane < 32; lane++) {
      u16 x[2];
      for (int e = 0; e < 2; e++) {
        const int row = turned ? 2 * (lane & 3) + e : lane >> 2, column = turned ? lane >> 2 : 2 * (lane & 3) + e;
        memcpy(&x[e], machine::at(g[8 * tile + row]->address, 16, 16) + 2 * column, 2);
      }
      g[lane]->r[tile] = x[0] | (u32)x[1] << 16;
    }
}
INLINE void store_tiles(Tiles** g, bool turned) {
  for (int tile = 0; tile < 4; tile++)
    for (int lane = 0; lane < 32; lane++)
      for (int e = 0; e < 2; e++) {
        const int row = turned ? 2 * (lane & 3) + e : lane >> 2, column = turned ? lane >> 2 : 2 * (lane & 3) + e;
        const u16 x = (u16)(g[lane]->r[tile] >> (16 * e));
        memcpy(machine::at(g[8 * tile + row]->address, 16, 16) + 2 * column, &x, 2);
      }
}
INLINE void ldm(u32* r, u32 a) { Tiles t{r, a}; machine::together("ldmatrix", t, [](Tiles** g) { load_tiles(g, false); }); }
INLINE void ldm_trans(u32* r, u32 a) { Tiles t{r, a}; machine::together("ldmatrix.trans", t, [](Tiles** g) { load_tiles(g, true); }); }
INLINE void stm(const u32* r, u32 a) { Tiles t{(u32*)r, a}; machine::together("stmatrix", t, [](Tiles** g) { store_tiles(g, false); }); }
INLINE void stm_trans(const u32* r, u32 a) { Tiles t{(u32*)r, a}; machine::together("stmatrix.trans", t, [](Tiles** g) { store_tiles(g, true); }); }

// -- barriers ------------------------------------------------------------------------------------------------------

INLINE void bar_init(u32 a, int n) {
  machine::at(a, 8, 8);
  machine::new_bar(a, (u32)n);
}
INLINE void bar_over(u32 a) { machine::bar(a) = machine::Bar(); }
INLINE void bars_ready() {}
INLINE void add_release(int* p, int x) { atomicAdd(p, x); }
INLINE void bar_arrive(u32 a) {
  machine::Bar& b = machine::bar(a);
  if (b.pending == 0) machine::fail("more arrive at a barrier than it counts");
  b.pending--;
  machine::settle(b);
}
INLINE void next_launch() {}
INLINE void launch_before() {
  machine::write_late();
  machine::here().waited = true;
}
INLINE void cp_arrive(u32 bar) { bar_arrive(bar); }
INLINE void bar_wait(u32 a, u32 phase) {
  machine::Bar& b = machine::bar(a);
  machine::wait_for("mbarrier", [&] { return (b.phase & 1) != (phase & 1); });
}
INLINE bool bar_passed(u32 a, u32 phase) { return (machine::bar(a).phase & 1) != (phase & 1); }
INLINE void bar_expect(u32 a, u32 bytes) {
  machine::Bar& b = machine::bar(a);
  b.bytes += bytes;
  bar_arrive(a);
}
INLINE void copy_in(u32 to, const void* from, u32 bytes, u32 bar) {
  memcpy(machine::at(to, bytes, 16), from, bytes);
  machine::Bar& b = machine::bar(bar);
  b.bytes -= bytes;
  machine::settle(b);
}
INLINE void copy_out(void* to, u32 from, u32 bytes) { memcpy(to, machine::at(from, bytes, 16), bytes); }
INLINE void copy_out_all() {}
INLINE void copied_out() {}
INLINE void written_out() {}
INLINE void copies_fence() {}
INLINE void between_all() { machine::barrier(3, 512, "between_all"); }
INLINE void between_warps() { machine::barrier(1, 256, "between_warps"); }
INLINE void between_others() { machine::barrier(2, 256, "between_others"); }
INLINE void between_two(int pair) { machine::barrier(pair + 2, 64, "between_two"); }
INLINE int load_acquire(const int* p) {
  machine::written_before();
  machine::leave();
  return *(volatile const int*)p;
}
INLINE void store_release(int* p, int x) { machine::written_before(); *(volatile int*)p = x; machine::it().progress++; }
INLINE void load_anywhere(u32* r, const u32* p) {
  for (int i = 0; i < 4; i++) r[i] = *(volatile const u32*)(p + i);
}
INLINE int swap_anywhere(int* p, int from, int to) {
  const int x = *(volatile int*)p;
  if (x == from) *(volatile int*)p = to;
  return x;
}
INLINE void store_release_anywhere(int* p, int x) { *(volatile int*)p = x; machine::it().progress++; }
INLINE void pause(int) {}
INLINE void prefetch(const void* p) { (void)*(const volatile char*)p; }
INLINE u64 nanoseconds() { return (u64)std::chrono::steady_clock::now().time_since_epoch().count(); }
template <int N> INLINE void registers_down() {}
template <int N> INLINE void registers_up() {}

// -- products ------------------------------------------------------------------------------------------------------

struct Product { float* c; const u32* a; u32 b0, b1; };
// A 16 x 16 operand in the registers of 32 lanes
template <bool FP16, class Given> INLINE void left_of(Given** g, float (*x)[16]) {
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < 4; i++) {
      float* to = &x[(lane >> 2) + 8 * (i & 1)][2 * (lane & 3) + 8 * (i >> 1)];
      to[0] = lo<FP16>(g[lane]->a[i]);
      to[1] = hi<FP16>(g[lane]->a[i]);
    }
}
// The sums over k of x [k] y [k][n], 4 of n at a time
typedef float Four __attribute__((vector_size(16)));
template <int K, int N> INLINE void row_times(const float* x, const float (*y)[N], float* to) {
  Four sum[N / 4] = {};
  for (int k = 0; k < K; k++)
    for (int i = 0; i < N / 4; i++) {
      Four right;
      memcpy(&right, y[k] + 4 * i, 16);
      sum[i] += x[k] * right;
    }
  memcpy(to, sum, sizeof sum);
}
template <bool FP16 = false> INLINE void mma(float* c, const u32* a, u32 b0, u32 b1) {
  Product mine{c, a, b0, b1};
  machine::together("mma", mine, [](Product** g) {
    float x[16][16], y[16][8], z[8];
    left_of<FP16>(g, x);
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 2; i++) {
        const u32 right = i ? g[lane]->b1 : g[lane]->b0;
        y[2 * (lane & 3) + 8 * i][lane >> 2] = lo<FP16>(right);
        y[2 * (lane & 3) + 8 * i + 1][lane >> 2] = hi<FP16>(right);
      }
    for (int row = 0; row < 16; row++) {
      row_times<16, 8>(x[row], y, z);
      for (int n = 0; n < 8; n++) g[(row & 7) * 4 + n / 2]->c[2 * (row >> 3) + (n & 1)] += z[n];
    }
  });
}

INLINE u32 as_tf32(float x) { return (__float_as_uint(x) + 0x1000) & ~0x1fffu; }
INLINE void mma_tf32(float* c, const u32* a, u32 b0, u32 b1) {
  Product mine{c, a, b0, b1};
  machine::together("mma_tf32", mine, [](Product** g) {
    for (int row = 0; row < 16; row++)
      for (int n = 0; n < 8; n++) {
        float sum = 0.f;
        for (int k = 0; k < 8; k++) {
          const u32 x = g[(row & 7) * 4 + (k & 3)]->a[(row >> 3) + 2 * (k >> 2)];
          const Product& p = *g[n * 4 + (k & 3)];
          const u32 y = k < 4 ? p.b0 : p.b1;
          if ((x | y) & 0x1fff) machine::fail("an operand of tf32 that is not rounded");
          sum += __uint_as_float(x) * __uint_as_float(y);
        }
        g[(row & 7) * 4 + n / 2]->c[2 * (row >> 3) + (n & 1)] += sum;
      }
  });
}

INLINE u64 descriptor(u32 at, u32 lead, u32 stride) {
  return (u64)((at & 0x3ffff) >> 4) | ((u64)(lead >> 4) << 16) | ((u64)(stride >> 4) << 32) | (1ull << 62);
}
// Where element k of row (or column) n of an operand in shared memory lies: `along` k, rows of 128 bytes, or along n. Eight
// in that direction are neighbours.
INLINE u32 place(u64 d, int n, int k, bool along_n) {
  const u32 start = (u32)(d & 0x3fff) << 4, lead = (u32)(d >> 16 & 0x3fff) << 4, stride = (u32)(d >> 32 & 0x3fff) << 4;
  if (d >> 62 != 1) machine::fail("a descriptor without 128-byte swizzle");
  const u32 a = along_n ? start + (n / 64) * lead + (n % 64) * 2 + (k / 8) * stride + (k % 8) * 128
                        : start + (n / 8) * stride + (n % 8) * 128 + k * 2;
  return a ^ ((a >> 7 & 7) << 4);
}

struct Wide { float* d; const u32* a; u64 left, right; int more; };
// d [64, N] (+)= left [64, 16] right [16, N], a warp its 16 rows. Left in registers (a) or in shared memory, stored [k][m]
template <int N, bool along_n, bool FP16 = false> INLINE void wide(float* d, const u32* a, u64 left, u64 right, int more) {
  Wide mine{d, a, left, right, more};
  machine::together("wgmma", mine, [](Wide** g) {
    const int rows = (machine::thread() / 32 & 3) * 16;
    float x[16][16], y[16][N], z[N];
    if (g[0]->a) left_of<FP16>(g, x);
    else
      for (int k = 0; k < 16; k++)
        for (int m = 0; m < 16; m += 8) eight_at<FP16>(place(g[0]->left, rows + m, k, true), &x[m][k], 16);
    if (along_n) {
      for (int k = 0; k < 16; k++)
        for (int n = 0; n < N; n += 8) eight_at<FP16>(place(g[0]->right, n, k, true), &y[k][n], 1);
    } else {
      for (int n = 0; n < N; n++)
        for (int k = 0; k < 16; k += 8) eight_at<FP16>(place(g[0]->right, n, k, false), &y[k][n], N);
    }
    for (int m = 0; m < 16; m++) {
      row_times<16, N>(x[m], y, z);
      for (int n = 0; n < N; n++) {
        Wide& p = *g[(m & 7) * 4 + (n & 7) / 2];
        float& to = p.d[(n / 8) * 4 + 2 * (m >> 3) + (n & 1)];
        to = p.more ? to + z[n] : z[n];
      }
    }
  });
}
INLINE void wg_fence() {}
INLINE void wg_commit() {}
template <class Registers> INLINE void wg_settled(Registers&) {}
template <class Registers> INLINE void wg_wait(Registers&) {}
INLINE void wgmma16(float (&d)[8], const u32* a, u64 b, int more) { wide<16, false>(d, a, 0, b, more); }
template <bool FP16 = false> INLINE void wgmma32(float (&d)[16], const u32* a, u64 b, int more) { wide<32, false, FP16>(d, a, 0, b, more); }
template <bool FP16 = false> INLINE void wgmma64(float (&d)[32], const u32* a, u64 b, int more) { wide<64, false, FP16>(d, a, 0, b, more); }
template <bool FP16 = false> INLINE void wgmma128(float (&d)[16][4], const u32* a, u64 b) { wide<128, true, FP16>(&d[0][0], a, 0, b, 1); }
INLINE void wgmma128_back(float (&d)[16][4], const u32* a, u64 b) { wide<128, false>(&d[0][0], a, 0, b, 1); }
INLINE void wgmma16(float (&d)[8], u64 a, u64 b, int more) { wide<16, false>(d, nullptr, a, b, more); }
template <bool FP16 = false> INLINE void wgmma32(float (&d)[16], u64 a, u64 b, int more) { wide<32, false, FP16>(d, nullptr, a, b, more); }
template <bool FP16 = false> INLINE void wgmma64(float (&d)[32], u64 a, u64 b, int more) { wide<64, false, FP16>(d, nullptr, a, b, more); }
