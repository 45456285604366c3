// Element-wise activation, then bf16 and quantised copies: silu_mul, sigmoid_gate, act_quant, and
// (ACT 0) the stand-alone quantisers.
//
// x [rows, X] bf16; thread (chunk, row) computes eight neighbouring columns of y [rows, K]:
//   ACT 0: y = x            ACT 1: y = silu(x[:K]) · x[K:2K]
//   ACT 2: y = x · sigmoid(gate), gates in qkv [rows, QKV] at 2·HEAD_DIM·head + HEAD_DIM
// Bound by bandwidth: a 16-byte load per operand and a store, no shared memory. Of fp8_token a
// block has a row, VECS times eight columns a thread; of few long rows a cluster of PARTS blocks.
// 1 / 32 / 128 / 1024 rows of 2 x 17408, H200: fp8 1.1 / 2.2 / 2.8 / 21.7 us, nvfp4 1.2 / 3.5 / 4.6
// / 31.2 (variants: benchmarks/log/rowwise/act_quant_fma.md).
#include "common/early.cuh"
#include "common/row_quant.cuh"

// y at eight columns.
#if ACT == 1
#define ACTIVATE(y, column)                                   \
  float up[8];                                                \
  unpack8(*(const uint4*)(x + row * 2 * K + column), y);      \
  unpack8(*(const uint4*)(x + row * 2 * K + K + column), up); \
  _Pragma("unroll") for (int i = 0; i < 8; i++) y[i] = fast_silu(y[i]) * up[i];
#elif ACT == 2
#define ACTIVATE(y, column)                                                         \
  float gate[8];                                                                    \
  const int head = column / HEAD_DIM;                                               \
  unpack8(*(const uint4*)(x + row * K + column), y);                                \
  unpack8(*(const uint4*)(qkv + row * QKV + column + (head + 1) * HEAD_DIM), gate); \
  _Pragma("unroll") for (int i = 0; i < 8; i++) y[i] *= fast_sigmoid(gate[i]);
#else
#define ACTIVATE(y, column) unpack8(*(const uint4*)(x + row * K + column), y);
#endif

#if QUANT == 4
DYNAMIC_SHARED(act_quant, THREADS / 32 * 4 + 4);
#endif
extern "C" __global__ void __launch_bounds__(THREADS)
    act_quant(const u16* x, const u16* qkv, const float* scales, QUANT_OUTPUTS) {
  const i64 row = blockIdx.y;
#if QUANT == 4
  extern __shared__ __align__(16) u8 memory[];  // a float a warp, and one
  float* const warp_max = (float*)memory;
  float y[VECS][8] = {};
  wait_and_let_next_begin();
#pragma unroll
  for (int v = 0; v < VECS; v++) {
    const int column = ((v * gridDim.x + blockIdx.x) * THREADS + threadIdx.x) * 8;
    if (column < K) {
      ACTIVATE(y[v], column)
    }
  }
  const float token = token_scale<THREADS>(y, warp_max);
#pragma unroll
  for (int v = 0; v < VECS; v++) {
    const int column = ((v * gridDim.x + blockIdx.x) * THREADS + threadIdx.x) * 8;
    emit(y[v], row, column, column < K, &token, QUANT_ARGS);
  }
#if PARTS > 1
  cluster_meet();  // the others have read this block's largest
#endif
#else
  const int column = (blockIdx.x * THREADS + threadIdx.x) * 8;
  const bool live = column < K;
  float y[8] = {};
  wait_and_let_next_begin();
  if (live) {
    ACTIVATE(y, column)
  }
  emit(y, row, column, live, scales, QUANT_ARGS);
#endif
}
