// Patches as activations, and their position rows: x[p] = patches[p] · pixels[0] + pixels[1], and
// positions[p] = Σ_t tap_weights[p, t] · table[taps[p, t]], taps clamped to the table.
//
// Block p, eight columns a thread at a time: first those of x, then those of the position. patches
// u8 [n, P], pixels f32 [2, P], table bf16 [ROWS, H], results bf16; P % 8 = H % 8 = 0.
// Not measured (log/vision/rowwise.md).
// Macros: P, H, TAPS, ROWS, THREADS.
#include "common/numeric.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    vision_patches(const u8* patches, const int* taps, const float* tap_weights,
                   const float* pixels, const uint4* table, uint4* x, uint4* positions) {
  const i64 patch = blockIdx.x;
  wait_then_launch_dependents();
  for (int i = threadIdx.x; i < P / 8; i += THREADS) {
    const uint2 codes = ((const uint2*)patches)[patch * (P / 8) + i];
    float factor[8], y[8];
    load8(pixels + i * 8, factor);
    load8(pixels + P + i * 8, y);
#pragma unroll
    for (int c = 0; c < 8; c++)
      y[c] = fmaf((float)((c < 4 ? codes.x : codes.y) >> c % 4 * 8 & 255), factor[c], y[c]);
    x[patch * (P / 8) + i] = pack8(y);
  }
  for (int i = threadIdx.x; i < H / 8; i += THREADS) {
    float sum[8] = {};
#pragma unroll
    for (int t = 0; t < TAPS; t++) {
      const int row = min(max(taps[patch * TAPS + t], 0), ROWS - 1);
      const float share = tap_weights[patch * TAPS + t];
      float v[8];
      unpack8(table[(i64)row * (H / 8) + i], v);
#pragma unroll
      for (int c = 0; c < 8; c++) sum[c] = fmaf(share, v[c], sum[c]);
    }
    positions[patch * (H / 8) + i] = pack8(sum);
  }
}
