// bf16 linear layer of up to 256 weight rows: y[m, n] = Σ_k x[m, k] · w[n, k]. A and B are swapped:
// a cluster has one m16 tile of weights and 8 tokens.
//
// Such a layer (the gates b and a of a gated delta net: 96 x 5120) moves a megabyte, so latency is
// all. Split-K: k is cut over 8 blocks of a cluster and 8 warps of each; a warp asks for its whole
// part of the weights at once; sums meet in shared memory, of the block, then of the cluster. The
// reduction order is ascending k in a warp, then warps, then blocks, whatever m is. The weights are
// written to be loaded before the wait for the previous launch (PDL), but ptxas 13.0 moves the wait
// in front of the loads (seen in the machine code of sm_90a). 96 x 5120, H200: 3.3 / 3.5 / 4.3 /
// 6.9 us at 1 / 8 / 32 / 128 rows (log/gemm/linear_small_n_cluster_sm90.md). Packed weights are
// those of linear_bf16_mma.cu (linear_layout.py), one panel. Macros: STEPS (steps of 16 k that a
// warp does), OUT_BF16; EARLY (early.cuh); LATE: x is older than the previous launch, so that all
// is computed while that runs.
#include "common/early.cuh"
#include "common/numeric.cuh"

#if LATE
#define LOAD_X load_late_if
#else
#define LOAD_X load_if
#endif

constexpr int BLOCKS = 8;
constexpr int WARPS = 8;

DEVICE void add(float4& sum, const float4& part) {
  sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
}
DEVICE void put(void* y, u64 at, float value) {
#if OUT_BF16
  ((u16*)y)[at] = (u16)pack_bf16(value, 0);
#else
  ((float*)y)[at] = value;
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    linear_small_n(const u8* x, const uint4* w, void* y, int m, int n, int k) {
  __shared__ float4 parts[WARPS][32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int rank = blockIdx.x, m16 = blockIdx.y, m16_tiles = gridDim.y, m0 = blockIdx.z * 8;
  const int steps = k / 16, first = (rank * WARPS + warp) * STEPS;
  uint4 a[STEPS] = {};
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int step = first + i;
    if (step >= steps) continue;
    a[i] = load_once(w + ((step / 4 * m16_tiles + m16) * 4 + step % 4) * 32 + lane);
  }
#if LATE
  launch_dependents();
#else
  wait_and_let_next_begin();
#endif
  const u32* mine = (const u32*)(x + (u64)(m0 + g) * k * 2) + first * 8 + t;
  u32 b[STEPS][2];  // all of it is asked for before any of it is used
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const bool there = first + i < steps && m0 + g < m;
    b[i][0] = LOAD_X(there, mine + i * 8);
    b[i][1] = LOAD_X(there, mine + i * 8 + 4);
  }
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const u32 fragment[4] = {a[i].x, a[i].y, a[i].z, a[i].w};
    mma_bf16(sums, fragment, b[i][0], b[i][1]);
  }
  parts[warp][lane] = make_float4(sums[0], sums[1], sums[2], sums[3]);
  __syncthreads();
  if (warp == 0) {  // the block's sum takes the place of its first warp's
    float4 sum = parts[0][lane];
#pragma unroll
    for (int i = 1; i < WARPS; ++i) add(sum, parts[i][lane]);
    parts[0][lane] = sum;
  }
  cluster_meet();
  constexpr int SHARE = 32 / BLOCKS;  // of the cluster's sums, each block's
  if (threadIdx.x < SHARE) {
    const int from = rank * SHARE + threadIdx.x;  // the lane that has these sums
    float4 other[BLOCKS];
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) other[i] = load_of_block(&parts[0][from], i);
#pragma unroll
    for (int i = 1; i < BLOCKS; ++i) add(other[0], other[i]);
    const float4& sum = other[0];
    const int row = m0 + from % 4 * 2, column = m16 * 16 + from / 4;
    const u64 at = (u64)row * n + column;
#if LATE
    wait_for_previous();  // in every block: its end says that the launch before has ended
#endif
    if (row < m && column < n) put(y, at, sum.x);
    if (row + 1 < m && column < n) put(y, at + n, sum.y);
    if (row < m && column + 8 < n) put(y, at + 8, sum.z);
    if (row + 1 < m && column + 8 < n) put(y, at + n + 8, sum.w);
  }
  cluster_meet();  // no block leaves while others read here
}
