// Grouped GEMM of experts in FP8, many tokens: y = Σ_e weight_e · w2_e(silu(gate_e(x)) · up_e(x)).
// sm_90a. QUANT 2: scales of 128 x 128 blocks (times: docs/results/layouts.md). QUANT 4: of
// rows (emulated, not yet run; log/moe/experts_wide_wgmma_sm90.md).
//
// Launches: moe_count and moe_sort cut the pairs (token, expert) into tiles of up to BLOCK_M tokens
// of one expert; quantise_rows makes e4m3 rows with a scale for each 128 columns, or one a row;
// wide_up and wide_down multiply; moe_combine adds a token's experts. In blocks wide_up quantises
// h: its block of work has the 128 columns of a scale. By rows quantise_inner does it.
// Work: a tile of tokens (wgmma's N, 8 … BLOCK_M) times four panels of 64 weight rows (wgmma's M, a
// lane's 16 bytes are fragments). The products of 128 k add up in separate registers, then the
// scales bring them into the sum. Persistent blocks: four consumer warpgroups, a panel each, and
// producers that fill a ring: weights by TMA bulk copies, rows and their scales by cp.async.
// Rows of codes have k in the order of the fragments: of each 64 k, byte 32h + 16i + 4t + b is k
// 16t + 8h + 4i + b. HIDDEN is a multiple of 256, INNER of 128. Macros: experts_common.cuh's (UP_WK
// and DOWN_WK are 1, PARTS_BF16), BLOCK_M, QUANT, SORT_BLOCKS, SHARED_LIMIT (bytes of a block).
#include "moe/experts/experts_wide_sm90.cuh"
#include "moe/experts/experts_quantise.cuh"

constexpr bool BY_ROW = QUANT == 4;  // a scale a row of x, of h and of the weights

// A stage is 128 k: the tokens' rows, their scales, two k-slabs of weights of four panels.
constexpr int ROWS_BYTES = BLOCK_M * 128, SCALES_BYTES = 1024, PANEL_BYTES = 2 * 4 * M16_BYTES;
constexpr int WEIGHTS_AT = ROWS_BYTES + SCALES_BYTES, STAGE = WEIGHTS_AT + 4 * PANEL_BYTES;
constexpr int DEPTH = (SHARED_LIMIT - STATIC) / STAGE;
constexpr int LAG = 2;  // stages of rows in flight behind the one announced
static_assert(BLOCK_M * 4 <= SCALES_BYTES && LAG < DEPTH, "a stage, and a ring");
static_assert(HIDDEN % 256 == 0 && INNER % 128 == 0, "whole blocks of four panels");

template <bool UP>
struct Wide {
  static constexpr int K = Side<UP>::K, STAGES = K / 128;
  static constexpr int BLOCKS = Side<UP>::PANELS / 4;  // of four panels
};

using PipelineState = RingPlace<DEPTH>;

// Quantised rows [rows, K] with scales [rows, K / 128] (BY_ROW: [rows]), by token for x, by place
// in `order` for h.
struct Rows {
  const u8* codes;
  const float* scales;
};
struct Operands {
  Rows rows;
  const int* order;
  const int4* tiles;
  const u8* w;
  const float* w_scale;  // [EXPERTS, weight rows / 128, K / 128]; BY_ROW: [EXPERTS, weight rows]
};

// --- Producers --------------------------------------------------------------------------------

template <bool UP>
DEVICE void produce_all(const Ring& r, const Operands& o) {
  using W = Wide<UP>;
  const int thread = threadIdx.x - CONSUMERS, chunk = thread & 7, row0 = thread >> 3;
  const int items = o.tiles[0].x * W::BLOCKS;
  const u64 policy = evict_first_policy();
  PipelineState here, behind;  // the stage that is filled, the one that is announced next
  int done = 0;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int4 tile = __ldcg(o.tiles + 1 + item / W::BLOCKS);
    const u64 panel = (u64)tile.x * Side<UP>::PANELS + item % W::BLOCKS * 4 + (thread >> 5);
    const u8* const weights = o.w + panel * Side<UP>::SLABS * 4 * M16_BYTES;
    u32 from[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; ++i) {
      const int row = min(row0 + 16 * i, tile.z - 1) + tile.y;
      from[i] = UP ? __ldcg(o.order + row) / K1 : row;
    }
#pragma unroll 1
    for (int stage = 0; stage < W::STAGES; ++stage, ++done, here.next()) {
      if (done >= DEPTH) barrier_wait(r.empty + here.slot, here.phase ^ 1);
      u8* const to = r.memory + here.slot * STAGE;
      if ((thread & 31) == 0) {
        barrier_expect(r.full + here.slot, PANEL_BYTES);
        bulk_load(to + WEIGHTS_AT + (thread >> 5) * PANEL_BYTES, weights + stage * PANEL_BYTES,
                  PANEL_BYTES, r.full + here.slot, policy);
      }
#pragma unroll
      for (int i = 0; i < ROUNDS; ++i) {
        const int row = row0 + 16 * i;
        if (row >= tile.z) continue;
        copy_async(to + row * 128 + ((chunk ^ (row & 7)) << 4),
                   o.rows.codes + (u64)from[i] * W::K + stage * 128 + chunk * 16);
        if (!BY_ROW && chunk == 0)
          copy_async_few<4>(to + ROWS_BYTES + row * 4,
                            o.rows.scales + (u64)from[i] * W::STAGES + stage);
      }
      commit_copies();
      if (done < LAG) continue;
      announce<LAG>(r, behind.slot);
      behind.next();
    }
  }
  for (int left = min(done, LAG); left > 0; --left, behind.next()) announce<0>(r, behind.slot);
}

