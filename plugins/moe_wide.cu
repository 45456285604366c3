// The experts of a mixture for many tokens: y = Σ_e weight_e · w2_e(silu(gate_e(x)) · up_e(x)).
//
// Four launches: `moe_sort` cuts the pairs (token, expert) into tiles of up to TILE tokens of one
// expert; `wide_up` and `wide_down` multiply; `moe_combine` adds a token's experts in ascending
// index in f32. Same packed weights and same order of every sum as the kernels for few tokens
// (KU units in order of k, then the parts in order), hence the same bits.
//
// A block of work is a tile of tokens and four groups of 64 weight rows. Weights are the M side of
// wgmma, decoded to registers; tokens are the N side (8 … TILE columns, rounded up to a width that
// exists), in shared memory in 128-byte swizzle. Persistent blocks of three warpgroups: two
// multiply, two groups each, the tensor cores busy with one while the other is decoded; the third
// fills a ring of stages of one unit (64 k): weights by the copy engine, rows of tokens by
// cp.async, since they are gathered. `h` lies in order of the sort with k as the fragments have it.
//
// Macros: those of moe_common.cuh, TILE (tokens of a tile), DEPTH (stages). sm_90a only.
#include "moe_sort.cuh"
#include "moe_wgmma.cuh"

constexpr int GROUP_BYTES = 4 * (STRIP + SCALES);
constexpr int COLUMNS = TILE * 128;               // of a stage: the tokens' rows
constexpr int STAGE = COLUMNS + 4 * GROUP_BYTES;  // a multiple of 1024
constexpr int COPIERS = 128;
constexpr int LAG = DEPTH > 4 ? 3 : DEPTH - 2;  // stages of tokens under way
constexpr int WIDE_THREADS = 256 + COPIERS;
static_assert(STAGE % 1024 == 0, "a swizzled tile begins at a multiple of 1024");

template <bool UP>
struct Wide {
  using S = Side<UP>;
  static constexpr int BLOCKS = (S::GROUPS + 3) / 4;  // of four groups
  static constexpr int ROW = S::UNITS * 128;          // bytes of a token's row
};

struct Ring {
  u8* memory;
  u64 *full, *empty;
};
struct Place {
  int slot = 0, phase = 0;
  DEVICE void next() {
    if (++slot == DEPTH) slot = 0, phase ^= 1;
  }
};

// --- Filling ---------------------------------------------------------------------------------

struct Tokens {
  const u8* rows;
  const int* order;
};

// The groups' weights of one unit: a warp's first lane fetches one group.
template <bool UP>
DEVICE void fetch_weights(const Ring& r, int slot, const u8* w, const u8* scales, u64 group,
                          bool there, int unit, u64 policy) {
  using S = Side<UP>;
  const int warp = (threadIdx.x >> 5) & 3;
  u8* const to = r.memory + slot * STAGE + COLUMNS;
  if (!there) {
    barrier_arrive(r.full + slot);
    return;
  }
  barrier_expect(r.full + slot, GROUP_BYTES);
  const u64 at = group * S::UNITS + unit;
  bulk_load(to + warp * 4 * STRIP, w + at * (4 * STRIP), 4 * STRIP, r.full + slot, policy);
  if (SCALES)
    bulk_load(to + 16 * STRIP + warp * 4 * SCALES, scales + at * (4 * SCALES), 4 * SCALES,
              r.full + slot, policy);
}

// wgmma reads as the copy engine does: who copied fences once the copies are done, then announces.
template <int LEFT> DEVICE void announce(const Ring& r, Place& behind) {
  wait_copies<LEFT>();
  fence_async();
  barrier_arrive(r.full + behind.slot);
  behind.next();
}

