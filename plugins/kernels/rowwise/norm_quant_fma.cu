// [x + residual ->] RMSNorm -> bf16 and quantised copies: rms_norm and norm_quant.
//
// One block a row, the row in registers: VECS vectors of eight columns a thread, at a stride of
// THREADS, so that lanes hold neighbouring columns. x, residual, y, sum bf16 [rows, K]; weight f32.
// No launch writes the norm's weight, so it is read before the wait for the previous launch (PDL).
// Figures: 1 / 32 / 128 / 1024 rows of 5120, with residual and sum, H200: no quant 1.3 / 1.5 / 2.5
// / 8.6 us, two fp8 copies 1.7 / 2.0 / 3.3 / 9.7 (log/rowwise/norm_quant_fma.md).
// Macros besides those of row_quant.cuh: THREADS, VECS, EPS, ADD (1: with residual and sum).
#include "common/early.cuh"
#include "common/row_quant.cuh"

// By token 32 registers suffice; other copies spill with so few. A multiprocessor has 32 blocks.
constexpr int BLOCKS = QUANT != 4 || VECS > 1 ? 1 : THREADS < 64 ? 32 : 2048 / THREADS;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    norm_quant(const u16* x, const float* weight, const u16* residual, const float* scales,
               uint4* __restrict__ sum, QUANT_OUTPUTS) {
  __shared__ float partial[THREADS / 32];
  const i64 row = blockIdx.x;
  float y[VECS][8] = {}, w[VECS][8] = {};
#pragma unroll
  for (int v = 0; v < VECS; v++) {
    const int column = (v * THREADS + threadIdx.x) * 8;
    if (column < K) load8(weight + column, w[v]);
  }
  wait_and_let_next_begin();
  float squares = 0.0f;
#pragma unroll
  for (int v = 0; v < VECS; v++) {
    const int column = (v * THREADS + threadIdx.x) * 8;
    if (column >= K) continue;
    unpack8(*(const uint4*)(x + row * K + column), y[v]);
#if ADD
    sum[(row * K + column) / 8] = add_bf16(y[v], *(const uint4*)(residual + row * K + column));
#endif
#pragma unroll
    for (int i = 0; i < 8; i++) squares += y[v][i] * y[v][i];
  }
  const float root = rsqrtf(block_sum<THREADS>(squares, partial) / K + (float)(EPS));
  emit_normed<THREADS>(y, root, w, row, scales, QUANT_ARGS);
}
