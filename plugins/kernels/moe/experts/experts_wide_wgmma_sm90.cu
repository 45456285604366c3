// Grouped GEMM of experts, many tokens: y = Σ_e weight_e · w2_e(silu(gate_e(x)) · up_e(x)). sm_90a.
//
// Four launches: moe_sort cuts the pairs (token, expert) into tiles of up to BLOCK_M tokens of one
// expert; wide_up and wide_down multiply; moe_combine adds a token's experts in ascending index.
// With BLOCK_M 64 weights and the order of every sum are experts_grouped_mma.cu's, hence the bits;
// with 128 all of k is one sum, and parts are bf16.
// Work: a tile of tokens (wgmma's N, 8 … BLOCK_M; 128-byte swizzle in shared memory) times four
// panels of 64 weight rows (wgmma's M, dequantised to registers). Persistent blocks: four ping-pong
// consumer warpgroups, a panel each, and a producer warpgroup that fills a ring: weights and `h` by
// TMA bulk copies, gathered rows of x by cp.async, each followed by an async proxy fence of the
// thread that copied. `h` is written in the order in which its tiles are read.
// 256 experts, top 8, H200: 257 / 418 / 1459 us at 1024 / 2048 / 8192 tokens by tiles of 64, 253 /
// 343 / 1022 by 128; floors 106 / 147 / 587 (benchmarks/log/moe/experts_wide_wgmma_sm90.md).
// Macros: experts_common.cuh's, BLOCK_M, SHARED_LIMIT (bytes of shared memory of a block).
#include "moe/experts/experts_wide_sm90.cuh"

// A stage is SPAN k-slabs: the tokens' rows of each, the weights of four panels, their scales.
constexpr int SPAN = Side<true>::PART_SLABS % 2 || Side<false>::PART_SLABS % 2 ? 1 : 2;
constexpr int KSLAB_X = BLOCK_M * 128;
constexpr int PANEL_BYTES = SPAN * 4 * M16_BYTES, PANEL_SCALES = SPAN * 4 * M16_SCALES;
constexpr int WEIGHTS_AT = SPAN * KSLAB_X, SCALES_AT = WEIGHTS_AT + 4 * PANEL_BYTES;
constexpr int STAGE = SCALES_AT + 4 * PANEL_SCALES;
constexpr int DEPTH =
    (SHARED_LIMIT - STATIC) / STAGE < 12 ? (SHARED_LIMIT - STATIC) / STAGE : 12;  // stages
constexpr int LAG = DEPTH > 2 ? 2 : DEPTH - 1;  // stages of rows in flight behind the one announced
constexpr int WIDE_THREADS = CONSUMERS + PRODUCERS;
using PipelineState = RingPlace<DEPTH>;
static_assert(STAGE % 1024 == 0, "a swizzled tile begins at a multiple of 1024");

template <bool UP>
struct Wide {
  using S = Side<UP>;
  static constexpr int BLOCKS = (S::PANELS + 3) / 4;  // of four panels
  static constexpr int ROW = S::SLABS * 128;          // bytes of a token's row
};

// --- Producers --------------------------------------------------------------------------------

struct Tokens {
  const u8* rows;
  const int* order;
};

// The weights of one stage: a warp's first lane fetches one panel.
template <bool UP>
DEVICE void produce_weights(const Ring& r, int slot, const u8* w, const u8* scales, u64 panel,
                            bool there, int slab, u64 policy) {
  const int warp = (threadIdx.x >> 5) & 3;
  u8* const to = r.memory + slot * STAGE;
  if (!there) return barrier_arrive(r.full + slot);
  barrier_expect(r.full + slot, PANEL_BYTES + PANEL_SCALES);
  const u64 at = (panel * Side<UP>::SLABS + slab) * 4;
  bulk_load(to + WEIGHTS_AT + warp * PANEL_BYTES, w + at * M16_BYTES, PANEL_BYTES, r.full + slot,
            policy);
  if (M16_SCALES)
    bulk_load(to + SCALES_AT + warp * PANEL_SCALES, scales + at * M16_SCALES, PANEL_SCALES,
              r.full + slot, policy);
}

