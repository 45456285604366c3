// Formats with packed weights that are mma.sync fragments (bf16, e4m3): nothing is dequantised.
// Defines of a format (stream_k_gemm.cuh, skinny_gemm.cuh) Raw, load and decode.
#pragma once
#include "common/numeric.cuh"

#define FRAGMENTS 1
constexpr int UNROLLED_STEPS = FP8_MMA && __CUDA_ARCH__ < 1000 ? 1 : 4;
// Where mma_e4m3 is two f16 products and the twelve conversions of their operands, a fragment that
// serves several products is widened once instead.
constexpr bool WIDENED = FP8_MMA && __CUDA_ARCH__ < 1000;
struct Scales {};
DEVICE Scales load_scales(u32) { return {}; }
DEVICE u32 load_x_scale(u32) { return 0; }

// What a lane holds of a m16's slab: 16 bytes a step are the four registers of its fragment.
struct Raw {
  uint4 steps[4];
};

DEVICE Raw load(u32 w, u32) {
  Raw raw;
#pragma unroll
  for (int step = 0; step < 4; ++step)
    raw.steps[step] = load_shared16(w + step * 512 + (threadIdx.x & 31) * 16);
  return raw;
}

DEVICE void decode(const Raw& raw, u32 (&a)[4][4]) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const uint4& v = raw.steps[step];
    a[step][0] = v.x, a[step][1] = v.y, a[step][2] = v.z, a[step][3] = v.w;
  }
}
