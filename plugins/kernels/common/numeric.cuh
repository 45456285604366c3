// Number formats and sums of one thread, warp or block: bf16, e4m3, e2m1, reductions.
//
// Every rounding is to nearest, ties to even, as in the numpy references. Reductions add in a fixed
// order, so a row's bits do not depend on other rows.
#pragma once
#include "common/ptx.cuh"

// ---- bf16 ------------------------------------------------------------------------------------
// A NaN becomes the NaN of the hardware's conversion.
DEVICE float from_bf16(u16 bits) { return __uint_as_float((u32)bits << 16); }
DEVICE float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
DEVICE float high_bf16(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
DEVICE u32 pack_bf16(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
DEVICE u16 to_bf16(float x) { return (u16)pack_bf16(x, 0.0f); }
DEVICE u32 pack_f16(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// Saturating at ±65504; NaN stays NaN.
DEVICE u32 pack_f16_finite(float low, float high) {
  u32 pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
DEVICE float from_f16(u16 bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
DEVICE void unpack8(const uint4& v, float (&x)[8]) {
  x[0] = low_bf16(v.x), x[1] = high_bf16(v.x), x[2] = low_bf16(v.y), x[3] = high_bf16(v.y);
  x[4] = low_bf16(v.z), x[5] = high_bf16(v.z), x[6] = low_bf16(v.w), x[7] = high_bf16(v.w);
}
DEVICE uint4 pack8(const float (&x)[8]) {
  return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                    pack_bf16(x[6], x[7]));
}
DEVICE void load8(const float* from, float (&x)[8]) {  // at a multiple of 16 bytes
  const float4 a = *(const float4*)from, b = *(const float4*)(from + 4);
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
DEVICE u32 mul_bf16x2(u32 a, u32 b) {
  u32 product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
DEVICE u32 sub_bf16x2(u32 a, u32 b) {
  u32 difference;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(difference) : "r"(a), "r"(b));
  return difference;
}
// (word & keep) | add in one instruction.
// Bytes of b:a by the low four nibbles of `order`, each up to 7: __byte_perm without its mask.
DEVICE u32 permuted(u32 a, u32 b, u32 order) {
  u32 r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(order));
  return r;
}
DEVICE u32 kept_or(u32 word, u32 keep, u32 add) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(word), "r"(keep), "r"(add));
  return r;
}
// Of both pairs' magnitudes the larger ones; signs are left undefined, and a NaN does not count.
DEVICE u32 largest_bf16x2(u32 a, u32 b) {
  u32 r;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// ---- e4m3: saturating at ±448; NaN stays NaN ---------------------------------------------------
DEVICE u16 to_e4m3x2(float low, float high) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
DEVICE u8 to_e4m3(float x) { return (u8)to_e4m3x2(x, 0.0f); }
DEVICE u32 e4m3x2_to_f16x2(u16 pair) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  return halves;
}
// Four e4m3 codes as two pairs of f16, exactly.
DEVICE void widen(u32 codes, u32& low, u32& high) {
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
}
DEVICE float from_e4m3(u8 code) { return from_f16((u16)e4m3x2_to_f16x2(code)); }

// ---- e2m1: codes 0..7 are 0 .5 1 1.5 2 3 4 6, bit 3 the sign, also of a negative value that
// rounds to zero. By comparisons on every target: sm_90 has no conversion instruction.
DEVICE u32 to_e2m1(float x) {
  float a = fabsf(x);
  u32 code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) +
             (a > 5.0f);
  return code | (x < 0.0f ? 8u : 0u);
}
DEVICE float from_e2m1(u32 code) {
  const u32 m = code & 7;
  const float size = m < 4 ? 0.5f * m : m < 6 ? m - 2.0f : 2.0f * m - 8.0f;
  return code & 8 ? -size : size;
}

DEVICE float minus_infinity() { return __int_as_float(0xff800000); }

// ---- floats as unsigned integers of the same order; -0 counts as 0 -----------------------------
DEVICE u32 ordered_key(float x) {
  const u32 bits = __float_as_uint(x + 0.0f);
  return bits ^ (bits >> 31 ? ~0u : 0x80000000u);
}
DEVICE float key_value(u32 key) { return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key); }
// A NaN has a key below all floats and above 0, which is no float's key.
DEVICE u32 ordered_key_nan_last(float x) {
  const u32 key = ordered_key(x);
  return x != x ? 1u : key;
}

