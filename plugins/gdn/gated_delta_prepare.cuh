// gated_delta_prepare: what of a tile of 64 tokens needs no state, for all tiles at once; the first
// launch of gated_delta.cu, which says what P, T and A are.
//
// Grid (key heads, tiles): decays summed in f64, norms, Q K^T and K K^T by mma.sync, then for each
// value head P and the factors of the scan to memory, and T by forward substitution: the inverses
// T0, T1 of A's diagonal blocks of 32 rows, in f32, a thread a column, then the block below them,
// -T1 (A10 T0).
// 128 tiles of the 27B's (35B's) heads, H200: 187 (143) us. Measured variants:
// benchmarks/log/gated_delta.md.
#pragma once
#include "gdn/replay_ring.cuh"
#include "gdn/gated_delta_mma.cuh"

#ifndef SWIZZLED
#define SWIZZLED 0
#endif
#ifndef PACKED
#define PACKED 0
#endif

constexpr int KP = KD / 8;  // 16-byte pieces of a row of q or k
constexpr int DP = DS / 8;  // of R and V'
constexpr int WIDTH = 2 * HK * KD + HV * VD;
constexpr int TAILS = TILE * DS * 2;  // bytes of one part of tail V'
constexpr int TOLD = DRAFTS ? 2 : 1;  // numbers that a ring tells of its state
constexpr int FACTORS = 5;            // rows of 64 floats of a (tile, value head), as below
// With |q|, |k| the norms' reciprocals:
// e^G |q| / sqrt(Dk), beta e^G |k|, beta, e^(Gc - G) |k|, e^Gc.
enum { QUERY, KEY, BETA, TAIL, LAST };

constexpr int HALF = TILE / 2;
typedef float Square[TILE][TILE + 4];  // rows of f32, padded against bank conflicts

struct Prepare {
  union {
    struct {
      alignas(128) char q[TILE * KD * 2], k[TILE * KD * 2];
    };
    Square a[R];  // once their products are made
  };
  float high[R][TILE], low[R][TILE];  // G / ln 2 in two floats: small differences of large sums
  float beta[R][TILE];
  float q_norm[TILE], k_norm[TILE];
};

