// A state on its way through a span, [V, K] in fp32 by eight warps, 16 of its rows a warp, and as operands of products:
//   S [16 tiles of 8 columns][4]: rows v0 + lane / 4 (and 8 more), columns 2 (lane % 4) and 1 more of each tile
// A file that includes this says before it how many channels a head has (D).
#pragma once
#include "hopper.cuh"

// Where 16 bytes `chunk` of a row of 128 bytes lie, so that eight rows' do not share banks.
INLINE u32 swz(int row, int chunk) { return (u32)((chunk ^ (row & 7)) << 4); }
// Where the next chunks 0, 2, 4 and 6 of such a row lie, given where its chunk 0 or 1 does (`at`): one bit pattern each, found once
INLINE void turned(u32 (&to)[4], u32 at) {
#pragma unroll
  for (int ks = 0; ks < 4; ks++) to[ks] = at ^ (ks << 5);
}

// Where 8 channels of K, chunk 0 to 15, of row v of a state [V, K] lie: an operand of wgmma as it is.
INLINE u32 state_place(int v, int chunk) { return (u32)((chunk >> 3) * 16384 + v * 128) + swz(v, chunk & 7); }

INLINE void begin_with(float (&S)[16][4], const float* from, int w, int lane) {  // [K, V]; null: zero
  const int tq = lane & 3, v = w * 16 + (lane >> 2);
#pragma unroll
  for (int nt = 0; nt < 16; nt++)
#pragma unroll
    for (int e = 0; e < 4; e++) S[nt][e] = from ? from[(nt * 8 + 2 * tq + (e & 1)) * D + v + (e >> 1) * 8] : 0.f;
}

INLINE void put_state(const float (&S)[16][4], float* to, int w, int lane) {  // [K, V]
  const int tq = lane & 3, v = w * 16 + (lane >> 2);
#pragma unroll
  for (int nt = 0; nt < 16; nt++)
#pragma unroll
    for (int e = 0; e < 4; e++) to[(nt * 8 + 2 * tq + (e & 1)) * D + v + (e >> 1) * 8] = S[nt][e];
}

// Where state i of many lies, as these warps hold it
INLINE float4* held(const float* all, u64 i, int w, int lane) { return (float4*)(all + i * (D * D)) + w * 32 + lane; }
INLINE void store(const float (&S)[16][4], float4* to) {
#pragma unroll
  for (int nt = 0; nt < 16; nt++) to[nt * 256] = make_float4(S[nt][0], S[nt][1], S[nt][2], S[nt][3]);
}
INLINE void load(float (&S)[16][4], const float4* from) {
#pragma unroll
  for (int nt = 0; nt < 16; nt++) {
    const float4 y = __ldcg(from + nt * 256);
    S[nt][0] = y.x; S[nt][1] = y.y; S[nt][2] = y.z; S[nt][3] = y.w;
  }
}

// -- what a span does to a state, Phi: the same registers, [K, K] ------------------------------------------------------

INLINE void identity(float (&S)[16][4], int w, int lane) {
  const int row = w * 16 + (lane >> 2), column = 2 * (lane & 3);
#pragma unroll
  for (int nt = 0; nt < 16; nt++)
#pragma unroll
    for (int e = 0; e < 4; e++) S[nt][e] = row + (e >> 1) * 8 == nt * 8 + column + (e & 1);
}
// Phi^T, [K, K] in two bf16 parts of 32 KB, to `at`, where nothing else lies as yet
INLINE void keep_map(const float (&S)[16][4], u32 at, int w, int lane) {
  between_warps();  // all slots are empty
#pragma unroll
  for (int nt = 0; nt < 16; nt++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int r = w * 16 + (lane >> 2) + e * 8;
      const u32 to = at + (nt >> 3) * 16384 + r * 128 + swz(r, nt & 7) + (lane & 3) * 4;
      const u32 high = pack(S[nt][2 * e], S[nt][2 * e + 1]);
      sts32(to, high);
      sts32(to + 32768, pack(S[nt][2 * e] - lo(high), S[nt][2 * e + 1] - hi(high)));
    }
  proxy_fence();
  between_warps();
}

// S += a state or a map times the map at `at`, on the way of gradients its transpose; read(nt): four numbers of tile nt
template <bool FORWARD, class Read> INLINE void add_product(float (&S)[16][4], u32 at, Read read) {
#pragma unroll
  for (int half = 0; half < 2; half++) {  // of what is read: registers do not hold all of it
    u32 high[4][4], low[4][4];
#pragma unroll
    for (int nt = 0; nt < 8; nt++) {
      const float4 y = read(8 * half + nt);
      u32 *x = high[nt >> 1] + 2 * (nt & 1), *z = low[nt >> 1] + 2 * (nt & 1);
      x[0] = pack(y.x, y.y); x[1] = pack(y.z, y.w);
      z[0] = pack(y.x - lo(x[0]), y.y - hi(x[0])); z[1] = pack(y.z - lo(x[1]), y.w - hi(x[1]));
    }
    wg_fence();
#pragma unroll
    for (int ks = 0; ks < 4; ks++) {
      auto place = [&](u32 part) {
        return FORWARD ? descriptor(part + (4 * half + ks) * 2048, 16384, 1024) : descriptor(part + half * 16384, 16, 1024) + ks * 2;
      };
      auto add = [&](const u32* x, u64 y) {
        if (FORWARD) wgmma128(S, x, y);
        else wgmma128_back(S, x, y);
      };
      add(high[ks], place(at));
      add(low[ks], place(at));
      add(high[ks], place(at + 32768));
    }
    wg_commit();
    wg_wait(S);
  }
}
// The same of what lies at `from`, see `held`
INLINE void add_mapped(float (&S)[16][4], const float4* from, u32 at) {
  add_product<true>(S, at, [&](int nt) { return __ldcg(from + nt * 256); });
}

// -- as operands --------------------------------------------------------------------------------------------------------

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
