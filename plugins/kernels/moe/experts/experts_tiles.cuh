// Grouped GEMM of experts of many tokens: what experts_tiles_{mma,fp4_sm120}.cu share.
//
// Work: a tile of up to BLOCK_M tokens of one expert (experts_sort.cuh) times four panels of 64
// weight rows. Persistent blocks of eight warps; a warp has 32 weight rows (mma.sync's m, in
// registers) and all tokens (its n), so that weights are unpacked once a tile. A ring of DEPTH
// stages is filled by cp.async across the bounds of tiles. A warp alone reads its weights in a
// stage: their place serves to turn its results before they are stored.
// The including file defines a form F: ROW_STAGE, OWN_STAGE (bytes of a stage: tokens' rows, and
// weights), ROW_SLOTS, runs<UP>() stages a dot product, LIST_AT (pairs of the tile's tokens, there
// with the last run), Source<UP> (open, close, copy, copy_list), REST (left of the weights' scale),
// FEWEST_EIGHTS (of tokens that multiply has code for), Held (what a thread holds from a stage to
// the next), arrive, multiply<UP, EIGHTS>, depart, `staging`, TURNS and write_inner.
// DEPTH, as many stages as fit.
// Macros: experts_common.cuh's, BLOCK_M, SORT_BLOCKS, QUANT, SHARED_LIMIT (bytes of a block).
#pragma once
#include "moe/experts/experts_quantise.cuh"
#include "moe/experts/experts_sort.cuh"

constexpr int COLUMNS = BLOCK_M / 8;
constexpr u32 HALF_STAGE = 400;     // ns, about
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

// The block scale's code of a maximum, given as bits to keep a NaN, and the code of a value.
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

// Where a stage is in shared memory: the tokens' rows, in ROW_SLOTS slots, and behind them the
// warps' weights, in DEPTH slots.
template <class F>
struct Place {
  u32 rows, own;
  DEVICE static Place first(u32 ring) { return {ring, ring + F::ROW_SLOTS * F::ROW_STAGE}; }
  DEVICE Place following(u32 ring) const {
    const Place from = first(ring);
    return {rows == ring + (F::ROW_SLOTS - 1) * F::ROW_STAGE ? from.rows : rows + F::ROW_STAGE,
            own == from.own + (DEPTH - 1) * F::OWN_STAGE ? from.own : own + F::OWN_STAGE};
  }
};

// Bytes of the ring, and of the barrier of warps that are apart.
template <class F>
constexpr int RING =
    F::ROW_SLOTS * F::ROW_STAGE + DEPTH * F::OWN_STAGE + (F::ROW_SLOTS > DEPTH ? 16 : 0);

// Where a warp turns results, 512 bytes at a time: half of the places from either address.
struct Staging {
  u32 from[2];
  template <int COUNT>
  DEVICE u32 at(int i) const {
    return from[i * 2 / COUNT] + i % (COUNT / 2) * 512;
  }
};

// An expert's output [pairs, HIDDEN], in bf16 or f32: 32 columns of eight tokens at a time, TURNS
// times before the lanes wait for each other.
template <int TURNS>
DEVICE void write_outer(const Operands& o, const int4& tile, int item, const Factors& f,
                        const Sums& sums, const Staging& staging, u32 list) {
  const int lane = lane_id(), row = Item<false>::row(item);
#ifdef PARTS_BF16
  const u32 mine = (lane & 7) * 64 + ((lane >> 3) ^ (lane >> 1 & 3)) * 16;
  const u32 whole = (lane >> 2) * 64 + ((lane & 3) ^ (lane >> 3 & 3)) * 16;
  const int first = row + (lane & 3) * 8;
#pragma unroll
  for (int j = 0; j < COLUMNS; j += TURNS) {
    if (j * 8 >= tile.z) break;
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      u32 turned[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const float (&v)[4] = sums[q >> 1][j + i];
        const float by = q & 1 ? f.high[q >> 1] : f.low[q >> 1];
        turned[q] = pack_bf16(__fmul_rn(v[2 * (q & 1)], by), __fmul_rn(v[2 * (q & 1) + 1], by));
      }
      store_matrix_transposed(staging.at<TURNS>(i) + mine, turned);
    }
    __syncwarp();
    uint4 values[TURNS];
    u32 pair[TURNS];  // behind the tile's end anything, and not stored
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      values[i] = load_shared16(staging.at<TURNS>(i) + whole);
      pair[i] = load_shared4(list + ((j + i) * 8 + (lane >> 2)) * 4);
    }
#pragma unroll
    for (int i = 0; i < TURNS; ++i)
      if ((j + i) * 8 + (lane >> 2) < tile.z && first < HIDDEN)
        *(uint4*)((u16*)o.to + (u64)pair[i] * HIDDEN + first) = values[i];
    __syncwarp();
  }
#else
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = j * 8 + (lane & 3) * 2 + c;
      if (column >= tile.z) continue;
      float* const y =
          (float*)o.to + (u64)load_shared4(list + column * 4) * HIDDEN + row + (lane >> 2);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (row + i * 16 >= HIDDEN) continue;
        y[i * 16] = __fmul_rn(sums[i][j][c], f.low[i]);
        y[i * 16 + 8] = __fmul_rn(sums[i][j][2 + c], f.high[i]);
      }
    }
#endif
}

// The copies of a ring, DEPTH - 1 stages ahead of its products. Behind the last item nothing is
// copied: a source that is closed has no rows and no weights, so that `copy` needs no branch.
template <class F, bool UP>
struct Feeder {
  int item, items, run;
  u32 ring;
  Place<F> to;
  typename F::template Source<UP> source;

