// Int4 linear layer, bf16 activations (W4A16): y[m, n] = w_scale2[n] · Σ_k x[m, k] · (code - zero)
// · scale, by groups of 32 k. This file is the format alone: codes and scales are laid out as those
// of NVFP4 (linear_nvfp4_mma.cu), with as many bytes, for the same kernels. Not timed yet; theirs:
// log/gemm/stream_k_gemm.md and skinny_gemm.md.
constexpr int ELEMENT_BITS = 4;
constexpr int SCALE_BYTES = 64;
constexpr int X_BYTES = 2;
constexpr int X_SCALE_BYTES = 0;
constexpr bool FP8_MMA = false;
#include "common/int4_decode.cuh"

struct Raw {
  uint4 words;
  uint2 scales;  // of rows g and g + 8: a half word for each 32 k
};

DEVICE Raw load(u32 w, u32 scales) {
  const int lane = threadIdx.x & 31;
  return {load_shared16(w + lane * 16), load_shared8(scales + (lane >> 2) * 8)};
}

DEVICE void decode(const Raw& raw, u32 (&a)[4][4]) {
  const u32 near = raw.scales.x, far = raw.scales.y;
  code_pairs(raw.words.x, int4_scale(near, 0), a[0][0], a[0][2], a[1][0], a[1][2]);
  code_pairs(raw.words.y, int4_scale(far, 0), a[0][1], a[0][3], a[1][1], a[1][3]);
  code_pairs(raw.words.z, int4_scale(near, 1), a[2][0], a[2][2], a[3][0], a[3][2]);
  code_pairs(raw.words.w, int4_scale(far, 1), a[2][1], a[2][3], a[3][1], a[3][3]);
}

DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_bf16(d, a, b0, b1); }

#ifdef SKINNY
#include "gemm/skinny_gemm.cuh"

DYNAMIC_SHARED(int4_linear_skinny, SHARED);
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    int4_linear_skinny(const u8* x, const u8* w, const u8* w_scale, const float* w_scale2, void* y,
                       int m, int n, int k, int each) {
  const Problem p = {x, w, w_scale, m, n, k};
  skinny_gemm(p, y, each, [=](int row) { return w_scale2[row] * CODES_REST; });
}
#else
#include "gemm/stream_k/stream_k_gemm.cuh"

DYNAMIC_SHARED(int4_linear, SHARED);
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
    int4_linear(const u8* x, const u8* w, const u8* w_scale, const float* w_scale2, void* y,
                float* partial, u32* arrived, int m, int n, int k) {
  const Problem p = {x, w, w_scale, partial, arrived, m, n, k};
  stream_k_gemm(p, y, [=](int row) { return w_scale2[row] * CODES_REST; });
}
#endif