// Rows of the tile's tokens, gathered by cp.async.
DEVICE void produce_rows(const Ring& r, int slot, const u8* x, const u32 (&from)[ROUNDS], int slab,
                         int count) {
  const int thread = threadIdx.x - CONSUMERS, chunk = thread & 7, row0 = thread >> 3;
  u8* const to = r.memory + slot * STAGE + row0 * 128 + ((chunk ^ (row0 & 7)) << 4);
#pragma unroll
  for (int i = 0; i < ROUNDS; ++i)
    if (row0 + 16 * i < count)
#pragma unroll
      for (int u = 0; u < SPAN; ++u)
        copy_async(to + u * KSLAB_X + i * 2048, x + from[i] + (slab + u) * 128);
  commit_copies();
}

template <bool UP>
DEVICE void produce_all(const Ring& r, const Tokens& x, const int4* tiles, const u8* w,
                        const u8* scales) {
  using S = Side<UP>;
  const int thread = threadIdx.x - CONSUMERS, chunk = thread & 7, row0 = thread >> 3;
  const int items = tiles[0].x * Wide<UP>::BLOCKS;
  const u64 policy = evict_first_policy();
  PipelineState here, behind;  // the stage that is filled, the one that is announced next
  int done = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int4 tile = tiles[1 + item / Wide<UP>::BLOCKS];
    const int panel = item % Wide<UP>::BLOCKS * 4 + (thread >> 5);
    const u64 at = (u64)tile.x * S::PANELS + panel;
    u32 from[ROUNDS];  // bytes; x is below 4 GiB
    if (UP)
#pragma unroll
      for (int i = 0; i < ROUNDS; ++i) {
        const int row = min(row0 + 16 * i, tile.z - 1) + tile.y;
        from[i] = (u32)(x.order[row] / K1) * Wide<UP>::ROW + chunk * 16;
      }
#pragma unroll 1
    for (int slab = 0; slab < S::SLABS; slab += SPAN, ++done, here.next()) {
      if (done >= DEPTH) barrier_wait(r.empty + here.slot, here.phase ^ 1);
      if ((thread & 31) == 0)
        produce_weights<UP>(r, here.slot, w, scales, at, panel < S::PANELS, slab, policy);
      if (UP) {
        produce_rows(r, here.slot, x.rows, from, slab, tile.z);
        if (done >= LAG) announce<LAG>(r, behind.slot), behind.next();
      } else if (thread == 0) {  // `h` is stored as it is read: a k-slab is one piece
        const int piece = tile.z * 128;
        const u8* const h = x.rows + (u64)tile.y * Wide<UP>::ROW + (u64)slab * piece;
        barrier_expect(r.full + here.slot, SPAN * piece);
        for (int u = 0; u < SPAN; ++u)
          bulk_load(r.memory + here.slot * STAGE + u * KSLAB_X, h + u * piece, piece,
                    r.full + here.slot);
      }
    }
  }
  if (UP)
    for (int left = min(done, LAG); left > 0; --left, behind.next()) announce<0>(r, behind.slot);
}

// --- Consumers ----------------------------------------------------------------------------

// A warpgroup's part of a tile: one panel of weight rows. a, b: factors of a lane's two rows.
struct TileWork {
  int4 tile;
  int item, panel;
  float a, b;
  void* to;
  const int* pair;  // by column
  int thread = threadIdx.x;

  DEVICE int m16() const { return (thread >> 5) & 3; }
  template <bool UP>
  DEVICE void load_factors(const float* scale2) {
    a = b = 1.0f;
    if (!FOUR_BITS) return;
    const int g = lane_id() >> 2;
    const int row = UP ? panel * 32 + m16() * 8 + g : panel * 64 + m16() * 16 + g;
    const float* two = scale2 + (u64)tile.x * (UP ? 2 * INNER : HIDDEN) + row;
    a = row < (UP ? INNER : HIDDEN) ? two[0] : 0.0f;
    b = row + (UP ? 0 : 8) < (UP ? INNER : HIDDEN) ? two[UP ? INNER : 8] : 0.0f;
  }
};

