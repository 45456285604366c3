// One warp's attention over tiles of 16 tokens: a row's chunks, the products, the online softmax,
// the sums to shared memory. attention_decode_mma.cu and attention_round_mma.cu share it, so their
// bits are equal.
//
// A and B are swapped: S^T = K·Q^T has tokens as the 16 rows and the heads of a GQA group as the 8
// columns; P is transposed by movmatrix; O^T += V^T·P.
#pragma once
#include "attention/attention_tile_stream.cuh"

// Chunks have about CHUNK tokens and equal sizes but for the last, so none has very few tokens.
DEVICE int chunk_tokens(int length) {
  int chunks = min(MOST_CHUNKS, max(1, (length + CHUNK / 2) / CHUNK));
  return max(64, (length + 64 * chunks - 1) / (64 * chunks) * 64);
}
DEVICE int chunks_of(int length, int size) {
  return length > 0 ? (length + size - 1) / size : 1;  // an inert row writes zeros
}

// A column's scores are relative to its reference: the maximum of the tile in which a score last
// rose above it by more than RISE. So few tiles change a reference, and a weight is 256 at most.
constexpr float LOWEST = -1e30f, RISE = 8.0f;

// The running softmax of a warp: O^T in fragments (rows d, columns heads), and for columns 2t and
// 2t + 1 the reference and, in `total`, the sum of the weights.
struct Softmax {
  float o[D / 16][4];
  float total[1][4], top[2];
};

// One query's heads as B operands (step s: dimensions from 16·s), in registers or, for warps with
// few registers, in shared memory.
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

// `at(c)`: the address of this lane's half of piece c (32 bytes) of its row of the keys.
template <class Query, class At>
DEVICE void scores(float (&s)[2][4], const Query& q, const At& at) {
#pragma unroll
  for (int c = 0; c < ROW / 32; c++) {
    u32 r[4];
    load_matrix(r, at(c));
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

// Four registers of a transposing load as A operands: two of codes, one of bf16.
DEVICE void widen_values(u32 (*a)[4], const u32 (&r)[4]) {
  if constexpr (KV_FP8) {
    widen_trans(r[0], a[0][0], a[0][1]), widen_trans(r[2], a[0][2], a[0][3]);
    widen_trans(r[1], a[1][0], a[1][1]), widen_trans(r[3], a[1][2], a[1][3]);
  } else {
    a[0][0] = r[0], a[0][1] = r[1], a[0][2] = r[2], a[0][3] = r[3];
  }
}

DEVICE void add_values(float (&o)[D / 16][4], u32 values, u32 p0, u32 p1, int lane) {
  int row = (lane & 7) + ((lane >> 4) << 3), half = (lane >> 3) & 1;
#pragma unroll
  for (int c = 0; c < ROW / 32; c++) {
    u32 r[4];
    load_matrix_transposed(r, values + swizzled<ROW>(row, 2 * c + half));
    if constexpr (KV_FP8) {
      u32 a[2][4];
      widen_values(a, r);
      mma16(o[2 * c], a[0], p0, p1);
      mma16(o[2 * c + 1], a[1], p0, p1);
    } else {
      mma16(o[c], r, p0, p1);
    }
  }
}

DEVICE float power_of(float score, float log2_scale, float top) {
  return fmaf(score, log2_scale, -top);
}
// The reference after a tile with this maximum of scores.
DEVICE float raised(float score, float log2_scale, float top) {
  return power_of(score, log2_scale, top) > RISE ? __fmul_rn(score, log2_scale) : top;
}

// The sums of weights are products with ones, so their order is the instruction's.
DEVICE void add_weights(float (&total)[4], u32 p0, u32 p1) {
  const u32 one = KV_FP8 ? 0x3c003c00 : 0x3f803f80, a[4] = {one, one, one, one};
  mma16(total, a, p0, p1);
}

// Scores of a tile to weights: P^T as the next product's B operand. If a reference rises, the whole
// warp calls `shrink` with the factors of the earlier sums.
template <class Shrink>
DEVICE void softmax_weights(u32 (&p)[2], float (&top)[2], float (&s)[2][4], int seen,
                            float log2_scale, int lane, const Shrink& shrink) {
  int g = lane >> 2;
  float v[4];
  bool rise = false;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    s[0][i] = g + (i >> 1) * 8 < seen ? s[0][i] + s[1][i] : minus_infinity();
    v[i] = power_of(s[0][i], log2_scale, top[i & 1]), rise |= v[i] > RISE;
  }
  if (__any_sync(~0u, rise)) {
    float by[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float m = fmaxf(s[0][j], s[0][j + 2]);
#pragma unroll
      for (int d = 4; d < 32; d <<= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, d));
      const float higher = raised(m, log2_scale, top[j]);
      by[j] = exp2_fast(top[j] - higher), top[j] = higher;
    }
    shrink(by);
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = power_of(s[0][i], log2_scale, top[i & 1]);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = exp2_fast(v[i]);
  p[0] = transpose_matrix(pack16(v[0], v[1])), p[1] = transpose_matrix(pack16(v[2], v[3]));
}

// The dimension of element i of fragment n.
DEVICE int dimension(int n, int i, int lane) {
  int g = lane >> 2;
  return 16 * n + (KV_FP8 ? 2 * g + (i >> 1) : g + 8 * (i >> 1));
}

template <int N>
DEVICE void multiply(float (&o)[N][4], const float (&by)[2]) {
#pragma unroll
  for (int n = 0; n < N; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) o[n][i] *= by[i & 1];
  }
}

