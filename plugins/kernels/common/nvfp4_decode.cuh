// NVFP4 weights dequantised in registers, for the experts: eight codes of a row become four bf16
// pairs, times their block scale. (linear_nvfp4_mma.cu decodes the linear layers' layout.)
//
// The eight codes of a word are packed (expert_layout.py) so that one rotation and one mask give a
// bf16 pair for three of the four pairs, and two of each for the fourth. A masked code is code ·
// 2^-126 and a decoded scale is scale · 2^119: products are code · scale · 2^-7, exact in bf16 (at
// most six significant bits). The epilogue multiplies by NVFP4_REST = 2^7.
//
// A lane's two words of a row are 16 consecutive k of one block, with one scale. k is permuted
// within every 64 before packing, at no cost, since activations are also read in runs of eight.
#pragma once
#include "common/numeric.cuh"

constexpr float NVFP4_REST = 128.0f;

// A rotation to the left, on the shifter: a wide multiplication takes twice as long and delays
// concurrent wgmma.
template <int SHIFT>
DEVICE u32 turn(u32 word) {
  return __funnelshift_l(word, word, SHIFT);
}

// Pairs k 8t + 2j, 8t + 2j + 1 of one row, j = 0…3.
DEVICE void fp4_pairs(u32 word, u32 scale, u32& p0, u32& p1, u32& p2, u32& p3) {
  const u32 all = 0x81C081C0;
  p0 = mul_bf16x2(word & all, scale);
  p1 = mul_bf16x2((word << 6) & all, scale);
  p2 = mul_bf16x2(turn<10>(word) & all, scale);
  p3 = mul_bf16x2((turn<12>(word) & 0x80C080C0) | ((word << 4) & 0x01000100), scale);
}

// Byte i of four block scales, twice, as bf16 · 2^119: an instruction of the logic pipe and one of
// the multiply pipe.
DEVICE u32 fp4_scale(u32 bytes, int i) {
  return __byte_perm(bytes, 0, 0x4440 + i) * 0x00100010 + 0x70007000;
}

// The fragments a[step][register] of a 16 x 64 tile from a lane's four words. `scales`: of rows g
// and g + 8, of the first of two tiles, then of the second.
DEVICE void fp4_fragments(const uint4& words, u32 scales, int tile, u32 (&a)[4][4]) {
  const u32 near = fp4_scale(scales, 2 * tile), far = fp4_scale(scales, 2 * tile + 1);
  fp4_pairs(words.x, near, a[0][0], a[0][2], a[1][0], a[1][2]);
  fp4_pairs(words.y, far, a[0][1], a[0][3], a[1][1], a[1][3]);
  fp4_pairs(words.z, near, a[2][0], a[2][2], a[3][0], a[3][2]);
  fp4_pairs(words.w, far, a[2][1], a[2][3], a[3][1], a[3][3]);
}
