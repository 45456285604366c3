// LayerNorm: y = (x − mean(x)) · rsqrt(var(x) + EPS) · weight + bias, of bf16 rows of K columns.
//
// A warp a row, which it holds: VECS vectors of eight columns a lane, at a stride of 32. The mean
// comes first, then the squares of what differs from it. K % 8 = 0; weight and bias f32. Rows side
// by side, which a merger reads, are the same memory. Not measured (log/vision/rowwise.md).
// Macros: K, VECS, EPS, THREADS.
#include "common/numeric.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    layer_norm(const uint4* x, const float* weight, const float* bias, uint4* y, int rows) {
  const i64 row = (i64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
  wait_then_launch_dependents();
  if (row >= rows) return;
  float v[VECS][8], sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int i = 0; i < VECS; i++) {
    const int at = i * 32 + lane_id();
    if (at >= K / 8) continue;
    unpack8(x[row * (K / 8) + at], v[i]);
#pragma unroll
    for (int c = 0; c < 8; c++) sum += v[i][c];
  }
  const float mean = warp_sum(sum) / K;
#pragma unroll
  for (int i = 0; i < VECS; i++) {
    if (i * 32 + lane_id() >= K / 8) continue;
#pragma unroll
    for (int c = 0; c < 8; c++) v[i][c] -= mean, squares = fmaf(v[i][c], v[i][c], squares);
  }
  const float root = rsqrtf(warp_sum(squares) / K + (float)(EPS));
#pragma unroll
  for (int i = 0; i < VECS; i++) {
    const int at = i * 32 + lane_id();
    if (at >= K / 8) continue;
    float w[8], b[8];
    load8(weight + at * 8, w);
    load8(bias + at * 8, b);
#pragma unroll
    for (int c = 0; c < 8; c++) v[i][c] = fmaf(v[i][c] * root, w[c], b[c]);
    y[row * (K / 8) + at] = pack8(v[i]);
  }
}
