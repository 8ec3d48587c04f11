// The gated delta rule's gradients in one launch, from what gdn_forward.cu with KEEP left: the state S before each chunk, N, P,
// and W = V - e^G k S - B U. Without gates (GATED 0) the delta rule's.
//
// With the names of gdn_forward.cu, B = tril(k k^T * E, -1), U = beta W, and from right to left the gradient dS of the state
// after a chunk:
//
//   dU = e^(GL - G) k dS + scale P^T dO     L = dU + N^T dU     dbeta = sum_V L W     dV = dR = diag(beta) L
//   dP = scale tril(dO U^T) * E             dB = -tril(dR U^T, -1) * E
//   dq = scale e^G dO S^T + dP k            dk = -e^G dR S^T + dB k + (e^(GL - G) U dS^T + dP^T q + dB^T k)
//   dS <- e^GL dS + scale (e^G q)^T dO - (e^G k)^T dR
//
// and with x = q dq + k dk, the part in brackets taken off instead of added, the gradient of g is the sum of x over a chunk's
// tokens from its own on, and of e^GL S dS and of k with the brackets' first term.
//
// A program works through a span of one head from its end to its begin: two warps make what needs nothing but a chunk's own
// tokens, two fetch states and find dB, eight carry dS transposed, [V, K]. A span that is not a piece's last starts up to
// sixteen chunks late from zero where those forget what comes from the right (the bound of gdn.cuh), or with the piece's end;
// else it waits for the span after it, going over its tokens three times as the forward does; or it is `given` what enters, which
// comes of a scan over what a launch with MAPS finds, or (MAILED) is found of that by the span's own program (entering.cuh).
#define WARPS 12
#define PARTS 2 // a span's halves, the second one first
#include "gdn.cuh"

#define MAKERS 2 // warps that make what needs a chunk's own tokens alone
#define SLOTS 3  // chunks under way
// A slot: q, k, then dq, dk (128-byte swizzle, 64 channels a row); dO and dR; W; N, P; dP, dB; e^G, e^(GL - G), beta, G
#define SLOT 50176
#define OFF_Q 0
#define OFF_K 8192
#define OFF_X 16384
#define OFF_W 32768
#define OFF_N 40960
#define OFF_P 43008
#define OFF_DP 45056
#define OFF_DB 47104
#define OFF_E 49152
#define HALF 4096                      // from 64 channels of q and k to the others
#define STATE (SLOTS * SLOT)           // the state before a chunk, [K half][V row][64 channels]
#define ADJOINT (STATE + 32768)        // dS the same way
#define SUMS (ADJOINT + 32768)         // of each warp that carries dS: its part of dbeta
#define DOTS (SUMS + 8 * 128)          // of two chunks: its part of x
#define ENDS (DOTS + 2 * 8 * 128)      // and of what the chunk's end brings
#define BARS (ENDS + 2 * 32)           // of each slot: full, empty, dR there, dB there
#define BARS_S (BARS + SLOTS * 32)     // of the state: full, empty
#define OPEN (BARS_S + 16)         // a barrier: the last of several passes may begin
#define SAID (OPEN + 16)               // the ticket; three words, of which `leave` takes the last; of 16 chunks, then of warps, see `forgetting`
#define HELD (SAID + 144) // two barriers: maps are there, see `enter_span`

struct BackArgs {
  Args a;          // S0: the gradients of the states that leave; S1: those of the states that enter
  const u16* dout; // [tokens, H, 128]
  u16 *dq, *dk, *dv; // dq, dk [tokens, H, 128]
  void* dg;        // like g
  float* dbeta;    // [tokens, H]
};

// Where 8 channels of a token of q or k lie, and of dO (rows 0 to 31) and dR (32 to 63)
INLINE u32 by_key(int row, int chunk) { return (u32)((chunk >> 3) * HALF + row * 128) + swz(row, chunk & 7); }
INLINE u32 by_value(int row, int chunk) { return (u32)((chunk >> 3) * 8192 + row * 128) + swz(row, chunk & 7); }

// -- what needs a chunk's own tokens alone: a warp a chunk -----------------------------------------------------------

