// First launches of experts_wide_wgmma_sm90.cu and experts_tiles.cuh: pairs (token, expert) by
// expert, in tiles of tokens; for wide also the activations, k in the order of the fragments.
//
// `order`: pairs by expert. `tiles`: [0].x is their number, then (expert, first place in `order`,
// count). Where in its tile a pair is depends on a race of atomics; no result does, since a
// token's column of a product does not depend on its neighbours.
// Variants: benchmarks/log/moe/experts_wide_wgmma_sm90.md.
// Macros: SORT_BLOCKS, if given: so many blocks sort without a cluster, in two launches.
#pragma once
#include "moe/experts/experts_common.cuh"

constexpr int SORT_THREADS = 1024;
// Atomics of one SM take a clock a pair: hence a cluster, or a launch that counts.
#ifdef SORT_BLOCKS
constexpr bool COUNTED = true;
constexpr int SORTERS = SORT_BLOCKS;
#else
constexpr bool COUNTED = false;
constexpr int SORTERS = 8;
#endif
constexpr int TOGETHER = 9;  // ids in flight for a thread: of 8 x 8,192 pairs and a shared expert

// Calls `each(pair, its id, its rank)` for this block's pairs; the loads of TOGETHER come first,
// since what `each` stores might be what it loads, for all that the compiler knows. `ranks` of
// nullptr: 0.
template <class Each>
DEVICE void for_pairs(const int* ids, const int* ranks, int pairs, const Each& each) {
  const int share = (pairs + SORTERS - 1) / SORTERS, from = blockIdx.x * share;
  const int end = min(from + share, pairs);
  for (int first = from + threadIdx.x; first < end; first += TOGETHER * SORT_THREADS) {
    int id[TOGETHER], rank[TOGETHER] = {};
#pragma unroll
    for (int t = 0; t < TOGETHER; ++t) {
      const int i = min(first + t * SORT_THREADS, end - 1);
      id[t] = __ldcg(ids + i);
      if (ranks) rank[t] = __ldcg(ranks + i);
    }
#pragma unroll
    for (int t = 0; t < TOGETHER; ++t)
      if (first + t * SORT_THREADS < end) each(first + t * SORT_THREADS, id[t], rank[t]);
  }
}

// Tiles of so many tokens of an expert, and what the largest has: they are nearly equal.
DEVICE int tiles_of(int tokens) { return (tokens + BLOCK_M - 1) / BLOCK_M; }
DEVICE int tile_size(int tokens) {
  const int n = tiles_of(tokens);
  return n ? ((tokens + n - 1) / n + 7) / 8 * 8 : 0;
}

// A pair's place among its expert's of its block.
DEVICE void rank_pairs(const int* ids, int pairs, int* ranks, int (&count)[EXPERTS]) {
  for (int e = threadIdx.x; e < EXPERTS; e += SORT_THREADS) count[e] = 0;
  __syncthreads();
  for_pairs(ids, nullptr, pairs,
            [&](int i, int id, int) { __stcg(ranks + i, atomicAdd(count + id, 1)); });
}

// The first SORTERS blocks. `counts`, where a launch counted: of each block and expert.
DEVICE void sort_pairs(const int* ids, int pairs, int* ranks, const int* counts, int* order,
                       int4* tiles) {
  __shared__ int count[EXPERTS], all[EXPERTS], begin[EXPERTS], tile[EXPERTS];
  // Without a cluster: persistent blocks take tiles in turns, so the longest are first, and all end
  // together. An expert's tiles stay neighbours: they share weights.
  constexpr bool LONGEST = COUNTED;
  __shared__ int turn[LONGEST ? EXPERTS : 1], cuts[LONGEST ? EXPERTS : 1];
  if (!COUNTED) rank_pairs(ids, pairs, ranks, count), cluster_meet();
  for (int e = threadIdx.x; e < EXPERTS; e += SORT_THREADS) {
    int sum = 0, before = 0;
#pragma unroll
    for (int block = 0; block < SORTERS; ++block) {
      if (block == blockIdx.x) before = sum;
      sum += COUNTED ? __ldcg(counts + block * EXPERTS + e) : load_of_block(count + e, block);
    }
    all[e] = sum, begin[e] = before;
    if (LONGEST) tile[e] = tile_size(sum);
  }
  if (COUNTED) __syncthreads();
  else cluster_meet();  // no block reads here any more
  if (LONGEST) {
    for (int e = threadIdx.x; e < EXPERTS; e += SORT_THREADS) {
      const int size = tile[e];
      int before = 0;
#pragma unroll 8
      for (int i = 0; i < EXPERTS; ++i) before += tile[i] > size || (tile[i] == size && i < e);
      turn[e] = before, cuts[before] = tiles_of(all[e]);
    }
    __syncthreads();
  }
  if (threadIdx.x < 32) {  // sums of pairs and of tiles before each expert
    constexpr int EACH = (EXPERTS + 31) / 32;
    const int from = threadIdx.x * EACH;
    int own = 0, cut = 0;
    for (int e = from; e < min(from + EACH, EXPERTS); ++e)
      own += all[e], cut += LONGEST ? cuts[e] : tiles_of(all[e]);
    int before = own, tiles_before = cut;
    for (int d = 1; d < 32; d *= 2) {
      const int a = __shfl_up_sync(~0u, before, d), b = __shfl_up_sync(~0u, tiles_before, d);
      if (threadIdx.x >= d) before += a, tiles_before += b;
    }
    if (threadIdx.x == 31 && blockIdx.x == 0) tiles[0].x = tiles_before;
    before -= own, tiles_before -= cut;
    for (int e = from; e < min(from + EACH, EXPERTS); ++e) {
      count[e] = before, tile[e] = tiles_before;
      before += all[e], tiles_before += LONGEST ? cuts[e] : tiles_of(all[e]);
    }
  }
  __syncthreads();
  for_pairs(ids, ranks, pairs,
            [&](int i, int id, int rank) { order[count[id] + begin[id] + rank] = i; });
  if (blockIdx.x) return;
  for (int e = threadIdx.x; e < EXPERTS; e += SORT_THREADS) {
    const int n = tiles_of(all[e]), size = tile_size(all[e]), first = tile[LONGEST ? turn[e] : e];
    for (int i = 0; i < n; ++i)
      tiles[1 + first + i] = make_int4(e, count[e] + i * size, min(size, all[e] - i * size), 0);
  }
}