// Four values of an m16 tile: rows g and g + 8, columns 2t and 2t + 1. bf16 goes out by pairs of
// rows, transposed in registers: then a lane has column g, rows 2t and 2t + 1.
template <bool UP>
DEVICE void write(const TileWork& work, const float (&v)[4], int column) {
  const int g = (work.thread & 31) >> 2, t = work.thread & 3;
  const int m16 = work.m16(), count = work.tile.z;
  if (UP) {
    const int row = work.panel * 32 + m16 * 8 + 2 * t, slab = work.panel >> 1, c = column + g;
    constexpr bool WHOLE = INNER % 64 == 0;  // no rows of padding within a k-slab
    if (slab >= Side<false>::SLABS) return;
    const float first = silu_mul(scaled(v[0], work.a), scaled(v[2], work.b));
    const float second = silu_mul(scaled(v[1], work.a), scaled(v[3], work.b));
    const u32 pair = transpose_matrix<true>(pack_bf16(first, second));
    u8* const h = (u8*)work.to + (u64)work.tile.y * Wide<false>::ROW + (u64)slab * count * 128;
    const int chunk = (m16 & 1) * 4 + t, place = ((work.panel & 1) * 2 + (m16 >> 1)) * 4;
    if (c < count)
      *(u32*)(h + c * 128 + ((chunk ^ g) << 4) + place) = WHOLE || row < INNER ? pair : 0;
    return;
  }
  const int row = work.panel * 64 + m16 * 16;
  constexpr bool WHOLE = HIDDEN % 256 == 0;  // no rows of padding in a block of four panels
  if (!WHOLE && row >= HIDDEN) return;
#ifdef PARTS_BF16
  const u32 low = transpose_matrix<true>(pack_bf16(scaled(v[0], work.a), scaled(v[1], work.a)));
  const u32 high = transpose_matrix<true>(pack_bf16(scaled(v[2], work.b), scaled(v[3], work.b)));
  if (column + g >= count) return;
  u32* y = (u32*)work.to + ((u64)work.pair[column + g] * HIDDEN + row) / 2 + t;
  y[0] = low, y[4] = high;
#else
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int c = column + 2 * t + i;
    if (c >= count) continue;
    float* y = (float*)work.to + (u64)work.pair[c] * HIDDEN + row + g;
    y[0] = scaled(v[i], work.a);
    if (WHOLE || row + g + 8 < HIDDEN) y[8] = scaled(v[2 + i], work.b);
  }
#endif
}

// One panel of a block of work by one warpgroup, N columns.
template <bool UP, int N>
DEVICE void consume_tile(const Ring& r, PipelineState& here, const TileWork& work) {
  using S = Side<UP>;
  constexpr bool AHEAD = WEIGHTS != 0 || N < 112;  // else no registers for two k-slabs of bf16
  const int own = threadIdx.x >> 7, m16 = work.m16();
  float sums[N / 8][4] = {};
#pragma unroll 1
  for (int part = 0; part < S::WK; ++part) {
    float d[N / 8][4] = {};
#pragma unroll 1
    for (int run = 0; run < S::PART_SLABS / SPAN; ++run) {
      const u8* const stage = r.memory + here.slot * STAGE;
      const u8* const w = stage + WEIGHTS_AT + own * PANEL_BYTES + m16 * M16_BYTES;
      const u8* const scales = stage + SCALES_AT + own * PANEL_SCALES + m16 / 2 * 2 * M16_SCALES;
      barrier_wait(r.full + here.slot, here.phase);
      const auto load = [&](int slab) {
        return load_raw(w + slab * 4 * M16_BYTES, scales + slab * 4 * M16_SCALES);
      };
      Raw raw = load(0);
#pragma unroll
      for (int slab = 0; slab < SPAN; ++slab) {
        u32 a[4][4];
        fragments(raw, m16, a);
        if (AHEAD && slab + 1 < SPAN) raw = load(slab + 1);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step)
          Wgmma<false, N>::run(d, a[step], wgmma_tile(stage + slab * KSLAB_X) + 2 * step);
        wgmma_commit();
        wgmma_wait<0>();
        if (!AHEAD && slab + 1 < SPAN) raw = load(slab + 1);
      }
      keep_order(d);
      if (lane_id() == 0) barrier_arrive(r.empty + here.slot);
      here.next();
    }
#pragma unroll
    for (int i = 0; i < N / 2; ++i)
      sums[i / 4][i % 4] = S::WK == 1 ? d[i / 4][i % 4] : sums[i / 4][i % 4] + d[i / 4][i % 4];
  }
  wait_copies<0>();
  meet(1 + own, 128);  // the warpgroup's list of pairs is written, and its next tile
  TileWork late = work;
  late.thread = forget(threadIdx.x);  // or what is computed of it is held all along
  late.panel = work.item % Wide<UP>::BLOCKS * 4 + (late.thread >> 7);
