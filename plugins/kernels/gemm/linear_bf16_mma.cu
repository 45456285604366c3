// bf16 linear layer: y[m, n] = Σ_k x[m, k] · w[n, k]. This file is the format alone; the kernels
// are stream-K (stream_k_gemm.cuh; with GELU, of biases and residuals) or, with SKINNY, the skinny
// GEMM (skinny_gemm.cuh).
//
// The 16 bytes that a lane loads are the four registers of its fragment. H200, 96 x 5120: 6 us at 1
// row, 8 at 128, all of it start, fix-up and end (benchmarks/log/gemm/stream_k_gemm.md).
constexpr int ELEMENT_BITS = 16;
constexpr int SCALE_BYTES = 0;
constexpr int X_BYTES = 2;
constexpr int X_SCALE_BYTES = 0;
constexpr bool FP8_MMA = false;
#include "gemm/plain_fragments.cuh"

DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_bf16(d, a, b0, b1); }

#ifdef SKINNY
#include "gemm/skinny_gemm.cuh"

DYNAMIC_SHARED(linear_skinny, SHARED);
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    linear_skinny(const u8* x, const u8* w, void* y, int m, int n, int k, int each) {
  const Problem p = {x, w, nullptr, m, n, k};
  skinny_gemm(p, y, each, [](int) { return 1.0f; });
}
#else
#include "gemm/stream_k/stream_k_gemm.cuh"

#ifdef GELU
DYNAMIC_SHARED(linear_bias, SHARED);
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
    linear_bias(const u8* x, const u8* w, const float* bias, const u16* residual, void* y,
                float* partial, u32* arrived, int m, int n, int k) {
  const Problem p = {x, w, nullptr, partial, arrived, m, n, k, residual};
  stream_k_gemm(p, y, [&](int at) { return bias[at]; });
}
#else
DYNAMIC_SHARED(linear, SHARED);
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
    linear(const u8* x, const u8* w, void* y, float* partial, u32* arrived, int m, int n, int k) {
  const Problem p = {x, w, nullptr, partial, arrived, m, n, k};
  stream_k_gemm(p, y, [](int) { return 1.0f; });
}
#endif
#endif
