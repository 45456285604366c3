// NVFP4 linear layer, NVFP4 activations (W4A4):
// y[m, n] = alpha[n] · Σ_k (xq · x_scale)[m, k] · (w · w_scale)[n, k]. The GEMM is m16_gemm.cuh.
//
// A k-slab is 64 k: one block-scaled FP4 mma for 16 weight rows and 8 tokens; a lane has four words
// of weights and one of scales. On sm_121a that is one OMMA; on sm_90a it is emulated with the same
// operands (fp4_mma.cuh): correct, not fast. It has not run yet where the instruction exists
// (benchmarks/log/nvfp4_linear_a4.md).
#include "common/fp4_mma.cuh"
#include "linear/m16_gemm.cuh"

struct A4 {
  const u8* x;
  const u8* x_scale;
  const uint4* w;
  const u32* w_scale;
  int m, k, slabs;
  u64 once;

  struct Weights {
    uint4 codes;
    u32 scale;
  };
  struct Inputs {
    u32 low, high, scale;
  };

  DEVICE Weights weights(int m16, int slab) const {
    const i64 at = (i64)m16 * slabs + slab;
    const int lane = lane_id();
    return {load_once(w + at * 32 + lane, once), w_scale[at * 16 + (lane >> 2) * 2 + (lane & 1)]};
  }
  DEVICE Inputs inputs(int row, int slab, bool there) const {
    const int t = lane_id() & 3, first = slab * 64 + t * 8;
    row += lane_id() >> 2;
    const u8* codes = x + (i64)row * (k / 2) + first / 2;
    const u8* scales = x_scale + (i64)row * (k / 16) + slab * 4;
    there &= row < m;
    Inputs in = {0, 0, 0};
    if (there && (WHOLE || first < k)) in.low = *(const u32*)codes;
    if (there && (WHOLE || first + 32 < k)) in.high = *(const u32*)(codes + 16);
    if (WHOLE) {
      if (there) in.scale = *(const u32*)scales;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (there && slab * 64 + i * 16 < k) in.scale |= (u32)scales[i] << 8 * i;
    }
    return in;
  }
  DEVICE static void multiply(float (&sums)[4], const Weights& w, const Inputs& x) {
    const u32 a[4] = {w.codes.x, w.codes.y, w.codes.z, w.codes.w};
    mma_nvfp4(sums, a, x.low, x.high, w.scale, x.scale);
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCK_M <= 16 ? 2 : 1)
    nvfp4_linear_a4(const u8* x, const u8* x_scale, const uint4* w, const u32* w_scale,
                    const float* alpha, void* y, int m, int n, int k) {
  const int slabs = (k + 63) / 64;
  const A4 f = {x, x_scale, w, w_scale, m, k, slabs, evict_first_policy()};
  m16_gemm(f, y, m, n, slabs, [=](int row) { return alpha[row]; });
}
