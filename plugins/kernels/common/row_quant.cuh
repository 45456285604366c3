// The epilogue of every op that quantises its result: eight neighbouring columns a thread become
// bf16 and up to four quantised copies.
//
// Lanes of a warp hold neighbouring columns, from a multiple of 256: a 128-wide block is half a
// warp and a 16-wide one two lanes. All lanes of a warp call together.
// Macros: K (columns a row; K % 8 = 0, nvfp4: 16), KEEP (1: y itself is stored), QUANT (0 none, 1
// fp8, 2 fp8_block, 3 nvfp4, 4 fp8_token), COPIES (with a scale each; fp8_block and fp8_token have
// none and one copy). Of fp8_token a block, or a cluster of PARTS blocks, has whole rows, and asks
// for `token_scale` first; with HALVES the codes of each 16 columns are those of 8, 0, 9, 1, …
// (K % 16 = 0).
#pragma once
#include "common/numeric.cuh"

#define QUANT_OUTPUTS                                                                      \
  uint4* __restrict__ kept, u8* __restrict__ q0, u8* __restrict__ s0, u8* __restrict__ q1, \
      u8* __restrict__ s1, u8* __restrict__ q2, u8* __restrict__ s2, u8* __restrict__ q3,  \
      u8* __restrict__ s3
#define QUANT_ARGS kept, q0, s0, q1, s1, q2, s2, q3, s3

// y becomes y + other, rounded to bf16; returns its bits.
DEVICE uint4 add_bf16(float (&y)[8], const uint4& other) {
  float more[8];
  unpack8(other, more);
#pragma unroll
  for (int i = 0; i < 8; i++) y[i] += more[i];
  const uint4 bits = pack8(y);
  unpack8(bits, y);
  return bits;
}
// y · root · w in bf16.
DEVICE uint4 normed(const float (&y)[8], float root, const float (&w)[8]) {
  float of[8];
#pragma unroll
  for (int i = 0; i < 8; i++) of[i] = y[i] * (root * w[i]);
  return pack8(of);
}

// Of eight values; a NaN does not count.
DEVICE u32 largest_bf16(const uint4& v, u32 top = 0) {
  top = largest_bf16x2(largest_bf16x2(largest_bf16x2(largest_bf16x2(top, v.x), v.y), v.z), v.w);
  return max(top & 0x7fff, top >> 16 & 0x7fff);
}
DEVICE float largest(const uint4& v) { return __uint_as_float(largest_bf16(v) << 16); }
// Eight e4m3 codes of v / scale, as numeric.cuh divides. WITHIN: no value is above 448 scales.
template <bool WITHIN>
DEVICE uint2 codes8(const uint4& v, float scale) {
  const bool tiny = scale < 1e-30f;
  const u32 lift = tiny ? 0x6f806f80 : 0x3f803f80;  // 2^96 or 1, twice: exact
  const float by = scale * (tiny ? 0x1p96f : 1.0f), reciprocal = 1.0f / by;
  float y[8];
  unpack8(make_uint4(mul_bf16x2(v.x, lift), mul_bf16x2(v.y, lift), mul_bf16x2(v.z, lift),
                     mul_bf16x2(v.w, lift)),
          y);
#pragma unroll
  for (int i = 0; i < 8; i++) y[i] = quotient<WITHIN>(y[i], by, reciprocal);
  return make_uint2(to_e4m3x2(y[0], y[1]) | (u32)to_e4m3x2(y[2], y[3]) << 16,
                    to_e4m3x2(y[4], y[5]) | (u32)to_e4m3x2(y[6], y[7]) << 16);
}