// Ask for the rows of 32 tokens from t on; those from `end` on are zero, dO where it is not `wanted`, W for the span's `own`.
INLINE void load_chunk(const BackArgs& b, int t, int end, int chunk, int h, bool wanted, bool own, u32 at, int lane) {
  const Args& a = b.a;
  const int hk = h / (a.H / a.HK), row = lane >> 4, j = lane & 15, live = end - t - row;
  const u64 sk = (u64)a.HK * (D * 2), sv = (u64)a.H * (D * 2);
  const char* q = (const char*)a.q + (u64)(t + row) * sk + hk * (D * 2) + j * 16;
  const char* o = (const char*)b.dout + (u64)(t + row) * sv + h * (D * 2) + j * 16;
  const u64 to_k = (const char*)a.k - (const char*)a.q;
#pragma unroll 2
  for (int i = 0; i < 16; i++) {
    const int r = 2 * i + row;
    const bool ok = 2 * i < live;
    const char* from = ok ? q : (const char*)a.q;
    cp16(at + OFF_Q + by_key(r, j), from, ok);
    cp16(at + OFF_K + by_key(r, j), from + to_k, ok);
    cp16(at + OFF_X + by_value(r, j), ok ? o : (const char*)b.dout, ok && wanted);
    q += 2 * sk; o += 2 * sv;
  }
  const u64 place = kept_at(a, chunk, h);
  const char* pairs = (const char*)(a.kept_pairs + place * (2 * C * C)) + lane * 16;
#pragma unroll 2
  for (int i = 0; i < 8; i++) cp16(at + OFF_N + i * 512 + lane * 16, pairs + i * 512, true);
  if (own) {
    const char* w = (const char*)(a.kept_W + place * (C * D)) + lane * 16;
#pragma unroll 2
    for (int i = 0; i < 16; i++) cp16(at + OFF_W + i * 512 + lane * 16, w + i * 512, true);
  }
}

// Products of rows 16 m to 16 m + 15 of dO or dR (from row `from` of their tile on) with W, times E and `by` and beta: to
// `to`, below the diagonal, and on it if `diagonal`.
INLINE void pair_gradients(int m, int from, float by, bool diagonal, u32 to, u32 at, int lane) {
  const int ra = (lane & 7) + (((lane >> 3) & 1) << 3), ca = lane >> 4;
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1;
  float P[4][4] = {};
  u32 rows[4], columns[4];
  turned(rows, at + OFF_X + by_value(from + 16 * m + ra, ca));
  turned(columns, at + OFF_W + tile_place(rb, cb));
#pragma unroll
  for (int ks = 0; ks < 8; ks++) {
    u32 x[4], w[4];
    ldm(x, rows[ks & 3] + (ks >> 2) * 8192);
    ldm(w, columns[ks & 3] + (ks >> 2) * 4096);
    mma(P[0], x, w[0], w[1]); mma(P[1], x, w[2], w[3]);
    if (m) {
      ldm(w, columns[ks & 3] + (ks >> 2) * 4096 + 2048);
      mma(P[2], x, w[0], w[1]); mma(P[3], x, w[2], w[3]);
    }
  }
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int i = m * 16 + e * 8 + (lane >> 2);
    const float Gi = lds(at + OFF_E + 384 + i * 4);
#pragma unroll
    for (int nt = 0; nt < 4; nt++) {
      if (nt >= 2 + 2 * m) continue;
      const int j = nt * 8 + 2 * (lane & 3);
      u32 beta[2], G[2];
      lds64(beta, at + OFF_E + 256 + j * 4);
      lds64(G, at + OFF_E + 384 + j * 4);
      const bool first = j < i || (j == i && diagonal), second = j + 1 < i || (j + 1 == i && diagonal);
      const float p0 = P[nt][2 * e] * __uint_as_float(beta[0]) * by * ex2(Gi - __uint_as_float(G[0]));
      const float p1 = P[nt][2 * e + 1] * __uint_as_float(beta[1]) * by * ex2(Gi - __uint_as_float(G[1]));
      sts32(to + pair_place(i, nt) + (lane & 3) * 4, pack(first ? p0 : 0.f, second ? p1 : 0.f));
    }
  }
}

