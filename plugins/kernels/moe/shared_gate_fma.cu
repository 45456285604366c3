// y = routed + sigmoid(x · w) · shared, a block a row: bf16 [rows, K], w [K] bf16 or f32 (W_F32).
//
// The row of x is summed in f32 in a fixed order; the other two operands are read meanwhile.
// 1 / 32 / 128 / 1024 rows of 2048, H200: 1.0 / 1.1 / 1.5 / 2.7 us (log/rowwise/rows_copy.md).
#include "common/numeric.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    shared_gate(const uint4* routed, const uint4* shared, const uint4* x, const void* w,
                uint4* __restrict__ y) {
  __shared__ float warp_sums[THREADS / 32];
  const i64 row = blockIdx.x;
  wait_then_launch_dependents();
  float dot = 0.0f;
  uint4 others[VECS][2];
#pragma unroll
  for (int v = 0; v < VECS; v++) {
    const int at = v * THREADS + threadIdx.x;
    if (at >= K / 8) continue;
    float a[8], b[8];
    unpack8(x[row * (K / 8) + at], a);
    others[v][0] = routed[row * (K / 8) + at];
    others[v][1] = shared[row * (K / 8) + at];
#if W_F32
#pragma unroll
    for (int i = 0; i < 8; i++) b[i] = ((const float*)w)[at * 8 + i];
#else
    unpack8(((const uint4*)w)[at], b);
#endif
#pragma unroll
    for (int i = 0; i < 8; i++) dot = fmaf(a[i], b[i], dot);
  }
  const float gate = sigmoid(block_sum<THREADS>(dot, warp_sums));
#pragma unroll
  for (int v = 0; v < VECS; v++) {
    const int at = v * THREADS + threadIdx.x;
    if (at >= K / 8) continue;
    float a[8], b[8];
    unpack8(others[v][0], a);
    unpack8(others[v][1], b);
#pragma unroll
    for (int i = 0; i < 8; i++) a[i] = fmaf(gate, b[i], a[i]);
    y[row * (K / 8) + at] = pack8(a);
  }
}
