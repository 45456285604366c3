// Producers of stream_k_gemm.cuh: the problem, the stream-K line of work, the ring, what fills it.
//
// One warp issues TMA bulk copies of weights, and does so before the previous launch has ended
// (PDL), since no launch writes weights; two warps copy activations by cp.async after the wait. A
// stage is announced on its `full` mbarrier and freed on its `empty` one.
#pragma once
#include "common/numeric.cuh"

#ifndef WARPS_M
#define WARPS_M 1
#endif
#ifndef W_SLABS
#define W_SLABS 1
#endif
constexpr int KSLAB_K = 128 / X_BYTES;
constexpr int STAGE_PACKED = STAGE_SLABS * W_SLABS;                 // k-slabs as weights are packed
constexpr int KSLAB_W = 16 * KSLAB_K * ELEMENT_BITS / 8 / W_SLABS;  // bytes of such an m16 tile's
constexpr int PANEL = 256;
constexpr int BLOCK_TILES = BLOCK_N / 16;
constexpr int NJ = BLOCK_M / 8 / WARPS_M;                   // of a warp
constexpr int WARPS = BLOCK_N / 16 / WARP_TILES * WARPS_M;  // consumers
constexpr int THREADS = WARPS * 32;
constexpr int STAGE_X = STAGE_SLABS * BLOCK_M * 128;
constexpr int STAGE_W = BLOCK_TILES * STAGE_PACKED * KSLAB_W;
constexpr int STAGE_S = BLOCK_TILES * STAGE_PACKED * SCALE_BYTES;
// With SLAB_SCALES a k-slab has an f32 of each activation row, then one of the tile's weights.
#ifdef SLAB_SCALES
constexpr int SLAB_XS = BLOCK_M < 32 ? 128 : BLOCK_M * 4 + 128;
#else
constexpr int SLAB_XS = BLOCK_M * X_SCALE_BYTES;
#endif
// FACTORS: a warp brings two warpgroups with 256 tokens the scales of tokens times the weights', of
// a round of the ring at once. Those of the next round have another place.
#ifdef SLAB_SCALES
constexpr bool FACTORS = BLOCK_M > 128;
static_assert(!FACTORS || STAGES == 4 && STAGE_SLABS == 1, "a row's scales are 16 bytes");
#else
constexpr bool FACTORS = false;
#endif
constexpr int STAGE_XS = STAGE_SLABS * SLAB_XS * (FACTORS ? 2 : 1);
constexpr int OWN = STAGE_X + STAGE_W + STAGE_S + STAGE_XS;
// wgmma's swizzle counts from a multiple of 1,024 bytes.
constexpr int STAGE = (OWN + (WGMMA ? 1023 : 0)) & (WGMMA ? ~1023 : ~0);
constexpr int SHARED = STAGES * STAGE;  // bytes of dynamic shared memory
// Threads that bring activations: a whole number of eights of rows at a time, which keeps a
// thread's place within a row's swizzle. The warp between them and that of the weights rests, or
// brings FACTORS.
constexpr int COPIERS = 64;
#ifndef TURNS
#define TURNS 0
#endif
constexpr int FIRST_COPIER = THREADS + 64;
constexpr int BLOCK = FIRST_COPIER + COPIERS;
// From producers to consumers, where the sums of a warp want it: what four warpgroups may have of a
// block's, or two; scales of activations take more of the producers.
constexpr bool MOVE_REGISTERS = BLOCK_M > 64 && BLOCK_N > 128 || BLOCK_M > 128;
constexpr int FEWER = WARPS > 8 ? 24 : 40;
constexpr int MORE = WARPS > 8 ? 112 : 232;

// With SLAB_SCALES registers are short: what is computed of the value is not held all along.
DEVICE u32 recomputed(u32 value) {
#ifdef SLAB_SCALES
  static_assert(BLOCK_N <= 128, "a tile's weights share a scale");
  return forget(value);
#endif
  return value;
}

// Stages with activations in flight before the first of them is announced.
constexpr int LAG = STAGES > 4 ? 3 : STAGES - 2;

