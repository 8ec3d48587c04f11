// A GPU's programs on a CPU: every thread of a program a fiber, all in one thread of the host, which run until they wait
// for each other. What threads of a warp do together is done when the last of them comes; a program that stands still is
// an error with the place where each warp waits. `seed` draws the order of the threads, so that what needs a barrier and
// has none is found by other orders.
//
// Included before everything else, since the kernels define macros of one letter. Headers that take long to compile are not
// asked for: every kernel is compiled with this.
#pragma once
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <cmath>
#include <memory>
#include <string>
#include <vector>
#include <ucontext.h>

namespace machine {

constexpr uint32_t BASE = 1024;  // the address of the first byte of shared memory
constexpr size_t STACK = 256 * 1024;

struct Failure { std::string text; };

struct Bar { uint32_t address = 0, count = 0, pending = 0, phase = 0; int64_t bytes = 0; };  // address 0: none

struct Warp { const void* given[32]; const char* doing = nullptr; int there = 0; uint64_t generation = 0; };

struct Together { int there = 0, threads = 0; uint64_t generation = 0; };  // threads: for how many the first to come waits

struct Program;

struct Place { void* words[5]; };  // what __builtin_setjmp keeps: where a function goes on, once it is jumped to

struct Asked {
  bool (*ready)(const void*);  // whether what a fiber waits for is there: it goes on then. None: it does not wait
  const void* of;              // what `ready` is given
};

struct Fiber {
  ucontext_t start;
  Place at;
  std::unique_ptr<char[]> stack;
  Program* program = nullptr;
  int thread = 0;
  bool begun = false, over = false;
  const char* waits = "";
};

struct Program {
  int number;
  std::vector<char> shared;
  std::vector<Fiber> fibers;
  std::vector<Asked> asked;  // of each fiber
  std::vector<Warp> warps;
  Bar bars[256];
  Together barriers[16];  // by number; 0: __syncthreads
  int over = 0;
  bool waited = false;  // whether a thread of it has waited for the launch before
};

struct Late { void* to; const void* from; uint64_t bytes; };

struct Machine {
  void (*start)(const void*);  // the kernel, given `kernel`
  const void* kernel;
  std::vector<Late> late_writes;  // of the launch before, made as late as they may be: when a thread waits for it
  bool early = false;  // whether this launch began before that one had ended
  int programs = 0;    // of this launch
  Fiber* now = nullptr;
  Place home;
  uint64_t progress = 0;
  std::string failure;
  bool late = false;  // whether products of a warpgroup are made when they are waited for
};

static Machine the_machine;
inline Machine& it() { return the_machine; }
inline Program& here() { return *it().now->program; }
inline int thread() { return it().now->thread; }

// In a function of its own, and no compiler may look through those that come back by it.
[[noreturn]] __attribute__((noipa)) inline void jump(Place& to) { __builtin_longjmp(to.words, 1); }
__attribute__((noipa)) inline void leave() {
  if (!__builtin_setjmp(it().now->at.words)) jump(it().home);
}
[[noreturn]] __attribute__((noinline)) inline void fail(std::string text) {
  it().failure = "program " + std::to_string(here().number) + ", thread " + std::to_string(thread()) + ": " + text;
  jump(it().home);
}
// What the launch before writes is asked for.
inline void written_before() {
  if (it().early && !here().waited) fail("flags before the launch that writes them is waited for");
}
inline void write_late() {
  for (const Late& x : it().late_writes) memcpy(x.to, x.from, x.bytes);
  it().late_writes.clear();
}
template <class Ready> inline void wait_for(const char* what, const Ready& ready) {
  if (!ready()) {
    Fiber& f = *it().now;
    Asked& asked = f.program->asked[f.thread];
    f.waits = what;
    asked = {[](const void* of) { return (*(const Ready*)of)(); }, &ready};
    leave();
    f.waits = "";
    asked = {};
  }
  it().progress++;
}

// All 32 threads of a warp: `work` gets what each gave, once.
template <class Given, class Work> inline void together(const char* doing, Given& given, Work work) {
  Warp& w = here().warps[thread() / 32];
  if (w.there && w.doing != doing && strcmp(w.doing, doing)) fail(std::string("a warp's threads do ") + w.doing + " and " + doing);
  w.doing = doing;
  w.given[thread() % 32] = &given;
  const uint64_t mine = w.generation;
  if (++w.there < 32) {
    wait_for(doing, [&] { return w.generation != mine; });
    return;
  }
  Given* g[32];
  for (int i = 0; i < 32; i++) g[i] = (Given*)w.given[i];
  work(g);
  w.there = 0;
  w.generation++;
  it().progress++;
}
// At barrier `number`, for so many threads, or for all that there are (`threads` 0). A GPU takes calls for other counts as illegal, or
// parts threads.
inline void barrier(int number, int threads, const char* what) {
  Together& b = here().barriers[number];
  if (b.there && b.threads != threads)
    fail(std::string(what) + ": barrier " + std::to_string(number) + " is waited at for " + std::to_string(b.threads) + " threads and for " + std::to_string(threads));
  b.threads = threads;
  const uint64_t mine = b.generation;
  if (++b.there < (threads ? threads : (int)here().fibers.size())) return wait_for(what, [&] { return b.generation != mine; });
  b.there = 0; b.generation++; it().progress++;
}

[[noreturn]] __attribute__((noinline)) inline void outside(uint32_t address, uint32_t bytes) {
  fail("shared memory " + std::to_string(address) + ", " + std::to_string(bytes) + " bytes of " + std::to_string(here().shared.size()));
}
inline char* at(uint32_t address, uint32_t bytes, uint32_t aligned = 1) {
  auto& s = here().shared;
  if (address < BASE || address + bytes > BASE + s.size() || address % aligned) outside(address, bytes);
  return s.data() + (address - BASE);
}

inline Bar* find_bar(uint32_t address) {
  for (Bar& b : here().bars)
    if (b.address == address) return &b;
  return nullptr;
}
[[noreturn]] __attribute__((noinline)) inline void no_bar(uint32_t address) { fail("no barrier at " + std::to_string(address)); }
inline Bar& bar(uint32_t address) {
  Bar* found = find_bar(address);
  if (!found) no_bar(address);
  return *found;
}
inline void new_bar(uint32_t address, uint32_t count) {
  Bar* b = find_bar(address);
  if (!b && !(b = find_bar(0))) fail("more barriers than this machine has");
  *b = Bar{address, count, count};
}
inline void settle(Bar& b) {
  if (b.pending || b.bytes) return;
  b.phase ^= 1;
  b.pending = b.count;
  it().progress++;
}

inline void body() {
  it().start(it().kernel);
  it().now->over = true;
  here().asked[thread()] = {[](const void*) { return false; }, nullptr};
  here().over++;
  it().progress++;
  jump(it().home);
}

__attribute__((noipa)) inline void resume(Fiber& f) {
  it().now = &f;
  if (__builtin_setjmp(it().home.words)) return;
  if (f.begun) jump(f.at);
  f.begun = true;
  setcontext(&f.start);
}

inline uint32_t drawn(uint32_t& seed) {  // the next of a sequence (xorshift)
  seed ^= seed << 13;
  seed ^= seed >> 17;
  return seed ^= seed << 5;
}

// `programs` of `threads` each, `beside` of them at a time. An empty string, or what failed.
template <class Kernel>
std::string run(const Kernel& kernel, int programs, int threads, int shared, int beside, unsigned seed) {
  Machine& m = it();
  m.programs = programs;
  m.start = [](const void* of) { (*(const Kernel*)of)(); };
  m.kernel = &kernel;
  m.failure = "";
  std::vector<std::unique_ptr<Program>> running;
  std::vector<std::unique_ptr<char[]>> stacks;  // of programs that are over
  std::vector<int> order(threads);
  int next = 0;
  uint64_t seen = m.progress;
  int still = 0;
  while (next < programs || !running.empty()) {
    while ((int)running.size() < beside && next < programs) {
      auto p = std::make_unique<Program>();
      p->number = next++;
      p->shared.assign(shared, (char)0xff);  // NaN
      p->warps.resize(threads / 32);
      p->fibers.resize(threads);
      p->asked.resize(threads);
      for (int t = 0; t < threads; t++) {
        Fiber& f = p->fibers[t];
        f.program = p.get();
        f.thread = t;
        if (stacks.empty()) stacks.emplace_back(new char[STACK]);
        f.stack = std::move(stacks.back());
        stacks.pop_back();
        getcontext(&f.start);
        f.start.uc_stack.ss_sp = f.stack.get();
        f.start.uc_stack.ss_size = STACK;
        f.start.uc_link = nullptr;
        makecontext(&f.start, body, 0);
      }
      running.push_back(std::move(p));
    }
    for (auto& p : running) {
      for (int t = 0; t < threads; t++) order[t] = t;
      for (int t = threads; seed && t > 1; t--) std::swap(order[t - 1], order[drawn(seed) % t]);
      for (int t : order)
        if (const Asked& asked = p->asked[t]; !asked.ready || asked.ready(asked.of)) {
          resume(p->fibers[t]);
          if (!m.failure.empty()) return m.failure;
        }
    }
    for (size_t i = running.size(); i-- > 0;)
      if (running[i]->over == threads) {
        for (Fiber& f : running[i]->fibers) stacks.push_back(std::move(f.stack));
        running.erase(running.begin() + i);
      }
    still = m.progress == seen ? still + 1 : 0;
    seen = m.progress;
    if (still > 1000) {
      std::string text = "nothing goes on:";
      for (auto& p : running)
        for (int w = 0; w < threads / 32; w++)
          text += " program " + std::to_string(p->number) + " warp " + std::to_string(w) + " " +
                  (p->fibers[32 * w].over ? "is over" : p->fibers[32 * w].waits) + ";";
      return text;
    }
  }
  return "";
}

}  // namespace machine

