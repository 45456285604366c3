// Linear layers by persistent stream-K: y[m, n] = finish(n, Σ_k x[m, k] · w[n, k]). A and B are
// swapped: weights (BLOCK_N rows a tile) are the A of the mma, m16 tiles; activations (BLOCK_M) its
// B, so a token costs a column of 8, 16, ... One block a multiprocessor; the k-slabs of all tiles
// form a line, cut into gridDim.x equal pieces (stream_k_schedule.py). Producer warps fill a ring:
// one by TMA bulk copies of weights, two by cp.async of x (128-byte swizzle). Consumer warps use
// mma.sync (stream_k_mma.cuh) or (WGMMA) wgmma: with A in registers it stalls its warp until it
// drains and slows decoding in others 1.4-1.7x; so four consumer warpgroups ping-pong.
// NVFP4 34816 x 5120, 8 / 32 / 64 / 128 rows: 28 / 34 / 43 / 68 us (log/gemm/stream_k_gemm.md).
// The including file is the format: ELEMENT_BITS, SCALE_BYTES (an m16 tile's k-slab's), X_BYTES (an
// activation's), X_SCALE_BYTES (an activation row's k-slab's), FP8_MMA, Raw (what a lane loads),
// load, decode (to a[step][register]), multiply, and what stream_k_mma.cuh asks for.
// Macros: BLOCK_N, BLOCK_M, WARP_TILES, STAGE_SLABS (k-slabs a stage), CUT (k-slabs between cuts, a
// multiple of STAGE_SLABS), STAGES, WGMMA, OUT_BF16, RAGGED (n % 16), WHOLE_K (k is whole k-slabs),
// RESIDENT (blocks an SM); if given W_SLABS (k-slabs packed in one), WARPS_M (warps of an m16),
// BAND (m tiles of a band), TURNS (warpgroups multiply in turn).
#pragma once
#include "gemm/stream_k/stream_k_epilogue.cuh"
#if WGMMA
#include "common/wgmma_sm90.cuh"
#endif

// --- Consumers -----------------------------------------------------------------------------

// Where this warp's m16 tiles are in a stage of a tile with `m16_tiles` of them.
struct Mine {
  u32 place[WARP_TILES], step;  // of k-slab 0, and from k-slab to k-slab, in m16 tiles' k-slabs

  DEVICE explicit Mine(int m16_tiles) : step(m16_tiles) {
#pragma unroll
    for (int mt = 0; mt < WARP_TILES; ++mt) place[mt] = min(m16_of(mt), m16_tiles - 1);
  }
#ifndef SCALED
  // Part i of a stage: slab i / WARP_TILES, m16 i % WARP_TILES.
  DEVICE Raw part(u32 stage, int i) const {
    const u32 at = place[i % WARP_TILES] + i / WARP_TILES * W_SLABS * step;
    const u32 w = stage + STAGE_X + at * KSLAB_W, s = stage + STAGE_X + STAGE_W + at * SCALE_BYTES;
#if W_SLABS > 1
    return load(w, s, step);
#else
    return load(w, s);
#endif
  }
#endif
};

constexpr int PARTS = STAGE_SLABS * WARP_TILES;  // of a stage, for one warp

#ifdef SLAB_SCALES
// The scales of a k-slab: an accumulator's columns 2t and 2t + 1 of each eight are two tokens.
struct SlabScales {
  u32 tokens;
  float weights;

  DEVICE SlabScales(u32 stage, const PipelineState& here, int slab) {
    const u32 scales = stage + here.scales() + slab * SLAB_XS;
    if (!FACTORS) weights = __uint_as_float(load_shared4(scales + BLOCK_M * 4));
    tokens = scales + (threadIdx.x & 3) * (FACTORS ? 16 : 8) + warp_m() * 4;
  }
  // With FACTORS: those of a lane's columns of the i-th 16.
  DEVICE uint4 products(int i) const { return load_shared16(tokens + i * 64); }
  // What the j-th 8 columns' products are multiplied by: a lane's two columns.
  DEVICE float2 factors(int j) const {
    const uint2 pair = load_shared8(tokens + j * 32);
    return {__uint_as_float(pair.x) * weights, __uint_as_float(pair.y) * weights};
  }
};
DEVICE void fold(float (&sum)[4], const float (&part)[4], const float2& factor) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] = fmaf(part[i], i & 1 ? factor.y : factor.x, sum[i]);
}
#endif

