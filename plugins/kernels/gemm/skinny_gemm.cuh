// Skinny GEMM (m <= 16): y[m, n] = finish(n, Σ_k x[m, k] · w[n, k]). No fix-up between blocks. A
// and B are swapped: weights are the A of mma.sync (m16 tiles), activations its B (8 columns).
//
// A block has whole m16 tiles and all of k, or, in a cluster of SPLITS blocks, a part of k
// (split-K). Warp (wk, wn) takes k-slabs wk, wk + WK, ... of its WARP_TILES m16 tiles. Each warp
// has its own ring of weights, filled by one of its lanes with TMA bulk copies, and two buffers of
// activations; warps do not wait for one another before the epilogue. The ring is filled before the
// wait for the previous launch (PDL), since no launch writes weights.
// Epilogue: a block adds its warps in order of wk, then the cluster's first block adds all blocks:
// the reduction order depends on WK and SPLITS alone. Layout of weights: linear_layout.py.
// NVFP4 34816 x 5120 at 1 row, H200: 26.7 us, floor 23.3 (variants: log/gemm/skinny_gemm.md).
// Macros: BLOCK_M (8 or 16), WK, WN (warps along k, n), WARP_TILES, CHUNK (m16 tiles a stage),
// STAGES, SPLITS, OUT_BF16, RAGGED (n % 16). The including file is the format, as for
// stream_k_gemm.cuh.
#pragma once
#include "common/store_fragment.cuh"

constexpr int KSLAB_W = 16 * (128 / X_BYTES) * ELEMENT_BITS / 8;  // bytes of an m16 tile's k-slab
constexpr int PANEL_TILES = 16;                                   // m16 tiles
constexpr int NJ = BLOCK_M / 8;
constexpr int WARPS = WK * WN;
constexpr int KSLAB_X = BLOCK_M * 128;  // bytes of a k-slab's activations
// With SLAB_SCALES also an f32 for each of 16 rows, then for each of 16 m16 tiles.
#ifdef SLAB_SCALES
constexpr int INPUT = KSLAB_X + 128;
#else
constexpr int INPUT = KSLAB_X;
#endif
constexpr int INPUTS = 2 * INPUT;  // of a warp
constexpr int STAGE = CHUNK * (KSLAB_W + SCALE_BYTES);
constexpr int RING = STAGES * STAGE;                      // of a warp
constexpr int SHARED = WARPS * (RING + INPUTS);           // bytes of dynamic shared memory
constexpr int CHUNKS = (WARP_TILES + CHUNK - 1) / CHUNK;  // stages of a k-slab
constexpr int BLOCK_TILES = WN * WARP_TILES;              // of a block, at most
constexpr int ITEMS = (BLOCK_TILES * NJ + WARPS - 1) / WARPS;
static_assert(WARP_TILES * NJ * 512 <= RING, "a warp's sums take the place of its ring");

struct Problem {
  const u8* x;
  const u8* w;
  const u8* scales;
  int m, n, k;
#ifdef BY_TOKEN
  const float* token_scales;  // [m]
#endif
  const float* x_scales;  // [m, k-slabs] and [⌈n / 128⌉, k-slabs] with SLAB_SCALES
  const float* w_scales;
};

// What a warp has to read, stage by stage: its k-slabs in order, of each its m16 tiles in chunks.
// The m16 tiles are in one panel or in two: `near` and `far` are where the first of each is.
struct Source {
  int slab, last;           // of the next stage; the end of the block's share of k
  int count, in_near;       // m16 tiles, and how many of them in the first panel
  u32 near, far;            // in k-slabs of m16 tiles
  u32 near_step, far_step;  // from this warp's k-slab to its next

