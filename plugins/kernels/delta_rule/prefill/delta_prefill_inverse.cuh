// T = (I + A)^-1 of a tile and value head, A strictly lower triangular, by blocks of 16 x 16:
//   T_ii = (I + A_ii)^-1 by forward substitution in f32, a thread a column;
//   T_ij = -T_ii (A_ij T_jj + … + A_i,i-1 T_i-1,j) by mma.sync, a warp a column of blocks.
// It computes transposes, so that T_kj is a left operand as the lanes hold it; A_ik and T_ii are
// right operands as prepare and the substitution leave them. All are in two bf16 parts, as T itself
// is stored.
#pragma once
#include "delta_rule/prefill/delta_prefill_operands.cuh"

constexpr int BLOCKS = TILE / 16;
constexpr int BLOCK = 512;  // bytes of a block in bf16, as fragments of a right operand
struct Triangle {           // A of a value head
  alignas(16) char below[BLOCKS * (BLOCKS - 1) / 2][2][BLOCK];  // the diagonal: high, low
  char diagonal[BLOCKS]
               [2 * BLOCK + 16];  // f32, then T's block: high, low; padded against conflicts
};

// Numbers of T's or P's high or low part. PACKED: of the blocks that are not zeros, one after
// another by rows, each as fragments of a right operand.
constexpr int PART = PACKED ? BLOCKS * (BLOCKS + 1) / 2 * 256 : TILE * TILE;
// The place of an element of T or P otherwise: as wgmma reads it (common/wgmma16_sm90.cuh).
DEVICE int element(int i, int column) { return i * TILE + (column ^ (i & 7) * 8); }
// A block of one part of T or P to memory: fragments of a right operand.
DEVICE void store_block(u16* to, int i, int j, const u32 (&b)[4], int lane) {
  if (PACKED) {
    *(uint4*)(to + (i * (i + 1) / 2 + j) * 256 + lane * 8) = {b[0], b[1], b[2], b[3]};
    return;
  }
#pragma unroll
  for (int w = 0; w < 4; w++)
    *(u32*)(to + element(i * 16 + w / 2 * 8 + lane / 4, j * 16 + w % 2 * 8 + lane % 4 * 2)) = b[w];
}
DEVICE void load_block(u32 (&b)[4], const char* block, int lane) {
  const uint4 v = load_shared16(block + lane * 16);
  b[0] = v.x, b[1] = v.y, b[2] = v.z, b[3] = v.w;
}

// T_ii where A_ii was, by 16 lanes; the other half of the warp has another.
DEVICE void invert_diagonal(char* block, int c) {
  const float* a = (const float*)block;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; i++) {  // column c: (I + A) x = e_c
    float sum[4] = {};
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 y = *(const float4*)&a[i * 16 + j];
      sum[0] = fmaf(y.x, x[j], sum[0]);
      if (j + 1 < i) sum[1] = fmaf(y.y, x[j + 1], sum[1]);
      if (j + 2 < i) sum[2] = fmaf(y.z, x[j + 2], sum[2]);
      if (j + 3 < i) sum[3] = fmaf(y.w, x[j + 3], sum[3]);
    }
    x[i] = (i == c ? 1.f : 0.f) - ((sum[0] + sum[1]) + (sum[2] + sum[3]));
  }
  __syncwarp();  // all have read A
#pragma unroll
  for (int i = 0; i < 16; i++) {
    u16* const to = (u16*)(block + (i % 8 * 4 + c % 8 / 2) * 16 + (i / 8 * 2 + c / 8) * 4) + c % 2;
    const u16 high = to_bf16(x[i]);
    to[0] = high, to[BLOCK / 2] = to_bf16(x[i] - from_bf16(high));
  }
}

// d = x y in two parts each, the sums of the smaller products apart.
DEVICE void add_block(float (&d)[2][2][4], const u32 (&high)[4], const u32 (&low)[4], const char* y,
                      int lane) {
  u32 b[2][4];
  load_block(b[0], y, lane), load_block(b[1], y + BLOCK, lane);
  mma_pair(d[0], high, b[0]), mma_pair(d[1], low, b[1]);
  mma_pair(d[1], low, b[0]), mma_pair(d[1], high, b[1]);
}
// The sum of both as a left operand in two parts.
DEVICE void split_sum(u32 (&high)[4], u32 (&low)[4], const float (&d)[2][2][4], float sign) {
#pragma unroll
  for (int w = 0; w < 4; w++) {
    const float *x = &d[0][w / 2][w % 2 * 2], *y = &d[1][w / 2][w % 2 * 2];
    split(sign * (x[0] + y[0]), sign * (x[1] + y[1]), high[w], low[w]);
  }
}
// Column j of T's blocks to `t`, by a warp.
DEVICE void invert_column(const Triangle& s, u16* t, int j, int lane) {
  u32 high[BLOCKS][4], low[BLOCKS][4];  // T_kj's transposes, from k = j on
  auto store_parts = [&](u32(&b)[2][4], int i) {
    store_block(t, i, j, b[0], lane), store_block(t + PART, i, j, b[1], lane);
  };
  u32 b[2][4];
  load_block(b[0], s.diagonal[j], lane), load_block(b[1], s.diagonal[j] + BLOCK, lane);
  store_parts(b, j);
#pragma unroll
  for (int w = 0; w < 4; w++) {
    high[0][w] = transpose_matrix<true>(b[0][w]), low[0][w] = transpose_matrix<true>(b[1][w]);
  }
#pragma unroll
  for (int n = 1; n < BLOCKS; n++) {
    const int i = j + n;
    if (i >= BLOCKS) break;
    float d[2][2][4] = {};
#pragma unroll
    for (int k = 0; k < n; k++)
      add_block(d, high[k], low[k], s.below[i * (i - 1) / 2 + j + k][0], lane);
    u32 y[2][4];
    split_sum(y[0], y[1], d, 1.f);
    float e[2][2][4] = {};
    add_block(e, y[0], y[1], s.diagonal[i], lane);
    split_sum(high[n], low[n], e, -1.f);
#pragma unroll
    for (int w = 0; w < 4; w++)
      b[0][w] = transpose_matrix<true>(high[n][w]), b[1][w] = transpose_matrix<true>(low[n][w]);
    store_parts(b, i);
  }
  const u32 zeros[4] = {};
  if (!PACKED)
    for (int i = 0; i < j; i++)
      store_block(t, i, j, zeros, lane), store_block(t + PART, i, j, zeros, lane);
}