template <bool UP>
DEVICE void fill(const Ring& r, const Tokens& x, const int4* tiles, const u8* w,
                 const u8* scales) {
  using S = Side<UP>;
  constexpr int EACH = TILE / 16;
  const int thread = threadIdx.x - 256, chunk = thread & 7, row0 = thread >> 3;
  const int items = tiles[0].x * Wide<UP>::BLOCKS;
  const u64 policy = evict_first_policy();
  Place here, behind;
  int done = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int4 tile = tiles[1 + item / Wide<UP>::BLOCKS];
    const int group = item % Wide<UP>::BLOCKS * 4 + (thread >> 5);
    const u64 at = (u64)tile.x * S::GROUPS + group;
    const u8* from[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int row = min(row0 + 16 * i, tile.z - 1) + tile.y;
      from[i] = x.rows + (u64)(UP ? x.order[row] / K1 : row) * Wide<UP>::ROW + chunk * 16;
    }
#pragma unroll 1
    for (int unit = 0; unit < S::UNITS; ++unit, ++done, here.next()) {
      if (done >= DEPTH) barrier_wait(r.empty + here.slot, here.phase ^ 1);
      if ((thread & 31) == 0)
        fetch_weights<UP>(r, here.slot, w, scales, at, group < S::GROUPS, unit, policy);
      u8* const to = r.memory + here.slot * STAGE + row0 * 128 + ((chunk ^ (row0 & 7)) << 4);
#pragma unroll
      for (int i = 0; i < EACH; ++i)
        if (row0 + 16 * i < tile.z) copy_async(to + i * 2048, from[i] + unit * 128);
      commit_copies();
      if (done >= LAG) announce<LAG>(r, behind);
    }
  }
  for (int left = min(done, LAG); left > 0; --left) announce<0>(r, behind);
}

// --- Multiplying -----------------------------------------------------------------------------

struct Out {
  const float* scale2;
  void* to;
};

// Four values of a strip: rows g and g + 8, columns 2t and 2t + 1. `pair`: by column.
template <bool UP>
DEVICE void write(const Out& out, const int* pair, int count, int first, int expert, int group,
                  const float (&v)[4], int column) {
  const int lane = lane_id(), g = lane >> 2, strip = (threadIdx.x >> 5) & 3;
  column += (lane & 3) * 2;
  if (UP) {
    constexpr int ROW = Wide<false>::ROW / 2;
    const int row = group * 32 + strip * 8 + g, at = group * 32 + (g >> 1) * 8 + strip * 2 + (g & 1);
    const bool real = row < INNER;
    if (at >= ROW) return;
    const float* two = out.scale2 + (u64)expert * 2 * INNER + row;
    const float a = WEIGHTS != 1 ? 1.0f : real ? two[0] : 0.0f;
    const float b = WEIGHTS != 1 ? 1.0f : real ? two[INNER] : 0.0f;
    u16* h = (u16*)out.to + (u64)(first + column) * ROW + at;
    if (column < count) h[0] = real ? to_bf16(silu_mul(scaled(v[0], a), scaled(v[2], b))) : 0;
    if (column + 1 < count)
      h[ROW] = real ? to_bf16(silu_mul(scaled(v[1], a), scaled(v[3], b))) : 0;
  } else {
    const int row = group * 64 + strip * 16 + g;
    if (row >= HIDDEN) return;
    const bool more = row + 8 < HIDDEN;
    const float* two = out.scale2 + (u64)expert * HIDDEN + row;
    const float a = WEIGHTS != 1 ? 1.0f : two[0], b = WEIGHTS != 1 || !more ? 1.0f : two[8];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (column + i >= count) continue;
      float* y = (float*)out.to + (u64)pair[column + i] * HIDDEN + row;
      y[0] = scaled(v[i], a);
      if (more) y[8] = scaled(v[2 + i], b);
    }
  }
}

// Queues the products of one group of a stage: 64 rows, 64 k, N columns.
template <int N>
DEVICE void queue(const u8* stage, int group, u32 (&a)[4][4], float (&d)[N / 8][4]) {
  const int at = group * 4 + ((threadIdx.x >> 5) & 3);
  load_strip(stage + COLUMNS + at * STRIP, stage + COLUMNS + 16 * STRIP + at * SCALES, a);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step) wgmma_bf16<N>(d, a[step], wgmma_tile(stage) + 2 * step);
  wgmma_commit();
}

