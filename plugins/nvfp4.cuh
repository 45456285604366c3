// NVFP4 weights in registers: eight codes of a row to four bf16 pairs, times their block scale.
//
// A word holds eight codes with their bits placed so that a rotation and a mask make a bf16 pair
// of three of the four pairs; the fourth takes two (plugins/expert_tiles.py). What comes out of the
// mask is code · 2^-126, a scale is decoded to scale · 2^119: products are code · scale · 2^-7, exact
// in bf16 (at most six significant bits), and NVFP4_REST is left for the end.
//
// Here a word's codes are eight consecutive k of one 16-block, so one scale serves a word: k is
// permuted within every 32 before packing, which costs nothing, since activations are read in
// runs of eight as well.
#pragma once
#include "numeric.cuh"

#define NVFP4_REST 128.0f

// A rotation to the left by SHIFT. WIDE: on the multiplier, since the shifter shares its
// pipe with the masks, for kernels that decode all the time; else on the shifter, for latency.
template <bool WIDE, int SHIFT>
DEVICE u32 turn(u32 word) {
  if (!WIDE) return __funnelshift_l(word, word, SHIFT);
  u32 low, high;
  asm("{.reg .b64 w;\nmul.wide.u32 w, %2, %3;\nmov.b64 {%0, %1}, w;}"
      : "=r"(low), "=r"(high)
      : "r"(word), "n"(1 << SHIFT));
  return low | high;
}

// Pairs k 8t + 2j, 8t + 2j + 1 of one row, j = 0…3.
template <bool WIDE>
DEVICE void fp4_pairs(u32 word, u32 scale, u32& p0, u32& p1, u32& p2, u32& p3) {
  const u32 all = 0x81C081C0;
  p0 = mul_bf16x2(word & all, scale);
  p1 = mul_bf16x2((word << 6) & all, scale);
  p2 = mul_bf16x2(turn<WIDE, 10>(word) & all, scale);
  p3 = mul_bf16x2((turn<WIDE, 12>(word) & 0x80C080C0) | ((word << 4) & 0x01000100), scale);
}

// Byte i of four block scales, twice, as bf16 · 2^119. `pick` = 0x4040 + 0x0101 · i.
DEVICE u32 fp4_scale(u32 bytes, u32 pick) {
  return __byte_perm(bytes, 0, pick) * 16 + 0x70007000;
}

// The fragments a[step][register] of a 16 x 64 tile from a lane's four words and eight scales.
template <bool WIDE>
DEVICE void fp4_fragments(const uint4& words, const uint2& scales, u32 (&a)[4][4]) {
  const u32 pick = 0x4040 + ((threadIdx.x >> 1) & 1) * 0x0101;  // lanes t > 1: the second block
  const u32 near0 = fp4_scale(scales.x, pick), near1 = fp4_scale(scales.x, pick + 0x0202);
  const u32 far0 = fp4_scale(scales.y, pick), far1 = fp4_scale(scales.y, pick + 0x0202);
  fp4_pairs<WIDE>(words.x, near0, a[0][0], a[0][2], a[1][0], a[1][2]);
  fp4_pairs<WIDE>(words.y, far0, a[0][1], a[0][3], a[1][1], a[1][3]);
  fp4_pairs<WIDE>(words.z, near1, a[2][0], a[2][2], a[3][0], a[3][2]);
  fp4_pairs<WIDE>(words.w, far1, a[2][1], a[2][3], a[3][1], a[3][3]);
}
