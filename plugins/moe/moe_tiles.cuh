// Grouped GEMM of experts by mma.sync, many tokens: what moe_tiles.cu and moe_tiles_fp4.cu share.
//
// Work: a tile of up to BLOCK_M tokens of one expert (moe_sort.cuh) times four panels of 64 weight
// rows. Persistent blocks of eight warps; a warp has 32 weight rows (mma.sync's m, in registers)
// and all tokens (its n), so that weights are unpacked once a tile. A ring of DEPTH stages is
// filled by cp.async across the bounds of tiles; one block barrier a stage. A warp alone reads its
// weights in a stage: their place serves to turn its results before they are stored.
// The including file defines a form F: STAGE bytes, runs<UP>() stages a dot product, WEIGHTS_AT,
// LIST_AT (pairs of the tile's tokens, there with the last run), Source<UP> (open, copy), REST
// (left of the weights' scale), multiply<UP> and write_inner.
// Macros: moe_common.cuh's, BLOCK_M, DEPTH, SORT_BLOCKS, QUANT.
#pragma once
#include "moe/moe_quantise.cuh"
#include "moe/moe_sort.cuh"

constexpr int COLUMNS = BLOCK_M / 8;
typedef float Sums[2][COLUMNS][4];  // of a lane, by m16 tile and eight tokens

struct Operands {
  const u8 *rows, *row_scales;  // activations; their block scales where they are codes
  const int* order;
  const int4* tiles;
  const u8 *w, *scales;
  const float *scale2, *given, *next;  // of weight rows; of an expert's input, of its `h`
  void* to;
  u8* to_scales;
};

// A block of work: a tile of tokens by four panels, of which a warp has half a panel.
template <bool UP>
struct Item {
  using S = Side<UP>;
  static constexpr int BLOCKS = (S::PANELS + 3) / 4;
  DEVICE static int warp() { return threadIdx.x >> 5; }
  DEVICE static int panel(int item) { return item % BLOCKS * 4 + warp() / 2; }
  DEVICE static bool there(int item) { return S::PANELS % 4 == 0 || panel(item) < S::PANELS; }
  // The first row of the warp: of h, or of y.
  DEVICE static int row(int item) {
    return UP ? panel(item) * 32 + (warp() & 1) * 16 : panel(item) * 64 + (warp() & 1) * 32;
  }
  DEVICE static int4 tile(const Operands& o, int item) {
    return __ldcg(o.tiles + 1 + item / BLOCKS);
  }
};

// Factors of a lane's rows g and g + 8 of two m16 tiles: for `up` a gate row's and an up row's.
struct Factors {
  float low[2], high[2], next;

  template <bool UP>
  DEVICE void load(const Operands& o, int expert, int item, float rest) {
    const int g = lane_id() >> 2;
    const float input = BY_PAIR ? o.given[expert] : 1.0f;
    next = BY_PAIR && UP ? o.next[expert] : 1.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      low[i] = high[i] = 1.0f;
      if (WEIGHTS == 0) continue;
      const int row = Item<UP>::row(item) + (UP ? i * 8 : i * 16) + g;
      const float* two = o.scale2 + (u64)expert * (UP ? 2 * INNER : HIDDEN) + row;
      low[i] = row < (UP ? INNER : HIDDEN) ? two[0] * input * rest : 0.0f;
      high[i] =
          row + (UP ? 0 : 8) < (UP ? INNER : HIDDEN) ? two[UP ? INNER : 8] * input * rest : 0.0f;
    }
  }
};

DEVICE float inner_of(const float (&v)[4], int column, const Factors& f, int i) {
  return silu_mul(__fmul_rn(v[column], f.low[i]), __fmul_rn(v[2 + column], f.high[i]));
}

// The block scale's code of a maximum, given as bits lest a NaN is lost, and the code of a value.
DEVICE u8 scale_code(u32 most, float gain) { return to_e4m3(__uint_as_float(most) / 6.0f * gain); }
DEVICE u32 value_code(float v, float gain, float scale) {
  return scale == 0.0f ? 0 : to_e2m1(v * gain, scale);
}
DEVICE u32 size_bits(float v) { return __float_as_uint(v) & 0x7fffffff; }
// Of the 16 inner columns of a token that the lanes of one t hold, two each.
DEVICE u32 most_of_block(float first, float second) {
  u32 most = max(size_bits(first), size_bits(second));
#pragma unroll
  for (int d = 4; d < 32; d *= 2) most = max(most, __shfl_xor_sync(~0u, most, d));
  return most;
}

