// Gated RMSNorm per head, then bf16 and quantised copies: gated_norm and gated_norm_quant.
//
// y = o / sqrt(mean_head(o²) + eps) · weight · silu(z). o, y bf16 [rows, K]; z is in packed
// [rows, PACKED] from column OFFSET on; weight f32 [DIM]. Grid (K / COLUMNS, rows): a block holds
// whole heads of one row, eight neighbouring columns a thread; a head's sum goes through shared
// memory in the order of its columns.
// Z_ALIGNED: z's rows start on 16-byte boundaries, so that one load reads eight.
// 1 / 32 / 128 / 1024 rows of 48 x 128, H200: fp8 1.1 / 1.5 / 2.5 / 11.1 us, nvfp4 1.3 / 2.0 / 3.0
// / 14.2. Measured variants: benchmarks/log/delta_rule/gated_norm_quant_fma.md.
#include "common/row_quant.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    gated_norm_quant(const u16* o, const u16* packed, const float* weight, const float* scales,
                     QUANT_OUTPUTS) {
  __shared__ float partial[THREADS];
  const i64 row = blockIdx.y;
  const int column = blockIdx.x * COLUMNS + threadIdx.x * 8;
  const bool live = threadIdx.x * 8 < COLUMNS && column < K;
  float y[8] = {}, w[8], z[8] = {};
#pragma unroll
  for (int i = 0; i < 8; i++) w[i] = weight[column % DIM + i];
  wait_for_previous();
  launch_dependents();
  if (live) {
    const u16* from = packed + row * PACKED + OFFSET + column;
    unpack8(*(const uint4*)(o + row * K + column), y);
#if Z_ALIGNED
    unpack8(*(const uint4*)from, z);
#else
#pragma unroll
    for (int i = 0; i < 8; i++) z[i] = from_bf16(from[i]);
#endif
  }
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) squares += y[i] * y[i];
  partial[threadIdx.x] = squares;
  __syncthreads();
  float total = 0.0f;
  const int first = threadIdx.x / (DIM / 8) * (DIM / 8);
#pragma unroll
  for (int i = 0; i < DIM / 8; i++) total += first + i < THREADS ? partial[first + i] : 0.0f;
  const float root = rsqrtf(total / DIM + (float)(EPS));
#pragma unroll
  for (int i = 0; i < 8; i++) y[i] = y[i] * root * w[i] * fast_silu(z[i]);
#if QUANT == 4
  const float token = token_scale<THREADS>((const float (&)[1][8])y, partial);
  scales = &token;
#endif
  emit(y, row, column, live, scales, QUANT_ARGS);
}
