// The ids that followed the last tokens of a row's text where they were before, as drafts.
//
// Block (part, row): a thread loads LOADS times four ids of a page before it knows the last tokens,
// so that both are one trip to memory; only where an id is the last token it reads back. Loads by
// `load_if` are in flight together; plain ones waited for their pages one by one. The greatest (ids
// that match, place) of the row is an atomic maximum, which does not depend on the order. The last
// block of a row writes the drafts, an id a lane, and resets both words to zero for the next
// launch. A row without a token reads nothing. The text ends with the slot's last token, which is
// in no page yet. 3.5 us at 8 rows of 32k ids, an H200 (benchmarks/log/sampling/draft_rounds.md).
// Macros: PAGE (tokens of one, a multiple of 4), PAGES (of a slot), DRAFTS (of a slot), LEAST and
// MOST (ids of a match), HELD (drafts of the head in this round), LOADS, THREADS.
#include "common/numeric.cuh"

struct Text {
  const u32 *pages, *own;
  const int* key;  // the end of the text, the last token first
  int end;
  DEVICE u32 page(bool there, int at) const { return load_if(there, own + at / PAGE); }
  DEVICE const u32* place(u32 page, int at) const { return pages + (i64)page * PAGE + at % PAGE; }
  DEVICE int id(int at) const { return at == end ? key[0] : (int)*place(own[at / PAGE], at); }
  // The ids that match at a place of the last token.
  DEVICE int matches(int at) const {
    int n = 1;
#pragma unroll 1
    while (n < MOST && n <= at && key[n] >= 0 && id(at - n) == key[n]) ++n;
    return n;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    match_drafts(const u32* pages, const u32* table, const u32* last, const u32* slots,
                 const u32* starts, const u32* counts, int* matched, int* drafts, u64* best,
                 int* arrived) {
  __shared__ u64 found;
  __shared__ int key[MOST];
  wait_then_launch_dependents();
  const int row = blockIdx.y, i = threadIdx.x, slot = load_if(true, slots + row);
  const int start = load_if(true, starts + row), count = load_if(true, counts + row);
  if (min(slot, start) < 0 || count <= 0) {
    if (blockIdx.x == 0 && i == 0) matched[row] = 0;
    return;
  }
  const int end = start + count, step = gridDim.x * THREADS * 4;
  const Text text = {pages, table + (i64)slot * PAGES, key, end};
  const bool ends = i < MOST && i <= end;
  const u32 key_page = text.page(ends && i > 0, end - i);
  if (i == 0) found = 0;
#pragma unroll 1
  for (int first = (blockIdx.x * THREADS + i) * 4, turn = 0; turn == 0 || first < end; ++turn) {
    u32 page[LOADS], hits = 0;  // a bit for each id of LOADS loads
    uint4 ids[LOADS];
#pragma unroll
    for (int l = 0; l < LOADS; ++l) page[l] = text.page(first + l * step < end, first + l * step);
    const u32* own = i > 0 ? text.place(key_page, end - i) : last + slot;
    const int id = load_if(ends && turn == 0, own);
#pragma unroll
    for (int l = 0; l < LOADS; ++l) {
      const int at = first + l * step;
      ids[l] = load_if16(at < end, text.place(page[l], at));
    }
    if (turn == 0) {
      if (i < MOST) key[i] = ends ? id : -1;
      __syncthreads();
    }
    const u32 token = key[0];
#pragma unroll
    for (int l = 0; l < LOADS; ++l) {
      const u32 equal = (ids[l].x == token) | (ids[l].y == token) << 1 | (ids[l].z == token) << 2;
      hits |= (equal | (ids[l].w == token) << 3) << 4 * l;
    }
#pragma unroll 1
    for (; hits; hits &= hits - 1) {
      const int bit = __ffs(hits) - 1, place = first + bit / 4 * step + bit % 4;
      const int length = (int)token < 0 || place >= end ? 0 : text.matches(place);
      if (length >= LEAST) atomicMax(&found, (u64)length << 32 | (u32)place);
    }
    first += LOADS * step;
  }
  __syncthreads();
  if (i >= 32) return;
  u64 most = found;
  bool final = false;
  if (i == 0) {
    if (most) atomicMax(best + row, most);
    final = count_up(arrived + row) == (int)gridDim.x - 1;
    if (final) most = atomicExch(best + row, 0ull), arrived[row] = 0;
  }
  if (!__shfl_sync(~0u, (int) final, 0)) return;
  most = __shfl_sync(~0u, most, 0);
  const int length = (int)(most >> 32), place = (int)(u32)most, period = end - place;
  int* to = drafts + (i64)slot * DRAFTS + i;
  const int draft = length && i < DRAFTS ? max(text.id(place + 1 + i % period), 0) : 0;
  const bool agrees = !HELD || length >= MOST || __shfl_sync(~0u, (int)(i || draft == *to), 0);
  if (i == 0) matched[row] = agrees ? length : 0;
  if (i < DRAFTS && (length && agrees || i >= HELD)) *to = agrees ? draft : 0;
}