template <class Query>
DEVICE void attend(Softmax& x, u32 tile, const Query& q, int seen, float log2_scale, int lane) {
  float s[2][4] = {};
  int row = lane & 15, half = lane >> 4;
  scores(s, q, [=](int c) { return tile + swizzled<ROW>(row, 2 * c + half); });
  u32 p[2];
  softmax_weights(p, x.top, s, seen, log2_scale, lane,
                  [&](const float (&by)[2]) { multiply(x.o, by), multiply(x.total, by); });
  add_weights(x.total[0], p[0], p[1]);
  add_values(x.o, tile + TILE, p[0], p[1], lane);
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
// Columns beyond the group repeat its first head; their sums are not read.
DEVICE void load_queries(Queries<false>& x, const u16 (*heads)[PITCH], int lane) {
  int g = lane >> 2, t = lane & 3;
  x.from = &heads[g < GQA_GROUP ? g : 0][2 * t];
}

constexpr bool QUERIES_IN_REGISTERS = THREADS * BLOCKS <= 384;  // 168 registers a thread

// The loop over the tiles of a warp with one query.
DEVICE void attend_tiles(Softmax& x, TileStream& stream, Block& b, float log2_scale, int reader,
                         int lane) {
  Queries<QUERIES_IN_REGISTERS> q;
  load_queries(q, b.queries, lane);
  x.top[0] = x.top[1] = LOWEST;
  int position = stream.first;
  for (int i = 0; position < stream.end; i++) {
    wait_copies<IN_FLIGHT - 1>();
    __syncwarp();
    if (position + 16 > stream.stored) {
      stream.patch(position, b.arena[reader] + i % STAGES * SLOT, b.fresh[0]);
    }
    attend(x, stream.tile(i), q, stream.end - position, log2_scale, lane);
    __syncwarp();
    const int next = position + IN_FLIGHT * TileStream::STRIDE;
    if (next < stream.end) stream.load(i + IN_FLIGHT, next);
    commit_copies();
    position += TileStream::STRIDE;
  }
}

// The warp's references and totals, and its sums [heads, WIDE] as floats in the reader's arena.
DEVICE void store_sums(Block& b, const Softmax& x, int reader, int lane) {
  float* rows = reinterpret_cast<float*>(b.arena[reader]);
  int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int j = 0; j < 2; j++) {
    if (g == 0) b.tally[reader][2 * t + j] = make_float2(x.top[j], x.total[0][j]);
  }
#pragma unroll
  for (int n = 0; n < D / 16; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      rows[(2 * t + (i & 1)) * WIDE + dimension(n, i, lane)] = x.o[n][i];
    }
  }
}
