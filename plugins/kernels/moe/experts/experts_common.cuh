// What the kernels of the experts share: sizes, weights to fragments, SiLU·mul, the order of the
// sum, and moe_combine, the sum over a token's experts.
//
// Layout of the weights: expert_layout.py.
// Macros: HIDDEN, INNER, EXPERTS, K1 (experts a token), UP_WK, DOWN_WK (parts of a dot product:
// split-K over warps), WEIGHTS (0 bf16, 1 NVFP4, 2 e4m3, 3 int4). CHUNKED, if given: the tokens of
// a node run in chunks of as many pairs as shared memory holds, and each kernel takes its chunk's
// first token as its last argument; the node's operands are indexed from there, scratch memory from
// the chunk.
#pragma once
#if WEIGHTS == 3
#include "common/int4_decode.cuh"
#else
#include "common/nvfp4_decode.cuh"
#endif

#ifdef CHUNKED
#define CHUNK_ARG , int chunk_start
#else
#define CHUNK_ARG
enum { chunk_start = 0 };  // no symbol: plans of one chunk keep their cubins
#endif

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
#define FOUR_BITS (WEIGHTS == 1 || WEIGHTS == 3)
constexpr int M16_BYTES = WEIGHTS == 0 ? 2048 : FOUR_BITS ? 512 : 1024;  // bytes of a k-slab
constexpr int M16_SCALES = FOUR_BITS ? 64 : 0;
constexpr float REST = FOUR_BITS ? CODES_REST : 1.0f;

// One of the two products. A dot product is always the sum of PART_SLABS k-slabs in order of k,
// then the WK parts in order, so that every path gives the same bits.
template <bool UP>
struct Side {
  static constexpr int K = UP ? HIDDEN : INNER;
  static constexpr int SLABS = (K + 63) / 64;
  static constexpr int WK = UP ? UP_WK : DOWN_WK;
  static constexpr int WN = WARPS / WK;
  static constexpr int PART_SLABS = SLABS / WK;
  static constexpr int PANELS = UP ? (INNER + 31) / 32 : (HIDDEN + 63) / 64;
  static constexpr int STEPS = (PANELS + WN - 1) / WN;
};

DEVICE float silu_mul(float gate, float up) {
  return __fmul_rn(__fdividef(gate, 1.0f + __expf(-gate)), up);
}
DEVICE float scaled(float dot, float scale2) { return __fmul_rn(dot, scale2 * REST); }

// Both sides are e4m3 codes as f16: two conversions of four codes where bf16 takes nine steps.
#define F16_CODES (QUANT == 2 || QUANT == 4)
// Two steps of k against a lane's eight activations: bf16, or codes as f16.
DEVICE void multiply(float (&d)[4], const u32 (&a)[4][4], int half, const uint4& x) {
#if F16_CODES
  mma_f16(d, a[2 * half], x.x, x.y);
  mma_f16(d, a[2 * half + 1], x.z, x.w);
#else
  mma_bf16(d, a[2 * half], x.x, x.y);
  mma_bf16(d, a[2 * half + 1], x.z, x.w);
#endif
}

// Four e4m3 codes (k 0 … 3) as pairs, exactly: of f16, or of bf16 by bits, which are the value ·
// 2^-120.
DEVICE void fp8_pairs(u32 codes, u32& p0, u32& p1) {
#if F16_CODES
  return widen(codes, p0, p1);
#endif
  const u32 gain = 0x7B807B80;  // 2^120
  const u32 low = __byte_perm(codes, 0, 0x1404), high = __byte_perm(codes, 0, 0x3424);
  p0 = mul_bf16x2((low & 0x80008000) | ((low & 0x7F007F00) >> 4), gain);
  p1 = mul_bf16x2((high & 0x80008000) | ((high & 0x7F007F00) >> 4), gain);
}

// The fragments a[step][register] of a 16 x 64 tile from a lane's four words of 4-bit codes.
DEVICE void code_fragments(const uint4& words, u32 scales, int tile, u32 (&a)[4][4]) {
  const RowScales s = row_scales(scales, tile);
  code_pairs(words.x, s.near, a[0][0], a[0][2], a[1][0], a[1][2]);
  code_pairs(words.y, s.far, a[0][1], a[0][3], a[1][1], a[1][3]);
  code_pairs(words.z, s.near, a[2][0], a[2][2], a[3][0], a[3][2]);
  code_pairs(words.w, s.far, a[2][1], a[2][3], a[3][1], a[3][3]);
}

