// What Hopper's instructions look like from CUDA C++, without headers of the toolkit, so that NVRTC alone compiles it.
// Addresses of shared memory are 32-bit numbers. bf16, or with FP16 fp16, travels as bits, two in a u32, the first in the
// low half.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

#define INLINE __device__ __forceinline__
#define LOG2E 1.4426950408889634f

// -- numbers -------------------------------------------------------------------------------------------------------

INLINE int uniform(int x) { return __shfl_sync(~0u, x, 0); }  // tells the compiler that a warp agrees
INLINE float from_half(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
template <bool FP16 = false> INLINE float lo(u32 x) {
  if constexpr (FP16) return from_half((u16)(x & 0xffff));
  return __uint_as_float(x << 16);
}
template <bool FP16 = false> INLINE float hi(u32 x) {
  if constexpr (FP16) return from_half((u16)(x >> 16));
  return __uint_as_float(x & 0xffff0000u);
}
INLINE float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
INLINE float lg2(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
template <bool FP16 = false> INLINE u32 pack(float first, float second) {
  u32 x;
  if constexpr (FP16) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(second), "f"(first));
  else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(second), "f"(first));
  return x;
}
INLINE u32 times_half(u32 x, u32 y) {  // of two fp16
  u32 z;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
INLINE u32 larger(u32 x, u32 y) {  // of two numbers of 16 bits each
  u32 z;
  asm("max.u16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
INLINE u32 warp_max(u32 x) {
  u32 y;
  asm("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}

// -- shared memory -------------------------------------------------------------------------------------------------

INLINE u32 smem_addr(const void* p) { return (u32)__cvta_generic_to_shared(p); }
INLINE u32 lds32(u32 a) {
  u32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(a) : "memory");
  return x;
}
INLINE float lds(u32 a) { return __uint_as_float(lds32(a)); }
INLINE void lds64(u32* r, u32 a) {
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(a) : "memory");
}
INLINE void lds128(u32* r, u32 a) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
INLINE void sts16(u32 a, u16 x) { asm volatile("st.shared.b16 [%0], %1;" ::"r"(a), "h"(x) : "memory"); }
INLINE void sts32(u32 a, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(a), "r"(x) : "memory"); }
INLINE void sts64(u32 a, u32 x, u32 y) {
  asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(a), "r"(x), "r"(y) : "memory");
}
INLINE void sts128(u32 a, const float* x) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(a), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
INLINE void sts128(u32 a, const u32* x) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(a), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
INLINE void stg128(void* p, const u32* x) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
INLINE void stg128_if(void* p, const u32* x, bool live) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n@p st.global.v4.b32 [%0], {%1,%2,%3,%4};\n}"
               ::"l"(p), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"((int)live) : "memory");
}
INLINE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }  // a line of 128 bytes, to L2
INLINE void cp16(u32 to, const void* from, bool live) {  // 16 bytes beside the computation; zeros where not live
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(live ? 16 : 0) : "memory");
}
INLINE void cp_arrive(u32 bar) {  // at a barrier, once this thread's copies so far are done
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}
INLINE void cp_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
INLINE void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }  // before wgmma reads stores

// Four 8 x 8 tiles, a row of one by each lane's address; trans: turned over.
INLINE void ldm(u32* r, u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
INLINE void ldm_trans(u32* r, u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a) : "memory");
}
INLINE void stm(const u32* r, u32 a) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(a), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
INLINE void stm_trans(const u32* r, u32 a) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
               ::"r"(a), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// -- barriers ------------------------------------------------------------------------------------------------------

