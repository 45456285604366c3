// Tiles of the vision tower's attention, and the online softmax over them.
//
// vision_attention_turn_fma.cu writes a head's queries, keys and values as tiles, which
// vision_attention_wgmma_sm90.cu and vision_attention_mma.cu copy as they are. A tile has
// consecutive panels of all its rows by 16 dimensions (32 bytes), zeros beyond the head's. The
// 16-byte chunk of a row in a panel is XOR-ed with the row's bit 2 (32-byte swizzle), so eight rows
// of one chunk are in eight bank groups.
// Macros: HEADS, HEAD_DIM, KEYS (rows of a tile of keys or values).
#pragma once
#include "common/numeric.cuh"

constexpr int D = HEAD_DIM, PANELS = (D + 15) / 16;
constexpr int QUERIES = 64;  // rows of a tile of queries
constexpr int ROW = PANELS * 32, TILE = KEYS * ROW, QUERY_TILE = QUERIES * ROW;  // bytes
static_assert(D % 8 == 0 && KEYS % 32 == 0, "unsupported sizes");

// Byte offset of a 16-byte chunk of a row in a tile of ROWS rows.
template <int ROWS>
DEVICE u32 place(int row, int chunk) {
  return chunk / 2 * (ROWS * 32) + row * 32 + (((chunk & 1) ^ (row >> 2 & 1)) << 4);
}

// A warp's 16 queries over tiles of keys; fragments as of mma.sync: rows g and g + 8 of the lane.
struct Softmax {
  float o[2 * PANELS][4], s[KEYS / 8][4];
  float top[2], sum[2], shrink[2];  // sum: of the lane's keys
  u32 p[KEYS / 16][4];              // weights, as operands
};

// The scores of a tile, which are to base 2, become weights relative to the new maximum; `shrink`
// is the factor of the earlier sums. MASKED: `left` keys of the tile are live, at least one.
template <bool MASKED>
DEVICE void weigh(Softmax& x, int left) {
  float higher[2] = {x.top[0], x.top[1]};
  const int mine = left - 2 * (int)(lane_id() & 3);
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (MASKED && 8 * n + (i & 1) >= mine) x.s[n][i] = minus_infinity();
      higher[i >> 1] = fmaxf(higher[i >> 1], x.s[n][i]);
    }
  }
#pragma unroll
  for (int j = 0; j < 2; j++) {
    higher[j] = fmaxf(higher[j], __shfl_xor_sync(~0u, higher[j], 1));
    higher[j] = fmaxf(higher[j], __shfl_xor_sync(~0u, higher[j], 2));
    x.shrink[j] = exp2_fast(x.top[j] - higher[j]);
    x.top[j] = higher[j], x.sum[j] *= x.shrink[j];
  }
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x.s[n][i] = exp2_fast(x.s[n][i] - x.top[i >> 1]);
      x.sum[i >> 1] += x.s[n][i];
    }
  }
}

DEVICE void begin(Softmax& x) {
  x.top[0] = x.top[1] = minus_infinity();
  x.sum[0] = x.sum[1] = 0.0f;
#pragma unroll
  for (int n = 0; n < 2 * PANELS; n++) x.o[n][0] = x.o[n][1] = x.o[n][2] = x.o[n][3] = 0.0f;
}

// Scales the earlier sums where a maximum rose; packs the weights.
DEVICE void rescale(Softmax& x) {
  if (__any_sync(~0u, x.shrink[0] != 1.0f || x.shrink[1] != 1.0f)) {
#pragma unroll
    for (int n = 0; n < 2 * PANELS; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) x.o[n][i] *= x.shrink[i >> 1];
    }
  }
#pragma unroll
  for (int n = 0; n < KEYS / 16; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float* pair = &x.s[2 * n + (i >> 1)][(i & 1) * 2];
      x.p[n][i] = pack_bf16(pair[0], pair[1]);
    }
  }
}

// The warp's rows of a head of y [live, HEADS · D], from row `first` on.
DEVICE void store(u16* y, const Softmax& x, int head, int first, int live) {
#pragma unroll
  for (int j = 0; j < 2; j++) {
    float sum = x.sum[j];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const float scale = 1.0f / sum;
    const int row = first + (int)(lane_id() >> 2) + 8 * j;
    u16* to = y + ((i64)row * HEADS + head) * D + 2 * (lane_id() & 3);
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
      const u32 pair = pack_bf16(x.o[n][2 * j] * scale, x.o[n][2 * j + 1] * scale);
      if (row < live) *reinterpret_cast<u32*>(to + 8 * n) = pair;
    }
  }
}