// --- Consumers ----------------------------------------------------------------------------

// What warpgroups share: the largest |h| of each token of a block of work, three blocks in turn,
// and the pairs of a warpgroup's tokens.
struct Shared {
  u32 most[3][BLOCK_M];
  int pairs[4][2][BLOCK_M];
};

struct TileWork {
  int4 tile;
  int panel, turn;
  DEVICE int thread() const { return threadIdx.x & 127; }
  DEVICE int m16() const { return (threadIdx.x >> 5) & 3; }
  DEVICE int own() const { return threadIdx.x >> 7; }
};

// h of eight tokens by eight columns of a warp, quantised: lanes hold row g, columns 2t, 2t + 1 of
// `sums`; a movmatrix gives a lane column g, rows 2t, 2t + 1, and half the lanes store four codes.
DEVICE void store_codes(u8* h, const TileWork& work, int column, float first, float second,
                        const float (&scale)[2]) {
  const int g = lane_id() >> 2, t = lane_id() & 3, c = column + g;
  const u32 codes = to_e4m3(divide(first, scale[0])) | to_e4m3(divide(second, scale[1])) << 16;
  const u32 turned = transpose_matrix<true>(codes);
  const u32 two = (turned & 0xFF) | (turned >> 8 & 0xFF00);
  const u32 other = __shfl_down_sync(~0u, two, 1);
  const int place = work.panel / 2 * 64 + (work.m16() & 1) * 32 + t / 2 * 16 +
                    ((work.panel & 1) * 2 + work.m16() / 2) * 4;
  if (t % 2 == 0 && c < work.tile.z)
    *(u32*)(h + (u64)(work.tile.y + c) * INNER + place) = two | other << 16;
}

template <int N>
DEVICE void write_inner(const TileWork& work, const float (&sums)[N / 8][4], Shared& shared, u8* h,
                        float* h_scale) {
  const int t = lane_id() & 3;
  u32* const most = shared.most[work.turn % 3];
  float v[N / 8][2];
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    v[j][0] = silu_mul(sums[j][0], sums[j][2]), v[j][1] = silu_mul(sums[j][1], sums[j][3]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float top = fmaxf(0.0f, fabsf(v[j][i]));
#pragma unroll
      for (int d = 4; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
      if (lane_id() < 4) atomicMax(most + j * 8 + 2 * t + i, __float_as_uint(top));
    }
  }
  // Of two blocks before; all have read it, since they have met for the last one.
  if (threadIdx.x < BLOCK_M) shared.most[(work.turn + 1) % 3][threadIdx.x] = 0;
  meet(5, CONSUMERS);
  if (threadIdx.x < work.tile.z) {
    const u64 row = work.tile.y + threadIdx.x;
    h_scale[row * Wide<false>::STAGES + work.panel / 4] =
        block_scale(__uint_as_float(most[threadIdx.x]));
  }
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    float scale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) scale[i] = block_scale(__uint_as_float(most[j * 8 + 2 * t + i]));
    store_codes(h, work, j * 8, v[j][0], v[j][1], scale);
  }
}

// The same by rows: f32, for quantise_inner.
template <int N>
DEVICE void write_raw(const TileWork& work, const float (&sums)[N / 8][4], float* raw) {
  const int g = lane_id() >> 2, t = lane_id() & 3;
  float* const to = raw + (u64)work.tile.y * INNER + work.panel * 32 + work.m16() * 8 + g;
#pragma unroll
  for (int j = 0; j < N / 8; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (j * 8 + 2 * t + i < work.tile.z)
        to[(u64)(j * 8 + 2 * t + i) * INNER] = silu_mul(sums[j][i], sums[j][2 + i]);
}

template <int N>
DEVICE void write_outer(const TileWork& work, const float (&sums)[N / 8][4], const int* pairs,
                        u32* parts) {
  const int g = lane_id() >> 2, t = lane_id() & 3, row = work.panel * 64 + work.m16() * 16;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const u32 low = transpose_matrix<true>(pack_bf16(sums[j][0], sums[j][1]));
    const u32 high = transpose_matrix<true>(pack_bf16(sums[j][2], sums[j][3]));
    if (j * 8 + g >= work.tile.z) continue;
    u32* const y = parts + ((u64)pairs[j * 8 + g] * HIDDEN + row) / 2 + t;
    y[0] = low, y[4] = high;
  }
}

