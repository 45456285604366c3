// NVFP4 linear layer, bf16 activations (W4A16): y[m, n] = w_scale2[n] · Σ_k x[m, k] · (code ·
// w_scale)[n, k]. This file is the format alone; the kernels are stream-K (stream_k_gemm.cuh) or,
// with SKINNY, the skinny GEMM (skinny_gemm.cuh). Figures: log/gemm/stream_k_gemm.md and
// skinny_gemm.md. With A8 the activations are e4m3 and weights become so (W4A8, below).
//
// code · w_scale has at most six significant bits, so it is exact in bf16: a bf16 GEMM of exact
// weights. A word holds eight codes (one row, two steps of k) with their bits placed so that a
// rotation and a mask dequantise three of its four pairs to bf16 and two of each the fourth: 9
// integer instructions for 8 weights. The mask leaves code · 2^-126; the block scale is stored so
// that one permutation and one multiply-add give two scales · 2^119; 2^7 is left for the epilogue.
constexpr int ELEMENT_BITS = 4;
constexpr int SCALE_BYTES = 64;
#ifdef A8
#define W_SLABS 2
constexpr int X_BYTES = 1;
constexpr bool FP8_MMA = true;
#else
constexpr int X_BYTES = 2;
constexpr bool FP8_MMA = false;
#endif
constexpr int X_SCALE_BYTES = 0;
#include "common/nvfp4_decode.cuh"

#ifdef A8
// y = x_scale[m] · 8 · w_scale2[n] · Σ_k xq · e4m3(code · w_scale / 8). A table has the e4m3 of the
// eight magnitudes for each scale byte as it is packed, so that a scale costs one load and four
// codes two permutations: of the table's entry, and of bits to the permutation's selectors. A lane
// has k 2t + 8, 2t, 2t + 9, 2t + 1 of a block of 16, in the order of the bytes of a register; xq is
// in that order (fp8_halves). 15 integer instructions for 8 weights.
constexpr int TABLE = 256;
__shared__ uint4 table[TABLE];  // an entry twice: of even rows and of odd ones, for fewer conflicts

DEVICE u32 e4m3x4(float a, float b, float c, float d) {
  return to_e4m3x2(a, b) | (u32)to_e4m3x2(c, d) << 16;
}
// Filled by all threads; the GEMM synchronises before it decodes.
DEVICE void fill_table() {
  for (int i = threadIdx.x; i < TABLE; i += blockDim.x) {
    const float s = __uint_as_float(((u32)i << 20) + (102u << 23));  // w_scale / 8
    const u32 low = e4m3x4(0.0f, 0.5f * s, s, 1.5f * s), high = e4m3x4(2 * s, 3 * s, 4 * s, 6 * s);
    table[i] = make_uint4(low, high, low, high);
  }
}

// a0, a2 of a row's even and odd blocks (or a1, a3), by their entries of the table.
DEVICE void decode(u32 word, const uint2& even, const uint2& odd, u32& e, u32& o) {
  const u32 down = word >> 2;
  u32 pick = kept_or(turn<22>(word), 0x04000400, kept_or(down, 0x03700370, word & 0x70077007));
  pick = permuted(pick, 0, 0x1320);
  e = permuted(even.x, even.y, pick), o = permuted(odd.x, odd.y, pick >> 16);
  e = kept_or(down, 0x00800080, kept_or(word, 0x80008000, e));
  o = kept_or(word << 4, 0x00800080, kept_or(word << 10, 0x80008000, o));
}

// The entries of four scales, which are held as decode_scales reads them.
DEVICE void look_up(u32 word, uint2 (&entries)[4]) {
  const u32 copy = (threadIdx.x & 4) * 2, turned = turn<8>(word);
  const u32 at[4] = {word, word >> 16, turned, turned >> 16};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    entries[i] = *(const uint2*)((const u8*)table + kept_or(at[i], 0xFF0, copy));
}

struct Raw {
  uint4 words[2];
  uint2 scales[2];
};

// `step`: from a packed k-slab of 64 to the next, in m16 tiles.
DEVICE Raw load(u32 w, u32 scales, u32 step) {
  const u32 lane = threadIdx.x & 31, codes = w + lane * 16, bytes = scales + (lane >> 2) * 8;
  return {{load_shared16(codes), load_shared16(codes + step * 512)},
          {load_shared8(bytes), load_shared8(bytes + step * SCALE_BYTES)}};
}

DEVICE void decode(const Raw& raw, u32 (&a)[4][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4& words = raw.words[half];
    u32(&first)[4] = a[2 * half], (&second)[4] = a[2 * half + 1];
    uint2 near[4], far[4];
    look_up(raw.scales[half].x, near);
    look_up(raw.scales[half].y, far);
    decode(words.x, near[0], near[1], first[0], first[2]);
    decode(words.y, far[0], far[1], first[1], first[3]);
    decode(words.z, near[2], near[3], second[0], second[2]);
    decode(words.w, far[2], far[3], second[1], second[3]);
  }
}

DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_e4m3(d, a, b0, b1); }
#else

DEVICE u32 low_twice(u32 pair) {
  u32 r;
  asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {l, l};}" : "=r"(r) : "r"(pair));
  return r;
}
DEVICE u32 high_twice(u32 pair) {
  u32 r;
  asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %1;\nmov.b32 %0, {h, h};}" : "=r"(r) : "r"(pair));
  return r;
}

// a0, a2 of an even step and of the odd step after it, times the row's two block scales.
DEVICE void decode(u32 word, u32 even, u32 odd, u32& e0, u32& e2, u32& o0, u32& o2) {
  const u32 all = 0x81C081C0;
  e0 = mul_bf16x2(word & all, even);
  e2 = mul_bf16x2((word << 6) & all, even);
  o0 = mul_bf16x2(turn<10>(word) & all, odd);
  o2 = mul_bf16x2((turn<12>(word) & 0x80C080C0) | ((word << 4) & 0x01000100), odd);
}

// One instruction: the constants must come from registers.
DEVICE u32 masked_or(u32 word, u32 keep, u32 add) {
  asm volatile("" : "+r"(keep), "+r"(add));
  return kept_or(word, keep, add);
}

// Four block scales -> bf16 pairs of each, · 2^119. A scale is held as 5 bits of exponent and 3 of
// mantissa such that the exponent of w_scale · 2^119 is 224 more; two are in place, two are a
// byte off.
DEVICE void decode_scales(u32 word, u32 (&s)[4]) {
  const u32 first = masked_or(word, 0x0FF00FF0, 0x70007000);
  const u32 second = masked_or(__byte_perm(word, 0, 0x2103), 0x0FF00FF0, 0x70007000);
  s[0] = low_twice(first), s[1] = high_twice(first);
  s[2] = low_twice(second), s[3] = high_twice(second);
}

struct Raw {
  uint4 words;
  uint2 scales;  // of rows g and g + 8
};

DEVICE Raw load(u32 w, u32 scales) {
  const int lane = threadIdx.x & 31;
  return {load_shared16(w + lane * 16), load_shared8(scales + (lane >> 2) * 8)};
}

DEVICE void decode(const Raw& raw, u32 (&a)[4][4]) {
  u32 low[4], high[4];
  decode_scales(raw.scales.x, low);
  decode_scales(raw.scales.y, high);
  decode(raw.words.x, low[0], low[1], a[0][0], a[0][2], a[1][0], a[1][2]);
  decode(raw.words.y, high[0], high[1], a[0][1], a[0][3], a[1][1], a[1][3]);
  decode(raw.words.z, low[2], low[3], a[2][0], a[2][2], a[3][0], a[3][2]);
  decode(raw.words.w, high[2], high[3], a[2][1], a[2][3], a[3][1], a[3][3]);
}

DEVICE void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_bf16(d, a, b0, b1); }
#endif

#ifdef SKINNY
#include "gemm/skinny_gemm.cuh"

DYNAMIC_SHARED(nvfp4_linear_skinny, SHARED);
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    nvfp4_linear_skinny(const u8* x, const u8* w, const u8* w_scale, const float* w_scale2, void* y,
                        int m, int n, int k, int each) {
  const Problem p = {x, w, w_scale, m, n, k};
  skinny_gemm(p, y, each, [=](int row) { return w_scale2[row] * CODES_REST; });
}
#else
#include "gemm/stream_k/stream_k_gemm.cuh"

#ifdef A8
DYNAMIC_SHARED(nvfp4_linear_a8, SHARED);
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
    nvfp4_linear_a8(const u8* xq, const float* x_scale, const u8* w, const u8* w_scale,
                    const float* w_scale2, void* y, float* partial, u32* arrived, int m, int n,
                    int k) {
  const Problem p = {xq, w, w_scale, partial, arrived, m, n, k, x_scale};
  fill_table();
  stream_k_gemm(p, y, [=](int row) { return w_scale2[row] * 8.0f; });
}
#else
DYNAMIC_SHARED(nvfp4_linear, SHARED);
extern "C" __global__ void __launch_bounds__(BLOCK, RESIDENT)
    nvfp4_linear(const u8* x, const u8* w, const u8* w_scale, const float* w_scale2, void* y,
                 float* partial, u32* arrived, int m, int n, int k) {
  const Problem p = {x, w, w_scale, partial, arrived, m, n, k};
  stream_k_gemm(p, y, [=](int row) { return w_scale2[row] * CODES_REST; });
}
#endif
#endif
