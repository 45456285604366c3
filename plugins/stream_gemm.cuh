// What the linear ops share: y[m, n] = finish(n, Σ_k x[m, k] · w[n, k]), weights streamed.
//
// Weights are the M side of the matrix instructions and the batch is the N side, so one row of
// batch costs a column of 8. Persistent blocks, one a multiprocessor; the work, tiles x stages
// of k, is one line cut into `gridDim.x` equal pieces (stream-K). A piece that holds only part
// of a tile leaves f32 partial sums; the blocks of that tile wait for one another and share the
// work of adding them in ascending k, so a result does not depend on timing, nor the cut on the
// number of rows.
//
// Four producer warps fill a ring in shared memory: one has the copy engine bring packed weights,
// two bring activations by cp.async with the 128-byte swizzle, one rests. Consumer warps own 16
// rows of weights (times MT) and all NB columns. A unit is 128 bytes of k of an activation row:
// four matrix steps.
//
// Layout of packed weights (`plugins/weight_tiles.py`): groups of 256 rows, in each the units in
// order of k, in each strips of 16 rows, in each 16-byte pieces in lane order such that what a lane
// loads is its fragment. The last group has as many strips as there are rows. A stage of a whole
// group is one piece of memory.
//
// A product of wgmma whose weights are in registers holds up its warp while it runs; beside it what
// other warps decode takes 1.4 to 1.7 times as long, and wide multiplications delay it (presumably
// ports of registers that they share). So four warpgroups of a strip a warp take turns, each
// decodes and multiplies unit by unit, and every instruction counts: 79 a unit and warp at 32 and
// 64 rows, of which 58 decode.
//
// The ladder, H200, NVFP4 34816 x 5120, microseconds at 1 (from 6 on 8) / 32 / 64 / 128 rows (floor
// 23 / 24 / 29 / 58 at the rate that libraries reach in long runs):
// 1. one producer warp for everything, codes in nibbles                  41 / 64 /  - / 215
// 2. three warps bring activations                                       38 / 47 /  - /  95
// 3. rotations by the multiplier, mma.sync at up to 8 rows               34 / 46 /  - /  93
// 4. parts of tiles added warp by warp; at 8 rows a ring of three        33 / 46 /  - /  92
// 5. a tile of two parts ends where its first is, in registers; more
//    parts are added by all their blocks, eight loads at a time          31 / 43 / 56 /  85
// 6. descriptors in uniform registers: 8 moves fewer a unit               - / 41 / 54 /  83
// 7. one strip a warp, so four warpgroups; nothing decoded ahead;
//    two warps bring activations, their addresses constants              31 / 40 / 51 /  77
// 8. rotations by the shifter                                            28 / 36 / 44 /  67
// 9. at up to 64 rows three stages of four units                         28 / 34 / 43 /  68
// Steps 6 to 9, cuts of two units and factors fetched early took 5120 x 17408 from 21 / 27 / 39 /
// 58 to 19 / 23 / 30 / 43; 2048 rows of 34816 x 5120 went from 1200 to 1020.
// Left out in turn, of 33.8 / 43.4 / 67.8: decoding, 27.7 / 35.9 / 62.1; products, 28.6 / 31.4 /
// 40.5; the loads of activations, 33.3 / 40.8 / 64.5; those and decoding, 27.1 / 33.4 / 60.2. With
// 5120 x 17408 the meeting of blocks at the end of tiles takes 4 / 9 / 13 of 23.6 / 31 / 45.
// Tried and left: 128-row tiles (+6 / +3 / - / +5), two blocks a multiprocessor that begin early
// (+1 at 8 rows; +16 where they begin late and fall on one multiprocessor), prefetches into L2
// before the wait (+1 to +2), stages of one unit (+2 / +2 / +5), all shifts by the shifter (+2 / +1
// / 0), decoding a unit ahead (0 / 0 / +4), warpgroups that multiply in a fixed order (+5 / 0 / 0),
// a fence of less order, more registers (0), mma.sync at 16 rows and more (+1 to +13).
// In a loop of 150 ms power grew to 520 W at 64 rows and 620 W at 128, the clock fell from 1980 to
// 1785 and 1755 MHz, and a launch took 6 and 8 % longer (of step 5); short runs show none of it.
//
// The including file sets ELEMENT_BITS, SCALE_BYTES (per unit of a strip), X_BYTES (of one
// activation), FP8_MMA, and defines `Raw` (what a lane loads of a strip's unit), `load`, `decode`
// (Raw to fragments a[step][register]) and `multiply`.
// Macros of an instantiation: ROWS (weights a tile), NB (batch a tile), MT (16-row strips a
// warp), KSUB (units a stage), CUT (units between which the line of work may be cut, a multiple of
// KSUB), STAGES, WG (1: wgmma), OUT_BF16, RAGGED (1: n is not whole strips), WHOLE_K (1: k is whole
// units), RESIDENT (blocks a multiprocessor must hold).
#pragma once
#include "stream_ends.cuh"
#if WG
#include "wgmma.cuh"
#endif

// --- Consumers -----------------------------------------------------------------------------

// Where this warp's strips lie in a stage of a tile with `strips` of them.
struct Mine {
  u32 place[MT], step;  // of unit 0, and from unit to unit, in strips' units

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
// One stage by wgmma. A product whose weights are in registers holds up its warp while it runs, so
// nothing is gained by decoding ahead of it: the other warpgroups of the block decode meanwhile.
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