// ---- sums and maxima ---------------------------------------------------------------------------
// Over groups of LANES neighbouring lanes; every lane gets it.
template <int LANES>
DEVICE float lane_sum(float x) {
#pragma unroll
  for (int d = LANES / 2; d; d >>= 1) x += __shfl_xor_sync(~0u, x, d);
  return x;
}
template <int LANES>
DEVICE float lane_max(float x) {
#pragma unroll
  for (int d = LANES / 2; d; d >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}
DEVICE float warp_sum(float x) { return lane_sum<32>(x); }
DEVICE float warp_max(float x) { return lane_max<32>(x); }
// The sum over a block of N_THREADS (whole warps), in every thread. `partial`: N_THREADS / 32
// floats of shared memory; the caller synchronises before it uses them again.
template <int N_THREADS>
DEVICE float block_sum(float x, float* partial) {
  x = warp_sum(x);
  if (N_THREADS == 32) return x;
  if (lane_id() == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < N_THREADS / 32; w++) total += partial[w];
  return total;
}

// ---- powers, subnormals flushed ----------------------------------------------------------------
DEVICE float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- angles ------------------------------------------------------------------------------------
// Without its multiples of 2π, in three parts, so that the fast sine and cosine are exact to 4e-7
// anywhere (sinf's own reduction of large angles would need local memory).
DEVICE float reduced_angle(float angle) {
  const float n = rintf(angle * 0.15915494f);
  float r = fmaf(-n, 6.28125f, angle);  // 2π = 6.28125 + 1.9353072e-3 + 1.0253e-11
  r = fmaf(-n, 1.93530716933310e-3f, r);
  return fmaf(-n, 1.02533763e-11f, r);
}

// ---- activations, in f32 -----------------------------------------------------------------------
DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }
// Within 1e-6 of the functions above: four and five instructions; 0 below -87.3.
DEVICE float fast_sigmoid(float x) { return reciprocal_fast(1.0f + exp2_fast(-1.44269504f * x)); }
DEVICE float fast_silu(float x) { return x * fast_sigmoid(x); }

// x / by, rounded as a division, by the reciprocal and one correction. A quotient beyond the range
// of codes is not corrected; WITHIN: none is.
template <bool WITHIN = false>
DEVICE float quotient(float x, float by, float reciprocal) {
  const float q = x * reciprocal;
  return WITHIN || fabsf(q) < 1e4f ? fmaf(fmaf(-q, by, x), reciprocal, q) : q;
}
// No branch, or each value's code is apart: both sides of a scale with a reciprocal near infinity
// become 2^96 times as large.
DEVICE float divide(float x, float scale) {
  const float lift = scale < 1e-30f ? 0x1p96f : 1.0f, by = scale * lift;
  return quotient(x * lift, by, 1.0f / by);
}
// The code of x / scale without a division: scale has four significant bits, so thresholds times
// scale are exact. One bit at a time: three comparisons instead of seven. `scale` is not 0.
DEVICE u32 to_e2m1(float x, float scale) {
  const float a = fabsf(x);
  const bool two = a >= 1.75f * scale;
  const bool one = a >= (two ? 3.5f * scale : 0.75f * scale);
  const float low = one ? 1.25f * scale : 0.25f * scale, high = one ? 5.0f * scale : 2.5f * scale;
  return (two ? 4u : 0u) | (one ? 2u : 0u) | (a > (two ? high : low) ? 1u : 0u) |
         (x < 0.0f ? 8u : 0u);
}