// Brings the scales of a lane's two rows of weights and two columns of each eight into its sums.
template <bool UP, int N>
DEVICE void scale_rows(const Operands& o, const TileWork& work, float (&sums)[N / 8][4]) {
  const int g = lane_id() >> 2, t = lane_id() & 3;
  const int row = UP ? work.panel * 32 + work.m16() * 8 + g : work.panel * 64 + work.m16() * 16 + g;
  const float* w = o.w_scale + (u64)work.tile.x * (UP ? 2 * INNER : HIDDEN) + row;
  const float low = __ldg(w), high = __ldg(w + (UP ? INNER : 8));
#pragma unroll
  for (int j = 0; j < N / 8; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = work.tile.y + min(j * 8 + 2 * t + i, work.tile.z - 1);
      const float x = __ldcg(o.rows.scales + (UP ? __ldcg(o.order + at) / K1 : at));
      sums[j][i] *= low * x, sums[j][2 + i] *= high * x;
    }
}

// One panel of a block of work by one warpgroup, N columns.
template <bool UP, int N>
DEVICE void consume_tile(const Ring& r, PipelineState& here, const TileWork& work,
                         const Operands& o, Shared& shared, void* to, float* h_scale) {
  constexpr int STAGES = Wide<UP>::STAGES;
  // Rows of a panel are gate and up by eights: rows g and g + 8 are in blocks I / 128 apart.
  const int blocks = (UP ? 2 * INNER : HIDDEN) / 128, block = work.panel / (UP ? 4 : 2);
  const float* low = o.w_scale + ((u64)work.tile.x * blocks + block) * STAGES;
  const float* high = low + (UP ? INNER / 128 * STAGES : 0);
  float sums[N / 8][4] = {};
#pragma unroll 1
  for (int stage = 0; stage < STAGES; ++stage, here.next()) {
    const float w_low = BY_ROW ? 1.0f : __ldg(low + stage);
    const float w_high = UP && !BY_ROW ? __ldg(high + stage) : w_low;
    const u8* const rows = r.memory + here.slot * STAGE;
    const u8* const w = rows + WEIGHTS_AT + work.own() * PANEL_BYTES + work.m16() * M16_BYTES;
    barrier_wait(r.full + here.slot, here.phase);
    u32 a[4][4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const uint4 v =
          *(const uint4*)(w + step / 2 * 4 * M16_BYTES + step % 2 * 512 + lane_id() * 16);
      a[step][0] = v.x, a[step][1] = v.z, a[step][2] = v.y, a[step][3] = v.w;
    }
    float part[N / 8][4];
    const u64 tile = wgmma_tile(uniform(shared_address(rows)));
    wgmma_fence();
    Wgmma<true, N>::begin(part, a[0], tile);
#pragma unroll
    for (int step = 1; step < 4; ++step) Wgmma<true, N>::run(part, a[step], tile + 2 * step);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_read(part);
    const u8* const scales = rows + ROWS_BYTES + (lane_id() & 3) * 8;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      if constexpr (BY_ROW) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[j][i] += part[j][i];
        continue;
      }
      const float2 x = *(const float2*)(scales + j * 32);
      sums[j][0] = fmaf(part[j][0], w_low * x.x, sums[j][0]);
      sums[j][1] = fmaf(part[j][1], w_low * x.y, sums[j][1]);
      sums[j][2] = fmaf(part[j][2], w_high * x.x, sums[j][2]);
      sums[j][3] = fmaf(part[j][3], w_high * x.y, sums[j][3]);
    }
    __syncwarp();
    barrier_arrive_warp(r.empty + here.slot, lane_id());
  }
  if constexpr (BY_ROW) scale_rows<UP, N>(o, work, sums);
  if constexpr (UP && BY_ROW) {
    write_raw<N>(work, sums, (float*)to);
  } else if constexpr (UP) {
    write_inner<N>(work, sums, shared, (u8*)to, h_scale);
  } else {
    wait_copies<0>();
    meet(1 + work.own(), 128);  // the warpgroup's pairs are there
    write_outer<N>(work, sums, shared.pairs[work.own()][work.turn & 1], (u32*)to);
  }
}