#if WGMMA && defined(SLAB_SCALES)
// One stage by wgmma: a k-slab's products add up in separate registers, which also bounds what e4m3
// wgmma's short sums lose, then its scales bring them into the sums. Of 256 tokens half at a time:
// the registers hold no more. With TURNS two warpgroups take turns to multiply, so that one
// scales while the other multiplies; if both begin together, both scale together.
DEVICE void consume(const Ring& r, const PipelineState& here, const Mine& mine, Sums& sums) {
  static_assert(WARP_TILES == 1, "the registers hold one m16 tile's parts");
  constexpr int WIDTH = BLOCK_M > 128 ? 128 : BLOCK_M, AT_ONCE = 2;
  const u32 own = threadIdx.x / 128, other = own ^ 1;
  const u32 stage = r.stage(here.index);
  const u64 tiles = wgmma_tile(uniform(stage));
#pragma unroll
  for (int u = 0; u < STAGE_SLABS; ++u) {
    u32 a[4][4];
    decode(mine.part(stage, u), a);
    const SlabScales scales(stage, here, u);
#pragma unroll
    for (int from = 0; from < BLOCK_M; from += WIDTH) {
      float part[WIDTH / 8][4];
      const u64 tile = tiles + (u * BLOCK_M + from) * (128 / 16);
      if (TURNS) meet(1 + own, 2 * 128);
      wgmma_fence();
      Wgmma<FP8_MMA, WIDTH>::begin(part, a[0], tile);
#pragma unroll
      for (int step = 1; step < 4; ++step)
        Wgmma<FP8_MMA, WIDTH>::run(part, a[step], tile + 2 * step);
      wgmma_commit();
      if constexpr (FACTORS) {
        if (TURNS) pass(1 + other, 2 * 128);
        uint4 ahead[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) ahead[i] = scales.products(from / 16 + i);
        wgmma_wait<0>();
        wgmma_read(part);
#pragma unroll
        for (int i = 0; i < WIDTH / 16; ++i) {
          const uint4 f = i < AT_ONCE ? ahead[i % AT_ONCE] : scales.products(from / 16 + i);
          fold(sums[0][from / 8 + 2 * i], part[2 * i],
               {__uint_as_float(f.x), __uint_as_float(f.y)});
          fold(sums[0][from / 8 + 2 * i + 1], part[2 * i + 1],
               {__uint_as_float(f.z), __uint_as_float(f.w)});
        }
      } else {
        wgmma_wait<0>();
        wgmma_read(part);
#pragma unroll
        for (int j = 0; j < WIDTH / 8; ++j) fold(sums[0][j], part[j], scales.factors(j));
      }
    }
  }
  __syncwarp();  // scales are read behind the last wait, which meets the warp
  barrier_arrive_warp(r.empty + here.index * 8, threadIdx.x & 31);
}
#elif WGMMA
// One stage by wgmma. wgmma with A in registers stalls its warp until it drains, so nothing is
// gained by dequantising ahead of it: the other consumer warpgroups dequantise meanwhile
// (ping-pong).
DEVICE void consume(const Ring& r, const PipelineState& here, const Mine& mine, Sums& sums) {
  const u32 stage = r.stage(here.index);
  const u64 tiles = wgmma_tile(uniform(stage));
  Raw raw = mine.part(stage, 0);
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    u32 a[4][4];
    decode(raw, a);
    if (part + 1 < PARTS) raw = mine.part(stage, part + 1);
    wgmma_fence();
    const u64 tile = tiles + part / WARP_TILES * (BLOCK_M * 128 / 16);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Wgmma<FP8_MMA, BLOCK_M>::run(sums[part % WARP_TILES], a[step], tile + 2 * step);
    wgmma_commit();
    wgmma_wait<0>();
  }
  barrier_arrive_warp(r.empty + here.index * 8, threadIdx.x & 31);
}
#else
#include "gemm/stream_k/stream_k_mma.cuh"
#endif