struct Problem {
  const u8* x;
  const u8* w;
  const u8* scales;
  float* partial;  // 2 x gridDim.x slots of BLOCK_N x BLOCK_M
  u32* arrived;    // a counter a slot and consumer warp, zero between launches
  int m, n, k;
#ifdef BY_TOKEN
  const float* token_scales;  // [m]
#endif
#ifdef GELU
  const u16* residual;  // [m, n] with RESIDUAL
#endif
  int rows;         // n, filled up to whole m16 tiles
  int stages;       // of a tile
  int batch_tiles;  // tiles that share weights
  u32 line;         // tiles x stages, in cuts
  u32 tiles;
  const u8* x_scales;     // [m, k-slabs, X_SCALE_BYTES], if the format has them
  const float* w_scales;  // [⌈n / 128⌉, k-slabs] with SLAB_SCALES

  // Works out the fields after `k`.
  DEVICE void divide() {
    const int slabs = (k + KSLAB_K - 1) / KSLAB_K;
    rows = (n + 15) / 16 * 16;
    stages = slabs / STAGE_SLABS;
    batch_tiles = (m + BLOCK_M - 1) / BLOCK_M;
    tiles = (n + BLOCK_N - 1) / BLOCK_N * batch_tiles;
    line = tiles * (slabs / CUT);
  }
  DEVICE u32 begin(u32 block) const { return line * block / gridDim.x * (CUT / STAGE_SLABS); }
  DEVICE u32 owner(u32 stage) const {
    return ((stage / (CUT / STAGE_SLABS) + 1) * gridDim.x - 1) / line;
  }
};

DEVICE Problem recomputed(Problem p) {
  p.m = forget(p.m), p.n = recomputed(p.n), p.k = forget(p.k);
  p.divide();
  return p;
}

// Where a tile is. In bands of BAND tiles along m, if it is given, so that what runs at once
// shares weights and activations in L2; else m by m.
struct Corner {
  int n, m;
  DEVICE Corner(const Problem& p, u32 tile) {
#if BAND
    const u32 across = (p.n + BLOCK_N - 1) / BLOCK_N, band = tile / (BAND * across);
    const u32 inside = tile - band * BAND * across, width = min(BAND, p.batch_tiles - band * BAND);
    n = inside / width * BLOCK_N;
    m = (band * BAND + inside % width) * BLOCK_M;
#else
    n = tile / p.batch_tiles * BLOCK_N;
    m = tile % p.batch_tiles * BLOCK_M;
#endif
  }
};

