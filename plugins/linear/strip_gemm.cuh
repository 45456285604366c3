// GEMM with scales along k: y[m, n] = finish(n) · Σ_k x[m, k] · w[n, k], for nvfp4_linear_a4 and
// fp8_block_linear.
//
// Weights are the M side of mma.sync: a block has STRIPS m16 tiles and NB rows of the batch. Warp w
// takes k-slabs w, w + WARPS, ...: weights straight into registers, DEPTH slabs ahead and 512 bytes
// a load, the first before the wait for the launch before (PDL); activations from L1. The warps'
// sums are added in a fixed order: bits depend neither on timing nor on other rows nor on the tile.
// Layout (strip_gemm.py): m16 tiles, in each the k-slabs in order, in each what lane 4g + t loads.
// The including file defines a format F: F::Weights (of a lane, an m16 tile's k-slab), F::Inputs (8
// batch rows), weights(strip, unit), inputs(row, unit, there) with zeros where not there, multiply.
// Figures: benchmarks/log/fp8_block_linear.md. Macros: NB (8, 16, 32, 64), STRIPS, DEPTH, WHOLE (k
// is whole slabs), OUT_BF16.
#pragma once
#include "common/numeric.cuh"

constexpr int WARPS = 8;
constexpr int NJ = NB / 8;
constexpr int SUMS = STRIPS * NJ * 4;  // of a lane

// Values of weight rows n0 + g and n0 + g + 8 (g = lane / 4) for batch rows m0 + 2t, m0 + 2t + 1.
DEVICE void store(void* out, int n0, int m0, int m, int n, const float (&s)[4]) {
  const int g = lane_id() >> 2, t = lane_id() & 3;
#if OUT_BF16
  u32* y = (u32*)out;
  const u32 low = transpose_matrix(pack_bf16(s[0], s[1]));   // batch row g, weights 2t, 2t + 1
  const u32 high = transpose_matrix(pack_bf16(s[2], s[3]));  // … 8 further
  if (m0 + g < m) {
    const i64 at = ((i64)(m0 + g) * n + n0) / 2 + t;
    y[at] = low;
    y[at + 4] = high;
  }
#else
  float* y = (float*)out + (i64)(m0 + 2 * t) * n + n0 + g;
  if (m0 + 2 * t < m) y[0] = s[0], y[8] = s[2];
  if (m0 + 2 * t + 1 < m) y[n] = s[1], y[n + 8] = s[3];
#endif
}

// The sum of all warps' sums, in warp 0: upper half onto lower half.
DEVICE void add_warps(float (&sums)[SUMS]) {
  __shared__ float room[WARPS / 2][SUMS][32];
  const int warp = threadIdx.x / 32, lane = lane_id();
#pragma unroll
  for (int half = WARPS / 2; half; half /= 2) {
    if (warp >= half && warp < 2 * half)
#pragma unroll
      for (int i = 0; i < SUMS; ++i) room[warp - half][i][lane] = sums[i];
    __syncthreads();
    if (warp < half)
#pragma unroll
      for (int i = 0; i < SUMS; ++i) sums[i] += room[warp][i][lane];
    __syncthreads();
  }
}

// `finish(n)` is the factor of column n. blockIdx = (tile of the batch, m16 tiles).
template <class F, class Finish>
DEVICE void strip_gemm(const F& f, void* y, int m, int n, int units, const Finish& finish) {
  const int warp = threadIdx.x / 32;
  const int first = blockIdx.y * STRIPS, m0 = blockIdx.x * NB;
  typename F::Weights w[DEPTH][STRIPS] = {};
#pragma unroll
  for (int d = 0; d < DEPTH; ++d)
#pragma unroll
    for (int s = 0; s < STRIPS; ++s)
      if (warp + d * WARPS < units && (first + s) * 16 < n)
        w[d][s] = f.weights(first + s, warp + d * WARPS);
  wait_for_previous();
  let_next_start();
  float sums[SUMS] = {};
  for (int u0 = warp; u0 < units; u0 += DEPTH * WARPS)
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      const int u = u0 + d * WARPS, next = u + DEPTH * WARPS;
      typename F::Inputs x[NJ];
#pragma unroll
      for (int j = 0; j < NJ; ++j) x[j] = f.inputs(m0 + j * 8, u, u < units);
#pragma unroll
      for (int s = 0; s < STRIPS; ++s) {  // one after another, lest both are dequantised
#pragma unroll
        for (int j = 0; j < NJ; ++j)
          F::multiply((float (&)[4])sums[(s * NJ + j) * 4], w[d][s], x[j]);
        asm volatile("" ::: "memory");
      }
#pragma unroll
      for (int s = 0; s < STRIPS; ++s)
        if (next < units && (first + s) * 16 < n) w[d][s] = f.weights(first + s, next);
    }
  add_warps(sums);
  if (warp > 0) return;
#pragma unroll
  for (int s = 0; s < STRIPS; ++s) {
    const int n0 = (first + s) * 16;
    if (n0 >= n) return;
    const float low = finish(n0 + (lane_id() >> 2)), high = finish(n0 + (lane_id() >> 2) + 8);
#pragma unroll
    for (int j = 0; j < NJ; ++j) {
      float (&v)[4] = (float (&)[4])sums[(s * NJ + j) * 4];
      v[0] *= low, v[1] *= low, v[2] *= high, v[3] *= high;
      if (m0 + j * 8 < m) store(y, n0, m0 + j * 8, m, n, v);
    }
  }
}
