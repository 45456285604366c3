// Int4 weights dequantised in registers: eight codes of a row become four bf16 pairs,
// (code - zero) · scale. The difference is exact, the product rounds once.
//
// An integer in the low bits of a bf16 is the integer · 2^-133. So of a half word the lowest four
// bits are a code; the next three with the sign, and a bit set below them, are 8 · (2 code - 15). A
// turn by a byte brings the other half of the codes there (weight_packing.py): five integer
// instructions for eight. Scale and zero of 32 codes are a half word: sign, four bits of zero, four
// of exponent (of 2^-15 … 1), seven of mantissa. The scale is used · 2^112: 2^21 is left for the
// epilogue.
#pragma once
#include "common/numeric.cuh"

constexpr float CODES_REST = 2097152.0f;

struct Int4Scale {
  u32 factor, zero;  // pairs
};

// Of one of a word's halves.
DEVICE Int4Scale int4_scale(u32 halves, int half) {
  const u32 both = __byte_perm(halves, 0, half ? 0x3232 : 0x1010);
  return {kept_or(both, 0x87FF87FF, 0x70007000), both >> 11 & 0x000F000F};
}

// Pairs j = 0…3 of a word: codes, and 16 code - 120 for a 16th of the scale.
DEVICE void code_pairs(u32 word, const Int4Scale& s, u32& p0, u32& p1, u32& p2, u32& p3) {
  const u32 turned = __byte_perm(word, 0, 0x2103);
  const u32 zero = fma_bf16x2(s.zero, 0x41804180, 0x80788078);
  const u32 factor = mul_bf16x2(s.factor, 0x3D803D80);
  p0 = mul_bf16x2(sub_bf16x2(word & 0x000F000F, s.zero), s.factor);
  p1 = mul_bf16x2(sub_bf16x2(kept_or(word, 0x80708070, 0x00080008), zero), factor);
  p2 = mul_bf16x2(sub_bf16x2(turned & 0x000F000F, s.zero), s.factor);
  p3 = mul_bf16x2(sub_bf16x2(kept_or(turned, 0x80708070, 0x00080008), zero), factor);
}

// Of rows g and g + 8 of an m16 tile of the experts.
struct RowScales {
  Int4Scale near, far;
};
// `scales`: of two tiles in two lanes with k of one group (expert_layout.py). All lanes ask.
DEVICE RowScales row_scales(u32 scales, int tile) {
  const u32 halves = __shfl_sync(~0u, scales, tile, 2);
  return {int4_scale(halves, 0), int4_scale(halves, 1)};
}