// A stage of this block's work: the tile's corner and the stage within it.
struct WorkCursor {
  Corner at;
  int stage;
#if BAND
  u32 tile;
  DEVICE explicit WorkCursor(const Problem& p) : at(p, blockIdx.x), stage(0), tile(blockIdx.x) {}
  DEVICE void next(const Problem& p) {
    if (++stage < p.stages) return;
    stage = 0, tile += gridDim.x;
    at = Corner(p, tile);
  }
  static DEVICE u32 count(const Problem& p) {
    return (p.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x * p.stages;
  }
#else
  DEVICE explicit WorkCursor(const Problem& p)
      : at(p, p.begin(blockIdx.x) / p.stages), stage(p.begin(blockIdx.x) % p.stages) {}
  DEVICE void next(const Problem& p) {
    if (++stage < p.stages) return;
    stage = 0;
    at.m += BLOCK_M;
    if (at.m < p.m) return;
    at.m = 0;
    at.n += BLOCK_N;
  }
  static DEVICE u32 count(const Problem& p) {
    return p.begin(blockIdx.x + 1) - p.begin(blockIdx.x);
  }
#endif
};

struct Ring {
  u32 base, full, empty;
  DEVICE u32 stage(u32 i) const { return base + i * STAGE; }
};

// A place in the ring: which stage, and the parity of its barriers.
struct PipelineState {
  u32 index = 0, phase = 0;
  // Where the scales of activations are in the stage.
  DEVICE u32 scales() const { return STAGE - STAGE_XS + (FACTORS ? phase * SLAB_XS : 0); }
  DEVICE void next() {
    if (++index == STAGES) {
      index = 0;
      phase ^= 1;
    }
  }
};

// --- Producer ------------------------------------------------------------------------------

// The weights of one stage, by one lane.
DEVICE void produce_weights(const Problem& p, const Ring& r, u32 i, const WorkCursor& c,
                            u64 policy) {
  const int m16_tiles = min(BLOCK_N, p.rows - c.at.n) / 16;
  const int panel0 = c.at.n / PANEL * PANEL, panel_tiles = min(PANEL, p.rows - panel0) / 16;
  const u64 first = (u64)(panel0 / 16) * p.stages * STAGE_PACKED +
                    c.stage * STAGE_PACKED * panel_tiles + (c.at.n - panel0) / 16;
  const u32 full = r.full + i * 8, w = r.stage(i) + STAGE_X;
  barrier_expect(full, STAGE_PACKED * m16_tiles * (KSLAB_W + SCALE_BYTES));
  const int copies = m16_tiles == panel_tiles ? 1 : STAGE_PACKED;
  const int pieces = STAGE_PACKED / copies * m16_tiles;
#pragma unroll 1
  for (int u = 0; u < copies; ++u) {
    const u64 from = first + u * panel_tiles;
    bulk_load(w + u * m16_tiles * KSLAB_W, p.w + from * KSLAB_W, pieces * KSLAB_W, full, policy);
    if (SCALE_BYTES)
      bulk_load(w + STAGE_W + u * m16_tiles * SCALE_BYTES, p.scales + from * SCALE_BYTES,
                pieces * SCALE_BYTES, full, policy);
  }
}

DEVICE void produce_all_weights(const Problem& p, const Ring& r) {
  const u64 policy = evict_first_policy();
  const u32 count = WorkCursor::count(p);
  WorkCursor cursor(p);
  PipelineState here;
  // Weights do not depend on the previous launch: they come while it ends.
  for (u32 done = 0; done < count; ++done, here.next(), cursor.next(p)) {
    if (done >= STAGES) barrier_wait_whole(r.empty + here.index * 8, here.phase ^ 1);
    produce_weights(p, r, here.index, cursor, policy);
  }
  wait_for_previous();  // then what the next fetches early is at least two launches old
  launch_dependents();
}

// The scales of one stage's activations, k-slab by k-slab, a copy a row.
DEVICE void produce_x_scales(const Problem& p, u32 to, const WorkCursor& c) {
  static_assert(X_SCALE_BYTES == 0 || X_SCALE_BYTES == 4 || X_SCALE_BYTES == 16, "a copy a row");
  const int rows = min(BLOCK_M, p.m - c.at.m), slabs = p.stages * STAGE_SLABS;
#ifdef SLAB_SCALES
  const int first = c.stage * STAGE_SLABS, thread = threadIdx.x - FIRST_COPIER;
  const float* from = (const float*)p.x_scales + (u64)c.at.m * slabs + first;
#pragma unroll
  for (int row = thread; row < BLOCK_M; row += COPIERS)
    if (row < rows)
#pragma unroll
      for (int u = 0; u < STAGE_SLABS; ++u)
        copy_async_few<4>(to + u * SLAB_XS + row * 4, from + (u64)row * slabs + u);
  if (thread < STAGE_SLABS)
    copy_async_few<4>(to + thread * SLAB_XS + BLOCK_M * 4,
                      p.w_scales + (u64)(c.at.n / 128) * slabs + first + thread);
#else
#pragma unroll
  for (int row = threadIdx.x - FIRST_COPIER; row < BLOCK_M; row += COPIERS)
    if (row < rows)
#pragma unroll
      for (int u = 0; u < STAGE_SLABS; ++u)
        copy_async(to + (u * BLOCK_M + row) * 16,
                   p.x_scales + ((u64)(c.at.m + row) * slabs + c.stage * STAGE_SLABS + u) * 16, 16);
#endif
}

#if defined(SLAB_SCALES) && BAND
DEVICE u32 product(u32 a, u32 b) {
  return __float_as_uint(__uint_as_float(a) * __uint_as_float(b));
}
// FACTORS, of the four k-slabs of a round, for which a row has one sector of L2. Of 16 tokens those
// of the columns 2t, 2t + 1, 2t + 8 and 2t + 9, which lane t multiplies, are neighbours.
DEVICE void produce_all_factors(const Problem& p, const Ring& r) {
  constexpr int AT_ONCE = 4;  // rows of a lane
  const u32 lane = threadIdx.x & 31, column = lane & 7;
  const u32 place = (lane & 16) + column / 2 * 4 + (lane & 8) / 4 + (column & 1);
  PipelineState here;  // a round's first stage
  wait_for_previous();
  for (u32 tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
    const Corner at(p, tile);
    const float* row = (const float*)p.x_scales + (u64)(at.m + lane) * p.stages;
    const float* weights = p.w_scales + at.n / 128 * p.stages;
    const int rows = p.m - at.m - (int)lane;
    for (int stage = 0; stage < p.stages; stage += STAGES, here.phase ^= 1) {
      const uint4 weight = load_if16(true, weights + stage);
      barrier_wait_whole(r.empty, here.phase ^ 1);  // at first it does not wait
      u32 to = r.stage(0) + here.scales() + place * 4;
      const float* from = row + stage;
#pragma unroll 1
      for (int left = rows; left > rows - BLOCK_M; left -= AT_ONCE * 32) {
        uint4 tokens[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i, from += 32 * p.stages)
          tokens[i] = load_if16(i * 32 < left, from);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i, to += 32 * 4) {
          const uint4 t = tokens[i];
          store_shared4(to, product(t.x, weight.x));
          store_shared4(to + STAGE, product(t.y, weight.y));
          store_shared4(to + 2 * STAGE, product(t.z, weight.z));
          store_shared4(to + 3 * STAGE, product(t.w, weight.w));
        }
      }
      __syncwarp();
      barrier_arrive_warp(r.full, lane);
    }
  }
}
#endif