#if BAND
// Tiles blockIdx.x, blockIdx.x + gridDim.x, …, whole.
template <class Finish>
DEVICE void consume_all(const Problem& p, const Ring& r, void* out, const Finish& finish) {
  wait_for_previous();  // nothing may be written earlier
  PipelineState here;
  // With FACTORS nothing is held all along: a block has at least one tile.
  u32 tiles = FACTORS ? ~0u : p.tiles;
  for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Problem now = FACTORS ? recomputed(p) : p;
    const Mine mine(min(BLOCK_N, now.rows - Corner(now, tile).n) / 16);
    Sums sums = {};
    for (int stage = 0; stage < p.stages; ++stage, here.next()) {
      barrier_wait_whole(r.full + here.index * 8, here.phase);
      consume(r, here, mine, sums);
    }
    const Problem late = recomputed(p);  // or what is computed here is held all along
    if (FACTORS) tiles = late.tiles;
    const Corner at(late, tile);
    const Factors<Finish> factors(late, at, finish);
    write_tile(late, at, out, sums, factors);
  }
}
#else
template <class Finish>
DEVICE void consume_all(const Problem& p, const Ring& r, void* out, const Finish& finish) {
  const u32 begin = p.begin(blockIdx.x), end = p.begin(blockIdx.x + 1);
  wait_for_previous();  // nothing may be written earlier
  PipelineState here;
  for (u32 at_stage = begin; at_stage < end;) {
    const u32 tile = at_stage / p.stages;
    const u32 from = at_stage, stop = min(end, (tile + 1) * p.stages);
    const Mine mine(min(BLOCK_N, p.rows - (int)(tile / p.batch_tiles) * BLOCK_N) / 16);
    Factors<Finish> factors(p, finish);
    if (AHEAD) factors.load(Corner(p, tile));
    Sums sums = {};
    for (; at_stage < stop; ++at_stage, here.next()) {
      barrier_wait_whole(r.full + here.index * 8, here.phase);
      consume(r, here, mine, sums);
    }
    const Corner at(p, tile);
    if (stop - from == p.stages) {
      if (!AHEAD) factors.load(at);
      write_tile(p, at, out, sums, factors);
      continue;
    }
    const Parts parts(p, tile);
    const u32 columns = columns_of(p, tile);
    if (parts.two() && parts.first == blockIdx.x) {
      if (!AHEAD) factors.load(at);
      fix_up_two(p, parts, columns, sums);
      write_tile(p, at, out, sums, factors);
      continue;
    }
    store_partial(p, from != begin, columns, sums);
    announce_partial(p, parts, parts.two() ? 1 : min(WARP_TILES * columns, parts.count()));
  }
}
#endif

// What a kernel runs: `finish(n)` is the factor of column n.
template <class Finish>
DEVICE void stream_k_gemm(Problem p, void* out, const Finish& finish) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  p.divide();
  const u32 full = shared_address(barriers);
  const Ring ring = {shared_address(memory), full, full + 8 * STAGES};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      // Weights announced, activations there, and the factors of a round.
      barrier_init(ring.full + i * 8, 1 + COPIERS + (FACTORS && i == 0 ? WARP_ARRIVALS : 0));
      barrier_init(ring.empty + i * 8, WARPS * WARP_ARRIVALS);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= THREADS) {
    if (MOVE_REGISTERS) fewer_registers<FEWER>();
    if (threadIdx.x == THREADS) produce_all_weights(p, ring);
    else if (threadIdx.x >= FIRST_COPIER) produce_all_activations(p, ring);
#if defined(SLAB_SCALES) && BAND
    else if (FACTORS && threadIdx.x >= THREADS + 32) produce_all_factors(p, ring);
#endif
  } else {
    if (MOVE_REGISTERS) more_registers<MORE>();
    if (TURNS && threadIdx.x >= 128) pass(1, 2 * 128);  // the first turn
    consume_all(p, ring, out, finish);
    if (TURNS && threadIdx.x < 128) meet(1, 2 * 128);
#if !BAND
    fix_up(p, out, finish);
#endif
  }
}