  DEVICE void open(const Operands& o, const int4& tile) {
    run = 0;
    if (item < items) source.open(o, tile, item);
    else source.close();
  }
  DEVICE void copy() { source.copy(to, run); }
  // After the copies of a stage: they are a group, and the next stage is on. `next`: the tile after
  // the one that is multiplied; where an item has few stages, copies are further on.
  DEVICE void turn(const Operands& o, const int4& next) {
    if (++run == F::template runs<UP>()) {
      source.copy_list(o, to);
      item += gridDim.x;
      if (F::template runs<UP>() >= DEPTH) open(o, next);
      else open(o, Item<UP>::tile(o, min(item, items - 1)));
    }
    commit_copies();
    to = to.following(ring);
  }
};

// The stages of a ring and the products of tiles. Where there is a slot of rows more than stages
// in flight, a warp may be half a stage ahead of another: in the middle of each it says that its
// copies of the next are there and those before this are read (`met`), and waits for the others at
// the next one's begin. Else the block meets there.
template <class F, bool UP>
struct Products {
  using S = Side<UP>;
  static constexpr bool APART = F::ROW_SLOTS > DEPTH;
  const Operands& o;
  u32 ring, met;
  Place<F> last, stage;  // the stage that was multiplied, and the next
  u32 parity;
  int4 next;
  Feeder<F, UP> feeder;
  typename F::Held held;

  DEVICE void open(int items) {
    met = ring + F::ROW_SLOTS * F::ROW_STAGE + DEPTH * F::OWN_STAGE;
    feeder.item = blockIdx.x, feeder.items = items, feeder.ring = ring;
    stage = last = feeder.to = Place<F>::first(ring), parity = 0;
    next = Item<UP>::tile(o, min((int)blockIdx.x, items - 1));
    if (APART && threadIdx.x == 0) barrier_init(met, WARPS * WARP_ARRIVALS);
    feeder.open(o, next);
#pragma unroll
    for (int i = 0; i < DEPTH - 1; ++i) feeder.copy(), feeder.turn(o, next);
    __syncthreads();
    held.open(stage);
    if (APART) announce(met);
    // A scheduler's two warps begin half a stage apart: what one does with products runs next to
    // the other's.
    if (APART) __nanosleep(Item<UP>::warp() / (WARPS / 2) * HALF_STAGE);  // no branch
  }
  DEVICE static void announce(u32 met) {
    __syncwarp();
    barrier_arrive_warp(met, lane_id());
  }
  // A tile of EIGHTS eights of tokens: as a constant, so that a stage is code without branches.
  template <int EIGHTS>
  DEVICE void multiply_eights(int count, Sums& sums) {
#pragma unroll 1
    for (int part = 0; part < S::WK; ++part) {
      [[maybe_unused]] Sums before;
      if (S::WK > 1)
#pragma unroll
        for (int i = 0; i < EIGHTS * 8; ++i) {
          float& sum = sums[i / EIGHTS / 4][i / 4 % EIGHTS][i % 4];
          before[i / EIGHTS / 4][i / 4 % EIGHTS][i % 4] = sum, sum = 0.0f;
        }
#pragma unroll 1
      for (int run = 0; run < F::template runs<UP>() / S::WK; ++run) {
        F::arrive();
        if (APART) barrier_wait(met, parity), parity ^= 1;
        else __syncthreads();
        last = stage, stage = stage.following(ring);
        F::template multiply<UP, EIGHTS>(*this, count, run, sums);
        feeder.turn(o, next);
        F::depart(held, stage);
      }
      if (S::WK > 1)
#pragma unroll
        for (int i = 0; i < EIGHTS * 8; ++i) {
          float& sum = sums[i / EIGHTS / 4][i / 4 % EIGHTS][i % 4];
          sum = before[i / EIGHTS / 4][i / 4 % EIGHTS][i % 4] + sum;
        }
    }
  }
  // As many eights of [FROM, TO] as `count` tokens take.
  template <int FROM, int TO>
  DEVICE void multiply(int count, Sums& sums) {
    if constexpr (FROM == TO) {
      multiply_eights<TO>(count, sums);
    } else {
      constexpr int MIDDLE = (FROM + TO) / 2;
      if (count <= MIDDLE * 8) multiply<FROM, MIDDLE>(count, sums);
      else multiply<MIDDLE + 1, TO>(count, sums);
    }
  }
};

template <class F, bool UP>
DEVICE void multiply_tiles(const Operands& o) {
  extern __shared__ __align__(1024) u8 memory[];
  wait_then_launch_dependents();
  const int items = __ldcg(&o.tiles[0].x) * Item<UP>::BLOCKS;
  // forget: or the address is asked for at each use
  Products<F, UP> products = {o, forget(shared_address(memory))};
  products.open(items);
#pragma unroll 1
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int4 tile = products.next;
    products.next = Item<UP>::tile(o, min(item + (int)gridDim.x, items - 1));
    Factors factors;
    factors.load<UP>(o, tile.x, item, F::REST);
    Sums sums = {};
    products.template multiply<F::FEWEST_EIGHTS, COLUMNS>(tile.z, sums);
    __syncwarp();
    if (!Item<UP>::there(item)) continue;
    const Staging staging = F::staging(products.last.own, products.stage.own);
    if constexpr (UP) F::write_inner(o, tile, item, factors, sums, staging);
    else
      write_outer<F::TURNS>(o, tile, item, factors, sums, staging, products.last.rows + F::LIST_AT);
  }
}
