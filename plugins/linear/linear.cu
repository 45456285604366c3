// bf16 linear layer: y[m, n] = Σ_k x[m, k] · w[n, k]. The format alone; the kernels are stream-K
// (stream_gemm.cuh) and, with FEW_ROWS, the skinny GEMM (few_rows.cuh).
//
// A lane's 16 bytes are the four registers of a bf16 fragment. H200, 96 x 5120: 6 us at 1 row, 8 at
// 128, all of it start, fix-up and end (benchmarks/log/stream_gemm.md).
constexpr int ELEMENT_BITS = 16;
constexpr int SCALE_BYTES = 0;
constexpr int X_BYTES = 2;
constexpr bool FP8_MMA = false;
#include "linear/stream_plain.cuh"

DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_bf16(d, a, b0, b1); }

#ifdef FEW_ROWS
#include "linear/few_rows.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    linear_few(const u8* x, const u8* w, void* y, int m, int n, int k, int each) {
  const Problem p = {x, w, nullptr, m, n, k};
  few_rows(p, y, each, [](int) { return 1.0f; });
}
#else
#include "linear/stream_gemm.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
    linear(const u8* x, const u8* w, void* y, float* partial, u32* arrived, int m, int n, int k) {
  const Problem p = {x, w, nullptr, partial, arrived, m, n, k};
  stream_gemm(p, y, [](int) { return 1.0f; });
}
#endif