// The chunks of `passes` over a span, n each, the last first; of three passes the second is without dO. `first`: the first
// chunk whose gradients are wanted. `early`: before them so many of the piece's first ones, behind which the span's wait if maps are
// `held` where chunks come.
INLINE void produce(const BackArgs& b, const Span& x, int h, int lim, int n, int passes, int first, int early, bool held, u32 base,
                    int w, int lane) {
  const Args& a = b.a;
  for (int c = w; c < early + n * passes; c += MAKERS) {
    const u32 at = base + c % SLOTS * SLOT, full = base + BARS + c % SLOTS * 32;
    if (c >= SLOTS) bar_wait(full + 8, (c / SLOTS - 1) & 1);
#if MAILED
    const int pass = 0, m = c < early ? early - 1 - c - (x.begin - x.piece * a.T) / C : early + n - 1 - c, t = x.begin + m * C;
    if (held && c >= early) bar_wait(base + OPEN, 0);
#else
    const int pass = c / n, m = (pass + 1) * n - 1 - c, t = x.begin + m * C;
    if (pass == 2) bar_wait(base + OPEN, 0);
#endif
    const bool own = c >= first;
    load_chunk(b, t, lim, x.chunk + m, h, pass != 1, own, at, lane);
    const u64 i = (u64)(t + lane) * a.H + h;
    const bool live = t + lane < lim;
    const float beta = live ? beta_at(a, i) : 0.f;
    float G = live ? gate_at(a, i) * LOG2E : 0.f;
#pragma unroll
    for (int m = 1; m < C; m *= 2) {
      const float before = __shfl_up_sync(~0u, G, m);
      if (lane >= m) G += before;
    }
    sts32(at + OFF_E + lane * 4, __float_as_uint(ex2(G)));
    sts32(at + OFF_E + 128 + lane * 4, __float_as_uint(ex2(__shfl_sync(~0u, G, C - 1) - G)));
    sts32(at + OFF_E + 256 + lane * 4, __float_as_uint(beta));
    sts32(at + OFF_E + 384 + lane * 4, __float_as_uint(G));
    cp_wait();
    __syncwarp();
    if (own) {
      pair_gradients(0, 0, a.scale, true, at + OFF_DP, at, lane);
      pair_gradients(1, 0, a.scale, true, at + OFF_DP, at, lane);
    }
    proxy_fence();
    __syncwarp();
    if (lane == 0) bar_arrive(full);
  }
}

// -- two warps: dB, and the first of them states on their way in -----------------------------------------------------

INLINE void fetch(const BackArgs& b, const Span& x, int h, int n, int first, bool held, u32 base, int m, int lane) {
  const u32 bar = base + BARS_S;
  if (held) bar_wait(base + OPEN, 0);
  auto ask = [&](int i) {  // for the state of the i-th chunk of the span's own, once nobody reads the one before it
    if (i) bar_wait(bar + 8, (i - 1) & 1);
    if (lane == 0) {
      bar_expect(bar, 32768);
      copy_in(base + STATE, b.a.kept_S + kept_at(b.a, x.chunk + n - 1 - first - i, h) * (D * D), 32768, bar);
    }
  };
  if (m == 0 && first < n) ask(0);
  for (int c = first; c < n; c++) {
    const u32 at = base + c % SLOTS * SLOT, bars = base + BARS + c % SLOTS * 32;
    bar_wait(bars + 16, (c - first) / SLOTS & 1);
    pair_gradients(m, C, -1.f, false, at + OFF_DB, at, lane);
    __syncwarp();
    if (lane == 0) bar_arrive(bars + 24);
    if (m == 0 && c + 1 < n) ask(c + 1 - first);
  }
}

// The sum of x[lane / 4] over the lanes that have its lane % 4
INLINE float shared_sums(const float (&x)[8], int lane) {
  float y[4], z[2];
#pragma unroll
  for (int i = 0; i < 4; i++) y[i] = (lane & 16 ? x[i + 4] : x[i]) + __shfl_xor_sync(~0u, lane & 16 ? x[i] : x[i + 4], 16);
#pragma unroll
  for (int i = 0; i < 2; i++) z[i] = (lane & 8 ? y[i + 2] : y[i]) + __shfl_xor_sync(~0u, lane & 8 ? y[i] : y[i + 2], 8);
  return (lane & 4 ? z[1] : z[0]) + __shfl_xor_sync(~0u, lane & 4 ? z[0] : z[1], 4);
}

// -- dS, from chunk to chunk: 16 of its rows, [V, K], a warp; and the gradients of 16 channels of K ------------------

// Where a lane of a warp that carries dS finds what it reads in the first slot: of tokens 0 to 15, the others 16 rows on
struct Places {
  u32 pairs, turned_pairs;  // of N, P, dP, dB, and of the same turned over; columns 16 to 31 32 bytes on, exclusive-or
  u32 firsts;               // the first numbers of its tokens
  u32 values, value_row;    // dO, as an operand and by rows; dR 4096 bytes on
  u32 written;              // W
  u32 keys, key_row;        // its channels of q; of k
};
INLINE Places places_of(u32 base, int kc, int w, int lane) {
  const int rb = (lane & 7) + ((lane >> 4) << 3), cb = (lane >> 3) & 1, rt = (lane & 7) + (((lane >> 3) & 1) << 3);
  Places p;
  p.pairs = base + pair_place(rb, cb);
  p.turned_pairs = base + pair_place(rt, lane >> 4);
  p.firsts = base + OFF_E + 8 * (lane & 3);
  p.values = base + OFF_X + by_value(rb, w * 2 + cb);
  p.value_row = base + OFF_X + by_value(lane >> 1, w * 2 + (lane & 1));
  p.written = base + OFF_W + tile_place(rb, w * 2 + cb);
  p.keys = base + by_key(rb, kc + cb);
  p.key_row = base + by_key(lane >> 1, kc + (lane & 1));
  asm volatile("" : "+r"(p.pairs), "+r"(p.turned_pairs), "+r"(p.firsts), "+r"(p.values), "+r"(p.value_row));  // else found in every chunk
  asm volatile("" : "+r"(p.written), "+r"(p.keys), "+r"(p.key_row));
  return p;
}

