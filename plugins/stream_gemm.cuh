// The body that the linear ops share: y[m, n] = finish(n, Σ_k x[m, k] · w[n, k]), weights streamed.
//
// Weights are the M side of the matrix instructions and the batch is the N side, so one row of
// batch costs a column of 8. Persistent blocks, one a multiprocessor; the work, tiles x stages
// of k, is one line cut into `gridDim.x` equal pieces (stream-K). A piece that holds only part
// of a tile leaves f32 partial sums; the blocks of that tile wait for one another and share the
// work of adding them in ascending k, so a result does not depend on timing, nor the cut on the
// number of rows.
//
// Four producer warps fill a ring in shared memory: one has the copy engine bring packed weights,
// three bring activations by cp.async with the 128-byte swizzle. Consumer warps own 16 rows of
// weights (times MT) and all NB columns. A unit is 128 bytes of k of an activation row: four matrix
// steps.
//
// Layout of packed weights (`plugins/weight_tiles.py`): groups of 256 rows, in each the units in
// order of k, in each strips of 16 rows, in each 16-byte pieces in lane order such that what a lane
// loads is its fragment. The last group has as many strips as there are rows. A stage of a whole
// group is one piece of memory.
//
// The ladder, H200, NVFP4 34816 x 5120, microseconds at 1 / 32 / 128 rows (floor 23 / 24 / 58):
// 1. one producer warp for everything, codes in nibbles                  41 / 64 / 215
// 2. three warps bring activations                                       38 / 47 /  95
// 3. rotations by the multiplier, mma.sync at up to 8 rows               34 / 46 /  93
// 4. parts of tiles added warp by warp; at 8 rows a ring of three        33 / 46 /  92
// 5. a tile of two parts ends where its first is, in registers; more
//    parts are added by all their blocks, eight loads at a time          31 / 43 /  85
// Step 5 took 5120 x 17408 from 63 to 58 us at 128 rows, 96 x 5120 of bf16 from 17 to 9.
// Tried and left: 128-row tiles (+6 / +3 / +5), two blocks a multiprocessor that begin early (+1 at
// 8 rows; +16 where they begin late and fall on one multiprocessor), prefetches into L2 before the
// wait (+1 to +2), more and shorter stages (+1 to +6), 16 consumer warps at 128 rows (+1), mma.sync
// at 16 / 32 / 64 rows (-3 / +1 / +13), raw weights a part ahead, two parts before a commit (0).
// What is left at 8 rows: 0.5 us until the launch before is seen to have ended, 0.5 until the first
// activations are there, 3 for the end of the tiles. At 32 rows and more the card is at its power
// limit (690 W) in a loop of these launches: from there on only less work an element helps.
//
// The including file sets ELEMENT_BITS, SCALE_BYTES (per unit of a strip), X_BYTES (of one
// activation), FP8_MMA, and defines `Raw` (what a lane loads of a strip's unit), `load`, `decode`
// (Raw to fragments a[step][register]) and `multiply`.
// Macros of an instantiation: ROWS (weights a tile), NB (batch a tile), MT (16-row strips a
// warp), KSUB (units a stage), CUT (units between which the line of work may be cut, a multiple of
// KSUB), STAGES, WG (1: wgmma), OUT_BF16, RAGGED (1: n is not whole strips), RESIDENT (blocks a
// multiprocessor must hold).
#pragma once
#include "stream_feed.cuh"
#if WG
#include "wgmma.cuh"
#endif

// --- Consumers -----------------------------------------------------------------------------

typedef float Sums[MT][NJ][4];

DEVICE int strip_of(int mt) {  // this warp's mt-th strip of the tile, 0…ROWS/16-1
  const int warp = threadIdx.x >> 5;
  return ((warp >> 2) * MT + mt) * 4 + (warp & 3);
}

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

// Writes two columns' values of one weight row and its neighbour's, for 8 batch rows.
DEVICE void store(const Problem& p, void* out, int n0, int m0, const float (&s)[4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#if RAGGED
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = m0 + 2 * t + (i & 1), n = n0 + g + (i & 2) * 4;
    if (row >= p.m || n >= p.n) continue;
#if OUT_BF16
    ((u16*)out)[(u64)row * p.n + n] = (u16)pack_bf16(s[i], 0);
#else
    ((float*)out)[(u64)row * p.n + n] = s[i];
#endif
  }
#elif OUT_BF16
  u32* y = (u32*)out;
  const u32 low = transpose_matrix<true>(pack_bf16(s[0], s[1]));   // batch row g, weights 2t, 2t+1
  const u32 high = transpose_matrix<true>(pack_bf16(s[2], s[3]));  // … 8 further
  if (m0 + g < p.m) {
    const u64 at = ((u64)(m0 + g) * p.n + n0) / 2 + t;
    y[at] = low;
    y[at + 4] = high;
  }
#else
  float* y = (float*)out + (u64)(m0 + 2 * t) * p.n + n0 + g;
  if (m0 + 2 * t < p.m) y[0] = s[0], y[8] = s[2];
  if (m0 + 2 * t + 1 < p.m) y[p.n] = s[1], y[p.n + 8] = s[3];
#endif
}