#pragma unroll
  for (int j = 0; j < N / 8; ++j) write<UP>(late, sums[j], j * 8);
}

// In as many columns as the tile needs, to the next eight.
template <bool UP, int N>
DEVICE void consume_width(const Ring& r, PipelineState& here, const TileWork& work) {
  if constexpr (N > 8)
    if (work.tile.z <= N - 8) return consume_width<UP, N - 8>(r, here, work);
  consume_tile<UP, N>(r, here, work);
}

// What a warpgroup learns of a tile before it comes to it.
struct Ahead {
  int pair[2][BLOCK_M];  // by column
  int4 tile[2];
};

template <bool UP>
DEVICE void consume_all(const Ring& r, const int4* tiles, const int* order, Ahead* ahead,
                        const float* scale2, void* to) {
  const int items = tiles[0].x * Wide<UP>::BLOCKS;
  PipelineState here;
  int turn = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x, turn ^= 1) {
    TileWork work;
    work.thread = forget(threadIdx.x);  // or all that depends on it is held all along
    const int own = work.thread >> 7, column = work.thread & 127;
    Ahead& mine = ahead[own];
    work.tile = item == blockIdx.x ? tiles[1 + item / Wide<UP>::BLOCKS] : mine.tile[turn];
    work.item = item, work.panel = item % Wide<UP>::BLOCKS * 4 + own, work.to = to;
    work.load_factors<UP>(scale2);
    const int next = min(item + (int)gridDim.x, items - 1) / Wide<UP>::BLOCKS;
    if (column == 0) copy_async(mine.tile + (turn ^ 1), tiles + 1 + next);
    commit_copies();
    if (!UP && column < work.tile.z) mine.pair[turn][column] = order[work.tile.y + column];
    work.pair = mine.pair[turn];
    consume_width<UP, BLOCK_M>(r, here, work);
  }
}

template <bool UP>
DEVICE void wide(const Tokens& x, const int4* tiles, const u8* w, const u8* scales,
                 const float* scale2, void* to) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ __align__(8) u64 barriers[2 * DEPTH];
  __shared__ __align__(16) Ahead ahead[4];
  const Ring r = {memory, barriers, barriers + DEPTH};
  r.open<DEPTH>(4 + (UP ? PRODUCERS : 1), CONSUMERS / 32);
  __syncthreads();
  wait_then_launch_dependents();
  if (threadIdx.x >= CONSUMERS) {
    fewer_registers<32>();
    produce_all<UP>(r, x, tiles, w, scales);
  } else {
    more_registers<112>();  // and the other's 32: 640 threads of 96 have no more
    consume_all<UP>(r, tiles, x.order, ahead, scale2, to);
  }
}

DYNAMIC_SHARED(wide_up, (DEPTH * STAGE));
DYNAMIC_SHARED(wide_down, (DEPTH * STAGE));

extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 1)
    wide_up(const u8* x, const int* order, const int4* tiles, const u8* w13, const u8* scale,
            const float* scale2, void* h) {
  wide<true>({x, order}, tiles, w13, scale, scale2, h);
}

extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 1)
    wide_down(const u8* h, const int* order, const int4* tiles, const u8* w2, const u8* scale,
              const float* scale2, void* parts) {
  wide<false>({h, order}, tiles, w2, scale, scale2, parts);
}