// One block of work by one warpgroup, N columns.
template <bool UP, int N>
DEVICE void multiply_tile(const Ring& r, Place& here, const int4& tile, int block, const int* pair,
                          const Out& out) {
  using S = Side<UP>;
  constexpr int SPAN = S::KU % 2 ? 1 : 2;
  const int half = threadIdx.x >> 7;
  float sums[2][N / 8][4] = {};
#pragma unroll 1
  for (int part = 0; part < S::WK; ++part) {
    float d[2][N / 8][4] = {};
    keep_order(d);
    // Straight code for SPAN units, then nothing is under way: in one loop over KU units, or for
    // more of them, the compiler runs out of registers and serialises the products.
#pragma unroll 1
    for (int run = 0; run < S::KU / SPAN; ++run) {
      u32 a[2][4][4];
      barrier_wait(r.full + here.slot, here.phase);
      queue<N>(r.memory + here.slot * STAGE, half * 2, a[0], d[0]);
#pragma unroll
      for (int unit = 1; unit < SPAN; ++unit) {
        const int slot = here.slot;
        queue<N>(r.memory + slot * STAGE, half * 2 + 1, a[1], d[1]);
        wgmma_wait<1>();
        here.next();
        barrier_wait(r.full + here.slot, here.phase);
        queue<N>(r.memory + here.slot * STAGE, half * 2, a[0], d[0]);
        wgmma_wait<1>();
        if (lane_id() == 0) barrier_arrive(r.empty + slot);
      }
      queue<N>(r.memory + here.slot * STAGE, half * 2 + 1, a[1], d[1]);
      wgmma_wait<0>();
      keep_order(d);
      if (lane_id() == 0) barrier_arrive(r.empty + here.slot);
      here.next();
    }
#pragma unroll
    for (int i = 0; i < N; ++i)
      sums[i / (N / 2)][i / 4 % (N / 8)][i % 4] += d[i / (N / 2)][i / 4 % (N / 8)][i % 4];
  }
  meet(1 + half, 128);  // the warpgroup's list of pairs is written
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int group = block * 4 + half * 2 + i;
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
      write<UP>(out, pair, tile.z, tile.y, tile.x, group, sums[i][j], j * 8);
  }
}

template <bool UP>
DEVICE void multiply_all(const Ring& r, const int4* tiles, const int* order, int (*lists)[TILE],
                         const Out& out) {
  const int items = tiles[0].x * Wide<UP>::BLOCKS, half = threadIdx.x >> 7;
  Place here;
  int turn = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x, turn ^= 1) {
    const int4 tile = tiles[1 + item / Wide<UP>::BLOCKS];
    const int block = item % Wide<UP>::BLOCKS, column = threadIdx.x & 127;
    int* pair = lists[half * 2 + turn];
    if (!UP && column < tile.z) pair[column] = order[tile.y + column];
    if (tile.z <= 8) multiply_tile<UP, 8>(r, here, tile, block, pair, out);
    else if (tile.z <= 16) multiply_tile<UP, 16>(r, here, tile, block, pair, out);
    else if (tile.z <= 32) multiply_tile<UP, 32>(r, here, tile, block, pair, out);
    else if (tile.z <= 48) multiply_tile<UP, 48>(r, here, tile, block, pair, out);
    else if (tile.z <= 64) multiply_tile<UP, 64>(r, here, tile, block, pair, out);
    else multiply_tile<UP, TILE>(r, here, tile, block, pair, out);
  }
}

template <bool UP>
DEVICE void wide(const Tokens& x, const int4* tiles, const u8* w, const u8* scales,
                 const Out& out) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ __align__(8) u64 barriers[2 * DEPTH];
  __shared__ int lists[4][TILE];
  const Ring r = {memory, barriers, barriers + DEPTH};
  if (threadIdx.x == 0) {
    for (int i = 0; i < DEPTH; ++i) {
      barrier_init(r.full + i, COPIERS + 4);
      barrier_init(r.empty + i, 8);
    }
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_previous();
  let_next_start();
  if (threadIdx.x >= 256) {
    fewer_registers<40>();
    fill<UP>(r, x, tiles, w, scales);
  } else {
    more_registers<232>();
    multiply_all<UP>(r, tiles, x.order, lists, out);
  }
}

extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 1)
    wide_up(const u8* x, const int* order, const int4* tiles, const u8* w13, const u8* scale,
            const float* scale2, void* h) {
  wide<true>({x, order}, tiles, w13, scale, {scale2, h});
}

extern "C" __global__ void __launch_bounds__(WIDE_THREADS, 1)
    wide_down(const u8* h, const int* order, const int4* tiles, const u8* w2, const u8* scale,
              const float* scale2, void* parts) {
  wide<false>({h, order}, tiles, w2, scale, {scale2, parts});
}
