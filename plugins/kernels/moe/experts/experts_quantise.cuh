// Activations of the experts, quantised to a format's codes and dequantised again, one launch
// before each product: bf16 rows that hold code · block scale (NVFP4) or the code alone (e4m3),
// exactly. Rules: numpy_codecs.py. fp8 and nvfp4 have a scale for each expert, so a row of x is
// made for each of its experts; fp8_block and fp8_token quantise where activations are loaded or
// made.
// Macros: QUANT (0 none, 1 fp8, 2 fp8_block, 3 nvfp4, 4 fp8_token).
#pragma once
#include "moe/experts/experts_common.cuh"

#define BY_EXPERT (QUANT == 1 || QUANT == 3)
constexpr bool BY_PAIR = BY_EXPERT;  // a row of x for each pair, else each token

template <int LANES>
DEVICE float most_of(const float (&v)[8]) {
  float top = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) top = fmaxf(top, fabsf(v[i]));
  return lane_max<LANES>(top);
}
// The scale of a block of e4m3 codes with `most` as the largest value.
DEVICE float block_scale(float most) {
  const float raw = most / 448.0f;
  return raw == 0.0f ? 1.0f : raw;
}
DEVICE float e4m3_of(float x, float scale) { return from_e4m3(to_e4m3(divide(x, scale))); }

// Eight values as e4m3 codes of a scale, in f16, exactly.
DEVICE uint4 f16_codes(const float (&v)[8], float scale) {
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    words[i] = e4m3x2_to_f16x2(to_e4m3x2(divide(v[2 * i], scale), divide(v[2 * i + 1], scale)));
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Eight neighbouring values of a row: of x in bf16, of h in f32.
template <bool UP>
DEVICE void load8(const void* in, u64 at, float (&v)[8]) {
  if (UP) return unpack8(__ldcg((const uint4*)((const u16*)in + at)), v);
  const float4* p = (const float4*)((const float*)in + at);
  const float4 a = __ldcg(p), b = __ldcg(p + 1);
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
  v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

#if BY_EXPERT
// Eight neighbouring values of a row, all lanes of the warp together; lanes hold neighbours.
DEVICE void round_codes(float (&v)[8], float given) {
#if QUANT != 3
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = e4m3_of(v[i], given);
#else
  const float gain = 1.0f / given;
  const float scale = from_e4m3(to_e4m3(most_of<2>(v) / 6.0f * gain));
#pragma unroll
  for (int i = 0; i < 8; ++i)  // a NaN keeps its row a NaN: its code would not
    v[i] = v[i] != v[i]    ? v[i]
           : scale == 0.0f ? 0.0f
                           : from_e2m1(to_e2m1(v[i] * gain, scale)) * scale;
#endif
}

// A block a row; eight columns a thread and turn.
template <bool UP>
DEVICE void quantise(const void* in, const int* ids, const float* given, uint4* out) {
  constexpr int K = Side<UP>::K, TURN = 256 * 8;
  wait_then_launch_dependents();
  const u64 row = blockIdx.x, from = UP ? row / K1 : row;
  const float scale = given[ids[row]];
  for (int base = 0; base < K; base += TURN) {
    const int k = base + threadIdx.x * 8;
    float v[8] = {};
    if (k < K) load8<UP>(in, from * K + k, v);
    round_codes(v, scale);
    if (k < K) out[(row * K + k) / 8] = pack8(v);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    quantise_x(const u16* x, const int* ids, const float* given, uint4* out CHUNK_ARG) {
  quantise<true>(x + (u64)chunk_start * HIDDEN, ids + (u64)chunk_start * K1, given, out);
}
extern "C" __global__ void __launch_bounds__(256)
    quantise_h(const void* h, const int* ids, const float* given, uint4* out CHUNK_ARG) {
  quantise<false>(h, ids + (u64)chunk_start * K1, given, out);
}
#endif
