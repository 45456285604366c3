// After an all-gather by NCCL over several hosts, parts [RANKS, part]: their bf16 sum, in f32 in
// the order of ranks and rounded once, as all_reduce of one host; or their rows of logits side by
// side. What was tried: benchmarks/log/collectives.md.
#include "common/numeric.cuh"
#include "common/ptx.cuh"

#define FIRST (blockIdx.x * (i64)blockDim.x + threadIdx.x)
#define STEP (gridDim.x * (i64)blockDim.x)

#ifndef COLUMNS
// `count` vectors of eight values in each part.
extern "C" __global__ void sum_parts(const uint4* parts, uint4* y, i64 count) {
  wait_for_previous();
  for (i64 i = FIRST; i < count; i += STEP) {
    float sum[8], part[8];
    unpack8(parts[i], sum);
#pragma unroll
    for (int r = 1; r < RANKS; r++) {
      unpack8(parts[r * count + i], part);
#pragma unroll
      for (int e = 0; e < 8; e++) sum[e] += part[e];
    }
    y[i] = pack8(sum);
  }
}
#else
// `count` vectors of y; a rank's row has COLUMNS vectors of four logits.
extern "C" __global__ void side_by_side(const uint4* parts, uint4* y, i64 count) {
  const i64 part = count / RANKS;
  wait_for_previous();
  for (i64 i = FIRST; i < count; i += STEP) {
    const i64 row = i / (RANKS * COLUMNS), within = i % (RANKS * COLUMNS);
    y[i] = parts[within / COLUMNS * part + row * COLUMNS + within % COLUMNS];
  }
}
#endif
