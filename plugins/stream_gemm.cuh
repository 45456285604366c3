// The body that the linear ops share: y[m, n] = finish(n, Σ_k x[m, k] · w[n, k]), weights streamed.
//
// Weights are the M side of the matrix instructions and the batch is the N side, so one row of
// batch costs a column of 8. Persistent blocks, one a multiprocessor; the work, tiles x stages
// of k, is one line cut into `gridDim.x` equal pieces (stream-K). A piece that holds only part
// of a tile leaves f32 partial sums; whoever arrives last at that tile adds them in ascending k,
// so a result does not depend on timing, nor the cut on the number of rows.
//
// One producer warp fills a ring in shared memory: packed weights by the copy engine, activations
// by cp.async with the 128-byte swizzle. Consumer warps own 16 rows of weights (times MT) and all
// NB columns. A unit is 128 bytes of k of an activation row: four matrix steps.
//
// Layout of packed weights (`plugins/weight_tiles.py`): groups of 64 rows, in each the units in
// order of k, in each four strips of 16 rows, in each 16-byte pieces in lane order such that what
// a lane loads is its fragment. The last group has as many strips as there are rows.
//
// The including file sets ELEMENT_BITS, SCALE_BYTES (per unit of a group), X_BYTES (of one
// activation) and defines `load_fragments`, `multiply` (MMA) and `finish`.
// Macros of an instantiation: ROWS (weights a tile), NB (batch a tile), MT (16-row strips a
// warp), KSUB (units a stage), STAGES, WG (1: wgmma), OUT_BF16.
#pragma once
#include "ptx.cuh"
#if WG
#include "wgmma.cuh"
#endif

constexpr int UNIT_K = 128 / X_BYTES;
constexpr int UNIT_W = 64 * UNIT_K * ELEMENT_BITS / 8;  // bytes of a group's unit
constexpr int GROUPS = ROWS / 64;
constexpr int NJ = NB / 8;
constexpr int WARPS = ROWS / 16 / MT;  // consumers
constexpr int THREADS = WARPS * 32;
constexpr int STAGE_X = KSUB * NB * 128;
constexpr int STAGE_W = GROUPS * KSUB * UNIT_W;
constexpr int STAGE_S = GROUPS * KSUB * SCALE_BYTES;
constexpr int STAGE = STAGE_X + STAGE_W + STAGE_S;
constexpr int PRODUCERS = MT > 1 ? 4 : 1;  // warps; three idle: registers move by fours of warps
constexpr int BLOCK = THREADS + PRODUCERS * 32;
// Stages that activations may be in flight. With wgmma a consumer frees a stage only once it has
// the next.
constexpr int LAG = STAGES > 4 ? 3 : STAGES - 1 - WG;

struct Problem {
  const u8* x;
  const u8* w;
  const u8* scales;
  float* partial;  // 2 x gridDim.x slots of ROWS x NB
  u32* arrived;    // a counter a tile, zero between launches
  int m, n, k;
  int stages;       // of a tile
  int batch_tiles;  // tiles that share weights
  u32 line;         // tiles x stages

  DEV u32 begin(u32 block) const { return line * block / gridDim.x; }
  DEV u32 owner(u32 unit) const { return ((unit + 1) * gridDim.x - 1) / line; }
};

struct Ring {
  u32 base, full, empty;
  DEV u32 stage(u32 i) const { return base + i * STAGE; }
};

// A place in the ring: which stage, and the parity of its barriers.
struct Place {
  u32 index = 0, phase = 0;
  DEV void next() {
    if (++index == STAGES) {
      index = 0;
      phase ^= 1;
    }
  }
};

// --- Producer ------------------------------------------------------------------------------

