// GEMM with scales along k: y[m, n] = finish(n) · Σ_k x[m, k] · w[n, k], for nvfp4_linear_a4 and
// fp8_block_linear. A and B are swapped: weights are the A of mma.sync (m16 tiles), activations its
// B.
//
// A block has BLOCK_TILES m16 tiles and BLOCK_M tokens. Warp w takes k-slabs w, w + WARPS, ...:
// weights straight into registers, DEPTH k-slabs ahead, the first before the wait for the launch
// before (PDL); activations from L1. The warps' sums are added in a fixed order: the result depends
// neither on timing, nor on other tokens, nor on the tile.
// Layout (m16_gemm.py): m16 tiles, in each the k-slabs in order, in each what lane 4g + t loads.
// The including file defines a format F: F::Weights (a lane's part of an m16 tile's k-slab),
// F::Inputs (8 tokens), weights(m16, slab), inputs(row, slab, there) with zeros where not there,
// multiply.
// Figures: log/gemm/linear_fp8_block_mma.md. Macros: BLOCK_M (8, 16, 32, 64), BLOCK_TILES, DEPTH,
// WHOLE (k is whole k-slabs), OUT_BF16.
#pragma once
#include "common/numeric.cuh"

constexpr int WARPS = 8;
constexpr int NJ = BLOCK_M / 8;
constexpr int SUMS = BLOCK_TILES * NJ * 4;  // of a lane

// Values of weight rows n0 + g and n0 + g + 8 (g = lane / 4) for tokens m0 + 2t, m0 + 2t + 1. (The
// store of store_fragment.cuh takes other registers here.)
DEVICE void store(void* out, int n0, int m0, int m, int n, const float (&s)[4]) {
  const int g = lane_id() >> 2, t = lane_id() & 3;
#if OUT_BF16
  u32* y = (u32*)out;
  const u32 low = transpose_matrix(pack_bf16(s[0], s[1]));   // token g, weights 2t, 2t + 1
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
  __shared__ float partial[WARPS / 2][SUMS][32];
  const int warp = threadIdx.x / 32, lane = lane_id();
#pragma unroll
  for (int half = WARPS / 2; half; half /= 2) {
    if (warp >= half && warp < 2 * half)
#pragma unroll
      for (int i = 0; i < SUMS; ++i) partial[warp - half][i][lane] = sums[i];
    __syncthreads();
    if (warp < half)
#pragma unroll
      for (int i = 0; i < SUMS; ++i) sums[i] += partial[warp][i][lane];
    __syncthreads();
  }
}

// `finish(n)` is the factor of column n. blockIdx = (tile of the batch, m16 tiles).
template <class F, class Finish>
DEVICE void m16_gemm(const F& f, void* y, int m, int n, int slabs, const Finish& finish) {
  const int warp = threadIdx.x / 32;
  const int first = blockIdx.y * BLOCK_TILES, m0 = blockIdx.x * BLOCK_M;
  typename F::Weights w[DEPTH][BLOCK_TILES] = {};
#pragma unroll
  for (int d = 0; d < DEPTH; ++d)
#pragma unroll
    for (int s = 0; s < BLOCK_TILES; ++s)
      if (warp + d * WARPS < slabs && (first + s) * 16 < n)
        w[d][s] = f.weights(first + s, warp + d * WARPS);
  wait_for_previous();
  launch_dependents();
  float sums[SUMS] = {};
  for (int u0 = warp; u0 < slabs; u0 += DEPTH * WARPS)
#pragma unroll
    for (int d = 0; d < DEPTH; ++d) {
      const int u = u0 + d * WARPS, next = u + DEPTH * WARPS;
      typename F::Inputs x[NJ];
#pragma unroll
      for (int j = 0; j < NJ; ++j) x[j] = f.inputs(m0 + j * 8, u, u < slabs);
#pragma unroll
      for (int s = 0; s < BLOCK_TILES; ++s) {  // in turn, so that not both are dequantised
#pragma unroll
        for (int j = 0; j < NJ; ++j)
          F::multiply((float (&)[4])sums[(s * NJ + j) * 4], w[d][s], x[j]);
        asm volatile("" ::: "memory");
      }
#pragma unroll
      for (int s = 0; s < BLOCK_TILES; ++s)
        if (next < slabs && (first + s) * 16 < n) w[d][s] = f.weights(first + s, next);
    }
  add_warps(sums);
  if (warp > 0) return;
#pragma unroll
  for (int s = 0; s < BLOCK_TILES; ++s) {
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
