// One path through a block's candidates: each draft is the candidate with the greatest score, which
// depends on the draft before it.
//
// A block has a row; a warp takes a candidate at a time, its lanes columns of the codebooks. It
// takes as long as TILE - 1 dependent gathers. Not timed yet
// (benchmarks/log/sampling/block_drafter.md).
// Macros: TILE (tokens of a row), TOP (candidates), RANK (columns, even), DRAFTS (of a slot),
// WARPS.
#include "common/numeric.cuh"

// Grid: rows.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    draft_path(const int* ids, const float* values, const u16* query, const u16* predecessor,
               const u16* successor, const int* last, const int* slots, const int* counts,
               int* drafts) {
  __shared__ float scores[2][TOP];
  const int row = blockIdx.x, warp = threadIdx.x / 32, lane = lane_id();
  wait_then_launch_dependents();
  const int slot = slots[row];
  if (slot < 0 || counts[row] <= 0) return;
  int before = last[slot];
#pragma unroll 1
  for (int t = 1; t < TILE; ++t) {
    const i64 token = row * TILE + t;
    const int* own = ids + token * TOP;
    float* score = scores[t & 1];
#pragma unroll 1
    for (int c = warp; c < TOP; c += WARPS) {
      const i64 id = own[c];
      float sum = 0.0f;
#pragma unroll 4
      for (int e = 2 * lane; e < RANK; e += 64) {
        const u32 q = *(const u32*)(query + token * RANK + e);
        const u32 p = *(const u32*)(predecessor + (i64)before * RANK + e);
        const u32 s = *(const u32*)(successor + id * RANK + e);
        sum = fmaf(low_bf16(p) * low_bf16(q), low_bf16(s), sum);
        sum = fmaf(high_bf16(p) * high_bf16(q), high_bf16(s), sum);
      }
      sum = warp_sum(sum);
      if (lane == 0) score[c] = values[token * TOP + c] + sum;
    }
    __syncthreads();
    int best = 0;
#pragma unroll 1
    for (int c = 1; c < TOP; ++c)
      if (score[c] > score[best]) best = c;
    before = own[best];
    if (threadIdx.x == 0) drafts[(i64)slot * DRAFTS + t - 1] = before;
  }
}