// The weights of one stage: a lane a copy.
DEV void produce_weights(const Problem& p, const Ring& r, u32 i, u32 unit, u64 policy) {
  const int lane = threadIdx.x & 31;
  const int row0 = (int)(unit / p.stages / p.batch_tiles) * ROWS;
  const int u0 = (int)(unit % p.stages) * KSUB;
  const int units = p.stages * KSUB;
  const int rows = min(ROWS, p.n - row0);
  const u32 full = r.full + i * 8;
  if (lane == 0) barrier_expect(full, rows / 16 * (KSUB * (UNIT_W + SCALE_BYTES) / 4));
  __syncwarp();
  const int group = lane & 15;
  if (group * 64 >= rows || group >= GROUPS) return;
  const int strips = min(4, (rows - group * 64) / 16);
  const u64 first = (u64)(row0 / 64 + group) * units * 4 + (u64)u0 * strips;  // in strips' units
  const u32 at = r.stage(i) + STAGE_X;
  if (lane < 16)
    bulk_load(at + group * KSUB * UNIT_W, p.w + first * (UNIT_W / 4), strips * KSUB * UNIT_W / 4,
              full, policy);
  else if (SCALE_BYTES)
    bulk_load(at + STAGE_W + group * KSUB * SCALE_BYTES, p.scales + first * (SCALE_BYTES / 4),
              strips * KSUB * SCALE_BYTES / 4, full, policy);
}

// The activations of one stage: rows of 128 bytes, 16-byte chunks swizzled by the row.
DEV void produce_activations(const Problem& p, const Ring& r, u32 i, u32 unit) {
  const int lane = threadIdx.x & 31;
  const int m0 = (int)(unit / p.stages % p.batch_tiles) * NB;
  const int chunk = lane & 7;
  const int rows = min(NB, p.m - m0);
  const int k0 = (int)(unit % p.stages) * KSUB * 128 + chunk * 16;  // in bytes
  const int width = p.k * X_BYTES;
  const u8* from = p.x + (u64)(m0 + (lane >> 3)) * width;
#pragma unroll 1
  for (int row = lane >> 3; row < rows; row += 4, from += 4 * (u64)width) {
    const u32 to = r.stage(i) + row * 128 + ((chunk ^ (row & 7)) << 4);
#pragma unroll
    for (int u = 0; u < KSUB; ++u) {
      const bool inside = k0 + u * 128 < width;
      copy16(to + u * NB * 128, inside ? from + k0 + u * 128 : p.x, inside);
    }
  }
  copy_commit();
}

template <int LEFT>
DEV void publish_activations(const Ring& r, u32 i) {
  copy_wait<LEFT>();
  fence_async_shared();
  __syncwarp();
  if ((threadIdx.x & 31) == 0) barrier_arrive(r.full + i * 8);
}

DEV void produce(const Problem& p, const Ring& r) {
  const u32 begin = p.begin(blockIdx.x), end = p.begin(blockIdx.x + 1);
  const u64 policy = evict_first();
  const u32 ahead = min(end - begin, (u32)STAGES);
  // Weights do not depend on the launch before: fetch them while it ends.
  for (u32 i = 0; i < ahead; ++i) produce_weights(p, r, i, begin + i, policy);
  wait_for_previous();
  Place here, behind;
  for (u32 unit = begin; unit < end; ++unit, here.next()) {
    if (unit - begin >= ahead) {
      barrier_wait(r.empty + here.index * 8, here.phase ^ 1);
      produce_weights(p, r, here.index, unit, policy);
    }
    produce_activations(p, r, here.index, unit);
    if (unit - begin >= LAG) {
      publish_activations<LAG>(r, behind.index);
      behind.next();
    }
  }
  let_next_begin();
  copy_wait<0>();
  for (u32 left = min(end - begin, (u32)LAG); left > 0; --left, behind.next())
    publish_activations<0>(r, behind.index);
}

// --- Consumers -----------------------------------------------------------------------------

typedef float Sums[MT][NJ][4];

DEV int strip_of(int mt) {  // this warp's mt-th strip of the tile, 0…ROWS/16-1
  const int warp = threadIdx.x >> 5;
  return ((warp >> 2) * MT + mt) * 4 + (warp & 3);
}

// Where this warp's strips lie in a stage. Those of a short last group stand closer together.
struct Mine {
  u32 place[MT], step[MT];  // of unit 0, and from unit to unit, in strips' units

