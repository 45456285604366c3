// Epilogue of stream_k_gemm.cuh: the stream-K fix-up of a tile's partial sums, then the store.
//
// A tile that is within one block's piece is stored from registers. Of a tile cut in two the
// block of the first part adds the second. Of a tile cut in more, each block adds every so-many-th
// group of 8 columns. Partial sums pass through f32 slots in global memory, warp by warp, and are
// added in ascending k: results do not depend on timing.
// GELU, if given: factors are added, as biases; then gelu (1: tanh's approximation, 2: by erf; 0:
// none), and with RESIDUAL the bf16 of the problem's `residual`.
#pragma once
#include "common/store_fragment.cuh"
#include "gemm/stream_k/stream_k_producer.cuh"

typedef float Sums[WARP_TILES][NJ][4];

// Warps take m16 tiles first, then, of WARPS_M, the next part of the tokens.
constexpr int WARPS_N = WARPS / WARPS_M;

// This warp's first token of the tile.
DEVICE int warp_m() { return WARPS_M > 1 ? (threadIdx.x >> 5) / WARPS_N * NJ * 8 : 0; }

DEVICE int m16_of(int mt) {  // this warp's mt-th of the tile, 0…BLOCK_N/16-1
  const int warp = (threadIdx.x >> 5) - (WARPS_M > 1 ? warp_m() / (NJ * 8) * WARPS_N : 0);
  return ((warp >> 2) * WARP_TILES + mt) * 4 + (warp & 3);
}

// A block's slot 0 is for the tile that its piece begins in, slot 1 for the one it ends in.
DEVICE float4* slot(const Problem& p, u32 block, u32 which) {
  return (float4*)p.partial + (u64)(2 * block + which) * (BLOCK_N * BLOCK_M / 4) + threadIdx.x;
}

// Leaves this warp's part of a tile in a slot; nothing is waited for.
DEVICE void store_partial(const Problem& p, u32 which, u32 columns, const Sums& sums) {
  float4* mine = slot(p, blockIdx.x, which);
#pragma unroll
  for (int i = 0; i < WARP_TILES * NJ; ++i)
    if (i % NJ < columns) {
      const float (&s)[4] = sums[i / NJ][i % NJ];
      __stcg(mine + i * THREADS, make_float4(s[0], s[1], s[2], s[3]));
    }
}

// The blocks that have a part of a tile.
struct Parts {
  u32 start, first, last;
  DEVICE Parts(const Problem& p, u32 tile)
      : start(tile * p.stages), first(p.owner(start)), last(p.owner(start + p.stages - 1)) {}
  DEVICE u32 count() const { return last - first + 1; }
  // Two parts are added by the block of the first, which still has it.
  DEVICE bool two() const { return last == first + 1; }
  // Which of a block's two tiles this is.
  DEVICE u32 which(const Problem& p, u32 block) const { return p.begin(block) < start; }
};

// What this warp of a block has learned of one of the block's tiles: how many parts are there.
DEVICE u32* counter(const Problem& p, u32 block, u32 which) {
  return p.arrived + (2 * block + which) * WARPS + threadIdx.x / 32;
}

// Tells the same warp of the first so many blocks of a tile that this part is there. Warps do this
// each on their own: none waits for another.
DEVICE void announce_partial(const Problem& p, const Parts& parts, u32 readers) {
  __threadfence();
  __syncwarp();
  for (u32 i = threadIdx.x & 31; i < readers; i += 32)
    atomicAdd(counter(p, parts.first + i, i == 0 && parts.which(p, parts.first)), 1);
}

// Waits until this warp has learned of so many parts. All blocks run at once, at most one a
// multiprocessor, so that none waits for one that cannot begin.
DEVICE void await_partials(const Problem& p, u32 which, u32 parts) {
  u32* arrived = counter(p, blockIdx.x, which);
  wait_until_equal(arrived, parts);
  __syncwarp();
  if ((threadIdx.x & 31) == 0) *arrived = 0;
}

// Adds the second part of a tile of two to the first.
DEVICE void fix_up_two(const Problem& p, const Parts& parts, u32 columns, Sums& sums) {
  await_partials(p, parts.which(p, parts.first), 1);
  const float4* from = slot(p, parts.last, 0);
#pragma unroll
  for (int i = 0; i < WARP_TILES * NJ; ++i) {
    if (i % NJ >= columns) continue;
    const float4 part = __ldcg(from + i * THREADS);
    float (&s)[4] = sums[i / NJ][i % NJ];
    s[0] += part.x, s[1] += part.y, s[2] += part.z, s[3] += part.w;
  }
}