// The activations of one stage: rows of 128 bytes, 16-byte chunks swizzled by the row.
DEVICE void produce_activations(const Problem& p, const Ring& r, const PipelineState& here,
                                const WorkCursor& c) {
  const u32 stage = r.stage(here.index), full = r.full + here.index * 8;
  const int thread = threadIdx.x - FIRST_COPIER, chunk = thread & 7, row = thread >> 3;
  const int rows = min(BLOCK_M, p.m - c.at.m) - row;
  const int width = p.k * X_BYTES, at = c.stage * STAGE_SLABS * 128 + chunk * 16;
  const u8* from = p.x + (u64)(c.at.m + row) * width + at;
  const u32 to = stage + row * 128 + ((chunk ^ row) << 4);
#pragma unroll
  for (int i = 0; i < BLOCK_M / 8; ++i, from += 8 * width)
    if (i * 8 < rows)
#pragma unroll
      for (int u = 0; u < STAGE_SLABS; ++u) {
        const bool inside = WHOLE_K || at + u * 128 < width;
        copy_async(to + u * BLOCK_M * 128 + i * 1024, inside ? from + u * 128 : p.x,
                   inside ? 16 : 0);
      }
  if constexpr (X_SCALE_BYTES > 0 && !FACTORS) produce_x_scales(p, stage + here.scales(), c);
#if WGMMA
  commit_copies();
#else
  barrier_arrive_after_copies(full);
#endif
}

// wgmma reads through the async proxy: the thread that copied executes the async proxy fence, once
// its copies are done, before the stage is announced. (A version that, among other things, left the
// fence to the readers once gave a wrong tile; this one never did.)
template <int LEFT>
DEVICE void announce(const Ring& r, u32 i) {
  wait_copies<LEFT>();
  fence_async();
  barrier_arrive(r.full + i * 8);
}

DEVICE void produce_all_activations(const Problem& p, const Ring& r) {
  const u32 count = WorkCursor::count(p);
  WorkCursor cursor(p);
  PipelineState here;
#if WGMMA
  PipelineState behind;
#endif
  wait_for_previous();
  for (u32 done = 0; done < count; ++done, here.next(), cursor.next(p)) {
    if (done >= STAGES) barrier_wait_whole(r.empty + here.index * 8, here.phase ^ 1);
    produce_activations(p, r, here, cursor);
#if WGMMA
    if (done < LAG) continue;
    announce<LAG>(r, behind.index);
    behind.next();
#endif
  }
#if WGMMA
  for (u32 left = min(count, (u32)LAG); left > 0; --left, behind.next())
    announce<0>(r, behind.index);
#endif
}