// Over chunks c0 to `stop` (not included) of those under way, the last of which begins at token `begin`; those before `first`
// only bring dS.
INLINE void walk(float (&S)[16][4], const BackArgs& b, int h, int begin, int end, int c0, int stop, int first, u32 base, int w,
                 int lane) {
  const Args& a = b.a;
  const int kc = (w >> 2) * 8 + (w & 3) * 2;
  const Places p = places_of(base, kc, w, lane);
  const u32 adjoint = base + ADJOINT;
  u32 tile[4];
  turned(tile, adjoint + state_place(w * 16 + (lane & 7) + (((lane >> 3) & 1) << 3), lane >> 4));
  auto write_dg = [&](int t, int i) {  // of the i-th chunk of the span's own, which begins at token t
#if GATED
    if (w != 1) return;
    float x = 0.f, ended = 0.f;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      x += lds(base + DOTS + (i & 1) * 1024 + j * 128 + lane * 4);
      ended += lds(base + ENDS + (i & 1) * 32 + j * 4);
    }
#pragma unroll
    for (int m = 1; m < C; m *= 2) {
      const float right = __shfl_down_sync(~0u, x, m);
      if (lane + m < C) x += right;
    }
    if (t + lane >= end) return;
    const u64 to = (u64)(t + lane) * a.H + h;
#if GATE_BF16
    ((u16*)b.dg)[to] = (u16)(pack(x + ended, 0.f) & 0xffff);
#else
    ((float*)b.dg)[to] = x + ended;
#endif
#endif
  };
  for (int c = c0; c < stop; c++) {
    const int slot = c % SLOTS, t = begin + (stop - 1 - c) * C, i = c - first;
    const u32 shift = uniform(slot * SLOT), at = base + shift, bars = base + BARS + slot * 32, state = base + STATE, bar_s = base + BARS_S;
    const bool own = !MAPS && uniform(c >= first);
    bar_wait(bars, (c / SLOTS) & 1);
    const u64 out = (((u64)(t + (lane >> 1)) * a.H + h) * D + (lane & 1) * 8) * 2, further = (u64)a.H * (16 * D * 2);
    u32 dout[2][4], dr[2][4];
    float trace = 0.f;
    {
      float X[16];
      {
        u32 f[8][4];
        as_operand(f, S);
        wg_fence();
#pragma unroll
        for (int ks = 0; ks < 8; ks++)
          wgmma32(X, f[ks], descriptor(at + OFF_K + (ks >> 2) * HALF, 16, 1024) + (ks & 3) * 2, ks > 0);
        wg_commit();
        if (own) {
#pragma unroll
          for (int ks = 0; ks < 8; ks++) stm(f[ks], tile[ks & 3] + (ks >> 2) * 16384);
        }
      }
      float L[16] = {};
      u32 y[4];
#pragma unroll
      for (int m = 0; m < 2; m++) {
        ldm_trans(dout[m], p.values + shift + m * 2048);
#pragma unroll
        for (int jp = 0; jp <= m; jp++) {
          ldm_trans(y, (p.turned_pairs ^ jp << 5) + shift + OFF_P + m * 1024);
          mma(L + 8 * jp, dout[m], y[0], y[1]); mma(L + 8 * jp + 4, dout[m], y[2], y[3]);
        }
      }
      wg_wait(X);
#pragma unroll
      for (int nt = 0; nt < 4; nt++) {
        u32 e[2];
        lds64(e, p.firsts + shift + 128 + nt * 32);
#pragma unroll
        for (int j = 0; j < 4; j++) L[4 * nt + j] = fmaf(X[4 * nt + j], __uint_as_float(e[j & 1]), a.scale * L[4 * nt + j]);
      }
#pragma unroll
      for (int m = 0; m < 2; m++) {
        u32 f[4];
#pragma unroll
        for (int j = 0; j < 4; j++) f[j] = pack(L[8 * m + 2 * j], L[8 * m + 2 * j + 1]);
#pragma unroll
        for (int jp = 0; jp <= m; jp++) {
          ldm_trans(y, (p.turned_pairs ^ jp << 5) + shift + OFF_N + m * 1024);
          mma(L + 8 * jp, f, y[0], y[1]); mma(L + 8 * jp + 4, f, y[2], y[3]);
        }
      }
#pragma unroll
      for (int nt = 0; nt < 4; nt++) {
        u32 z[2];
        lds64(z, p.firsts + shift + 256 + nt * 32);
        const float b0 = __uint_as_float(z[0]), b1 = __uint_as_float(z[1]);
        dr[nt >> 1][2 * (nt & 1)] = pack(L[4 * nt] * b0, L[4 * nt + 1] * b1);
        dr[nt >> 1][2 * (nt & 1) + 1] = pack(L[4 * nt + 2] * b0, L[4 * nt + 3] * b1);
      }
      if (own) {
#pragma unroll
        for (int m = 0; m < 2; m++) stm_trans(dr[m], p.values + shift + 4096 + m * 2048);
        proxy_fence();
        __syncwarp();
        if (lane == 0) bar_arrive(bars + 16);
        float sums[8];
#pragma unroll
        for (int m = 0; m < 2; m++) {
          u32 z[4];
          lds128(z, p.value_row + shift + 4096 + m * 2048);
          if (t + 16 * m + (lane >> 1) < end) stg128((char*)b.dv + out + m * further + w * 32, z);
          ldm_trans(z, p.written + shift + m * 2048);
          const float* y = L + 8 * m;
          sums[4 * m] = y[0] * lo(z[0]) + y[2] * lo(z[1]); sums[4 * m + 1] = y[1] * hi(z[0]) + y[3] * hi(z[1]);
          sums[4 * m + 2] = y[4] * lo(z[2]) + y[6] * lo(z[3]); sums[4 * m + 3] = y[5] * hi(z[2]) + y[7] * hi(z[3]);
        }
        sts32(base + SUMS + w * 128 + ((lane >> 3) * 8 + (lane & 3) * 2 + ((lane >> 2) & 1)) * 4, __float_as_uint(shared_sums(sums, lane)));
      }
    }
    float E[4][2];
#pragma unroll
    for (int nt = 0; nt < 4; nt++) {
      u32 e[2];
      lds64(e, p.firsts + shift + nt * 32);
      E[nt][0] = __uint_as_float(e[0]); E[nt][1] = __uint_as_float(e[1]);
    }
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const float(&e)[2] = E[2 * m + (j >> 1)];
        dout[m][j] = pack(lo(dout[m][j]) * (e[0] * a.scale), hi(dout[m][j]) * (e[1] * a.scale));
        dr[m][j] = pack(-lo(dr[m][j]) * e[0], -hi(dr[m][j]) * e[1]);
      }
    const float to_end = lds(at + OFF_E + (C - 1) * 4);
    if (own) {
      between_warps();  // dR and dS of all warps are there
      if (i > 0) write_dg(t + C, i - 1);
      bar_wait(bar_s, i & 1);
#if GATED
#pragma unroll
      for (int ks = 0; ks < 8; ks++) {
        u32 z[4];
        ldm(z, tile[ks & 3] + (ks >> 2) * 16384 + (STATE - ADJOINT));
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float* y = &S[2 * ks + (j >> 1)][2 * (j & 1)];
          trace = fmaf(y[0], lo(z[j]), fmaf(y[1], hi(z[j]), trace));
        }
      }
      trace *= to_end;