// A block's slot 0 is for the tile that its piece begins in, slot 1 for the one it ends in.
DEVICE float4* slot(const Problem& p, u32 block, u32 which) {
  return (float4*)p.partial + (u64)(2 * block + which) * (ROWS * NB / 4) + threadIdx.x;
}

// Leaves this warp's part of a tile in a slot; nothing is waited for.
DEVICE void leave(const Problem& p, u32 which, u32 columns, const Sums& sums) {
  float4* mine = slot(p, blockIdx.x, which);
#pragma unroll
  for (int i = 0; i < MT * NJ; ++i)
    if (i % NJ < columns) {
      const float(&s)[4] = sums[i / NJ][i % NJ];
      __stcg(mine + i * THREADS, make_float4(s[0], s[1], s[2], s[3]));
    }
}

// The blocks that have a part of a tile.
struct Parts {
  u32 start, first, last;
  DEVICE Parts(const Problem& p, u32 tile)
      : start(tile * p.stages), first(p.owner(start)), last(p.owner(start + p.stages - 1)) {}
  DEVICE u32 count() const { return last - first + 1; }
  // Two parts are added by the block of the first, which has it at hand.
  DEVICE bool two() const { return last == first + 1; }
  // Which of a block's two tiles this is.
  DEVICE u32 which(const Problem& p, u32 block) const { return p.begin(block) < start; }
};

// What this warp of a block has been told of one of the block's tiles: how many parts are there.
DEVICE u32* counter(const Problem& p, u32 block, u32 which) {
  return p.arrived + (2 * block + which) * WARPS + threadIdx.x / 32;
}

// Tells the same warp of the first so many blocks of a tile that this part is there. Warps do this
// each on their own: none waits for another.
DEVICE void announce_part(const Problem& p, const Parts& parts, u32 readers) {
  __threadfence();
  __syncwarp();
  for (u32 i = threadIdx.x & 31; i < readers; i += 32)
    atomicAdd(counter(p, parts.first + i, i == 0 && parts.which(p, parts.first)), 1);
}

// Waits until this warp has been told of so many parts. All blocks run at once, at most one a
// multiprocessor, so that none waits for one that cannot begin.
DEVICE void await_parts(const Problem& p, u32 which, u32 parts) {
  u32* told = counter(p, blockIdx.x, which);
  wait_until_equal(told, parts);
  __syncwarp();
  if ((threadIdx.x & 31) == 0) *told = 0;
}

// Adds the second part of a tile of two to the first.
DEVICE void add_second(const Problem& p, const Parts& parts, u32 columns, Sums& sums) {
  await_parts(p, parts.which(p, parts.first), 1);
  const float4* from = slot(p, parts.last, 0);
#pragma unroll
  for (int i = 0; i < MT * NJ; ++i) {
    if (i % NJ >= columns) continue;
    const float4 part = __ldcg(from + i * THREADS);
    float(&s)[4] = sums[i / NJ][i % NJ];
    s[0] += part.x, s[1] += part.y, s[2] += part.z, s[3] += part.w;
  }
}

// Where a tile lies in the result.
struct Corner {
  int n, m;
  DEVICE Corner(const Problem& p, u32 tile)
      : n((int)(tile / p.batch_tiles) * ROWS), m((int)(tile % p.batch_tiles) * NB) {}
};

// Groups of 8 activation rows of a tile that are there.
DEVICE u32 columns_of(const Problem& p, u32 tile) {
  return min(NJ, (p.m - (int)(tile % p.batch_tiles) * NB + 7) / 8);
}

// The factors of the two rows that a lane holds of a strip.
template <class Finish>
DEVICE float2 factors(const Problem& p, int n0, const Finish& finish) {
  const int n = n0 + ((threadIdx.x & 31) >> 2);
  const float low = RAGGED && n >= p.n ? 0 : finish(n);
  return make_float2(low, RAGGED && n + 8 >= p.n ? 0 : finish(n + 8));
}

