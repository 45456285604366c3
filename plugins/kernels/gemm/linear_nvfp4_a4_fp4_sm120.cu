// NVFP4 linear layer, NVFP4 activations (W4A4):
// y[m, n] = alpha[n] · Σ_k (xq · x_scale)[m, k] · (w · w_scale)[n, k]. This file is the format
// alone; the kernels are stream-K, or, with BLOCK_TILES, m16_gemm.cuh for few rows.
//
// One block-scaled FP4 mma is 16 weight rows, 8 tokens and 64 k. A k-slab is four of them: 256 k,
// the 128 bytes of an activation row as bf16 and e4m3 have them, so codes count by bytes (X_BYTES
// 1, k = bytes) and the 16 bytes that a lane loads are the four registers of its fragment. A lane's
// scales serve several steps: of weights lanes 4g + 2p + r hold row g + 8r's for steps p and 2 + p,
// of activations lane 4g + t column g's for step t, and the instruction has which lanes to ask.
// On sm_121a a product is one OMMA; on sm_90a it is emulated (fp4_mma_sm120.cuh): correct, not
// fast. Not run yet where the instruction exists (log/gemm/linear_nvfp4_a4_fp4_sm120.md).
#include "common/fp4_mma_sm120.cuh"

constexpr int M16_SLAB = 2048;  // bytes of codes of an m16 tile's k-slab
constexpr int ROWS_SLAB = 256;  // … and of its scales

#ifdef BLOCK_TILES
#include "gemm/m16_gemm.cuh"

constexpr int PANEL_TILES = 16;  // m16 tiles that are together in a k-slab (linear_layout.py)

struct A4 {
  const u8* x;
  const u8* x_scale;
  const u8* w;
  const u8* w_scale;
  int m, k, slabs, m16_tiles;
  u64 once;

  struct Weights {
    uint4 codes;
    u32 scale;
  };
  struct Inputs {
    u32 low, high, scale;
  };

  // `step`: of 64 k, four to a k-slab.
  DEVICE Weights weights(int m16, int step) const {
    const int panel = m16 / PANEL_TILES * PANEL_TILES, lane = lane_id();
    const i64 at =
        (i64)panel * slabs + step / 4 * min(PANEL_TILES, m16_tiles - panel) + m16 - panel;
    const int s = step % 4, p = s % 2;
    const u8* codes = w + at * M16_SLAB + s * 512 + lane * 16;
    const u8* scales = w_scale + at * ROWS_SLAB + ((lane >> 2) * 4 + 2 * p + (lane & 1)) * 8;
    return {load_once((const uint4*)codes, once), *(const u32*)(scales + s / 2 * 4)};
  }
  DEVICE Inputs inputs(int row, int step, bool there) const {
    const int t = lane_id() & 3, first = step * 64 + t * 8;
    row += lane_id() >> 2;
    const u8* codes = x + (i64)row * (k / 2) + first / 2;
    const u8* scales = x_scale + (i64)row * (k / 16) + step * 4;
    there &= row < m;
    Inputs in = {0, 0, 0};
    if (there && (WHOLE || first < k)) in.low = *(const u32*)codes;
    if (there && (WHOLE || first + 32 < k)) in.high = *(const u32*)(codes + 16);
    if (WHOLE) {
      if (there) in.scale = *(const u32*)scales;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (there && step * 64 + i * 16 < k) in.scale |= (u32)scales[i] << 8 * i;
    }
    return in;
  }
  DEVICE static void multiply(float (&sums)[4], const Weights& w, const Inputs& x) {
    const u32 a[4] = {w.codes.x, w.codes.y, w.codes.z, w.codes.w};
    mma_nvfp4(sums, a, x.low, x.high, w.scale, x.scale);
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCK_M <= 16 ? 2 : 1)
    nvfp4_linear_a4_m16(const u8* x, const u8* x_scale, const u8* w, const u8* w_scale,
                        const float* alpha, void* y, int m, int n, int k) {
  const int steps = (k + 63) / 64, slabs = (k + 255) / 256;
  const A4 f = {x, x_scale, w, w_scale, m, k, slabs, n / 16, evict_first_policy()};
  m16_gemm(f, y, m, n, steps, [=](int row) { return alpha[row]; });
}
#else
constexpr int ELEMENT_BITS = 8;
constexpr int SCALE_BYTES = ROWS_SLAB;
constexpr int X_BYTES = 1;
constexpr int X_SCALE_BYTES = 16;
constexpr int UNROLLED_STEPS = FP4_MMA ? 4 : 1;
constexpr bool WIDENED = false;
#define SCALED 1

typedef uint2 Scales;  // for steps p and 2 + p

DEVICE Scales load_scales(u32 scales) { return load_shared8(scales + (threadIdx.x & 31) * 8); }
// Of 8 rows of 16 bytes: this lane's is step t of row g.
DEVICE u32 load_x_scale(u32 rows) { return load_shared4(rows + (threadIdx.x & 31) * 4); }

DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const Scales& w, u32 x,
                     int step) {
  mma_nvfp4_step(d, a, b0, b1, step < 2 ? w.x : w.y, x, step);
}

#include "gemm/stream_k/stream_k_gemm.cuh"

// `bytes`: of codes in a row, half of k.
DYNAMIC_SHARED(nvfp4_linear_a4, SHARED);
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
    nvfp4_linear_a4(const u8* x, const u8* x_scale, const u8* w, const u8* w_scale,
                    const float* alpha, void* y, float* partial, u32* arrived, int m, int n,
                    int bytes) {
  Problem p = {x, w, w_scale, partial, arrived, m, n, bytes};
  p.x_scales = x_scale;
  stream_k_gemm(p, y, [=](int row) { return alpha[row]; });
}
#endif