#endif
    }
#pragma unroll
    for (int nt = 0; nt < 16; nt++)
#pragma unroll
      for (int j = 0; j < 4; j++) S[nt][j] *= to_end;
    float Y[32], Z[16];
    wg_fence();
    wgmma128(S, dout[0], descriptor(at + OFF_Q, HALF, 1024));
    wgmma128(S, dout[1], descriptor(at + OFF_Q + 2048, HALF, 1024));
    wgmma128(S, dr[0], descriptor(at + OFF_K, HALF, 1024));
    wgmma128(S, dr[1], descriptor(at + OFF_K + 2048, HALF, 1024));
    wg_commit();
    if (own) {
      wg_fence();
      const u64 sd = descriptor(state + (w >> 2) * 16384, 16, 1024), ad = descriptor(adjoint + (w >> 2) * 16384, 16, 1024);
#pragma unroll
      for (int ks = 0; ks < 8; ks++)
        wgmma64(Y, sd + ks * 128, descriptor(at + OFF_X + (ks >> 2) * 8192, 16, 1024) + (ks & 3) * 2, ks > 0);
#pragma unroll
      for (int ks = 0; ks < 8; ks++)
        wgmma32(Z, ad + ks * 128, descriptor(at + OFF_W + (ks >> 2) * 4096, 16, 1024) + (ks & 3) * 2, ks > 0);
      wg_commit();
      wg_wait(S);
      wg_settled(Y);
      wg_settled(Z);
      if (w == 0 && t + lane < end) {
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < 8; j++) sum += lds(base + SUMS + j * 128 + lane * 4);
        b.dbeta[(u64)(t + lane) * a.H + h] = sum;
      }
      bar_wait(bars + 24, (i / SLOTS) & 1);
      between_warps();  // nobody reads q, k, dS and the state as tiles any more
      if (lane == 0) bar_arrive(bar_s + 8);
      u32 q[2][4], k[2][4], x[4];
