// FP8 linear layer: y[m, n] = (x_scale · w_scale[n]) · Σ_k xq[m, k] · w[n, k], both sides e4m3.
// With BY_TOKEN x_scale is f32 [m], of each token, which the launch before writes.
// This file is the format alone; the kernels are stream-K or, with SKINNY, the skinny GEMM.
//
// The 16 bytes that a lane loads are the four registers of its fragment: nothing is dequantised.
// H200, 16384 x 5120: 19.5 us at 1 row (the floor), 20.3 at 32, 24.7 at 128, a block for each tile
// (log/gemm/stream_k_gemm.md). wgmma adds e4m3 products to some 13 bits (2e-4 of the result),
// mma.sync exactly.
constexpr int ELEMENT_BITS = 8;
constexpr int SCALE_BYTES = 0;
constexpr int X_BYTES = 1;
constexpr int X_SCALE_BYTES = 0;
constexpr bool FP8_MMA = true;
#include "gemm/plain_fragments.cuh"

// Stream-K where products are widened: as consume_widened adds them, so that a row has the same
// bits in every tile of tokens. (mma_e4m3 adds both products first, then the sum so far.)
DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#ifndef SKINNY
  if constexpr (WIDENED) {
    u32 low[4], high[4], b[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) widen(a[i], low[i], high[i]);
    widen(b0, b[0][0], b[1][0]), widen(b1, b[0][1], b[1][1]);
    mma_f16(d, low, b[0][0], b[0][1]);
    return mma_f16(d, high, b[1][0], b[1][1]);
  }
#endif
  mma_e4m3(d, a, b0, b1);
}

#ifdef BY_TOKEN
#define TOKEN_SCALES , x_scale
#define FACTOR(row) w_scale[row]
#else
#define TOKEN_SCALES
#define FACTOR(row) *x_scale* w_scale[row]
#endif

#ifdef SKINNY
#include "gemm/skinny_gemm.cuh"

DYNAMIC_SHARED(fp8_linear_skinny, SHARED);
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    fp8_linear_skinny(const u8* x, const u8* w, const float* x_scale, const float* w_scale, void* y,
                      int m, int n, int k, int each) {
  const Problem p = {x, w, nullptr, m, n, k TOKEN_SCALES};
  skinny_gemm(p, y, each, [=](int row) { return FACTOR(row); });
}
#else
#include "gemm/stream_k/stream_k_gemm.cuh"

DYNAMIC_SHARED(fp8_linear, SHARED);
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
    fp8_linear(const u8* x, const u8* w, const float* x_scale, const float* w_scale, void* y,
               float* partial, u32* arrived, int m, int n, int k) {
  const Problem p = {x, w, nullptr, partial, arrived, m, n, k TOKEN_SCALES};
  stream_k_gemm(p, y, [=](int row) { return FACTOR(row); });
}
#endif
