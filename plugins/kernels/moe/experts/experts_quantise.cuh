// Activations of the experts, quantised to a format's codes and dequantised again, one launch
// before each product: bf16 rows that hold code · block scale (NVFP4) or the code alone (e4m3; of
// fp8_token f16), exactly. Rules: numpy_codecs.py. fp8 and nvfp4 have a scale for each expert, so
// a row of x is made for each of its experts; fp8_block quantises where activations are loaded or
// made.
// Macros: QUANT (0 none, 1 fp8, 2 fp8_block, 3 nvfp4, 4 fp8_token).
#pragma once
#include "moe/experts/experts_common.cuh"

constexpr bool BY_PAIR = QUANT == 1 || QUANT == 3;  // a row of x for each pair, else each token

template <int LANES>
DEVICE float most_of(const float (&v)[8]) {
  float top = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) top = fmaxf(top, fabsf(v[i]));
#pragma unroll
  for (int d = LANES / 2; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  return top;
}
// The scale of a block of e4m3 codes with `most` as the largest value.
DEVICE float block_scale(float most) {
  const float raw = most / 448.0f;
  return raw == 0.0f ? 1.0f : raw;
}
DEVICE float e4m3_of(float x, float scale) {
  return from_e4m3(to_e4m3(divide(x, scale, 1.0f / scale)));
}

// Eight values as e4m3 codes of a scale, in f16, exactly.
DEVICE uint4 f16_codes(const float (&v)[8], float scale) {
  const float reciprocal = 1.0f / scale;
  u32 words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    words[i] = e4m3x2_to_f16x2(
        to_e4m3x2(divide(v[2 * i], scale, reciprocal), divide(v[2 * i + 1], scale, reciprocal)));
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

#if QUANT && QUANT != 2
#if QUANT == 4
typedef float Given;  // scales of rows, written here
#else
typedef const float Given;  // of experts
#endif

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

#if QUANT == 4
// The largest magnitude / 448 of a row of x (bf16) or of h (f32).
template <bool UP>
DEVICE float token_scale(const void* in, u64 row) {
  __shared__ float warp_max[8];
  float top = 0.0f;
  for (u64 i = row * Side<UP>::K + threadIdx.x; i < (row + 1) * Side<UP>::K; i += 256)
    top = fmaxf(top,
                fabsf(UP ? from_bf16(__ldcg((const u16*)in + i)) : __ldcg((const float*)in + i)));
#pragma unroll
  for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  if (lane_id() == 0) warp_max[threadIdx.x / 32] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < 8; ++w) top = fmaxf(top, warp_max[w]);
  return top == 0.0f ? 1.0f : top / 448.0f;
}
#endif

// A block a row; eight columns a thread and turn.
template <bool UP>
DEVICE void quantise(const void* in, const int* ids, Given* given, uint4* out) {
  constexpr int K = Side<UP>::K, TURN = 256 * 8;
  wait_for_previous();
  launch_dependents();
  const u64 row = blockIdx.x, from = UP && BY_PAIR ? row / K1 : row;
#if QUANT == 4
  const float scale = token_scale<UP>(in, row);
  if (threadIdx.x == 0) given[row] = scale;
#else
  const float scale = given[ids[row]];
#endif
  for (int base = 0; base < K; base += TURN) {
    const int k = base + threadIdx.x * 8;
    float v[8] = {};
    if (k < K) load8<UP>(in, from * K + k, v);
#if QUANT == 4
    const uint4 codes = f16_codes(v, scale);
#else
    round_codes(v, scale);
    const uint4 codes = pack8(v);
#endif
    if (k < K) out[(row * K + k) / 8] = codes;
  }
}

extern "C" __global__ void __launch_bounds__(256)
    quantise_x(const u16* x, const int* ids, Given* given, uint4* out CHUNK_ARG) {
  quantise<true>(x + (u64)chunk_start * HIDDEN, ids + (u64)chunk_start * K1, given, out);
}
extern "C" __global__ void __launch_bounds__(256)
    quantise_h(const void* h, const int* ids, Given* given, uint4* out CHUNK_ARG) {
  quantise<false>(h, ids + (u64)chunk_start * K1, given, out);
}
#endif