// In as many columns as the tile needs, to the next eight.
template <bool UP, int N>
DEVICE void consume_width(const Ring& r, PipelineState& here, const TileWork& work,
                          const Operands& o, Shared& shared, void* to, float* h_scale) {
  if constexpr (N > 8)
    if (work.tile.z <= N - 8)
      return consume_width<UP, N - 8>(r, here, work, o, shared, to, h_scale);
  consume_tile<UP, N>(r, here, work, o, shared, to, h_scale);
}

template <bool UP>
DEVICE void consume_all(const Ring& r, const Operands& o, Shared& shared, void* to,
                        float* h_scale) {
  const int items = o.tiles[0].x * Wide<UP>::BLOCKS;
  PipelineState here;
  TileWork work;
  work.turn = 0;
  int4 next = __ldcg(o.tiles + 1 + min((int)blockIdx.x, items - 1) / Wide<UP>::BLOCKS);
  for (int item = blockIdx.x; item < items; item += gridDim.x, ++work.turn) {
    work.tile = next, work.panel = item % Wide<UP>::BLOCKS * 4 + work.own();
    next = __ldcg(o.tiles + 1 + min(item + (int)gridDim.x, items - 1) / Wide<UP>::BLOCKS);
    if (!UP && work.thread() < work.tile.z)
      copy_async_few<4>(shared.pairs[work.own()][work.turn & 1] + work.thread(),
                        o.order + work.tile.y + work.thread());
    if (!UP) commit_copies();
    consume_width<UP, BLOCK_M>(r, here, work, o, shared, to, h_scale);
  }
}

template <bool UP>
DEVICE void wide(const Operands& o, void* to, float* h_scale) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ __align__(8) u64 barriers[2 * DEPTH];
  __shared__ Shared shared;
  const Ring r = {memory, barriers, barriers + DEPTH};
  r.open<DEPTH>(4 + PRODUCERS, CONSUMERS / 32 * WARP_ARRIVALS);
  if (threadIdx.x < BLOCK_M) shared.most[0][threadIdx.x] = 0;
  __syncthreads();
  wait_then_launch_dependents();
  if (threadIdx.x >= CONSUMERS) {
    fewer_registers<32>();
    produce_all<UP>(r, o);
  } else {
    more_registers<112>();  // with the other's 32 what 640 threads of 96 have
    consume_all<UP>(r, o, shared, to, h_scale);
  }
}

// A warp a row: of x (bf16) or of h (f32).
template <bool UP>
DEVICE void quantise_row(const void* in, u8* codes, float* scales) {
  constexpr int K = Side<UP>::K, TURNS = (K + 255) / 256;
  wait_then_launch_dependents();
  const u64 row = blockIdx.x;
  float v[TURNS][8] = {}, top = 0.0f;
#pragma unroll
  for (int i = 0; i < TURNS; ++i)
    if (const int k = i * 256 + lane_id() * 8; k < K) load8<UP>(in, row * K + k, v[i]);
#pragma unroll
  for (int i = 0; i < TURNS; ++i) top = fmaxf(top, most_of<1>(v[i]));
  top = warp_max(top);
#pragma unroll
  for (int i = 0; i < TURNS; ++i) {
    const int k = i * 256 + lane_id() * 8;
    const float scale = block_scale(BY_ROW ? top : most_of<16>(v[i]));
    if (k >= K) continue;
    u32 words[2] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j) words[j / 4] |= (u32)to_e4m3(divide(v[i][j], scale)) << j % 4 * 8;
    u8* const to = codes + row * K + k / 64 * 64 + k / 8 % 2 * 32 + k / 16 % 4 * 4;
    *(u32*)to = words[0], *(u32*)(to + 16) = words[1];
    if (BY_ROW ? k == 0 : k % 128 == 0) scales[BY_ROW ? row : row * (K / 128) + k / 128] = scale;
  }
}
extern "C" __global__ void __launch_bounds__(32)
    quantise_rows(const u16* x, u8* codes, float* scales) {
  quantise_row<true>(x, codes, scales);
}
#if QUANT == 4
extern "C" __global__ void __launch_bounds__(32)
    quantise_inner(const float* raw, u8* h, float* scales) {
  quantise_row<false>(raw, h, scales);
}
#endif

DYNAMIC_SHARED(wide_up, (DEPTH * STAGE));
DYNAMIC_SHARED(wide_down, (DEPTH * STAGE));

extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1)
    wide_up(const u8* codes, const float* scales, const int* order, const int4* tiles,
            const u8* w13, const float* w13_scale, void* h, float* h_scale) {
  wide<true>({{codes, scales}, order, tiles, w13, w13_scale}, h, h_scale);
}

extern "C" __global__ void __launch_bounds__(CONSUMERS + PRODUCERS, 1)
    wide_down(const u8* h, const float* h_scale, const int* order, const int4* tiles, const u8* w2,
              const float* w2_scale, void* parts) {
  wide<false>({{h, h_scale}, order, tiles, w2, w2_scale}, parts, nullptr);
}
