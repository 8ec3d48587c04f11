// What the fused kernels of the rule DPLR share. Chunks of 32 tokens, K = V = 128; gates in bf16.
#pragma once
#define C 32  // tokens a chunk
#define D 128 // channels of a head
#define GATE_BF16 1
#define OUTER a.outer
#include "half.cuh"

struct Args {
  const u16 *q, *k, *v;  // [tokens, HK, 128], v [tokens, H, 128], bf16
  const u16 *a, *b, *g;  // [tokens, H, 128], bf16
  u16* o;                // [tokens, H, 128], or null: nobody wants it
  const float* S0;       // [pieces, H, K, V] or null: zero
  float* S1;             // [pieces, H, K, V] or null: nobody wants it
  const int* table;      // [count, 6], see spans/runs; null: rows of T tokens, cut evenly
  const int* cu;         // [pieces + 1] beside a table
  int* flags;            // [2 * count * H + 3 + count * heads], zero at first: see `decided`, `done` and `ticket`
  float* states;         // [count, H, 128 * 128]
  float* parts;          // [count, H, 2, 128 * 128], see `combine`; null: spans do not
  u16* kept_S;           // [chunks, heads, 128 * 128], the state before each chunk as `state_place` lays it out
  u16* kept_Y;           // [chunks, heads, 32 * 128], Y of its tokens, see `tile_place`
  u16* kept_P;           // [chunks, heads, 4 * 32 * 32], P of k, P of b, L, M, see `pair_place`
  int T, H, HK, count, length, pieces;
  int first_head, heads; // this launch's
  int pick;              // whether spans that wait go first, see `choose`
  int together;          // how many spans that wait combine
  int outer;             // tokens of the span that goes over its own once, see `span_of`
  float scale;
};

INLINE u64 kept_at(const Args& a, int chunk, int h) { return (u64)chunk * a.heads + h - a.first_head; }

// Where 8 channels of a token of two lie that are one operand of wgmma: the first's rows are 0 to 31, the other's 32 to 63.
#define BOTH 8192   // from 64 channels to the others
#define SECOND 4096 // from the first's rows to the other's
INLINE u32 both_place(int row, int chunk) { return (u32)((chunk >> 3) * BOTH + row * 128) + swz(row, chunk & 7); }

// Every span but one that begins (or, back, ends) a piece waits: nothing bounds what a token leaves of a state.
INLINE int waiting(const Args& a, bool outer, int s, int h) {
  if (outer) return 0;
  if (threadIdx.x == 0) store_release(decided(a, s, h), 2);
  return -1;
}
