// NVFP4 weights as e4m3 in registers (W4A8): e4m3(code · w_scale / 8), by a table in shared memory.
//
// The table has the e4m3 of the eight magnitudes for each scale byte as it is packed, so that a
// scale costs one load and four codes two permutations: of the table's entry, and of bits to the
// permutation's selectors. 15 integer instructions for 8 weights. Words are packed as
// nvfp4_decode.cuh says. Defines: table, fill_table, entry, decode.
#pragma once
#include "common/numeric.cuh"
#include "common/nvfp4_decode.cuh"

constexpr int TABLE = 256;
__shared__ uint4 table[TABLE];  // an entry twice: of even rows and of odd ones, for fewer conflicts

DEVICE u32 e4m3x4(float a, float b, float c, float d) {
  return to_e4m3x2(a, b) | (u32)to_e4m3x2(c, d) << 16;
}
// Filled by all threads; the kernel synchronises before it decodes.
DEVICE void fill_table() {
  for (int i = threadIdx.x; i < TABLE; i += blockDim.x) {
    const float s = __uint_as_float(((u32)i << 20) + (102u << 23));  // w_scale / 8
    const u32 low = e4m3x4(0.0f, 0.5f * s, s, 1.5f * s), high = e4m3x4(2 * s, 3 * s, 4 * s, 6 * s);
    table[i] = make_uint4(low, high, low, high);
  }
}
// The entry of the scale in bits 4 to 11; `copy`: 8 for odd rows.
DEVICE uint2 entry(u32 scale, u32 copy) {
  return *(const uint2*)((const u8*)table + kept_or(scale, 0xFF0, copy));
}

// The two registers of a word, by the entries of their scales. Bytes of a register: the first of
// its second pair of k, of its first pair, the second of the second, of the first.
DEVICE void decode(u32 word, const uint2& even, const uint2& odd, u32& e, u32& o) {
  const u32 down = word >> 2;
  u32 pick = kept_or(turn<22>(word), 0x04000400, kept_or(down, 0x03700370, word & 0x70077007));
  pick = permuted(pick, 0, 0x1320);
  e = permuted(even.x, even.y, pick), o = permuted(odd.x, odd.y, pick >> 16);
  e = kept_or(down, 0x00800080, kept_or(word, 0x80008000, e));
  o = kept_or(word << 4, 0x00800080, kept_or(word << 10, 0x80008000, o));
}