#pragma unroll
      for (int m = 0; m < 2; m++) {
        ldm_trans(q[m], p.keys + shift + OFF_Q + m * 2048);
        ldm_trans(k[m], p.keys + shift + OFF_K + m * 2048);
      }
      float ended = trace;
#pragma unroll
      for (int nt = 0; nt < 4; nt++) {
        u32 e[2], z[2];
        lds64(e, p.firsts + shift + 128 + nt * 32);
        lds64(z, p.firsts + shift + 256 + nt * 32);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const u32 key = k[nt >> 1][2 * (nt & 1) + (j >> 1)];
          Y[4 * nt + j] *= E[nt][j & 1] * a.scale;
          Y[16 + 4 * nt + j] *= -E[nt][j & 1];
          Z[4 * nt + j] *= __uint_as_float(e[j & 1]) * __uint_as_float(z[j & 1]);
          ended = fmaf(j & 1 ? hi(key) : lo(key), Z[4 * nt + j], ended);
        }
      }
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int jb = 0; jb <= m; jb++) {
          const u32 pairs = (p.pairs ^ jb << 5) + shift + m * 1024, turned_pairs = (p.turned_pairs ^ jb << 5) + shift + m * 1024;
          ldm(x, pairs + OFF_DP);
          mma(Y + 8 * m, k[jb], x[0], x[1]); mma(Y + 8 * m + 4, k[jb], x[2], x[3]);
          ldm(x, pairs + OFF_DB);
          mma(Y + 16 + 8 * m, k[jb], x[0], x[1]); mma(Y + 16 + 8 * m + 4, k[jb], x[2], x[3]);
          ldm_trans(x, turned_pairs + OFF_DP);
          mma(Z + 8 * jb, q[m], x[0], x[1]); mma(Z + 8 * jb + 4, q[m], x[2], x[3]);
          ldm_trans(x, turned_pairs + OFF_DB);
          mma(Z + 8 * jb, k[m], x[0], x[1]); mma(Z + 8 * jb + 4, k[m], x[2], x[3]);
        }
#if GATED
      float dots[8];
#pragma unroll
      for (int nt = 0; nt < 4; nt++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& sum = dots[2 * nt + e];
          sum = 0.f;
#pragma unroll
          for (int j = e; j < 4; j += 2) {
            const u32 y = q[nt >> 1][2 * (nt & 1) + (j >> 1)], z = k[nt >> 1][2 * (nt & 1) + (j >> 1)];
            const float dk = Y[16 + 4 * nt + j] - Z[4 * nt + j];
            sum = fmaf(e ? hi(y) : lo(y), Y[4 * nt + j], fmaf(e ? hi(z) : lo(z), dk, sum));
          }
        }
      sts32(base + DOTS + (i & 1) * 1024 + w * 128 + ((lane >> 3) * 8 + (lane & 3) * 2 + ((lane >> 2) & 1)) * 4,
            __float_as_uint(shared_sums(dots, lane)));
#pragma unroll
      for (int k = 1; k < 32; k *= 2) ended += __shfl_xor_sync(~0u, ended, k);
      if (lane == 0) sts32(base + ENDS + (i & 1) * 32 + w * 4, __float_as_uint(ended));
#endif
#pragma unroll
      for (int m = 0; m < 2; m++) {
        u32 f[4], g[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int n = 8 * m + 2 * j;
          f[j] = pack(Y[n], Y[n + 1]);
          g[j] = pack(Y[16 + n] + Z[n], Y[16 + n + 1] + Z[n + 1]);
        }
        stm_trans(f, p.keys + shift + OFF_Q + m * 2048);
        stm_trans(g, p.keys + shift + OFF_K + m * 2048);
      }
      __syncwarp();
