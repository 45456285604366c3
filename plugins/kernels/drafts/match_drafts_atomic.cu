// The ids that followed the last tokens of a row's text where they were before, as drafts.
//
// Block (part, row): a thread loads LOADS times four ids of a page before it knows the last tokens,
// so that both are one trip to memory; only where an id is the last token it reads back. Loads by
// `load_if` are in flight together, plain ones waited for their pages one by one. The greatest (ids
// that match, place) of the row is an atomic maximum, which does not depend on the order. The last
// block of a row writes the drafts, an id a lane, and resets both words to zero for the next launch.
// A row without a token reads nothing. The text ends with the slot's last token, which is in no page
// yet. Figures: benchmarks/log/sampling/draft_rounds.md.
// Macros: PAGE (tokens of one, a multiple of 4), PAGES (of a slot), DRAFTS (of a slot), LEAST and
// MOST (ids of a match), HELD (drafts of the head in this round), LOADS, THREADS.
#include "common/numeric.cuh"

DEVICE u64 greater(u64 a, u64 b) { return a > b ? a : b; }

DEVICE u64 greatest(u64 mine) {
#pragma unroll
  for (int d = 16; d; d >>= 1) mine = greater(mine, __shfl_xor_sync(~0u, mine, d));
  return mine;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    match_drafts(const u32* pages, const u32* table, const u32* last, const u32* slots,
                 const u32* starts, const u32* counts, int* matched, int* drafts, u64* best,
                 int* arrived) {
  __shared__ u64 warp_best[THREADS / 32];
  __shared__ int key[MOST];  // the end of the text, the last token first
  wait_for_previous();
  launch_dependents();
  const int row = blockIdx.y, i = threadIdx.x, slot = load_if(true, slots + row);
  const int start = load_if(true, starts + row), count = load_if(true, counts + row);
  if (min(slot, start) < 0 || count <= 0) {
    if (blockIdx.x == 0 && i == 0) matched[row] = 0;
    return;
  }
  const int end = start + count, step = gridDim.x * THREADS * 4;
  const u32* own = table + (i64)slot * PAGES;
  const auto page_of = [&](bool there, int at) { return load_if(there, own + at / PAGE); };
  const auto place_of = [&](u32 page, int at) { return pages + (i64)page * PAGE + at % PAGE; };
  const auto id_at = [&](int at) {
    return at == end ? key[0] : (int)*place_of(own[at / PAGE], at);
  };
  const bool ends = i < MOST && i <= end;
  int first = (blockIdx.x * THREADS + i) * 4;
  u32 page[LOADS];
  uint4 ids[LOADS];
  const auto find_pages = [&] {
#pragma unroll
    for (int l = 0; l < LOADS; ++l) page[l] = page_of(first + l * step < end, first + l * step);
  };
  const auto load = [&] {
#pragma unroll
    for (int l = 0; l < LOADS; ++l) {
      const int at = first + l * step;
      ids[l] = load_if16(at < end, place_of(page[l], at));
    }
  };
  const u32 key_page = page_of(ends && i > 0, end - i);
  find_pages();
  const int id = load_if(ends, i > 0 ? place_of(key_page, end - i) : last + slot);
  load();
  if (i < MOST) key[i] = ends ? id : -1;
  __syncthreads();
  const u32 token = key[0];
  u64 mine = 0;
#pragma unroll 1
  while (first < end) {
    u32 hits = 0;  // a bit for each id of LOADS loads
#pragma unroll
    for (int l = 0; l < LOADS; ++l) {
      const uint4 x = ids[l];
      const u32 equal = (x.x == token) | (x.y == token) << 1 | (x.z == token) << 2;
      hits |= (equal | (x.w == token) << 3) << 4 * l;
    }
#pragma unroll 1
    while (hits) {
      const int bit = 31 - __clz(hits), place = first + bit / 4 * step + bit % 4;
      hits ^= 1u << bit;
      if ((int)token < 0 || place >= end) continue;
      int length = 1;
#pragma unroll 1
      while (length < MOST && length <= place && key[length] >= 0 &&
             id_at(place - length) == key[length])
        ++length;
      if (length >= LEAST) mine = greater(mine, (u64)length << 32 | (u32)place);
    }
    first += LOADS * step;
    find_pages();
    load();
  }
  mine = greatest(mine);
  if (lane_id() == 0) warp_best[i / 32] = mine;
  __syncthreads();
  if (i >= 32) return;
  mine = greatest(warp_best[i % (THREADS / 32)]);
  bool final = false;
  if (i == 0) {
    if (mine) atomicMax((unsigned long long*)best + row, mine);
    final = count_up(arrived + row) == (int)gridDim.x - 1;
    if (final) mine = atomicExch((unsigned long long*)best + row, 0ull), arrived[row] = 0;
  }
  if (!__shfl_sync(~0u, (int) final, 0)) return;
  mine = __shfl_sync(~0u, mine, 0);
  const int length = (int)(mine >> 32), place = (int)(u32)mine, period = end - place;
  int* to = drafts + (i64)slot * DRAFTS + i;
  int draft = length && i < DRAFTS ? max(id_at(place + 1 + i % period), 0) : 0;
  const bool agrees = !HELD || length >= MOST || __shfl_sync(~0u, (int)(i || draft == *to), 0);
  if (!agrees) draft = 0;
  const bool found = length && agrees;
  if (i == 0) matched[row] = found ? length : 0;
  if (i < DRAFTS && (found || i >= HELD)) *to = draft;
}