  // `slabs` of all k; `m16` is this warp's first, `end` the end of the block's, of `m16_tiles`.
  DEVICE Source(int slab, int last, int slabs, int m16, int end, int m16_tiles)
      : slab(slab), last(last) {
    const int panel = m16 / PANEL_TILES, second = (panel + 1) * PANEL_TILES;
    const int near_wide = min(PANEL_TILES, m16_tiles - panel * PANEL_TILES);
    const int far_wide = min(PANEL_TILES, m16_tiles - second);
    count = min(WARP_TILES, end - m16);
    in_near = min(count, second - m16);
    near = panel * PANEL_TILES * slabs + slab * near_wide + m16 % PANEL_TILES;
    far = second * slabs + slab * far_wide;
    near_step = near_wide * WK, far_step = far_wide * WK;
    if (count <= 0) this->slab = last;
  }
  DEVICE bool there() const { return slab < last; }
  DEVICE void copy(const Problem& p, u32 at, u32 to, int first, int m16_tiles, u32 full,
                   u64 policy) const {
    bulk_load(to + first * KSLAB_W, p.w + (u64)at * KSLAB_W, m16_tiles * KSLAB_W, full, policy);
    if (SCALE_BYTES)
      bulk_load(to + CHUNK * KSLAB_W + first * SCALE_BYTES, p.scales + (u64)at * SCALE_BYTES,
                m16_tiles * SCALE_BYTES, full, policy);
  }
  // Asks for this stage, which is chunk `chunk`, then moves to the next. A stage of no m16 tiles
  // is there at once.
  DEVICE void fetch(const Problem& p, int chunk, u32 to, u32 full, u64 policy) {
    const int from = chunk * CHUNK;
    const int here = CHUNKS == 1 ? count : max(0, min(CHUNK, count - from));
    const int some = CHUNKS == 1 ? in_near : max(0, min(here, in_near - from));
    if (elect_one()) {
      barrier_expect(full, here * (KSLAB_W + SCALE_BYTES));
      if (CHUNKS == 1 || some) copy(p, near + from, to, 0, some, full, policy);
      if (some < here) copy(p, far + max(0, from - in_near), to, some, here - some, full, policy);
    }
    if (chunk + 1 == CHUNKS) slab += WK, near += near_step, far += far_step;
  }
};

// Activations: a warp's two buffers of a k-slab, rows of 128 bytes in which 16-byte pieces are
// swizzled (row r's piece q is in place q ^ r % 8). Rows that are not there are zeros all along.
struct Inputs {
  const u8* from;  // this lane's piece of its row, and of every fourth below, of the next k-slab
  int row, left;   // this lane's row; bytes of it from `from` on
  u32 to, matrix;  // where it goes, and what this lane tells load_matrix
#ifdef SLAB_SCALES
  static_assert(BLOCK_M <= 16 && WARP_TILES <= 16, "a lane copies one scale");
  const float* scale;  // of this lane's activation row, or of its m16 tile
  u32 scale_to;

  // `m16`: of this warp, the first; `end`: of the block's.
  DEVICE void scales(const Problem& p, u32 buffers, int slab, int slabs, int m16, int end) {
    const int lane = lane_id(), tile = m16 + lane - 16;
    const bool there = lane < 16 ? lane < min(p.m, BLOCK_M) : lane - 16 < WARP_TILES && tile < end;
    const float* row = lane < 16 ? p.x_scales + (u64)lane * slabs : p.w_scales + tile / 8 * slabs;
    scale = there ? row + slab : nullptr;
    scale_to = buffers + KSLAB_X + lane * 4;
  }
  DEVICE void fetch_scale(u32 buffer) {
    if (scale == nullptr) return;
    copy_async_few<4>(scale_to + buffer, scale);
    scale += WK;
  }
#endif

  DEVICE Inputs(const Problem& p, u32 buffers, int slab) : row(lane_id() >> 3) {
    const int piece = lane_id() & 7, at = slab * 128 + piece * 16;
    from = p.x + (u64)row * p.k * X_BYTES + at;
    left = p.k * X_BYTES - at;
    to = buffers + row * 128 + ((piece ^ row) << 4);
    matrix = buffers + piece * 128 + ((row ^ piece) << 4);
  }
  // Asks for a k-slab, then moves to this warp's next.
  DEVICE void fetch(const Problem& p, u32 buffer) {
#pragma unroll
    for (int r = 0; r < BLOCK_M; r += 4) {
      const u32 place = (to + r * 128) ^ (r & 4) << 4;
      if (row + r < p.m) copy_async(place + buffer, from + r * (p.k * X_BYTES), left > 0 ? 16 : 0);
    }
    from += WK * 128, left -= WK * 128;
#ifdef SLAB_SCALES
    fetch_scale(buffer);
#endif
  }
  // Matrix step i's are b[j][2i] and b[j][2i + 1] for the j-th 8 rows.
  DEVICE void load(u32 buffer, u32 (&b)[NJ][8]) const {
#pragma unroll
    for (int j = 0; j < NJ; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        load_matrix((u32(&)[4])b[j][half * 4], (matrix + buffer + j * 1024) ^ half << 6);
  }
};

// Scales of a k-slab's products: of a lane's two tokens of each eight, and of the m16 tiles.
struct SlabScales {
#ifdef SLAB_SCALES
  float2 tokens[NJ];
  const float* tiles;