// A lane's share of one m16 tile of a k-slab, as stored. `scales`: also those of its neighbour.
struct Raw {
  uint4 words[M16_BYTES / 512];
  u32 scales;
};
// `scales`: of the two m16 tiles.
DEVICE Raw load_raw(const u8* m16, const u8* scales) {
  Raw raw;
#pragma unroll
  for (int i = 0; i < M16_BYTES / 512; ++i)
    raw.words[i] = *(const uint4*)(m16 + i * 512 + lane_id() * 16);
  if (M16_SCALES) raw.scales = *(const u32*)(scales + lane_id() * 4);
  return raw;
}
// The fragments a[step][register] of it.
DEVICE void fragments(const Raw& raw, int m16, u32 (&a)[4][4]) {
#if WEIGHTS == 0
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 v = raw.words[i];
    a[i][0] = v.x, a[i][1] = v.y, a[i][2] = v.z, a[i][3] = v.w;
  }
#elif FOUR_BITS
  code_fragments(raw.words[0], raw.scales, m16 & 1, a);
#else
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 v = raw.words[half];  // eight k of row g, then of row g + 8
    fp8_pairs(v.x, a[2 * half][0], a[2 * half][2]);
    fp8_pairs(v.y, a[2 * half + 1][0], a[2 * half + 1][2]);
    fp8_pairs(v.z, a[2 * half][1], a[2 * half][3]);
    fp8_pairs(v.w, a[2 * half + 1][1], a[2 * half + 1][3]);
  }
#endif
}

// The places 0…K1-1 of a token's experts in ascending order of index.
DEVICE void sort_experts(const int* ids, int* order) {
  if (threadIdx.x < K1) {
    const int id = ids[threadIdx.x];
    int rank = 0;
    for (int j = 0; j < K1; ++j) rank += ids[j] < id || (ids[j] == id && j < (int)threadIdx.x);
    order[rank] = threadIdx.x;
  }
}

// What a thread adds at once: so many columns of a part, 16 bytes.
#ifdef PARTS_BF16
typedef u16 Part;
DEVICE void unpack_part(const uint4& v, float (&x)[8]) { unpack8(v, x); }
#else
typedef float Part;
DEVICE void unpack_part(const uint4& v, float (&x)[4]) {
  x[0] = __uint_as_float(v.x), x[1] = __uint_as_float(v.y);
  x[2] = __uint_as_float(v.z), x[3] = __uint_as_float(v.w);
}
#endif

// A block a token: the weighted sum of its experts.
extern "C" __global__ void __launch_bounds__(256)
    moe_combine(const int* ids, const float* weights, const Part* parts, u32* y CHUNK_ARG) {
  constexpr int EACH = 16 / sizeof(Part);
  __shared__ int order[K1];
  ids += (u64)chunk_start * K1, weights += (u64)chunk_start * K1;
  y += (u64)chunk_start * (HIDDEN / 2);
  const u64 pair = (u64)blockIdx.x * K1;
  sort_experts(ids + pair, order);
  __syncthreads();
  float share[K1];
#pragma unroll
  for (int j = 0; j < K1; ++j) share[j] = weights[pair + order[j]];
  wait_then_launch_dependents();
  for (int i = threadIdx.x * EACH; i < HIDDEN; i += blockDim.x * EACH) {
    uint4 v[K1];
#pragma unroll
    for (int j = 0; j < K1; ++j)
      v[j] = __ldcg((const uint4*)(parts + (pair + order[j]) * HIDDEN + i));
    float sum[EACH] = {};
#pragma unroll
    for (int j = 0; j < K1; ++j) {
      float part[EACH];
      unpack_part(v[j], part);
#pragma unroll
      for (int c = 0; c < EACH; ++c) sum[c] = __fmaf_rn(share[j], part[c], sum[c]);
    }
    u32* const to = y + ((u64)blockIdx.x * HIDDEN + i) / 2;
#pragma unroll
    for (int c = 0; c < EACH; c += 4)
      *(uint2*)(to + c / 2) =
          make_uint2(pack_bf16(sum[c], sum[c + 1]), pack_bf16(sum[c + 2], sum[c + 3]));
  }
}