// Groups of 8 activation rows of this warp's part of a tile that are there.
DEVICE u32 columns_of(const Problem& p, u32 tile) {
  const int left = (p.m - (int)(tile % p.batch_tiles) * BLOCK_M - warp_m() + 7) / 8;
  return WARPS_M == 1 ? min(NJ, left) : max(0, min(NJ, left));
}

// The factors of the rows that a lane holds of a tile, two of each m16 tile. With one m16 tile a
// warp they are fetched at once, before parts are waited for: 0.1 to 0.4 us of a tile's end. With
// AHEAD a whole tile's are fetched before its products, with its tokens' scales.
#ifdef BY_TOKEN
constexpr bool AHEAD = WARP_TILES == 1 && NJ <= 8;
#else
constexpr bool AHEAD = false;
#endif
constexpr int COLUMNS_AHEAD = AHEAD ? NJ : 1;
constexpr int TOGETHER = NJ < 16 ? NJ : 16;  // columns of which tokens' scales are fetched at once
template <class Finish>
struct Factors {
  const Problem& p;
  const Finish& finish;
  int tile_n;
  float2 early, tokens[COLUMNS_AHEAD];

  DEVICE Factors(const Problem& p, const Finish& finish) : p(p), finish(finish) {}
  DEVICE Factors(const Problem& p, const Corner& at, const Finish& finish) : Factors(p, finish) {
    load(at);
  }
  DEVICE void load(const Corner& at) {
    tile_n = at.n;
    if (WARP_TILES == 1) early = fetch(0);
    if (AHEAD)
#pragma unroll
      for (int j = 0; j < NJ; ++j) tokens[j] = token_scales(p, at.m + warp_m() + j * 8);
  }
  DEVICE float2 fetch(int mt) const {
    const int n0 = tile_n + m16_of(mt) * 16, n = n0 + ((threadIdx.x & 31) >> 2);
    if (n0 >= p.n) return make_float2(0, 0);
    const float low = RAGGED && n >= p.n ? 0 : finish(n);
    return make_float2(low, RAGGED && n + 8 >= p.n ? 0 : finish(n + 8));
  }
  DEVICE float2 of(int mt) const { return WARP_TILES == 1 ? early : fetch(mt); }
};

#ifdef GELU
// x · Φ(x), or its approximation by tanh. 1 − erf within 1.5e-7 (Abramowitz & Stegun 7.1.26).
DEVICE float gelu(float x) {
  if (GELU == 1) {
    const float u = 1.5957691216f * fmaf(0.044715f * x * x, x, x);
    return __fdividef(x, 1.0f + __expf(-u));
  }
  if (GELU == 2) {
    const float z = fabsf(x) * 0.7071067812f, t = __fdividef(1.0f, fmaf(0.3275911f, z, 1.0f));
    float tail = fmaf(fmaf(1.061405429f, t, -1.453152027f), t, 1.421413741f);
    tail = 0.5f * x * fmaf(fmaf(tail, t, -0.284496736f), t, 0.254829592f) * t * __expf(-z * z);
    return x < 0.0f ? tail : x - tail;
  }
  return x;
}
#endif

// The sums of a fragment, with a lane's two factors.
DEVICE void apply(float (&s)[4], const float2& factor) {
#ifdef GELU
  s[0] = gelu(s[0] + factor.x), s[1] = gelu(s[1] + factor.x);
  s[2] = gelu(s[2] + factor.y), s[3] = gelu(s[3] + factor.y);
#else
  s[0] *= factor.x, s[1] *= factor.x, s[2] *= factor.y, s[3] *= factor.y;
#endif
}

#if RESIDUAL
// Of a fragment: as pairs are stored, or with RAGGED as a lane holds its sums.
DEVICE uint2 load_residual(const Problem& p, int n0, int m0) {
  const int g = lane_id() >> 2, t = lane_id() & 3;
  if (RAGGED) {
    u32 pairs[2] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = m0 + 2 * t + (i & 1), n = n0 + g + (i & 2) * 4;
      if (row < p.m && n < p.n)
        pairs[i / 2] |= (u32)__ldcg(p.residual + (u64)row * p.n + n) << (i & 1) * 16;
    }
    return make_uint2(pairs[0], pairs[1]);
  }
  if (m0 + g >= p.m) return make_uint2(0, 0);
  const u32* from = (const u32*)p.residual + ((u64)(m0 + g) * p.n + n0) / 2 + t;
  return make_uint2(__ldcg(from), __ldcg(from + 4));
}

DEVICE void add_residual(float (&s)[4], const uint2& pairs) {
  const u32 low = RAGGED ? pairs.x : transpose_matrix<true>(pairs.x);
  const u32 high = RAGGED ? pairs.y : transpose_matrix<true>(pairs.y);
  s[0] += low_bf16(low), s[1] += high_bf16(low), s[2] += low_bf16(high), s[3] += high_bf16(high);
}
constexpr int FETCHED = NJ < 8 ? NJ : 8;  // fragments of residuals in flight at once
#endif