#pragma unroll
      for (int m = 0; m < 2; m++) {
        u32 y[4], z[4];
        lds128(y, p.key_row + shift + OFF_Q + m * 2048);
        lds128(z, p.key_row + shift + OFF_K + m * 2048);
        if (t + 16 * m + (lane >> 1) < end) {
          stg128((char*)b.dq + out + m * further + kc * 16, y);
          stg128((char*)b.dk + out + m * further + kc * 16, z);
        }
      }
    } else {
      wg_wait(S);
    }
    __syncwarp();
    if (lane == 0) bar_arrive(bars + 8);
  }
  if (stop > first) {
    between_warps();
    write_dg(begin, stop - 1 - first);
  }
}

#if MAILED
// What leaves the piece, of its first n chunks, which forget what came from the right. By the program of the last span.
INLINE void end_piece(float (&S)[16][4], const BackArgs& b, const Span& x, int h, int n, u32 base, int w, int lane) {
  const Args& a = b.a;
  const Mail& m = a.mail;
  float* const leaving = m.leaving + ((u64)x.piece * a.H + h) * (D * D);
  begin_with(S, 0, w, lane);
  walk(S, b, h, uniform(x.piece * a.T), uniform(x.end), 0, n, n, base, w, lane);
  put_state(S, leaving, w, lane);
  between_warps();
  if (m.target >= 0) send(leaving, m, first_lane(a, x, h), base + SAID + 16, w, lane, [] { between_warps(); });
}

// early: chunks under way before the span's; held: whether these wait
INLINE void consume(const BackArgs& b, const Span& x, int s, int h, int n, int first, bool waits, int early, u64 zeros, bool held, u32 base,
                    int w, int lane) {
  const Args& a = b.a;
  float S[16][4];
  const bool ends = x.last && !early, sends = ends && a.mail.target >= 0;
  if (early) end_piece(S, b, x, h, early, base, w, lane);
  if (sends && w == 0) claim(a.mail, first_lane(a, x, h), base + SAID + 16, lane);
  enter_span<false>(S, a, x, s, h, waits, zeros, sends, ends && leaves(a.mail), base, base + HELD, base + SAID + 16, w, lane);
  between_warps();  // nobody reads maps any more
  if (held && w == 0 && lane == 0) bar_arrive(base + OPEN);
  wg_settled(S);  // in one place, where the walk has it
  walk(S, b, h, uniform(x.begin), uniform(x.end), early, early + n, first, base, w, lane);
}
#else
INLINE void consume(const BackArgs& b, const Span& x, int s, int h, int n, int first, bool known, bool waits, int passes, u32 base,
                    int w, int lane) {
  const Args& a = b.a;
  const int begin = uniform(x.begin), end = uniform(x.end);
  float S[16][4];
  launch_before();  // flags are there
  if (passes == 1 && waits && !a.given)
    take(S, a, s + 1, h, w, lane);
  else
    begin_with(S, entering(a, x.piece, s, h, known, waits), w, lane);
#pragma unroll 1
  for (int pass = 0; pass < passes; pass++) {
    walk(S, b, h, begin, end, pass * n, (pass + 1) * n, min(first, (pass + 1) * n), base, w, lane);
    if (pass == passes - 1) break;
    between_passes(S, a, false, pass, s, h, base, base + OPEN, w, lane);
  }
  if (passes == 1 && !a.given) leave(S, a, x.piece, x.first, s, s - 1, h, base + SAID, w, lane);
}
#endif

// How many chunks late a span begins, or -1: it waits. By all warps.
INLINE int late(const Args& a, const Span& x, int s, int h, u32 base, int lane) {
  if (x.last) return 0;
  const int behind = piece_end(a, x) - x.end;
  int found = forgetting(a, x.end, 1, behind, h, base + SAID + 16, lane);
  if (found < 0 && !a.given && behind <= BACK * C) found = (behind + C - 1) / C;  // begins with the piece's end
  if (threadIdx.x == 0) decide_on(a, s, h, found < 0);
  return found;
}

