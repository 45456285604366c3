// The block-scaled FP4 matrix instruction m16n8k64: native on sm_12xa, emulated elsewhere.
//
// Operands are those of the instruction: of lane 4g + t, a[0…3] hold eight codes each of (row g,
// k 8t…), (row g + 8, k 8t…), (row g, k 32 + 8t…), (row g + 8, k 32 + 8t…); b[0…1] those of column
// g; `scale_a` is row g's four e4m3 scales in lane t = 2 PAIR, row g + 8's in the next, `scale_b`
// column g's in lane t = LANE; d as of any m16n8 mma.
//
// The emulation is exact but for the f32 order of the four block sums: a block's products are
// multiples of 1/4 of at most 36, so one f16 mma sums them exactly. Two lanes hold a block's 16
// codes of a row; exchanging halves with the lane two further gives each lane four of the one block
// and four of the next, the same ones for a and b, so k is permuted within a block alone.
#pragma once
#include "common/numeric.cuh"

// NVRTC defines this macro for sm_12xa, but not nvcc's __CUDA_ARCH_FEAT_SM121_ALL.
#if defined(__CUDA_ARCH_SPECIFIC__) && __CUDA_ARCH_SPECIFIC__ / 100 == 12
constexpr bool FP4_MMA = true;

template <int PAIR = 0, int LANE = 0>
DEVICE void mma_nvfp4(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 scale_a, u32 scale_b) {
  asm volatile(
      "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X"
      ".f32.e2m1.e2m1.f32.ue4m3 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, "
      "%10, {0, %12}, %11, {0, %13};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(scale_a), "r"(scale_b),
        "n"(PAIR), "n"(LANE));
}

// With PAIR = step % 2 and LANE = step; `step` must be a constant after unrolling.
DEVICE void mma_nvfp4_step(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 scale_a,
                           u32 scale_b, int step) {
  if (step == 0) mma_nvfp4<0, 0>(d, a, b0, b1, scale_a, scale_b);
  if (step == 1) mma_nvfp4<1, 1>(d, a, b0, b1, scale_a, scale_b);
  if (step == 2) mma_nvfp4<0, 2>(d, a, b0, b1, scale_a, scale_b);
  if (step == 3) mma_nvfp4<1, 3>(d, a, b0, b1, scale_a, scale_b);
}
#else
constexpr bool FP4_MMA = false;

// Four codes -> two f16 pairs, each value · 2^-14.
DEVICE void halves_of(u32 codes, u32& first, u32& second) {
  const u32 low = (codes & 0x000f) | (codes & 0x00f0) << 12;
  const u32 high = (codes >> 8 & 0x000f) | (codes & 0xf000) << 4;
  first = (low & 0x00080008) << 12 | (low & 0x00070007) << 9;
  second = (high & 0x00080008) << 12 | (high & 0x00070007) << 9;
}

DEVICE void mma_nvfp4_of(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 scale_a, u32 scale_b,
                         u32 pair, u32 at) {
  const u32 lane = lane_id(), t = lane & 3;
  const u32 g = (lane & ~3u) + 2 * pair;
  const u32 c = 8 * t + at;
  const u32 rows[2] = {__shfl_sync(~0u, scale_a, g), __shfl_sync(~0u, scale_a, g + 1)};
  const u32 columns[2] = {__shfl_sync(~0u, scale_b, c), __shfl_sync(~0u, scale_b, c + 4)};
  const u32 b[2] = {b0, b1};
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    const int half = block / 2;
    const bool own = (block & 1) == (t >= 2);  // this lane's low codes belong to the block
    u32 mine[3] = {a[2 * half], a[2 * half + 1], b[half]}, f[3][2];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const u32 theirs = __shfl_xor_sync(~0u, mine[i], 2) >> 16;
      halves_of(own ? mine[i] & 0xffff : theirs, f[i][0], f[i][1]);
    }
    const u32 fa[4] = {f[0][0], f[1][0], f[0][1], f[1][1]};
    float part[4] = {};
    mma_f16(part, fa, f[2][0], f[2][1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float scale = from_e4m3(rows[i / 2] >> 8 * block & 0xff) *
                          from_e4m3(columns[i % 2] >> 8 * block & 0xff);
      d[i] += part[i] * (scale * 268435456.0f);  // 2^28
    }
  }
}

template <int PAIR = 0, int LANE = 0>
DEVICE void mma_nvfp4(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 scale_a, u32 scale_b) {
  mma_nvfp4_of(d, a, b0, b1, scale_a, scale_b, PAIR, LANE);
}
DEVICE void mma_nvfp4_step(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 scale_a,
                           u32 scale_b, int step) {
  mma_nvfp4_of(d, a, b0, b1, scale_a, scale_b, step & 1, step);
}
#endif
