// What a warp does on its way over tiles of 16 tokens of keys and values: a row's chunks, the
// products and the running softmax, its sums into shared memory. What paged_decode.cu and
// paged_round.cu share, so that their bits are the same.
//
// A and B are swapped: S^T = K·Q^T has tokens as the 16 rows and the heads of a GQA group as the 8
// columns; P is transposed by movmatrix; O^T += V^T·P.
#pragma once
#include "attention/paged_merge.cuh"

// Chunks of about CHUNK tokens, all of one size but the last: none is left with a token or two.
DEVICE int chunk_tokens(int length) {
  int chunks = min(MOST_CHUNKS, max(1, (length + CHUNK / 2) / CHUNK));
  return max(64, (length + 64 * chunks - 1) / (64 * chunks) * 64);
}
DEVICE int chunks_of(int length, int size) {
  return length > 0 ? (length + size - 1) / size : 1;  // an inert row still writes its zeros
}

// The running softmax of a warp: O^T in fragments (rows d, columns heads), and for columns 2t and
// 2t + 1 the maximum and this lane's share of the sum.
struct Softmax {
  float o[D / 16][4];
  float top[2], sum[2];
};

// One query's heads as right operands (step s: dimensions from 16·s), kept in registers, or read
// each time by warps that have few.
template <bool KEPT>
struct Queries {
  u32 q[D / 16][2];
  DEVICE u32 at(int step, int half) const { return q[step][half]; }
};
template <>
struct Queries<false> {
  const u16* from;
  DEVICE u32 at(int step, int half) const {
    return *reinterpret_cast<const u32*>(from + 16 * step + 8 * half);
  }
};

template <class Query>
DEVICE void scores(float (&s)[2][4], u32 keys, const Query& q, int lane) {
  int row = lane & 15, half = lane >> 4;
#pragma unroll
  for (int c = 0; c < ROW / 32; c++) {
    u32 r[4];
    load_matrix(r, keys + swizzled<ROW>(row, 2 * c + half));
    if constexpr (KV_FP8) {
      u32 a[4], b[4];
      widen(r[0], a[0], a[2]), widen(r[1], a[1], a[3]);
      widen(r[2], b[0], b[2]), widen(r[3], b[1], b[3]);
      mma16(s[0], a, q.at(2 * c, 0), q.at(2 * c, 1));
      mma16(s[1], b, q.at(2 * c + 1, 0), q.at(2 * c + 1, 1));
    } else {
      mma16(s[c & 1], r, q.at(c, 0), q.at(c, 1));
    }
  }
}

DEVICE void weigh(float (&o)[D / 16][4], u32 values, u32 p0, u32 p1, int lane) {
  int row = (lane & 7) + ((lane >> 4) << 3), half = (lane >> 3) & 1;
#pragma unroll
  for (int c = 0; c < ROW / 32; c++) {
    u32 r[4];
    load_matrix_transposed(r, values + swizzled<ROW>(row, 2 * c + half));
    if constexpr (KV_FP8) {
      u32 a[4], b[4];
      widen_trans(r[0], a[0], a[1]), widen_trans(r[2], a[2], a[3]);
      widen_trans(r[1], b[0], b[1]), widen_trans(r[3], b[2], b[3]);
      mma16(o[2 * c], a, p0, p1);
      mma16(o[2 * c + 1], b, p0, p1);
    } else {
      mma16(o[c], r, p0, p1);
    }
  }
}

template <class Query>
DEVICE void attend(Softmax& x, u32 tile, const Query& q, int seen, float log2_scale, int lane) {
  float s[2][4] = {};
  scores(s, tile, q, lane);
  int g = lane >> 2;
  float v[4], higher[2];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    v[i] = g + (i >> 1) * 8 < seen ? (s[0][i] + s[1][i]) * log2_scale : minus_infinity();
  }
#pragma unroll
  for (int j = 0; j < 2; j++) {
    float m = fmaxf(v[j], v[j + 2]);
#pragma unroll
    for (int d = 4; d < 32; d <<= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
    higher[j] = fmaxf(x.top[j], m);
  }
  if (__any_sync(~0u, higher[0] > x.top[0] || higher[1] > x.top[1])) {
    float shrink[2] = {exp2_fast(x.top[0] - higher[0]), exp2_fast(x.top[1] - higher[1])};
#pragma unroll
    for (int j = 0; j < 2; j++) x.sum[j] *= shrink[j], x.top[j] = higher[j];
#pragma unroll
    for (int n = 0; n < D / 16; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) x.o[n][i] *= shrink[i & 1];
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = exp2_fast(v[i] - x.top[i & 1]);
  x.sum[0] += v[0] + v[2], x.sum[1] += v[1] + v[3];
  u32 p0 = transpose_matrix(pack16(v[0], v[1])), p1 = transpose_matrix(pack16(v[2], v[3]));
  weigh(x.o, tile + TILE, p0, p1, lane);
}

DEVICE void load_queries(Queries<true>& x, const u16 (*heads)[PITCH], int lane) {
  int g = lane >> 2, t = lane & 3;
  bool real = g < GQA_GROUP;
#pragma unroll
  for (int s = 0; s < D / 16; s++) {
    const u16* from = &heads[real ? g : 0][16 * s + 2 * t];
    u32 first = *reinterpret_cast<const u32*>(from);
    u32 second = *reinterpret_cast<const u32*>(from + 8);
    x.q[s][0] = real ? first : 0, x.q[s][1] = real ? second : 0;
  }
}
// Columns beyond the group repeat its first head; nobody reads their sums.
DEVICE void load_queries(Queries<false>& x, const u16 (*heads)[PITCH], int lane) {
  int g = lane >> 2, t = lane & 3;
  x.from = &heads[g < GQA_GROUP ? g : 0][2 * t];
}

// A warp's sums into place `slot` of a walker's arena, and its maxima and totals.
DEVICE void spill(Block& b, Softmax& x, int walker, int slot, int lane) {
  int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int j = 0; j < 2; j++) {
#pragma unroll
    for (int d = 4; d < 32; d <<= 1) x.sum[j] += __shfl_xor_sync(~0u, x.sum[j], d);
    if (g == 0) b.tally[slot * WALKERS + walker][2 * t + j] = make_float2(x.top[j], x.sum[j]);
  }
  float* rows = reinterpret_cast<float*>(b.arena[walker] + slot * MERGE);
#pragma unroll
  for (int n = 0; n < D / 16; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int d = 16 * n + (KV_FP8 ? 2 * g + (i >> 1) : g + 8 * (i >> 1));
      rows[(2 * t + (i & 1)) * WIDE + d] = x.o[n][i];
    }
  }
}
