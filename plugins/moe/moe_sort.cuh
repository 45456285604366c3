// First launch of moe_wide.cu: the pairs (token, expert) sorted by expert and cut into tiles of
// tokens, and the activations with k in the order of the fragments.
//
// `order`: pairs by expert. `tiles`: [0].x is their number, then (expert, first place in `order`,
// count), those of most tokens first: then blocks that take every so-many-th end together. Where
// in its tile a pair stands, and a tile among its equals, depends on a race of atomics; no result
// does, since a token's column of a product does not depend on its neighbours.
#pragma once
#include "moe/moe_common.cuh"

constexpr int SORT_THREADS = 1024;
constexpr int SORT_BLOCKS = 8;  // a cluster: atomics of one SM take a clock a pair
constexpr int TOGETHER = 4;     // ids in flight for a thread

// Calls `each(pair)` for this block's pairs, TOGETHER at a time.
template <class Each>
DEVICE void for_pairs(int pairs, const Each& each) {
  const int share = (pairs + SORT_BLOCKS - 1) / SORT_BLOCKS, from = blockIdx.x * share;
  const int end = min(from + share, pairs);
#pragma unroll TOGETHER
  for (int i = from + threadIdx.x; i < end; i += SORT_THREADS) each(i);
}

DEVICE int eights(int tokens) { return (tokens + 7) / 8; }

// Calls `what(expert, first, n, size)` for n tiles of `size` tokens, the first-th of the expert's
// and the following: all but its last, then that. They are of nearly equal size.
template <class What>
DEVICE void for_tiles(const int* all, const What& what) {
  for (int e = threadIdx.x; e < EXPERTS; e += SORT_THREADS) {
    const int n = (all[e] + BLOCK_M - 1) / BLOCK_M;
    if (n == 0) continue;
    const int size = eights((all[e] + n - 1) / n) * 8;
    if (n > 1) what(e, 0, n - 1, size);
    what(e, (n - 1) * size, 1, all[e] - (n - 1) * size);
  }
}

// One block: the tiles of experts that have `all` pairs each, from `first` on.
DEVICE void cut_tiles(const int* first, const int* all, int4* tiles) {
  constexpr int SIZES = BLOCK_M / 8;
  __shared__ int next[SIZES];
  if (threadIdx.x < SIZES) next[threadIdx.x] = 0;
  __syncthreads();
  for_tiles(all, [&](int, int, int n, int size) { atomicAdd(next + SIZES - eights(size), n); });
  __syncthreads();
  if (threadIdx.x == 0) {
    int before = 1;
    for (int i = 0; i < SIZES; ++i) before += next[i], next[i] = before - next[i];
    tiles[0].x = before - 1;
  }
  __syncthreads();
  for_tiles(all, [&](int e, int from, int n, int size) {
    const int at = atomicAdd(next + SIZES - eights(size), n);
    for (int i = 0; i < n; ++i) tiles[at + i] = make_int4(e, first[e] + from + i * size, size, 0);
  });
}

// The first SORT_BLOCKS blocks, a cluster. `ranks`: a pair's place among its expert's of its block.
DEVICE void sort_pairs(const int* ids, int pairs, int* ranks, int* order, int4* tiles) {
  __shared__ int count[EXPERTS], all[EXPERTS], begin[EXPERTS];
  for (int e = threadIdx.x; e < EXPERTS; e += SORT_THREADS) count[e] = 0;
  __syncthreads();
  for_pairs(pairs, [&](int i) { ranks[i] = atomicAdd(count + __ldcg(ids + i), 1); });
  cluster_meet();
  for (int e = threadIdx.x; e < EXPERTS; e += SORT_THREADS) {
    int sum = 0, before = 0;
#pragma unroll
    for (int block = 0; block < SORT_BLOCKS; ++block) {
      if (block == blockIdx.x) before = sum;
      sum += load_of_block(count + e, block);
    }
    all[e] = sum, begin[e] = before;
  }
  cluster_meet();          // nobody reads here any more
  if (threadIdx.x < 32) {  // sums of pairs before each expert
    constexpr int EACH = (EXPERTS + 31) / 32;
    const int from = threadIdx.x * EACH;
    int own = 0;
    for (int e = from; e < min(from + EACH, EXPERTS); ++e) own += all[e];
    int before = own;
    for (int d = 1; d < 32; d *= 2) {
      const int a = __shfl_up_sync(~0u, before, d);
      if (threadIdx.x >= d) before += a;
    }
    before -= own;
    for (int e = from; e < min(from + EACH, EXPERTS); ++e) count[e] = before, before += all[e];
  }
  __syncthreads();
  for_pairs(pairs, [&](int i) {
    const int e = __ldcg(ids + i);
    order[count[e] + begin[e] + ranks[i]] = i;
  });
  if (blockIdx.x == 0) cut_tiles(count, all, tiles);
}

// The transpose of four words by four lanes, `stride` and 2 · `stride` apart; `mine`: which one.
DEVICE void transpose_words(uint4& v, int mine, int stride) {
  const auto swap = [](bool high, u32& a, u32& b, int apart) {
    const u32 got = __shfl_xor_sync(~0u, high ? a : b, apart);
    (high ? a : b) = got;
  };
  swap(mine & 1, v.x, v.y, stride), swap(mine & 1, v.z, v.w, stride);
  swap(mine & 2, v.x, v.z, 2 * stride), swap(mine & 2, v.y, v.w, 2 * stride);
}

// 16 bytes a lane: eight k, the h-th half of the t-th 16 of a k-slab. Chunk q of 16 bytes of the
// result holds the q-th pairs of the four halves h.
DEVICE void reorder_rows(const u8* x, u8* out, int tokens) {
  constexpr int CHUNKS = Side<true>::SLABS * 8;
  const i64 all = (i64)tokens * CHUNKS, step = (i64)(gridDim.x - SORT_BLOCKS) * SORT_THREADS;
  const int lane = lane_id(), t = lane >> 1 & 3, h = lane & 1;
  i64 first = (i64)(blockIdx.x - SORT_BLOCKS) * SORT_THREADS + threadIdx.x - lane;  // the warp's
  for (; first < all; first += TOGETHER * step) {
    uint4 v[TOGETHER];
#pragma unroll
    for (int u = 0; u < TOGETHER; ++u) {
      const i64 i = first + u * step + lane;
      const int k = (int)(i % CHUNKS) * 8;
      v[u] = make_uint4(0, 0, 0, 0);
      if (i < all && (HIDDEN % 64 == 0 || k < HIDDEN))
        v[u] = __ldcg((const uint4*)(x + (i / CHUNKS * HIDDEN + k) * 2));
    }
#pragma unroll
    for (int u = 0; u < TOGETHER; ++u) {
      transpose_words(v[u], t, 2);
      const i64 i = first + u * step + lane;
      if (i < all) ((uint4*)out)[i - (lane & 7) + h * 4 + t] = v[u];
    }
  }
}

// The first cluster sorts, the others reorder.
extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    moe_sort(const u8* x, const int* ids, u8* reordered, int* ranks, int* order, int4* tiles,
             int tokens) {
  wait_for_previous();
  launch_dependents();
  if (blockIdx.x < SORT_BLOCKS) sort_pairs(ids, tokens * K1, ranks, order, tiles);
  else reorder_rows(x, reordered, tokens);
}
