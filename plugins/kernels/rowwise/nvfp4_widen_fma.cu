// NVFP4 activations as bf16 values, code · block scale, exactly: for targets without FP4 matrix
// instructions. Eight codes a thread; K % 16 = 0, so rows follow each other without a gap.
// Not timed yet; why bf16: log/gemm/linear_nvfp4_a4_fp4_sm120.md.
#include "common/numeric.cuh"

extern "C" __global__ void nvfp4_widen(const u32* xq, const u8* x_scale, uint4* x, int words) {
  const int at = blockIdx.x * blockDim.x + threadIdx.x;
  wait_then_launch_dependents();
  if (at >= words) return;
  const u32 codes = xq[at];
  const float scale = from_e4m3(x_scale[at / 2]);
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = from_e2m1(codes >> 4 * i) * scale;
  x[at] = pack8(v);
}
