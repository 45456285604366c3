// NVFP4 weights dequantised in registers, for the experts: eight codes of a row become four bf16
// pairs, times their block scale. (linear_nvfp4_mma.cu decodes the linear layers' layout.)
//
// The eight codes of a word are packed (expert_layout.py) so that one rotation and one mask give a
// bf16 pair for three of the four pairs, and two of each for the fourth. A masked code is code ·
// 2^-126 and a decoded scale is scale · 2^119: products are code · scale · 2^-7, exact in bf16 (at
// most six significant bits). The epilogue multiplies by CODES_REST = 2^7.
//
// A lane's two words of a row are 16 consecutive k of one block, with one scale. k is permuted
// within every 64 before packing, at no cost, since activations are also read in runs of eight.
#pragma once
#include "common/numeric.cuh"

constexpr float CODES_REST = 128.0f;

// A rotation to the left, on the shifter: a wide multiplication takes twice as long and delays
// concurrent wgmma.
template <int SHIFT>
DEVICE u32 turn(u32 word) {
  return __funnelshift_l(word, word, SHIFT);
}

// Pairs k 8t + 2j, 8t + 2j + 1 of one row, j = 0…3.
DEVICE void code_pairs(u32 word, u32 scale, u32& p0, u32& p1, u32& p2, u32& p3) {
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

// Of rows g and g + 8 of an m16 tile of the experts. `scales`: of the first of two tiles, then of
// the second.
struct RowScales {
  u32 near, far;
};
DEVICE RowScales row_scales(u32 scales, int tile) {
  return {fp4_scale(scales, 2 * tile), fp4_scale(scales, 2 * tile + 1)};
}
