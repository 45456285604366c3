// A block drafter's convolution over two tokens: y[i] = a x[i] + b x[i - 1] by column, with factors
// of the token and the column's group.
//
// A thread has eight columns of a token, which are in one group: two loads of rows, a delta of each
// tap. Not timed yet (benchmarks/log/sampling/block_drafter.md).
// Macros: H (columns), GROUP (columns of a group, a multiple of 8), TILE (tokens of a row), SIDE,
// THREADS.
#include "common/numeric.cuh"

// Grid: (parts of a row, tokens).
extern "C" __global__ void __launch_bounds__(THREADS)
    block_conv(const u16* x, const u16* deltas, const float* base, u16* y) {
  constexpr int GROUPS = H / GROUP;
  const int at = (blockIdx.x * THREADS + threadIdx.x) * 8;
  const i64 token = blockIdx.y;
  wait_then_launch_dependents();
  if (at >= H) return;
  const u16* own = deltas + token * (4 * GROUPS) + 2 * SIDE * GROUPS + at / GROUP;
  const float now = from_bf16(own[0]), then = from_bf16(own[GROUPS]);
  const float* factors = base + 2 * SIDE * H + at;
  float here[8], before[8] = {};
  unpack8(*(const uint4*)(x + token * H + at), here);
  if (token % TILE) unpack8(*(const uint4*)(x + (token - 1) * H + at), before);
#pragma unroll
  for (int e = 0; e < 8; ++e)
    here[e] = (factors[e] + now) * here[e] + (factors[H + e] + then) * before[e];
  *(uint4*)(y + token * H + at) = pack8(here);
}