extern "C" __global__ void __launch_bounds__(384, 1) gdn_backward(const __grid_constant__ BackArgs b) {
  extern __shared__ __align__(1024) char smem[];
  const Args& a = b.a;
  const u32 base = (smem_addr(smem) + 1023) & ~1023u;
  const int tid = threadIdx.x;
  if (tid == 0) {
    for (int i = 0; i < SLOTS; i++) {
      bar_init(base + BARS + i * 32, 1);
      bar_init(base + BARS + i * 32 + 8, 8);
      bar_init(base + BARS + i * 32 + 16, 8);
      bar_init(base + BARS + i * 32 + 24, 2);
    }
    bar_init(base + BARS_S, 1);
    bar_init(base + BARS_S + 8, 8);
    bar_init(base + OPEN, 1);
#if MAILED
    for (int i = 0; i < 2; i++) bar_init(base + HELD + i * 8, 1);
#endif
    bars_ready();
  }
  const int w = uniform((tid >> 5) & 7), lane = tid & 31;
#if MAPS
  Job j = job_of(a, blockIdx.x * PARTS + 1);
  Reach r = {0, 0, 0, 0};
  __syncthreads();
  if (j.n > 0) r = reach(a, j.x, j.s, j.h, false, !a.arrived, base + SAID + 16, lane);
  // where the transition is 0 nobody has that of a half
  const bool halved = j.halved && r.whole && uniform(!a.flags[j.s * a.H + j.h]);
  if (tid == 0) decide(a, j, r, halved ? 2 : 1);
  const bool empty = !j.n;
  if (!halved) {
    j.halved = false;
    j.n = uniform(r.n);
  }
  u32 opened = 0;
  auto next = [&](bool again) {  // whether there is another part
    __syncthreads();
    if (tid == 0) {
      sts32(base + SAID, next_part(a));
      for (int i = 0; again && i < SLOTS; i++) {
        bar_over(base + BARS + i * 32); bar_over(base + BARS + i * 32 + 8);
        bar_init(base + BARS + i * 32, 1); bar_init(base + BARS + i * 32 + 8, 8);
      }
      bars_ready();
    }
    __syncthreads();
    const int number = uniform(lds32(base + SAID));
    if (number) j = job_of(a, number);
    return number != 0;
  };
  if (empty && !next(false)) return;
  auto half = [&] {  // the chunks of this part
    if (!j.halved) return;
    const int first = j.n / 2;
    if (j.part) j.n = first;
    else j.n -= first, j.x.begin += first * C, j.x.chunk += first;
  };
  if (uniform(tid >> 8)) {
    registers_down<104>();
    do {
      half();
      if (w < MAKERS) produce(b, j.x, j.h, piece_end(a, j.x), j.n, 1, j.n, 0, false, base, w, lane);
    } while (next(true));
  } else {
    registers_up<200>();
    do {
      half();
      const u64 i = (u64)j.s * a.H + j.h;
      if (j.halved && j.part && tid == 0) {  // chunks' states, which are not asked for, would lie there
        bar_expect(base + OPEN, MAP);
        copy_in(base + STATE, a.half + i * (MAP / 2), MAP, base + OPEN);
      }
      float S[16][4];
      begin_with(S, 0, w, lane);
      walk(S, b, j.h, j.x.begin, j.x.end, 0, j.n, j.n, base, w, lane);
      if (j.halved && !j.part) {
        leave_part(S, a.extra, a, j, w, lane);
        continue;
      }
      float* const adds = a.states + i * (D * D);
      if (j.halved) {  // what the second half adds, through this one
        between_warps();  // all slots are empty
        put_state(S, adds, w, lane);
        await_part(a, j, 0);
        load(S, held(a.extra, i, w, lane));
        bar_wait(base + OPEN, opened);
        opened ^= 1;
        pass_on<false>(S, adds, base + STATE, base, w, lane);
      }
      put_state(S, adds, w, lane);
    } while (next(true));
  }
#else
  const Choice mine = choose(a, false, a.given || !a.pick, base + SAID, [&](int s, const Span& x, int h) { return late(a, x, s, h, base, lane); });
  const int s = mine.s, h = mine.h, behind = mine.back;
  const Span x = span_of(a, s);
  if (x.end <= x.begin) return;
  const int lim = piece_end(a, x);
  const bool known = x.last || (!a.given && behind >= 0 && behind * C >= lim - x.end);
  const int own = uniform((x.end - x.begin + C - 1) / C), n = own + max(behind, 0);
  const int passes = uniform(behind < 0 && !x.first && !a.given ? 3 : 1);
  int early = 0;
#if MAILED
  u64 zeros = 0;
  if (x.last || behind < 0) zeros = zeros_of<false>(a, first_on_way<false>(a, s), h, lane);
  if (x.last) early = chunks_at_end<false>(a, s, h);
  const bool held = takes_room<false>(a, s, x.last, behind < 0, zeros, early);
#else
  const bool held = false;
#endif
  const int first = early + n * passes - own;
  if (uniform(tid >> 8)) {
    registers_down<104>();
    if (w < MAKERS) produce(b, x, h, lim, n, passes, first, early, held, base, w, lane);
    else fetch(b, x, h, early + n * passes, first, held, base, w - MAKERS, lane);
  } else {
    registers_up<200>();
#if MAILED
    consume(b, x, s, h, n, first, behind < 0, early, zeros, held, base, w, lane);
#else
    consume(b, x, s, h, n, first, known, behind < 0, passes, base, w, lane);
#endif
  }
#endif
}
