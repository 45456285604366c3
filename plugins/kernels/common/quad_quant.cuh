// Quantised copies of four neighbouring columns a lane, for kernels with 128 columns a warp.
//
// Lanes hold neighbouring columns from a multiple of 16 on (of 128 for fp8_block). All lanes of a
// warp call together.
// Macros: QUANT (0 none, 1 fp8, 2 fp8_block, 3 nvfp4), COPIES (with a scale each).
#pragma once
#include "common/numeric.cuh"

// Four e4m3 codes of y / scale.
DEVICE u32 codes4(const float (&y)[4], float scale) {
  return to_e4m3x2(divide(y[0], scale), divide(y[1], scale)) |
         (u32)to_e4m3x2(divide(y[2], scale), divide(y[3], scale)) << 16;
}

// The copies of y, already rounded to the activations' type, at `column` of a row of WIDTH columns.
// `amax`: the largest magnitude of the 128-column block, for fp8_block only.
template <int WIDTH>
DEVICE void quantise(const float (&y)[4], i64 row, int column, float amax, const float* scales,
                     u8* const* q, u8* const* q_scale, bool live) {
#if QUANT == 1
#pragma unroll
  for (int i = 0; i < COPIES; i++) {
    u32 codes = codes4(y, scales[i]);
    if (live) *(u32*)(q[i] + row * WIDTH + column) = codes;
  }
#elif QUANT == 2
  float s = amax / 448.f;
  s = s == 0.f ? 1.f : s;
  u32 codes = codes4(y, s);
  if (live) *(u32*)(q[0] + row * WIDTH + column) = codes;
  if (live && column % 128 == 0) ((float*)q_scale[0])[row * (WIDTH / 128) + column / 128] = s;
#elif QUANT == 3
  const float own = fmaxf(fmaxf(fabsf(y[0]), fabsf(y[1])), fmaxf(fabsf(y[2]), fabsf(y[3])));
  const float top = lane_max<4>(own);
#pragma unroll
  for (int i = 0; i < COPIES; i++) {
    float gain = 1.f / scales[i];
    u8 code = to_e4m3(top / 6.f * gain);
    float s = from_e4m3(code);
    u32 bits = 0;
#pragma unroll
    for (int e = 0; e < 4; e++) bits |= to_e2m1(s == 0.f ? 0.f : y[e] * gain, s) << (4 * e);
    if (live) *(u16*)(q[i] + row * (WIDTH / 2) + column / 2) = (u16)bits;
    if (live && column % 16 == 0) q_scale[i][row * (WIDTH / 16) + column / 16] = code;
  }
#endif
}