INLINE void bar_init(u32 a, int n) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(a), "r"(n) : "memory"); }
INLINE void bar_over(u32 a) { asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(a) : "memory"); }  // before another bar_init
INLINE void bars_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }  // behind the last bar_init
INLINE void bar_arrive(u32 a) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(a) : "memory"); }
INLINE void bar_wait(u32 a, u32 phase) {
  asm volatile("{\n.reg .pred p;\nL_%=:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@!p bra L_%=;\n}"
               ::"r"(a), "r"(phase) : "memory");
}
INLINE bool bar_passed(u32 a, u32 phase) {  // whether bar_wait would not wait
  u32 x;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(x) : "r"(a), "r"(phase) : "memory");
  return x;
}
INLINE void bar_expect(u32 a, u32 bytes) {  // arrive, and wait for so many bytes of copies
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(a), "r"(bytes) : "memory");
}
INLINE void copy_in(u32 to, const void* from, u32 bytes, u32 bar) {  // by the copy engine; `bar` hears of it
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
INLINE void copy_out(void* to, u32 from, u32 bytes) {  // the other way; `copied_out` waits for those of this thread
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
INLINE void copy_out_all() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }  // behind the last copy_out
INLINE void written_out() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }  // and is there, for whom this thread tells
INLINE void copies_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }  // before copies read what this thread was told is there
INLINE void copied_out() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }  // what was read may be written
// 512 threads, where there are no pairs
INLINE void between_all() { asm volatile("bar.sync 3, 512;" ::: "memory"); }
INLINE void between_warps() { asm volatile("bar.sync 1, 256;" ::: "memory"); }  // of the first 256 threads that come
INLINE void between_others() { asm volatile("bar.sync 2, 256;" ::: "memory"); }  // of other 256, where there are no pairs
// The two warps of a pair; `pair`: its number, from 0 to 13
INLINE void between_two(int pair) { asm volatile("bar.sync %0, 64;" ::"r"(pair + 2) : "memory"); }
INLINE int load_acquire(const int* p) {
  int x;
  asm volatile("ld.acquire.gpu.b32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
INLINE void store_release(int* p, int x) {
  asm volatile("st.release.gpu.b32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
INLINE void add_release(int* p, int x) { asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(x) : "memory"); }
// The same where other devices read and write, too
INLINE void load_anywhere(u32* r, const u32* p) {
  asm volatile("ld.relaxed.sys.global.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "l"(p) : "memory");
}
INLINE int swap_anywhere(int* p, int from, int to) {  // what was there, and what was written before it
  int x;
  asm volatile("atom.acquire.sys.global.cas.b32 %0, [%1], %2, %3;" : "=r"(x) : "l"(p), "r"(from), "r"(to) : "memory");
  return x;
}
INLINE void store_release_anywhere(int* p, int x) {
  asm volatile("st.release.sys.global.b32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
INLINE u64 nanoseconds() {
  u64 x;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(x));
  return x;
}
INLINE void pause(int n) {  // cycles; none if below 1
  u32 from, now;
  asm volatile("mov.u32 %0, %clock;" : "=r"(from));
  do asm volatile("mov.u32 %0, %clock;" : "=r"(now));
  while ((int)(now - from) < n);
}

// A launch may begin before the one before it has ended (programmatic dependent launch; `CudaKernel.early`): once all programs of
// that have come to `next_launch` or ended. It finds what that has written behind `launch_before`, by this thread and those that hear
// of it; what was written before that launch, which is not early itself, is there from the start. Elsewhere `launch_before` does nothing.
INLINE void next_launch() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
INLINE void launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Registers of each thread of a warpgroup, from here on
template <int N> INLINE void registers_down() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> INLINE void registers_up() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// -- products ------------------------------------------------------------------------------------------------------

// c [16, 8] += a [16, 16] b [16, 8]
#define MMA(TYPE)                                                                                                       \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "    \
               "{%0,%1,%2,%3};"                                                                                         \
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <bool FP16 = false> INLINE void mma(float* c, const u32* a, u32 b0, u32 b1) {
  if constexpr (FP16) MMA("f16");
  else MMA("bf16");
}

// c [16, 8] += a [16, 8] b [8, 8] of tf32
INLINE void mma_tf32(float* c, const u32* a, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
INLINE u32 as_tf32(float x) {  // rounded
  u32 y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

#define F4(x) "+f"((x)[0]), "+f"((x)[1]), "+f"((x)[2]), "+f"((x)[3])
#define F8(x) F4(x), F4((x) + 4)
#define F16(x) F4(x), F4((x) + 4), F4((x) + 8), F4((x) + 12)
#define F32(x) F16(x), F16((x) + 16)
#define F64(x) F4(x[0]), F4(x[1]), F4(x[2]), F4(x[3]), F4(x[4]), F4(x[5]), F4(x[6]), F4(x[7]), F4(x[8]), F4(x[9]), \
               F4(x[10]), F4(x[11]), F4(x[12]), F4(x[13]), F4(x[14]), F4(x[15])

INLINE void wg_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
INLINE void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait for what was committed (`wg_wait`). Registers are named behind the wait (`wg_settled`), so that nothing reads them before it.
INLINE void wg_settled(u32 (&a)[4]) { asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory"); }
INLINE void wg_settled(float (&d)[8]) { asm volatile("" : F8(d)::"memory"); }
INLINE void wg_settled(float (&d)[16]) { asm volatile("" : F16(d)::"memory"); }
INLINE void wg_settled(float (&d)[32]) { asm volatile("" : F32(d)::"memory"); }
INLINE void wg_settled(float (&d)[16][4]) { asm volatile("" : F64(d)::"memory"); }
template <class Registers> INLINE void wg_wait(Registers& d) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  wg_settled(d);
}
// d [64, 32] = a [64, 16] b [16, 32] (`more`: + d); b stored [n][k]. A warpgroup's, a and d in registers.
#define WGMMA32(TYPE)                                                                                                 \
  asm volatile(                                                                                                       \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"                                                                    \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "\
      "{%16,%17,%18,%19}, %20, p, 1, 1, 0;\n}"                                                                        \
      : F16(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more))
template <bool FP16 = false> INLINE void wgmma32(float (&d)[16], const u32* a, u64 b, int more) {
  if constexpr (FP16) WGMMA32("f16");
  else WGMMA32("bf16");
}
#define WGMMA64(TYPE)                                                                                                 \
  asm volatile(                                                                                                       \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                                                    \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"\
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "                                            \
      "{%32,%33,%34,%35}, %36, p, 1, 1, 0;\n}"                                                                        \
      : F32(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more))
template <bool FP16 = false> INLINE void wgmma64(float (&d)[32], const u32* a, u64 b, int more) {  // d [64, 64]
  if constexpr (FP16) WGMMA64("f16");
  else WGMMA64("bf16");
}
// d [64, 128] += a [64, 16] b [16, 128]; b stored [k][n]
#define WGMMA128(TYPE, BY_K)                                                                                                \
  asm volatile(                                                                                                       \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"\
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,"\
      "%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "                            \
      "{%64,%65,%66,%67}, %68, 1, 1, 1, " BY_K ";"                                                                         \
      : F64(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
template <bool FP16 = false> INLINE void wgmma128(float (&d)[16][4], const u32* a, u64 b) {
  if constexpr (FP16) WGMMA128("f16", "1");
  else WGMMA128("bf16", "1");
}
// The same of b stored [n][k]
INLINE void wgmma128_back(float (&d)[16][4], const u32* a, u64 b) { WGMMA128("bf16", "0"); }
// d [64, 16] = a [64, 16] b [16, 16] (`more`: + d); b stored [n][k]
INLINE void wgmma16(float (&d)[8], const u32* a, u64 b, int more) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, 1, 0;\n}"
      : F8(d) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more));
}
// The same with a in shared memory, stored [k][m]
INLINE void wgmma16(float (&d)[8], u64 a, u64 b, int more) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, %8, %9, p, 1, 1, 1, 0;\n}"
      : F8(d) : "l"(a), "l"(b), "r"(more));
}
#define WGMMA32_SHARED(TYPE)                                                                                          \
  asm volatile(                                                                                                       \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"                                                                    \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "\
      "%16, %17, p, 1, 1, 1, 0;\n}"                                                                                   \
      : F16(d) : "l"(a), "l"(b), "r"(more))
template <bool FP16 = false> INLINE void wgmma32(float (&d)[16], u64 a, u64 b, int more) {
  if constexpr (FP16) WGMMA32_SHARED("f16");
  else WGMMA32_SHARED("bf16");
}
#define WGMMA64_SHARED(TYPE)                                                                                          \
  asm volatile(                                                                                                       \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                                    \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"\
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, %32, %33, p, 1, 1, 1, 0;\n}"                 \
      : F32(d) : "l"(a), "l"(b), "r"(more))
template <bool FP16 = false> INLINE void wgmma64(float (&d)[32], u64 a, u64 b, int more) {
  if constexpr (FP16) WGMMA64_SHARED("f16");
  else WGMMA64_SHARED("bf16");
}
// Of an operand in shared memory with 128-byte swizzle: bytes between its parts (PTX ISA, matrix descriptor format).
INLINE u64 descriptor(u32 at, u32 lead, u32 stride) {
  return (u64)((at & 0x3ffff) >> 4) | ((u64)(lead >> 4) << 16) | ((u64)(stride >> 4) << 32) | (1ull << 62);
}