// Numbers of T's or P's high or low part. PACKED: of the blocks of 16 x 16 that are not zeros, one
// after another by rows, each as the fragments of mma.sync's right operand, 16 bytes a lane.
constexpr int PART = PACKED ? 10 * 256 : TILE * TILE;
// Where an element of T or P lies. SWIZZLED: as wgmma reads it (common/wgmma16.cuh).
DEVICE int element(int i, int column) {
  if (!PACKED) return i * TILE + (SWIZZLED ? column ^ (i & 7) * 8 : column);
  const int row = i / 16, block = row * (row + 1) / 2 + column / 16;
  const int lane = i % 8 * 4 + column % 8 / 2, word = i / 8 % 2 * 2 + column / 8 % 2;
  return block * 256 + lane * 8 + word * 2 + column % 2;
}
// One element of T as high and low bf16 parts.
DEVICE void store_split(u16* t, int i, int column, float x) {
  if (PACKED && column / 16 > i / 16) return;
  u16 high = to_bf16(x);
  t[element(i, column)] = high;
  t[PART + element(i, column)] = to_bf16(x - from_bf16(high));
}
// sum[i] = rows first.. of a block of `a` (from column `left`) times column `c` of another block
// (rows from `top`): 16 rows by HALF.
DEVICE void block_product(float (&sum)[16], const Square& a, int first, int left, int top, int c) {
#pragma unroll 1
  for (int j = 0; j < HALF; j += 4) {
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; e++) x[e] = a[top + j + e][c];
#pragma unroll
    for (int i = 0; i < 16; i++) {
      float4 y = *(const float4*)&a[first + i][left + j];
      sum[i] = fmaf(y.x, x[0], sum[i]), sum[i] = fmaf(y.y, x[1], sum[i]);
      sum[i] = fmaf(y.z, x[2], sum[i]), sum[i] = fmaf(y.w, x[3], sum[i]);
    }
  }
}
// T = (I + a)^-1 by the 64 threads that own a head; a is overwritten: T0 and T1 stand where their
// blocks were, A10 T0 in the corner that was zeros.
DEVICE void invert(Square& a, u16* t) {
  const int half = threadIdx.x / HALF % 2, c = threadIdx.x % HALF, base = half * HALF;
  const u32 barrier = 1 + threadIdx.x / TILE;
  float x[HALF];
#pragma unroll
  for (int i = 0; i < HALF; i++) {  // column c of a diagonal block: (I + A) x = e_c
    float sum[4] = {};
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      float4 y = *(const float4*)&a[base + i][base + j];
      sum[0] = fmaf(y.x, x[j], sum[0]);
      if (j + 1 < i) sum[1] = fmaf(y.y, x[j + 1], sum[1]);
      if (j + 2 < i) sum[2] = fmaf(y.z, x[j + 2], sum[2]);
      if (j + 3 < i) sum[3] = fmaf(y.w, x[j + 3], sum[3]);
    }
    x[i] = (i == c ? 1.f : 0.f) - ((sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
  __syncwarp();  // a warp has the whole block
#pragma unroll
  for (int i = 0; i < HALF; i++) {
    a[base + i][base + c] = x[i];
    store_split(t, base + i, base + c, x[i]);
  }
  meet(barrier, TILE);
  const int first = 16 * half;
  float sum[16] = {};
  block_product(sum, a, HALF + first, 0, 0, c);  // A10 T0
#pragma unroll
  for (int i = 0; i < 16; i++) {
    a[first + i][HALF + c] = sum[i];
    store_split(t, first + i, HALF + c, 0.f);
    sum[i] = 0.f;
  }
  meet(barrier, TILE);
  block_product(sum, a, HALF + first, HALF, 0, HALF + c);  // T1 (A10 T0)
#pragma unroll
  for (int i = 0; i < 16; i++) store_split(t, HALF + first + i, c, -sum[i]);
}

// G of a value head's tokens, summed in f64 by a warp, and beta; zeros behind the last valid token.
DEVICE void sum_decays(Prepare& s, const u16* ba, const float* a_log, const float* dt_bias, int row,
                       int head, int valid, int warp, int lane) {
  const int h = head * R + warp;
  const float speed = -expf(a_log[h]), bias = dt_bias[h];
  double sum[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int t = lane * 2 + i;
    const u16* rate = ba + ((i64)row * TILE + t) * 2 * HV + h;
    s.beta[warp][t] = t < valid ? sigmoid(from_bf16(rate[0])) : 0.f;
    sum[i] = t < valid ? (double)(speed * softplus(from_bf16(rate[HV]) + bias)) : 0.0;
  }
  double total = sum[0] + sum[1], before = total;
#pragma unroll
  for (int off = 1; off < 32; off *= 2) {
    double other = __shfl_up_sync(~0u, before, off);
    if (lane >= off) before += other;
  }
  before -= total;
  sum[0] += before, sum[1] += sum[0];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    sum[i] *= 1.4426950408889634;
    float high = (float)sum[i];
    s.high[warp][lane * 2 + i] = high, s.low[warp][lane * 2 + i] = (float)(sum[i] - high);
  }
}
// The norms' reciprocals of q and k, four threads a token.
DEVICE void sum_squares(Prepare& s) {
  const int t = threadIdx.x / 4, part = threadIdx.x % 4;
  float qq = 0.f, kk = 0.f;
  for (int i = part; i < KP; i += 4) {
    float x[8];
    unpack8(*(uint4*)(s.q + at<KP>(t, i)), x);
#pragma unroll
    for (int e = 0; e < 8; e++) qq = fmaf(x[e], x[e], qq);
    unpack8(*(uint4*)(s.k + at<KP>(t, i)), x);
#pragma unroll
    for (int e = 0; e < 8; e++) kk = fmaf(x[e], x[e], kk);
  }
  qq = lane_sum<4>(qq), kk = lane_sum<4>(kk);
  s.q_norm[t] = 1.f / sqrtf(qq + 1e-6f) / sqrtf((float)KD), s.k_norm[t] = 1.f / sqrtf(kk + 1e-6f);
}
// Of value head r, from d, the products of the tile's rows: P to memory by warps 0-3, A to shared
// memory by warps 4-7; both zero above the diagonal.
DEVICE void decay_products(Prepare& s, const float (&d)[4][2][4], u16* p_out, i64 tile_head, int r,
                           int first, int warp, int lane) {
  const int top = first + lane / 4;  // this lane's rows: top, top + 8
  float high[2], low[2], factor[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int i = top + half * 8;
    high[half] = s.high[r][i], low[half] = s.low[r][i];
    factor[half] = warp < 4 ? s.q_norm[i] : s.k_norm[i] * s.beta[r][i];
  }
#pragma unroll
  for (int n = 0; n < 8; n++) {
    const int j = n * 8 + lane % 4 * 2;
    float v[2][2] = {};
    if (n * 8 < first + 16) {  // else above the diagonal
      float2 h = *(float2*)&s.high[r][j], l = *(float2*)&s.low[r][j], k = *(float2*)&s.k_norm[j];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int last = top + half * 8 - (warp < 4 ? 0 : 1);  // the last column that counts
        const float* x = &d[n / 2][n % 2][half * 2];
        float left = exp2_fast(high[half] - h.x + (low[half] - l.x)) * factor[half] * k.x;
        float right = exp2_fast(high[half] - h.y + (low[half] - l.y)) * factor[half] * k.y;
        v[half][0] = j <= last ? x[0] * left : 0.f;
        v[half][1] = j + 1 <= last ? x[1] * right : 0.f;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int i = top + half * 8;
      if (warp < 4) {
        u32 upper, lower;
        split(v[half][0], v[half][1], upper, lower);
        u16* to = p_out + tile_head * 2 * PART + element(i, j);
        if (!PACKED || n * 8 < first + 16) *(u32*)to = upper, *(u32*)(to + PART) = lower;
      } else {
        *(float2*)&s.a[r][i][j] = {v[half][0], v[half][1]};
      }
    }
  }
}
// What the scan multiplies token t's rows by, of value head r.
DEVICE void store_factors(const Prepare& s, float* factors, i64 tile_head, int r, int t) {
  float* f = factors + tile_head * FACTORS * TILE + t;
  float grown = exp2_fast(s.high[r][t]), beta = s.beta[r][t];
  float last = s.high[r][TILE - 1];
  float gap = last - s.high[r][t] + (s.low[r][TILE - 1] - s.low[r][t]);
  f[QUERY * TILE] = grown * s.q_norm[t];
  f[KEY * TILE] = grown * s.k_norm[t] * beta;
  f[BETA * TILE] = beta;
  f[TAIL * TILE] = exp2_fast(gap) * s.k_norm[t];
  f[LAST * TILE] = exp2_fast(last);
}

// Whether a sequence, or an inert row, begins at row i: so are rows cut into sequences.
DEVICE bool begins(const int* slots, int i) {
  return i == 0 || slots[i] < 0 || slots[i] != slots[i - 1];
}
// Where the ring of a row of the states has number i of what it tells.
DEVICE i64 told_at(int of, int i, int head) {
  return (i64)of * SLOT_RING + (DRAFTS ? KEPT * RECORD + i * HV + head : RECORD - 1);
}

extern "C" __global__ void __launch_bounds__(256, 2)
    gated_delta_prepare(const u16* c, const u16* ba, const float* a_log, const float* dt_bias,
                        const int* slots, const int* starts, const int* counts, const int* sources,
                        const float* ring, float* bases, u16* t_out, u16* p_out, float* factors) {
  extern __shared__ __align__(128) char memory[];
  Prepare& s = *(Prepare*)memory;
  const int row = blockIdx.y, head = blockIdx.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_for_previous();
  launch_dependents();
  const int valid = slots[row] < 0 ? 0 : counts[row];
#if RING  // the scan will write where this stands
  if (head == 0 && threadIdx.x < TOLD && begins(slots, row) && slots[row] >= 0 && starts[row])
    bases[row * TOLD + threadIdx.x] = ring[told_at(sources[row], threadIdx.x, 0)];
#endif
  if (valid == 0) return;
  const u16* tokens = c + (i64)row * TILE * WIDTH;
  fetch<KP>(s.q, tokens + head * KD, WIDTH, valid);
  fetch<KP>(s.k, tokens + HK * KD + head * KD, WIDTH, valid);
  commit_copies();
  if (warp < R) sum_decays(s, ba, a_log, dt_bias, row, head, valid, warp, lane);
  wait_copies<0>();
  __syncthreads();
  sum_squares(s);
  float d[4][2][4] = {};  // warps 0-3: Q K^T, 4-7: K K^T
  const int first = warp % 4 * 16;
#pragma unroll
  for (int i = 0; i < KD; i += 16) {
    u32 a[4], b[4];
    load_a<KP>(a, warp < 4 ? s.q : s.k, first, i, lane);
#pragma unroll
    for (int n = 0; n < 4; n++) load_b<KP>(b, s.k, i, n * 16, lane), mma_pair(d[n], a, b);
  }
  __syncthreads();
#pragma unroll 1
  for (int r = 0; r < R; r++) {
    const i64 tile_head = (i64)row * HV + head * R + r;
    decay_products(s, d, p_out, tile_head, r, first, warp, lane);
    if (threadIdx.x < TILE) store_factors(s, factors, tile_head, r, threadIdx.x);
  }
  __syncthreads();
  for (int r = threadIdx.x / TILE; r < R; r += 4)
    invert(s.a[r], t_out + ((i64)row * HV + head * R + r) * 2 * PART);
}
