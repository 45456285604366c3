// The ids that followed the last tokens of a row's text where they were before, as drafts.
//
// Block (part, row): each thread compares LOADS times four ids of a page, loaded together, with the
// last token; only where one is equal it reads back. The greatest (ids that match, place) of the
// row is an atomic maximum, which does not depend on the order. The last block of a row writes the
// drafts and resets both words to zero for the next launch. A row without a token reads nothing.
// The text ends with the slot's last token, which is in no page yet. Not timed yet
// (log/sampling/draft_rounds.md).
// Macros: PAGE (tokens of one, a multiple of 4), PAGES (of a slot), DRAFTS (of a slot), LEAST and
// MOST (ids of a match), HELD (drafts of the head in this round), LOADS, THREADS.
#include "common/numeric.cuh"

DEVICE u64 greater(u64 a, u64 b) { return a > b ? a : b; }

extern "C" __global__ void __launch_bounds__(THREADS)
    match_drafts(const int* pages, const int* table, const int* last, const int* slots,
                 const int* starts, const int* counts, int* matched, int* drafts, u64* best,
                 int* arrived) {
  __shared__ u64 warp_best[THREADS / 32];
  __shared__ int key[MOST];  // the end of the text, the last token first
  wait_for_previous();
  launch_dependents();
  const int row = blockIdx.y, slot = slots[row], count = counts[row];
  if (slot < 0 || count <= 0) {
    if (blockIdx.x == 0 && threadIdx.x == 0) matched[row] = 0;
    return;
  }
  const int end = starts[row] + count;
  const int* own = table + (i64)slot * PAGES;
  const auto id_at = [&](int at) {
    return at == end ? last[slot] : pages[(i64)own[at / PAGE] * PAGE + at % PAGE];
  };
  if (threadIdx.x < MOST)
    key[threadIdx.x] = end >= (int)threadIdx.x ? id_at(end - threadIdx.x) : -1;
  __syncthreads();
  const int token = key[0], step = gridDim.x * THREADS * 4;
  u64 mine = 0;
#pragma unroll 1
  for (int first = (blockIdx.x * THREADS + threadIdx.x) * 4; first < end; first += LOADS * step) {
    u32 hits = 0;  // a bit for each id of LOADS loads
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int at = first + i * step;
      int4 ids = make_int4(-1, -1, -1, -1);
      if (at < end) ids = *(const int4*)(pages + (i64)own[at / PAGE] * PAGE + at % PAGE);
      const u32 equal = (ids.x == token) | (ids.y == token) << 1 | (ids.z == token) << 2;
      hits |= (equal | (ids.w == token) << 3) << 4 * i;
    }
#pragma unroll 1
    while (hits) {
      const int bit = 31 - __clz(hits), place = first + bit / 4 * step + bit % 4;
      hits ^= 1u << bit;
      if (token < 0 || place >= end) continue;
      int length = 1;
#pragma unroll 1
      while (length < MOST && length <= place && key[length] >= 0 &&
             id_at(place - length) == key[length])
        ++length;
      if (length >= LEAST) mine = greater(mine, (u64)length << 32 | (u32)place);
    }
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) mine = greater(mine, __shfl_xor_sync(~0u, mine, d));
  if (lane_id() == 0) warp_best[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x > 0) return;
#pragma unroll
  for (int w = 1; w < THREADS / 32; ++w) mine = greater(mine, warp_best[w]);
  if (mine) atomicMax((unsigned long long*)best + row, mine);
  if (count_up(arrived + row) < (int)gridDim.x - 1) return;
  mine = atomicExch((unsigned long long*)best + row, 0ull);
  arrived[row] = 0;
  const int length = (int)(mine >> 32), place = (int)(u32)mine, period = end - place;
  int* to = drafts + (i64)slot * DRAFTS;
  int id[DRAFTS] = {};
#pragma unroll
  for (int i = 0; i < DRAFTS; ++i)
    if (length) id[i] = max(id_at(place + 1 + i % period), 0);
  const bool found = length && (!HELD || length >= MOST || id[0] == to[0]);
  matched[row] = found ? length : 0;
#pragma unroll
  for (int i = 0; i < DRAFTS; ++i)
    if (found || i >= HELD) to[i] = found ? id[i] : 0;
}