  DEVICE explicit SlabScales(const u8* from) : tiles((const float*)from + 16) {
#pragma unroll
    for (int j = 0; j < NJ; ++j) tokens[j] = ((const float2*)from)[j * 4 + (lane_id() & 3)];
  }
#else
  DEVICE explicit SlabScales(const u8*) {}
#endif
};
// Adds a k-slab's products of an m16 tile.
DEVICE void add_products(const u32 (&a)[4][4], const u32 (&b)[NJ][8], const SlabScales& scales,
                         int tile, float (&sums)[NJ][4]) {
#pragma unroll
  for (int j = 0; j < NJ; ++j) {
#ifdef SLAB_SCALES
    float part[4] = {};
#else
    float (&part)[4] = sums[j];
#endif
#pragma unroll
    for (int step = 0; step < 4; ++step)
      multiply(part, a[step], b[j][2 * step], b[j][2 * step + 1]);
#ifdef SLAB_SCALES
#pragma unroll
    for (int i = 0; i < 4; ++i)
      sums[j][i] =
          fmaf(part[i], scales.tiles[tile] * (i & 1 ? scales.tokens[j].y : scales.tokens[j].x),
               sums[j][i]);
#endif
  }
}

DEVICE void add(float4& sum, const float4& part) {
  sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
}

// The end: item i is 8 batch rows of an m16 tile; a warp has every WARPS-th.
struct Epilogue {
  float2 factors[ITEMS];  // of the rows g and g + 8
  float2 tokens[ITEMS];   // of the columns 2t and 2t + 1
  float4 sums[ITEMS];
  int begin, count;  // m16 tiles of the block

  // The factors are cold: asked for long before they are used.
  template <class Finish>
  DEVICE Epilogue(const Problem& p, int begin, int end, const Finish& finish)
      : begin(begin), count(end - begin) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int n = (begin + item(i) / NJ) * 16 + (lane_id() >> 2);
      factors[i].x = there(i) && n < p.n ? finish(n) : 0;
      factors[i].y = there(i) && n + 8 < p.n ? finish(n + 8) : 0;
    }
  }
  // The scales of tokens, which the launch before writes.
  DEVICE void load_tokens(const Problem& p) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) tokens[i] = token_scales(p, item(i) % NJ * 8);
  }
  DEVICE int item(int i) const { return i * WARPS + threadIdx.x / 32; }
  DEVICE bool there(int i) const { return item(i) / NJ < count; }

  // The sums of the warps, which are in `partial`.
  DEVICE void add_warps(const u8* partial) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (!there(i)) continue;
      const int m16 = item(i) / NJ;
      const u8* from =
          partial + m16 / WARP_TILES * RING + (m16 % WARP_TILES * NJ + item(i) % NJ) * 512;
      sums[i] = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int k0 = 0; k0 < WK; k0 += 8) {
        float4 part[8];
#pragma unroll
        for (int k = 0; k < 8; ++k)
          part[k] = *((const float4*)(from + (k0 + k) * WN * RING) + lane_id());
#pragma unroll
        for (int k = 0; k < 8; ++k) add(sums[i], part[k]);
      }
    }
  }
  // Adds the other blocks' sums in the first. False in the others, which may leave.
  DEVICE bool add_blocks() {
#if SPLITS > 1
    __shared__ float4 others[SPLITS - 1][BLOCK_TILES * NJ][32];
    cluster_wait();  // all have started
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      if (blockIdx.x && there(i))
        store_in_block(&others[blockIdx.x - 1][item(i)][lane_id()], 0, sums[i]);
    cluster_arrive();
    if (blockIdx.x) return false;
    cluster_wait();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
      for (int s = 0; s < SPLITS - 1 && there(i); ++s) add(sums[i], others[s][item(i)][lane_id()]);
#endif
    return true;
  }
  DEVICE void write(const Problem& p, void* y) const {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (!there(i)) continue;
      const float2 f = factors[i];
      const float4 s = sums[i];
      const float scaled[4] = {s.x * f.x, s.y * f.x, s.z * f.y, s.w * f.y};
      store_fragment<RAGGED || !OUT_BF16>(p, y, (begin + item(i) / NJ) * 16, item(i) % NJ * 8,
                                          scaled, tokens[i]);
    }
  }
};