template <class Finish>
DEVICE void write_tile(const Problem& p, u32 tile, void* out, Sums& sums, const Finish& finish) {
  const Corner at(p, tile);
#pragma unroll
  for (int mt = 0; mt < MT; ++mt) {
    const int n0 = at.n + strip_of(mt) * 16;
    if (n0 >= p.n) continue;
    const float2 factor = factors(p, n0, finish);
#pragma unroll
    for (int j = 0; j < NJ; ++j) {
      float(&s)[4] = sums[mt][j];
      s[0] *= factor.x, s[1] *= factor.x, s[2] *= factor.y, s[3] *= factor.y;
      if (at.m + j * 8 < p.m) store(p, out, n0, at.m + j * 8, s);
    }
  }
}

// The end of a tile of three or more parts: each of its blocks adds the parts, in ascending k, of
// every so-many-th 8 columns of each warp's share, and writes them.
template <class Finish>
DEVICE void share(const Problem& p, u32 tile, void* out, const Finish& finish) {
  const Parts at_work(p, tile);
  const u32 first = at_work.first, parts = at_work.count();
  const Corner at(p, tile);
  const u32 columns = columns_of(p, tile), count = MT * columns, mine = blockIdx.x - first;
  if (mine >= count || at_work.two()) return;
  await_parts(p, at_work.which(p, blockIdx.x), parts);
  const u64 skip = slot(p, first + 1, 0) - slot(p, first, 0);
  const float4* head = slot(p, first, at_work.which(p, first));
  const float4* others = slot(p, first, 0);
  constexpr int TOGETHER = 8;  // loads in flight
  u32 next = mine, next_part = 0;  // to be loaded
  float4 sum;
#pragma unroll 1
  for (u32 i = mine, part = 0; i < count;) {
    float4 got[TOGETHER];
#pragma unroll
    for (int t = 0; t < TOGETHER; ++t) {
      if (next >= count) continue;
      const u32 at_sum = next < columns ? next : next - columns + NJ;
      got[t] = __ldcg((next_part ? others + next_part * skip : head) + at_sum * THREADS);
      if (++next_part == parts) next_part = 0, next += parts;
    }
#pragma unroll
    for (int t = 0; t < TOGETHER; ++t) {
      if (i >= count) continue;
      if (part == 0) sum = make_float4(0, 0, 0, 0);
      sum.x += got[t].x, sum.y += got[t].y, sum.z += got[t].z, sum.w += got[t].w;
      if (++part < parts) continue;
      const u32 mt = i >= columns;
      const int n0 = at.n + strip_of(mt) * 16;
      if (n0 < p.n) {
        const float2 factor = factors(p, n0, finish);
        const float s[4] = {sum.x * factor.x, sum.y * factor.x, sum.z * factor.y,
                            sum.w * factor.y};
        store(p, out, n0, at.m + (i - mt * columns) * 8, s);
      }
      part = 0, i += parts;
    }
  }
}

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
    if (stop - from == p.stages) {
      write_tile(p, tile, out, sums, finish);
      continue;
    }
    const Parts parts(p, tile);
    const u32 columns = columns_of(p, tile);
    if (parts.two() && parts.first == blockIdx.x) {
      add_second(p, parts, columns, sums);
      write_tile(p, tile, out, sums, finish);
      continue;
    }
    leave(p, from != begin, columns, sums);
    announce_part(p, parts, parts.two() ? 1 : min(MT * columns, parts.count()));
  }
}

// The tiles of which this block had a part, at most two.
template <class Finish>
DEVICE void share_all(Problem p, void* out, const Finish& finish) {
  p.k = forget(p.k);  // or what is computed here is held all along
  p.divide();
  const u32 block = forget(blockIdx.x);
  const u32 begin = p.begin(block), end = p.begin(block + 1);
  if (begin == end) return;
  const u32 low = begin / p.stages, high = (end - 1) / p.stages;
#pragma unroll 1
  for (u32 tile = low; tile <= high; tile += max(1, high - low))
    if (begin > tile * p.stages || end < (tile + 1) * p.stages) share(p, tile, out, finish);
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
    if (threadIdx.x == THREADS)
      produce_all_weights(p, ring);
    else if (threadIdx.x >= FIRST_COPIER)
      produce_all_activations(p, ring);
  } else {
    if (MOVE_REGISTERS) more_registers<112>();
    consume_all(p, ring, out, finish);
    share_all(p, out, finish);
  }
}
