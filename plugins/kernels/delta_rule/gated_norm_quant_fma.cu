// Gated RMSNorm per head, then bf16 and quantised copies: gated_norm and gated_norm_quant.
//
// y = o / sqrt(mean_head(o²) + eps) · weight · silu(z). o, y bf16 [rows, K]; z is in packed
// [rows, PACKED] from column OFFSET on; weight f32 [DIM]. Grid (K / COLUMNS, rows / ROWS): a block
// holds whole heads of ROWS rows, all loaded first, eight neighbouring columns a thread; a head's
// sum goes through shared memory in the order of its columns.
// Z_ALIGNED: z's rows start on 16-byte boundaries, so that one load reads eight.
// 1 / 32 / 128 / 1024 rows of 48 x 128, H200: fp8 1.1 / 1.5 / 2.5 / 11.1 us, nvfp4 1.3 / 2.0 / 3.0
// / 14.2. Measured variants: benchmarks/log/delta_rule/gated_norm_quant_fma.md.
#include "common/row_quant.cuh"

constexpr int LANES = DIM / 8;             // that hold a head
constexpr bool IN_WARP = 32 % LANES == 0;  // every head

// The sum over the lanes of a head, in the order of their columns.
DEVICE float head_sum(float own, float* partial) {
  partial[threadIdx.x] = own;
  if (IN_WARP) __syncwarp();
  else __syncthreads();
  float total = 0.0f;
  const int first = threadIdx.x / LANES * LANES;
#pragma unroll
  for (int i = 0; i < LANES; i++)
    total += IN_WARP || first + i < THREADS ? partial[first + i] : 0.0f;
  return total;
}
DEVICE uint4 load_gate(const u16* from, bool live) {
#if Z_ALIGNED
  return load_if16(live, from);
#else
  u16 z[8] = {};
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (live) z[i] = from[i];
  return make_uint4(z[0] | z[1] << 16, z[2] | z[3] << 16, z[4] | z[5] << 16, z[6] | z[7] << 16);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gated_norm_quant(const u16* o, const u16* packed, const float* weight, const float* scales,
                     QUANT_OUTPUTS) {
  __shared__ float partial[ROWS][THREADS];
  const i64 first = (i64)blockIdx.y * ROWS;
  const int column = blockIdx.x * COLUMNS + threadIdx.x * 8;
  const bool live = threadIdx.x * 8 < COLUMNS && column < K;
  float w[8];
  load8(weight + column % DIM, w);
  float known[COPIES] = {};
#if QUANT == 1 || QUANT == 3
#pragma unroll
  for (int i = 0; i < COPIES; i++) known[i] = scales[i];
#endif
  wait_then_launch_dependents();
  uint4 x[ROWS], gate[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    x[r] = load_if16(live, o + (first + r) * K + column);
    gate[r] = load_gate(packed + (first + r) * PACKED + OFFSET + column, live);
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    float y[8], z[8], squares = 0.0f;
    unpack8(x[r], y), unpack8(gate[r], z);
#pragma unroll
    for (int i = 0; i < 8; i++) squares += y[i] * y[i];
    const float root = rsqrtf(head_sum(squares, partial[r]) / DIM + (float)(EPS));
#pragma unroll
    for (int i = 0; i < 8; i++) y[i] = y[i] * root * w[i] * fast_silu(z[i]);
    const uint4 bits[1] = {pack8(y)};
#if QUANT == 4
    __shared__ u32 tops[THREADS / 32 + 1];
    known[0] = token_scale<THREADS>(bits, tops);
#endif
    emit(bits[0], first + r, column, live, known, QUANT_ARGS);
  }
}