// What a kernel runs: `finish(n)` is the factor of column n, `each` the m16 tiles of a cluster;
// blockIdx = (share of k, m16 tiles).
template <class Finish>
DEVICE void skinny_gemm(const Problem& p, void* y, int each, const Finish& finish) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(8) u64 barriers[WARPS][STAGES];
  // The compiler knows then that a warp's lanes agree: its cursors stay out of their registers.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = lane_id();
  const int wk = warp / WN;
  const u32 ring = shared_address(memory) + warp * RING, full = shared_address(barriers[warp]);
  const int slabs = (p.k * X_BYTES + 127) / 128, m16_tiles = (p.n + 15) / 16;
  const int first = slabs * blockIdx.x / SPLITS + wk, last = slabs * (blockIdx.x + 1) / SPLITS;
  const int begin = blockIdx.y * each, end = min(m16_tiles, begin + each);
  Source source(first, last, slabs, begin + warp % WN * WARP_TILES, end, m16_tiles);
  const u64 policy = evict_first_policy();
  if (elect_one()) {
#pragma unroll
    for (int i = 0; i < STAGES; ++i) barrier_init(full + i * 8, 1);
    barrier_init_fence();
  }
  __syncwarp();
  int turns = source.there() ? (last - first + WK - 1) / WK : 0;
#pragma unroll
  for (int i = 0; i < STAGES; ++i)
    if (source.there()) source.fetch(p, i % CHUNKS, ring + i * STAGE, full + i * 8, policy);
  u8* buffers = memory + WARPS * RING + warp * INPUTS;
  if (p.m < BLOCK_M)
    for (int i = lane; i < INPUTS / 16; i += 32) ((uint4*)buffers)[i] = make_uint4(0, 0, 0, 0);
  __syncwarp();
  Inputs inputs(p, shared_address(buffers), first);
#ifdef SLAB_SCALES
  inputs.scales(p, shared_address(buffers), first, slabs, begin + warp % WN * WARP_TILES, end);
#endif
#if SPLITS > 1
  cluster_arrive();
#endif
  Epilogue epilogue(p, begin, end, finish);
  wait_for_previous();
  launch_dependents();
  epilogue.load_tokens(p);
  if (turns > 0) inputs.fetch(p, 0);
  commit_copies();
  u32 buffer = 0, slot = 0, phase = 0;
  float sums[WARP_TILES][NJ][4] = {};
#pragma unroll 1
  for (; turns > 0; --turns) {
    if (turns > 1) inputs.fetch(p, buffer ^ INPUT);
    commit_copies();
    wait_copies<1>();
    __syncwarp();
    u32 b[NJ][8];
    inputs.load(buffer, b);
    const SlabScales scales(buffers + buffer + KSLAB_X);
    buffer ^= INPUT;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const u32 stage = ring + slot * STAGE, ready = full + slot * 8;
      barrier_wait_whole(ready, phase);
#pragma unroll
      for (int i = 0; i < CHUNK && c * CHUNK + i < WARP_TILES; ++i) {
        u32 a[4][4];
        decode(load(stage + i * KSLAB_W, stage + CHUNK * KSLAB_W + i * SCALE_BYTES), a);
        add_products(a, b, scales, c * CHUNK + i, sums[c * CHUNK + i]);
      }
      __syncwarp();
      if (source.there()) source.fetch(p, (c + STAGES) % CHUNKS, stage, ready, policy);
      if (++slot == STAGES) slot = 0, phase ^= 1;
    }
  }
  float4* to = (float4*)(memory + warp * RING) + lane;
#pragma unroll
  for (int i = 0; i < WARP_TILES * NJ; ++i) {
    const float (&s)[4] = sums[i / NJ][i % NJ];
    to[i * 32] = make_float4(s[0], s[1], s[2], s[3]);
  }
  __syncthreads();
  epilogue.add_warps(memory);
  if (epilogue.add_blocks()) epilogue.write(p, y);
}
