// FP8 linear layer, weight scales of 128 x 128 blocks, activation scales by row and 128 columns:
// y[m, n] = Σ_kb x_scale[m, kb] · w_scale[n / 128, kb] · Σ_{k in kb} xq[m, k] · w[n, k]. The GEMM
// is m16_gemm.cuh.
//
// A k-slab is a block of 128 k: four e4m3 mma for 16 weight rows and 8 tokens add up in registers
// for the slab, then the two scales bring them into the sum. k is permuted within a k-slab so that
// a lane's activations are 32 neighbouring bytes. 16384 x 5120, H200, two m16 tiles a block: 21.2
// us at 1 row, 36.0 at 32 (floor 20; variants: benchmarks/log/gemm/linear_fp8_block_mma.md).
#include "gemm/m16_gemm.cuh"

struct Fp8Block {
  const u8* x;
  const float* x_scale;
  const uint4* w;
  const float* w_scale;
  int m, k, slabs;
  u64 once;

  struct Weights {
    uint4 codes[4];
    float scale;
  };
  struct Inputs {
    uint4 codes[2];
    float scale[2];  // of batch rows 2t, 2t + 1
  };

  DEVICE Weights weights(int m16, int slab) const {
    const uint4* from = w + ((i64)m16 * slabs + slab) * 128 + lane_id();
    Weights v;
#pragma unroll
    for (int step = 0; step < 4; ++step) v.codes[step] = load_once(from + step * 32, once);
    v.scale = w_scale[(i64)(m16 / 8) * slabs + slab];
    return v;
  }
  DEVICE Inputs inputs(int row, int slab, bool there) const {
    const int g = lane_id() >> 2, t = lane_id() & 3, first = slab * 128 + t * 32;
    Inputs in = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (there && row + g < m && (WHOLE || first + i * 16 < k))
        in.codes[i] = *(const uint4*)(x + (i64)(row + g) * k + first + i * 16);
      const int other = row + 2 * t + i;
      if (there && other < m) in.scale[i] = x_scale[(i64)other * slabs + slab];
    }
    return in;
  }
  DEVICE static void multiply(float (&sums)[4], const Weights& w, const Inputs& x) {
    const u32 b[8] = {x.codes[0].x, x.codes[0].y, x.codes[0].z, x.codes[0].w,
                      x.codes[1].x, x.codes[1].y, x.codes[1].z, x.codes[1].w};
    float part[4] = {};
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint4& v = w.codes[step];
      const u32 a[4] = {v.x, v.y, v.z, v.w};
      mma_e4m3(part, a, b[2 * step], b[2 * step + 1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = fmaf(part[i], w.scale * x.scale[i % 2], sums[i]);
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCK_M <= 16 ? 2 : 1)
    fp8_block_linear(const u8* x, const float* x_scale, const uint4* w, const float* w_scale,
                     void* y, int m, int n, int k) {
  const int slabs = (k + 127) / 128;
  const Fp8Block f = {x, x_scale, w, w_scale, m, k, slabs, evict_first_policy()};
  m16_gemm(f, y, m, n, slabs, [](int) { return 1.0f; });
}