// Two of four words of lanes LANES apart change places, so that two rounds transpose 4 x 4.
template <int LANES>
DEVICE void swap_words(u32 (&v)[4], bool high) {
  constexpr int APART = LANES / 2;  // words: of lanes 2 apart one, of lanes 4 apart two
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int low = APART == 1 ? 2 * i : i;
    const u32 got = __shfl_xor_sync(~0u, high ? v[low] : v[low + APART], LANES);
    (high ? v[low] : v[low + APART]) = got;
  }
}
// Sixteen bytes a lane, a k-slab of 64 eight lanes: of the h-th eight of each 16 k chunk q of the
// result holds the q-th pairs.
DEVICE void reorder_rows(const u8* x, u8* out, int tokens) {
  constexpr int CHUNKS = Side<true>::SLABS * 8, AT_ONCE = 4;
  const i64 all = (i64)tokens * CHUNKS, step = (i64)(gridDim.x - SORTERS) * SORT_THREADS;
  const int t = lane_id() / 2 % 4, half = lane_id() % 2;
  const i64 first = (i64)(blockIdx.x - SORTERS) * SORT_THREADS + threadIdx.x;
  for (i64 from = first - lane_id(); from < all; from += AT_ONCE * step) {  // a warp together
    uint4 v[AT_ONCE];
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      const i64 i = from + n * step + lane_id();
      const int chunk = (int)(i % CHUNKS);
      const bool there = i < all && (HIDDEN % 64 == 0 || chunk * 8 < HIDDEN);
      v[n] = load_if16(there, x + (i / CHUNKS * HIDDEN + chunk * 8) * 2);
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; ++n) {
      u32 words[4] = {v[n].x, v[n].y, v[n].z, v[n].w};
      swap_words<2>(words, t & 1);
      swap_words<4>(words, t & 2);
      const i64 i = from + n * step + lane_id();
      if (i < all)
        *(uint4*)(out + (i / 8 * 8 + half * 4 + t) * 16) =
            make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

#ifdef SORT_BLOCKS
extern "C" __global__ void __launch_bounds__(SORT_THREADS, 1)  // else ptxas spills for two blocks
    moe_count(const int* ids, int* ranks, int tokens) {
  __shared__ int count[EXPERTS];
  wait_then_launch_dependents();
  rank_pairs(ids, tokens * K1, ranks, count);
  __syncthreads();
  int* const counts = ranks + tokens * K1 + blockIdx.x * EXPERTS;
  for (int e = threadIdx.x; e < EXPERTS; e += SORT_THREADS) counts[e] = count[e];
}
extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    moe_sort(const int* ids, int* ranks, int* order, int4* tiles, int tokens) {
  wait_then_launch_dependents();
  sort_pairs(ids, tokens * K1, ranks, ranks + tokens * K1, order, tiles);
}
#else
// The first cluster sorts, the others reorder.
extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    moe_sort(const u8* x, const int* ids, u8* reordered, int* ranks, int* order, int4* tiles,
             int tokens) {
  wait_then_launch_dependents();
  if (blockIdx.x < SORTERS) sort_pairs(ids, tokens * K1, ranks, nullptr, order, tiles);
  else reorder_rows(x, reordered, tokens);
}
#endif