  DEV explicit Mine(int n_left) {
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      const int strip = strip_of(mt);
      step[mt] = max(1, min(4, (n_left - (strip & ~3) * 16) / 16));
      place[mt] = (strip >> 2) * KSUB * 4 + min(strip & 3, step[mt] - 1);
    }
  }
  // The fragments of unit u, strip mt: a[step][register].
  DEV void load(u32 stage, int u, int mt, u32 (&a)[4][4]) const {
    const u32 at = place[mt] + u * step[mt];
    load_fragments(stage + STAGE_X + at * (UNIT_W / 4),
                   stage + STAGE_X + STAGE_W + at * (SCALE_BYTES / 4), a);
  }
};

#if WG
// One stage by wgmma. On return the last group may still run; `released` is the stage before,
// free as soon as the first group of this one is followed.
DEV void consume(const Ring& r, u32 i, const Mine& mine, Sums& sums, u32 (&a)[2][4][4], int released) {
  const u32 stage = r.stage(i);
#pragma unroll
  for (int u = 0; u < KSUB; ++u)
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) {
      const int turn = (u * MT + mt) & 1;
      mine.load(stage, u, mt, a[turn]);
      wgmma_fence();
      const u64 tile = wgmma_tile(stage + u * NB * 128);
#pragma unroll
      for (int step = 0; step < 4; ++step)
        Wgmma<FP8_MMA, NB>::run(sums[mt], a[turn][step], tile + 2 * step);
      wgmma_commit();
      wgmma_wait<KSUB * MT % 2 == 0>();
      if (u == 0 && mt == 0 && released >= 0 && (threadIdx.x & 31) == 0)
        barrier_arrive(r.empty + released * 8);
    }
}
#else
// One stage by mma.sync.
DEV void consume(const Ring& r, u32 i, const Mine& mine, Sums& sums) {
  const u32 stage = r.stage(i);
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int u = 0; u < KSUB; ++u) {
    u32 a[MT][4][4];
#pragma unroll
    for (int mt = 0; mt < MT; ++mt) mine.load(stage, u, mt, a[mt]);
    const u32 row = stage + u * NB * 128 + (lane & 7) * 128;
#pragma unroll
    for (int j = 0; j < NJ; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 b[4];
        load_matrices(b, row + j * 1024 + (((half * 4 + (lane >> 3)) ^ (lane & 7)) << 4));
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
DEV void store(const Problem& p, void* out, int n0, int m0, const float (&s)[4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#if OUT_BF16
  u32* y = (u32*)out;
  const u32 low = transpose_matrix(pack_bf16x2(s[0], s[1]));   // batch row g, weights 2t, 2t+1
  const u32 high = transpose_matrix(pack_bf16x2(s[2], s[3]));  // … 8 further
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

// Leaves this block's part of `tile` for the last to arrive; true if that is this block, which
// then holds the whole sum.
DEV bool gather(const Problem& p, u32 tile, u32 first, u32 last, int columns, Sums& sums) {
  __shared__ u32 others;
  // A block's slot 0 is for the tile that its piece begins in, slot 1 for the one it ends in.
  const u64 slot = (u64)ROWS * NB / 4;
  float4* slots = (float4*)p.partial + threadIdx.x;
  float4* first_slot = slots + (2 * first + (p.begin(first) < tile * p.stages)) * slot;
  float4* mine = blockIdx.x == first ? first_slot : slots + 2 * blockIdx.x * slot;
#pragma unroll
  for (int i = 0; i < MT * NJ; ++i)
    if (i % NJ < columns) {
      const float(&s)[4] = sums[i / NJ][i % NJ];
      __stcg(mine + i * THREADS, make_float4(s[0], s[1], s[2], s[3]));
    }
  __threadfence();
  named_barrier(1, THREADS);
  if (threadIdx.x == 0) others = atomicAdd(p.arrived + tile, 1);
  named_barrier(1, THREADS);
  if (others != last - first) return false;
  __threadfence();
  if (threadIdx.x == 0) p.arrived[tile] = 0;
  constexpr int TOGETHER = MT * NJ < 8 ? MT * NJ : 8;  // loads in flight for one block's part
#pragma unroll
  for (int i0 = 0; i0 < MT * NJ; i0 += TOGETHER) {
    if (i0 % NJ >= columns) continue;
#pragma unroll
    for (int i = i0; i < i0 + TOGETHER; ++i) {
      const float4 part = __ldcg(first_slot + i * THREADS);
      float(&s)[4] = sums[i / NJ][i % NJ];
      s[0] = part.x, s[1] = part.y, s[2] = part.z, s[3] = part.w;
    }
#pragma unroll(8 / TOGETHER)
    for (u32 c = first + 1; c <= last; ++c) {
      const float4* from = slots + 2 * c * slot;
#pragma unroll
      for (int i = i0; i < i0 + TOGETHER; ++i) {
        const float4 part = __ldcg(from + i * THREADS);
        float(&s)[4] = sums[i / NJ][i % NJ];
        s[0] += part.x, s[1] += part.y, s[2] += part.z, s[3] += part.w;
      }
    }
  }
  return true;
}

template <class Finish>
DEV void write_tile(const Problem& p, u32 tile, void* out, Sums& sums, const Finish& finish) {
  const int n_tile = (int)(tile / p.batch_tiles) * ROWS;
  const int m_tile = (int)(tile % p.batch_tiles) * NB;
  const int g = (threadIdx.x & 31) >> 2;
#pragma unroll
  for (int mt = 0; mt < MT; ++mt) {
    const int n0 = n_tile + strip_of(mt) * 16;
    if (n0 >= p.n) continue;
    const float low = finish(n0 + g), high = finish(n0 + g + 8);
#pragma unroll
    for (int j = 0; j < NJ; ++j) {
      float(&s)[4] = sums[mt][j];
      s[0] *= low, s[1] *= low, s[2] *= high, s[3] *= high;
      if (m_tile + j * 8 < p.m) store(p, out, n0, m_tile + j * 8, s);
    }
  }
}

template <class Finish>
DEV void consume_all(const Problem& p, const Ring& r, void* out, const Finish& finish) {
  const u32 begin = p.begin(blockIdx.x), end = p.begin(blockIdx.x + 1);
  wait_for_previous();  // nothing may be written earlier
  Place here;
  for (u32 unit = begin; unit < end;) {
    const u32 tile = unit / p.stages;
    const u32 start = tile * p.stages;
    const u32 stop = min(end, start + p.stages);
    const Mine mine(p.n - (int)(tile / p.batch_tiles) * ROWS);
    Sums sums = {};
#if WG
    u32 a[2][4][4];
    int held = -1;
    for (; unit < stop; ++unit, here.next()) {
      barrier_wait(r.full + here.index * 8, here.phase);
      consume(r, here.index, mine, sums, a, held);
      held = here.index;
    }
    wgmma_wait<0>();
    if ((threadIdx.x & 31) == 0) barrier_arrive(r.empty + held * 8);
#else
    for (; unit < stop; ++unit, here.next()) {
      barrier_wait(r.full + here.index * 8, here.phase);
      consume(r, here.index, mine, sums);
    }
#endif
    const u32 first = p.owner(start), last = p.owner(start + p.stages - 1);
    const int columns = (p.m - (int)(tile % p.batch_tiles) * NB + 7) / 8;
    if (first == last || gather(p, tile, first, last, columns, sums))
      write_tile(p, tile, out, sums, finish);
  }
}

// What a kernel runs: `finish(n)` is the factor of column n.
template <class Finish>
DEV void stream_gemm(Problem p, void* out, const Finish& finish) {
  extern __shared__ __align__(1024) u8 memory[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  const int units = (p.k + UNIT_K - 1) / UNIT_K;
  p.stages = units / KSUB;
  p.batch_tiles = (p.m + NB - 1) / NB;
  p.line = (p.n + ROWS - 1) / ROWS * p.batch_tiles * p.stages;
  const u32 full = shared_address(barriers);
  const Ring ring = {shared_address(memory), full, full + 8 * STAGES};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(ring.full + i * 8, 2);  // weights announced, activations there
      barrier_init(ring.empty + i * 8, WARPS);
    }
    barrier_init_done();
  }
  __syncthreads();
  if (threadIdx.x >= THREADS) {
    if (PRODUCERS == 4) fewer_registers<40>();
    if (threadIdx.x < THREADS + 32) produce(p, ring);
  } else {
    if (PRODUCERS == 4) more_registers<232>();
    consume_all(p, ring, out, finish);
  }
}