template <class Finish>
DEVICE void write_tile(const Problem& p, const Corner& at, void* out, Sums& sums,
                       const Factors<Finish>& factors) {
#pragma unroll
  for (int mt = 0; mt < WARP_TILES; ++mt) {
    const int n0 = at.n + m16_of(mt) * 16;
    if (n0 >= p.n) continue;
    const float2 factor = factors.of(mt);
    float2 tokens[TOGETHER];
#if RESIDUAL
    uint2 residuals[FETCHED];
#endif
#pragma unroll
    for (int j = 0; j < NJ; ++j) {
      if (!AHEAD && j % TOGETHER == 0)
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i)
          tokens[i] = token_scales(p, at.m + warp_m() + (j + i) * 8);
      float (&s)[4] = sums[mt][j];
      apply(s, factor);
      const int m0 = at.m + warp_m() + j * 8;
#if RESIDUAL
      if (j % FETCHED == 0)
#pragma unroll
        for (int i = 0; i < FETCHED; ++i) residuals[i] = load_residual(p, n0, m0 + i * 8);
      add_residual(s, residuals[j % FETCHED]);
#endif
      const float2 scales = AHEAD ? factors.tokens[j % COLUMNS_AHEAD] : tokens[j % TOGETHER];
      if (m0 < p.m) store_fragment(p, out, n0, m0, s, scales);
    }
  }
}

// The end of a tile of three or more parts: each of its blocks adds the parts, in ascending k, of
// every so-many-th 8 columns of each warp's share, and writes them.
template <class Finish>
DEVICE void fix_up_tile(const Problem& p, u32 tile, void* out, const Finish& finish) {
  const Parts at_work(p, tile);
  const u32 first = at_work.first, parts = at_work.count();
  const Corner at(p, tile);
  const u32 columns = columns_of(p, tile), count = WARP_TILES * columns, mine = blockIdx.x - first;
  if (mine >= count || at_work.two()) return;
  const Factors<Finish> factors(p, at, finish);
  await_partials(p, at_work.which(p, blockIdx.x), parts);
  const u64 skip = slot(p, first + 1, 0) - slot(p, first, 0);
  const float4* head = slot(p, first, at_work.which(p, first));
  const float4* others = slot(p, first, 0);
  constexpr int LOADS = 8;         // in flight
  u32 next = mine, next_part = 0;  // to be loaded
  float4 sum;
#pragma unroll 1
  for (u32 i = mine, part = 0; i < count;) {
    float4 got[LOADS];
#pragma unroll
    for (int t = 0; t < LOADS; ++t) {
      if (next >= count) continue;
      const u32 at_sum = next < columns ? next : next - columns + NJ;
      got[t] = __ldcg((next_part ? others + next_part * skip : head) + at_sum * THREADS);
      if (++next_part == parts) next_part = 0, next += parts;
    }
#pragma unroll
    for (int t = 0; t < LOADS; ++t) {
      if (i >= count) continue;
      if (part == 0) sum = make_float4(0, 0, 0, 0);
      sum.x += got[t].x, sum.y += got[t].y, sum.z += got[t].z, sum.w += got[t].w;
      if (++part < parts) continue;
      const u32 mt = i >= columns;
      const int n0 = at.n + m16_of(mt) * 16;
      if (n0 < p.n) {
        const float2 factor = factors.of(mt);
        float s[4] = {sum.x, sum.y, sum.z, sum.w};
        apply(s, factor);
        const int m0 = at.m + warp_m() + (i - mt * columns) * 8;
#if RESIDUAL
        add_residual(s, load_residual(p, n0, m0));
#endif
        store_fragment(p, out, n0, m0, s, token_scales(p, m0));
      }
      part = 0, i += parts;
    }
  }
}

// The tiles of which this block had a part, at most two.
template <class Finish>
DEVICE void fix_up(Problem p, void* out, const Finish& finish) {
  p.n = recomputed(p.n), p.k = forget(p.k);  // or what is computed here is held all along
  p.divide();
  const u32 block = forget(blockIdx.x);
  const u32 begin = p.begin(block), end = p.begin(block + 1);
  if (begin == end) return;
  const u32 low = begin / p.stages, high = (end - 1) / p.stages;
#pragma unroll 1
  for (u32 tile = low; tile <= high; tile += max(1, high - low))
    if (begin > tile * p.stages || end < (tile + 1) * p.stages) fix_up_tile(p, tile, out, finish);
}
