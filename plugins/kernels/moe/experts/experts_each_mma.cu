// Experts of up to four tokens, a pair (token, expert) at a time: y = Σ_e weight_e · w2_e(silu(
// gate_e(x)) · up_e(x)), NVFP4 weights straight to registers, all loads in flight at once.
//
// `each_up` makes h. `each_down` loads its weights while `each_up` runs (PDL) and adds a token's
// experts itself, in ascending index. Weights are the A of mma.sync; split-K over warps.
// 256 experts and a shared one, H 2048, I 512, top 8, one token, weights cold, H200: 9.5 us, floor
// 3.7 (variants: benchmarks/log/moe/experts_each_mma.md). Macros: those of experts_common.cuh.
#include "moe/experts/experts_common.cuh"

// Two m16 tiles of WN panels for one pair; blockIdx = (half panel, pair).
extern "C" __global__ void __launch_bounds__(THREADS, Side<true>::PART_SLABS > 4 ? 2 : 3)
    each_up(const u8* x, const int* ids, const u8* w13, const u8* scale, const float* scale2,
            u16* h) {
  using S = Side<true>;
  __shared__ __align__(16) u8 row[S::SLABS * 128];
  __shared__ float2 parts[2][WARPS][8];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int wk = warp / S::WN, wn = warp % S::WN;
  const int panel = (blockIdx.x >> 1) * S::WN + wn, half = blockIdx.x & 1, pair = blockIdx.y;
  const bool busy = panel < S::PANELS;
  wait_then_launch_dependents();
  const int expert = ids[pair];
  uint4 words[S::PART_SLABS][2];
  u32 scales[S::PART_SLABS];
  if (busy) {
    const u64 at = ((u64)expert * S::PANELS + panel) * S::SLABS + wk * S::PART_SLABS;
#pragma unroll
    for (int u = 0; u < S::PART_SLABS; ++u) {
      const u64 m16 = (at + u) * 4 + half * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) words[u][i] = load_once(w13 + (m16 + i) * M16_BYTES + lane * 16);
      scales[u] = load_once4(scale + m16 * M16_SCALES + lane * 4);
    }
  }
  const u8* from = x + (u64)(pair / K1) * HIDDEN * 2;
  for (int i = threadIdx.x * 16; i < S::SLABS * 128; i += THREADS * 16)
    *(uint4*)(row + i) = i < HIDDEN * 2 ? __ldcg((const uint4*)(from + i)) : make_uint4(0, 0, 0, 0);
  __syncthreads();
  float sums[2][4] = {};
  if (busy) {
#pragma unroll
    for (int u = 0; u < S::PART_SLABS; ++u) {
      uint4 b[2] = {};
#pragma unroll
      for (int k = 0; k < 2; ++k)
        if (lane < 4)
          b[k] = *(const uint4*)(row + (wk * S::PART_SLABS + u) * 128 + lane * 32 + k * 16);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32 a[4][4];
        code_fragments(words[u][i], scales[u], i, a);
        multiply(sums[i], a, 0, b[0]);
        multiply(sums[i], a, 1, b[1]);
      }
    }
  }
  if ((lane & 3) == 0)
    for (int i = 0; i < 2; ++i) parts[i][warp][lane >> 2] = make_float2(sums[i][0], sums[i][2]);
  __syncthreads();
  for (int i = threadIdx.x; i < S::WN * 16; i += THREADS) {
    const int g = i & 7, m16 = i >> 3 & 1, n = i >> 4;
    const int out = ((blockIdx.x >> 1) * S::WN + n) * 32 + (half * 2 + m16) * 8 + g;
    if (out >= INNER) continue;
    float2 v = parts[m16][n][g];
    for (int k = 1; k < S::WK; ++k) {
      const float2 p = parts[m16][k * S::WN + n][g];
      v.x += p.x, v.y += p.y;
    }
    const float* two = scale2 + (u64)expert * 2 * INNER + out;
    h[(u64)pair * INNER + out] = to_bf16(silu_mul(scaled(v.x, two[0]), scaled(v.y, two[INNER])));
  }
}

// One m16 tile of 16 outputs of a token over all its experts; blockIdx = (m16 tile, token).
constexpr int TURNS = (K1 + Side<false>::WN - 1) / Side<false>::WN;  // experts of a warp
constexpr int HELD_SLABS = TURNS * Side<false>::PART_SLABS;          // of all of them
extern "C" __global__ void __launch_bounds__(THREADS, HELD_SLABS > 10 ? 1 : 2)
    each_down(const u8* h, const int* ids, const float* weights, const u8* w2, const u8* scale,
              const float* scale2, u16* y) {
  using S = Side<false>;
  __shared__ float parts[K1][S::WK][16];
  __shared__ int order[K1];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int wk = warp / S::WN, wn = warp % S::WN;
  const u64 pair0 = (u64)blockIdx.y * K1;
  ids += pair0;
  uint4 words[TURNS][S::PART_SLABS];
  u32 scales[TURNS][S::PART_SLABS];
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int j = i * S::WN + wn;
    if (j >= K1) continue;
    const u64 at = ((u64)ids[j] * S::PANELS + (blockIdx.x >> 2)) * S::SLABS + wk * S::PART_SLABS;
#pragma unroll
    for (int u = 0; u < S::PART_SLABS; ++u) {
      const u64 m16 = (at + u) * 4 + (blockIdx.x & 3);
      words[i][u] = load_once(w2 + m16 * M16_BYTES + lane * 16);
      scales[i][u] = load_once4(scale + m16 / 2 * 2 * M16_SCALES + lane * 4);
    }
  }
  sort_experts(ids, order);
  wait_then_launch_dependents();
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int j = i * S::WN + wn;
    if (j >= K1) continue;
    float sums[4] = {};
#pragma unroll
    for (int u = 0; u < S::PART_SLABS; ++u) {
      const int k = (wk * S::PART_SLABS + u) * 64 + lane * 16;
      uint4 b[2] = {};
#pragma unroll
      for (int p = 0; p < 2; ++p)
        if (lane < 4 && k + p * 8 < INNER)
          b[p] = __ldcg((const uint4*)(h + ((pair0 + j) * INNER + k + p * 8) * 2));
      u32 a[4][4];
      code_fragments(words[i][u], scales[i][u], blockIdx.x & 1, a);
      multiply(sums, a, 0, b[0]);
      multiply(sums, a, 1, b[1]);
    }
    if ((lane & 3) == 0) parts[j][wk][lane >> 2] = sums[0], parts[j][wk][8 + (lane >> 2)] = sums[2];
  }
  __syncthreads();
  const int out = blockIdx.x * 16 + threadIdx.x;
  if (threadIdx.x >= 16 || out >= HIDDEN) return;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < K1; ++i) {
    const int j = order[i];
    float dot = parts[j][0][threadIdx.x];
    for (int k = 1; k < S::WK; ++k) dot += parts[j][k][threadIdx.x];
    const float one = scaled(dot, scale2[(u64)ids[j] * HIDDEN + out]);
    sum = __fmaf_rn(weights[pair0 + j], one, sum);
  }
  y[(u64)blockIdx.y * HIDDEN + out] = to_bf16(sum);
}