// -- what CUDA C++ has of itself -------------------------------------------------------------------------------------

#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __shared__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct float4 { float x, y, z, w; };
struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct ThreadIndex { struct { operator int() const { return machine::thread(); } } x; };
static ThreadIndex threadIdx;
struct ProgramIndex { struct { operator int() const { return machine::here().number; } } x; };
static ProgramIndex blockIdx;
struct ProgramCount { struct { operator int() const { return machine::it().programs; } } x; };
static ProgramCount gridDim;
__align__(1024) char smem[1];  // stands for a program's shared memory

inline float __uint_as_float(uint32_t x) { float y; memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { return __uint_as_float((uint32_t)x); }
inline uint32_t __float_as_uint(float x) { uint32_t y; memcpy(&y, &x, 4); return y; }
inline float __log2f(float x) { return log2f(x); }
inline int min(int x, int y) { return x < y ? x : y; }
inline int max(int x, int y) { return x > y ? x : y; }
template <class Value> inline Value __ldcg(const Value* p) { return *p; }
inline int __clzll(uint64_t x) { return x ? __builtin_clzll(x) : 64; }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int atomicAdd(int* p, int x) { machine::written_before(); const int before = *p; *p += x; machine::it().progress++; return before; }
inline float atomicAdd(float* p, float x) { const float before = *p; *p += x; machine::it().progress++; return before; }

template <class Value> struct Passed { Value value; int from; Value found; };
template <class Value> inline Value passed(Value x, int from) {
  Passed<Value> mine{x, from, x};
  machine::together("shuffle", mine, [](Passed<Value>** g) {
    for (int i = 0; i < 32; i++) g[i]->found = g[i]->from < 0 ? g[i]->value : g[g[i]->from & 31]->value;
  });
  return mine.found;
}
template <class Value> inline Value __shfl_sync(unsigned, Value x, int from) { return passed(x, from & 31); }
template <class Value> inline Value __shfl_xor_sync(unsigned, Value x, int with) { return passed(x, (machine::thread() & 31) ^ with); }
template <class Value> inline Value __shfl_up_sync(unsigned, Value x, int by) {
  const int lane = machine::thread() & 31;
  return passed(x, lane >= by ? lane - by : -1);
}
template <class Value> inline Value __shfl_down_sync(unsigned, Value x, int by, int width = 32) {
  const int lane = machine::thread() & 31;
  return passed(x, lane % width + by < width ? lane + by : -1);
}
inline unsigned __ballot_sync(unsigned, int x) {
  Passed<unsigned> mine{x != 0, 0, 0};
  machine::together("ballot", mine, [](Passed<unsigned>** g) {
    unsigned all = 0;
    for (int i = 0; i < 32; i++) all |= g[i]->value << i;
    for (int i = 0; i < 32; i++) g[i]->found = all;
  });
  return mine.found;
}
inline int __any_sync(unsigned mask, int x) { return __ballot_sync(mask, x) != 0; }
inline int __all_sync(unsigned mask, int x) { return !__any_sync(mask, !x); }
inline void __syncwarp() {
  int nothing = 0;
  machine::together("syncwarp", nothing, [](int**) {});
}
inline void __syncthreads() { machine::barrier(0, 0, "syncthreads"); }