template <bool WITHIN>
DEVICE void emit_fp8(const uint4& v, i64 at, float scale, u8* q, bool live) {
  uint2 codes = codes8<WITHIN>(v, scale);
#ifdef HALVES
  const bool second = threadIdx.x & 1;  // eights are two lanes'
  const u32 other = __shfl_xor_sync(~0u, second ? codes.x : codes.y, 1);
  const u32 low = second ? other : codes.x, high = second ? codes.y : other;
  codes = make_uint2(__byte_perm(low, high, 0x1504), __byte_perm(low, high, 0x3726));
#endif
  if (live) *(uint2*)(q + at) = codes;
}
DEVICE void emit_fp8_block(const uint4& v, i64 row, int column, u8* q, float* s, bool live) {
  float scale = lane_max<16>(live ? largest(v) : 0.0f) / 448.0f;
  scale = scale == 0.0f ? 1.0f : scale;
  uint2 codes = codes8<true>(v, scale);
  if (live) *(uint2*)(q + row * K + column) = codes;
  if (live && column % 128 == 0) s[row * ((K + 127) / 128) + column / 128] = scale;
}
#if QUANT == 4
// The scale of a row of which a thread has COUNT times eight columns, already bf16: its largest /
// 448. `tops`: a word a warp, and one; the caller synchronises before it uses them again. With
// PARTS they are in dynamic shared memory, and the cluster meets before a block ends.
template <int N_THREADS, int COUNT>
DEVICE float token_scale(const uint4 (&v)[COUNT], u32* tops) {
  u32 top = 0;
#pragma unroll
  for (int i = 0; i < COUNT; i++) top = largest_bf16(v[i], top);
  top = __reduce_max_sync(~0u, top);
  if (lane_id() == 0) tops[threadIdx.x / 32] = top;
  __syncthreads();
  top = __reduce_max_sync(~0u, lane_id() < N_THREADS / 32 ? tops[lane_id()] : 0u);
#if PARTS > 1
  int* const mine = (int*)tops + N_THREADS / 32;
  if (threadIdx.x == 0) *mine = (int)top;
  cluster_meet();
#pragma unroll
  for (int b = 0; b < PARTS; b++) top = max(top, (u32)load_of_block((const int*)mine, b));
#endif
  return top == 0 ? 1.0f : __uint_as_float(top << 16) / 448.0f;
}
#endif
DEVICE void emit_nvfp4(const uint4& v, i64 at, float input_scale, u8* q, u8* s, bool live) {
  float gain = 1.0f / input_scale;
  u8 code = to_e4m3(lane_max<2>(largest(v)) / 6.0f * gain);
  float scale = from_e4m3(code);
  float y[8];
  unpack8(v, y);
  u32 word = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) word |= to_e2m1(y[i] * gain, scale) << (4 * i);
  if (live) *(u32*)(q + at / 2) = scale == 0.0f ? 0 : word;
  if (live && at % 16 == 0) s[at / 16] = code;
}

// Stores eight values and their copies. `scales`: of the copies, or of the token.
DEVICE void emit(const uint4& v, i64 row, int column, bool live, const float* scales,
                 QUANT_OUTPUTS) {
  const i64 at = row * K + column;
#if KEEP
  if (live) kept[at / 8] = v;
#endif
#if QUANT == 1
  u8* const q[4] = {q0, q1, q2, q3};
#pragma unroll
  for (int i = 0; i < COPIES; i++) emit_fp8<false>(v, at, scales[i], q[i], live);
#elif QUANT == 2
  emit_fp8_block(v, row, column, q0, (float*)s0, live);
#elif QUANT == 4
  emit_fp8<true>(v, at, scales[0], q0, live);
  if (live && column == 0) ((float*)s0)[row] = scales[0];
#elif QUANT == 3
  u8* const q[4] = {q0, q1, q2, q3};
  u8* const s[4] = {s0, s1, s2, s3};
#pragma unroll
  for (int i = 0; i < COPIES; i++) emit_nvfp4(v, at, scales[i], q[i], s[i], live);
#endif
}

// Stores a row that is normed: of y · root · w a thread has COUNT times eight columns, at a stride
// of N_THREADS. The caller synchronises before the next row.
template <int N_THREADS, int COUNT>
DEVICE void emit_normed(const float (&y)[COUNT][8], float root, const float (&w)[COUNT][8], i64 row,
                        const float* scales, QUANT_OUTPUTS) {
#if QUANT == 4
  uint4 bits[COUNT];
#pragma unroll
  for (int v = 0; v < COUNT; v++) bits[v] = normed(y[v], root, w[v]);
  __shared__ u32 tops[N_THREADS / 32];
  const float token = token_scale<N_THREADS>(bits, tops);
  scales = &token;
#endif
#pragma unroll
  for (int v = 0; v < COUNT; v++) {
    const int column = (v * N_THREADS + threadIdx.x) * 8;
#if QUANT == 4
    const uint4 out = bits[v];
#else  // a row's worth of them would spill
    const uint4 out = normed(y[v], root, w[v]);
#endif
    emit(out, row, column, column < K, scales, QUANT_ARGS);
  }
}