// An expert's output [pairs, HIDDEN], in bf16 or f32: 32 columns of eight tokens at a time.
DEVICE void write_outer(const Operands& o, const int4& tile, int item, const Factors& f,
                        const Sums& sums, u8* room, const int* list) {
  const int lane = lane_id(), row = Item<false>::row(item);
  [[maybe_unused]] u8* const mine = room + (lane & 7) * 64 + ((lane >> 3) ^ (lane >> 1 & 3)) * 16;
  [[maybe_unused]] const u8* const whole =
      room + (lane >> 2) * 64 + ((lane & 3) ^ (lane >> 3 & 3)) * 16;
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j) {
    if (j * 8 >= tile.z) break;
#ifdef PARTS_BF16
    u32 turned[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const float (&v)[4] = sums[q >> 1][j];
      const float by = q & 1 ? f.high[q >> 1] : f.low[q >> 1];
      turned[q] = pack_bf16(__fmul_rn(v[2 * (q & 1)], by), __fmul_rn(v[2 * (q & 1) + 1], by));
    }
    store_matrix_transposed(mine, turned);
    __syncwarp();
    const uint4 values = load_shared16(whole);
    const int column = j * 8 + (lane >> 2), first = row + (lane & 3) * 8;
    if (column < tile.z && first < HIDDEN)
      *(uint4*)((u16*)o.to + (u64)list[column] * HIDDEN + first) = values;
    __syncwarp();
#else
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = j * 8 + (lane & 3) * 2 + c;
      if (column >= tile.z) continue;
      float* const y = (float*)o.to + (u64)list[column] * HIDDEN + row + (lane >> 2);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (row + i * 16 >= HIDDEN) continue;
        y[i * 16] = __fmul_rn(sums[i][j][c], f.low[i]);
        y[i * 16 + 8] = __fmul_rn(sums[i][j][2 + c], f.high[i]);
      }
    }
#endif
  }
}

// The copies of a ring, DEPTH - 1 stages ahead of its products.
template <class F, bool UP>
struct Feeder {
  int item, items, run, slot;
  typename F::template Source<UP> source;

  DEVICE void open(const Operands& o) {
    run = 0;
    if (item < items) source.open(o, Item<UP>::tile(o, item), item);
  }
  DEVICE void fetch(const Operands& o, u8* memory) {
    if (item < items) {
      source.copy(o, memory + slot * F::STAGE, run);
      if (++run == F::template runs<UP>()) item += gridDim.x, open(o);
    }
    commit_copies();
    if (++slot == DEPTH) slot = 0;
  }
};

template <class F, bool UP>
DEVICE void multiply_tiles(const Operands& o) {
  extern __shared__ __align__(1024) u8 memory[];
  using S = Side<UP>;
  wait_for_previous();
  launch_dependents();
  const int items = __ldcg(&o.tiles[0].x) * Item<UP>::BLOCKS;
  Feeder<F, UP> feeder = {(int)blockIdx.x, items, 0, 0};
  feeder.open(o);
#pragma unroll
  for (int i = 0; i < DEPTH - 1; ++i) feeder.fetch(o, memory);
  int slot = 0;
  int4 next = Item<UP>::tile(o, min((int)blockIdx.x, items - 1));
#pragma unroll 1
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int4 tile = next;
    next = Item<UP>::tile(o, min(item + (int)gridDim.x, items - 1));
    Factors factors;
    factors.load<UP>(o, tile.x, item, F::REST);
    Sums sums = {};
    u8* stage = memory;
#pragma unroll 1
    for (int part = 0; part < S::WK; ++part) {
      [[maybe_unused]] Sums before;
      if (S::WK > 1)
#pragma unroll
        for (int i = 0; i < COLUMNS * 8; ++i) {
          float& sum = sums[i / COLUMNS / 4][i / 4 % COLUMNS][i % 4];
          before[i / COLUMNS / 4][i / 4 % COLUMNS][i % 4] = sum, sum = 0.0f;
        }
#pragma unroll 1
      for (int run = 0; run < F::template runs<UP>() / S::WK; ++run) {
        wait_copies<DEPTH - 2>();
        __syncthreads();
        feeder.fetch(o, memory);
        stage = memory + slot * F::STAGE;
        if (Item<UP>::there(item)) F::template multiply<UP>(stage, tile.z, run, sums);
        if (++slot == DEPTH) slot = 0;
      }
      if (S::WK > 1)
#pragma unroll
        for (int i = 0; i < COLUMNS * 8; ++i) {
          float& sum = sums[i / COLUMNS / 4][i / 4 % COLUMNS][i % 4];
          sum = before[i / COLUMNS / 4][i / 4 % COLUMNS][i % 4] + sum;
        }
    }
    __syncwarp();
    u8* const room = stage + F::WEIGHTS_AT + Item<UP>::warp() * F::OWN_BYTES;
    if (!Item<UP>::there(item)) continue;
    if constexpr (UP) F::write_inner(o, tile, item, factors, sums, room);
    else write_outer(o, tile, item, factors, sums, room, (const int*)(stage + F::LIST_AT));
  }
}
