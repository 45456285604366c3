// Linear layers by persistent stream-K: y[m, n] = finish(n, Σ_k x[m, k] · w[n, k]).
// Weights are M of the tile (ROWS), the batch is N (NB): a row of batch costs 8 columns. One block
// a multiprocessor; tiles x stages of k are a line, cut into gridDim.x equal pieces. Producer warps
// fill a ring: one by TMA bulk copies of weights, two by cp.async of x (128-byte swizzle). Consumer
// warps own MT m16 tiles and all NB columns: mma.sync, or (WG) wgmma in four ping-pong consumer
// warpgroups, since wgmma with A in registers stalls its warp. Fix-up: stream_ends.cuh.
// Layout (weight_tiles.py): groups of 256 rows, in each k-slabs (128 bytes of a row of x) in order,
// in each m16 tiles, in each 16-byte pieces in lane order. A stage of a whole group is one copy.
// NVFP4 34816 x 5120, H200: 28 / 34 / 43 / 68 us at 8 / 32 / 64 / 128 rows (log/stream_gemm.md).
// The including file is the format: ELEMENT_BITS, SCALE_BYTES (of an m16 tile's k-slab), X_BYTES
// (of an activation), FP8_MMA, Raw (what a lane loads), load, decode (to a[step][register]),
// multiply.
// Macros: ROWS, NB, MT, KSUB (k-slabs a stage), CUT (k-slabs between cuts, a multiple of KSUB),
// STAGES, WG, OUT_BF16, RAGGED (n is not whole m16 tiles), WHOLE_K (k is whole k-slabs), RESIDENT
// (blocks a multiprocessor).
#pragma once
#include "linear/stream_ends.cuh"
#if WG
#include "common/wgmma.cuh"
#endif

// --- Consumers -----------------------------------------------------------------------------

// Where this warp's m16 tiles lie in a stage of a tile with `strips` of them.
struct Mine {
  u32 place[MT], step;  // of k-slab 0, and from k-slab to k-slab, in m16 tiles' k-slabs

  DEVICE explicit Mine(int strips) : step(strips) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) place[mt] = min(strip_of(mt), strips - 1);
  }
  // Part i of a stage: unit i / MT, strip i % MT.
  DEVICE Raw part(u32 stage, int i) const {
    const u32 at = place[i % MT] + i / MT * step;
    return load(stage + STAGE_X + at * UNIT_W, stage + STAGE_X + STAGE_W + at * SCALE_BYTES);
  }
};

constexpr int PARTS = KSUB * MT;  // of a stage, for one warp

#if WG
// One stage by wgmma. wgmma with A in registers stalls its warp until it drains, so nothing is
// gained by dequantising ahead of it: the other consumer warpgroups dequantise meanwhile
// (ping-pong).
DEVICE void consume(const Ring& r, u32 i, const Mine& mine, Sums& sums) {
  const u32 stage = r.stage(i);
  const u64 tiles = wgmma_tile(uniform(stage));
  Raw raw = mine.part(stage, 0);
#pragma unroll
  for (int part = 0; part < PARTS; ++part) {
    u32 a[4][4];
    decode(raw, a);
    if (part + 1 < PARTS) raw = mine.part(stage, part + 1);
    wgmma_fence();
    const u64 tile = tiles + part / MT * (NB * 128 / 16);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Wgmma<FP8_MMA, NB>::run(sums[part % MT], a[step], tile + 2 * step);
    wgmma_commit();
    wgmma_wait<0>();
  }
  if ((threadIdx.x & 31) == 0) barrier_arrive(r.empty + i * 8);
}
#else
// One stage by mma.sync.
DEVICE void consume(const Ring& r, u32 i, const Mine& mine, Sums& sums) {
  const u32 stage = r.stage(i);
  const int lane = threadIdx.x & 31;
  Raw raw[MT];
#pragma unroll
  for (int mt = 0; mt < MT; ++mt) raw[mt] = mine.part(stage, mt);
#pragma unroll
  for (int u = 0; u < KSUB; ++u) {
    u32 a[MT][4][4];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      decode(raw[mt], a[mt]);
      if (u + 1 < KSUB) raw[mt] = mine.part(stage, (u + 1) * MT + mt);
    }
    const u32 row = stage + u * NB * 128 + (lane & 7) * 128;
#pragma unroll
    for (int j = 0; j < NJ; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 b[4];
        load_matrix(b, row + j * 1024 + (((half * 4 + (lane >> 3)) ^ (lane & 7)) << 4));
#pragma unroll
        for (int mt = 0; mt < MT; ++mt) {
          multiply(sums[mt][j], a[mt][half * 2], b[0], b[1]);
          multiply(sums[mt][j], a[mt][half * 2 + 1], b[2], b[3]);
        }
      }
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(r.empty + i * 8);
}
#endif

template <class Finish>
DEVICE void consume_all(const Problem& p, const Ring& r, void* out, const Finish& finish) {
  const u32 begin = p.begin(blockIdx.x), end = p.begin(blockIdx.x + 1);
  wait_for_previous();  // nothing may be written earlier
  Place here;
  for (u32 unit = begin; unit < end;) {
    const u32 tile = unit / p.stages;
    const u32 from = unit, stop = min(end, (tile + 1) * p.stages);
    const Mine mine(min(ROWS, p.rows - (int)(tile / p.batch_tiles) * ROWS) / 16);
    Sums sums = {};
    for (; unit < stop; ++unit, here.next()) {
      barrier_wait_whole(r.full + here.index * 8, here.phase);
      consume(r, here.index, mine, sums);
    }
    const Corner at(p, tile);
    if (stop - from == p.stages) {
      const Factors<Finish> factors(p, at.n, finish);
      write_tile(p, at, out, sums, factors);
      continue;
    }
    const Parts parts(p, tile);
    const u32 columns = columns_of(p, tile);
    if (parts.two() && parts.first == blockIdx.x) {
      const Factors<Finish> factors(p, at.n, finish);
      add_second(p, parts, columns, sums);
      write_tile(p, at, out, sums, factors);
      continue;
    }
    leave(p, from != begin, columns, sums);
    announce_part(p, parts, parts.two() ? 1 : min(MT * columns, parts.count()));
  }
}

// What a kernel runs: `finish(n)` is the factor of column n.
template <class Finish>
DEVICE void stream_gemm(Problem p, void* out, const Finish& finish) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  p.divide();
  const u32 full = shared_address(barriers);
  const Ring ring = {shared_address(memory), full, full + 8 * STAGES};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(ring.full + i * 8, 1 + COPIERS);  // weights announced, activations there
      barrier_init(ring.empty + i * 8, WARPS);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= THREADS) {
    if (MOVE_REGISTERS) fewer_registers<24>();
    if (threadIdx.x == THREADS) produce_all_weights(p, ring);
    else if (threadIdx.x >= FIRST_COPIER) produce_all_activations(p, ring);
  } else {
    if (MOVE_REGISTERS) more_registers<112>();
    consume_all(p, ring, out, finish);
    share_all(p, out, finish);
  }
}
