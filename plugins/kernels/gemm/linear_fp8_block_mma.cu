// FP8 linear layer, weight scales of 128 x 128 blocks, activation scales by row and 128 columns:
// y[m, n] = Σ_kb x_scale[m, kb] · w_scale[n / 128, kb] · Σ_{k in kb} xq[m, k] · w[n, k]. This file
// is the format alone; the kernels are stream-K or, with SKINNY, the skinny GEMM.
//
// A k-slab is a block of 128 k (SLAB_SCALES): its products add up in separate registers, then the
// two scales bring them into the sum, as DeepSeek-V3 3.3 does it. An m16 tile has one scale.
// Figures: log/gemm/linear_fp8_block_mma.md.
#define SLAB_SCALES 1
constexpr int ELEMENT_BITS = 8;
constexpr int SCALE_BYTES = 0;
constexpr int X_BYTES = 1;
constexpr int X_SCALE_BYTES = 4;
constexpr bool FP8_MMA = true;
#include "gemm/plain_fragments.cuh"

DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_e4m3(d, a, b0, b1); }

#ifdef SKINNY
#include "gemm/skinny_gemm.cuh"

DYNAMIC_SHARED(fp8_block_linear_skinny, SHARED);
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    fp8_block_linear_skinny(const u8* x, const float* x_scale, const u8* w, const float* w_scale,
                            void* y, int m, int n, int k, int each) {
  const Problem p = {x, w, nullptr, m, n, k, x_scale, w_scale};
  skinny_gemm(p, y, each, [](int) { return 1.0f; });
}
#else
#include "gemm/stream_k/stream_k_gemm.cuh"

DYNAMIC_SHARED(fp8_block_linear, SHARED);
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
    fp8_block_linear(const u8* x, const float* x_scale, const u8* w, const float* w_scale, void* y,
                     float* partial, u32* arrived, int m, int n, int k) {
  Problem p = {x, w, nullptr, partial, arrived, m, n, k};
  p.x_scales = (const u8*)x_scale, p.w_scales = w_scale;
  stream_k_gemm(p, y, [](int) { return 1.0f; });
}
#endif
