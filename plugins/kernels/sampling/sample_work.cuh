// A block over a row of logits: its shared memory, running sums, and passes over selected cells.
// Atomics add integers only, so no result depends on their order.
#pragma once
#include "sampling/sample_row.cuh"

constexpr int SMALL = 64;       // results of `greatest`, at most
constexpr int MAX_HELD = 4096;  // candidates held
constexpr int FEW = 1024;       // candidates that are compared pairwise, at most
constexpr int BINS = 2048;
constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int NO_ID = 1 << 30;

struct Found {
  int index;
  u64 before;
};

struct __align__(16) RowMemory {
  u32 groups[THREADS];
  u64 held[MAX_HELD];  // (key, ~id)
  u64 few[FEW], measures[FEW];
  u32 low[BINS], high[BINS];  // the halves of each bin's u64 sum
  u64 sorted[SMALL];
  u64 sums[CELLS];
  u32 raw[CELLS], keys[CELLS];  // greatest of each cell
  int visit[CELLS];
  u64 totals[WARPS];
  Found found;
  u64 least;
  u32 bound;
  int visits, count, answer, biases;
  float partial[WARPS];
  int bias_ids[BIASES];
  float bias_values[BIASES];
};

DEVICE u64 pair_of(u32 key, int id) { return (u64)key << 32 | (u32)~id; }
DEVICE int id_of(u64 pair) { return (int)~(u32)pair; }
DEVICE u32 key_of(u64 pair) { return (u32)(pair >> 32); }

// ---- sums ------------------------------------------------------------------------------------

DEVICE u64 warp_upto(u64 own) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const u64 other = __shfl_up_sync(~0u, own, d);
    if (lane() >= d) own += other;
  }
  return own;
}

// The sum of `own` over lower threads; `total`: over all threads.
DEVICE u64 sum_before(RowMemory& w, u64 own, u64& total) {
  const u64 upto = warp_upto(own);
  if (lane() == 31) w.totals[thread() / 32] = upto;
  __syncthreads();
  u64 before = upto - own;
  total = 0;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
    if (i < (int)thread() / 32) before += w.totals[i];
    total += w.totals[i];
  }
  __syncthreads();
  return before;
}

// The first of N values with reached(`base` + the sum up to it); index -1 if there is none.
template <int N, class Value, class Reached>
DEVICE Found locate(RowMemory& w, u64 base, const Value& value, const Reached& reached) {
  constexpr int EACH = (N + THREADS - 1) / THREADS;
  const int first = thread() * EACH;
  u64 own = 0, total;
#pragma unroll
  for (int e = 0; e < EACH; ++e)
    if (first + e < N) own += value(first + e);
  if (thread() == 0) w.found = {-1, 0};
  u64 before = base + sum_before(w, own, total);
  const auto enough = reached(base + total);
  if (!enough(before) && enough(before + own)) {
    for (int e = 0; first + e < N; ++e) {
      const u64 here = value(first + e);
      if (enough(before + here)) {
        w.found = {first + e, before};
        break;
      }
      before += here;
    }
  }
  __syncthreads();
  const Found found = w.found;
  __syncthreads();
  return found;
}

// each(cell, the lane's eight raw logits) for the warp's share of the cells with a maximum of
// `least` or more. The next cell is loaded meanwhile.
template <bool RAW, class Each>
DEVICE void for_cells(const RowMemory& w, const Row& r, u32 least, const Each& each) {
  const u32* cells = RAW ? w.raw : w.keys;
  const auto after = [&](int c) {
    for (c += WARPS; c < CELLS && cells[c] < least;) c += WARPS;
    return c;
  };
  float next[8] = {};  // initialised: else it is live across the loop over rows
  int c = after((int)thread() / 32 - WARPS);
  if (c < CELLS) load8(r, c, next);
  while (c < CELLS) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = next[i];
    const int following = after(c);
    if (following < CELLS) load8(r, following, next);
    each(c, x);
    c = following;
  }
}
// each(key, id) for this thread's logits with keys of `least` or more.
template <bool RAW, class Each>
DEVICE void for_keys(const RowMemory& w, const Row& r, u32 least, const Each& each) {
  for_cells<RAW>(w, r, least, [&](int c, float (&x)[8]) {
    u32 key[8];
    keys8<RAW>(r, c, x, key);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (key[i] >= least) each(key[i], id8(c, i));
  });
}

// The first id, ascending, at which reached(running sum of `one`) holds; w.sums has the sums of
// cells. If these were computed in another form and the sum of `one` ends a cell slightly early,
// the result is the cell's last id.
template <bool RAW, class One, class Reached>
DEVICE int find_id(RowMemory& w, const Row& r, const One& one, const Reached& reached) {
  u64 total = 0;
  const auto keep_total = [&](u64 t) { return total = t, reached(t); };
  const Found cell = locate<CELLS>(w, 0, [&](int c) { return w.sums[c]; }, keep_total);
  if (thread() < 32 && cell.index >= 0) {
    const auto enough = reached(total);
    u64 before = cell.before;
    u32 key[8];
    keys8<RAW>(r, cell.index, key);
    int id = NO_ID, last = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u64 part[4], sum = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        part[i] = key[half * 4 + i] ? one(key[half * 4 + i], id8(cell.index, half * 4 + i)) : 0;
        sum += part[i];
      }
      const u64 upto = warp_upto(sum);
      u64 at = before + upto - sum;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        at += part[i];
        if (!part[i]) continue;
        last = id8(cell.index, half * 4 + i);
        if (enough(at)) id = min(id, last);
      }
      before += __shfl_sync(~0u, upto, 31);
    }
    id = __reduce_min_sync(~0u, id);
    last = __reduce_max_sync(~0u, last);
    if (thread() == 0) w.answer = id == NO_ID ? last : id;
  }
  if (thread() == 0 && cell.index < 0) w.answer = 0;
  __syncthreads();
  const int answer = w.answer;
  __syncthreads();
  return answer;
}

// w.sums: the sum of `one` over each cell's logits with keys of `least` or more.
template <bool RAW, class One>
DEVICE void sum_cells(RowMemory& w, const Row& r, u32 least, const One& one) {
  for (int c = thread(); c < CELLS; c += THREADS) w.sums[c] = 0;
  __syncthreads();
  for_cells<RAW>(w, r, least, [&](int c, float (&x)[8]) {
    u32 key[8];
    keys8<RAW>(r, c, x, key);
    u64 sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (key[i] >= least) sum += one(key[i], id8(c, i));
#pragma unroll
    for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
    if (lane() == 0) w.sums[c] = sum;
  });
  __syncthreads();
}
