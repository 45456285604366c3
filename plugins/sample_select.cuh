// A block over one row: sums and searches without order, thresholds by histograms, the k greatest.
//
// A threshold (the k-th logit, the end of top_p) is found by a histogram of all logits in BINS
// steps of z, by another, finer one while more than ROOM lie in the deciding bin, then among those
// directly. Whatever is added is a whole number, so no result depends on the order of atomics.
#pragma once
#include "sample_row.cuh"

constexpr int SMALL = 64;     // the most that `greatest` gives
constexpr int ROOM = 1024;    // candidates held
constexpr int BINS = 2048;
constexpr int THREADS = 512;
constexpr int WARPS = THREADS / 32;
constexpr int NO_ID = 1 << 30;

struct Found {
  int index;
  u64 before;
};

struct __align__(16) Work {
  u32 groups[THREADS];
  u64 held[ROOM];                   // (key, ~id)
  u64 measures[ROOM];
  u32 low[BINS], high[BINS];        // halves of each bin's sum
  u64 sorted[SMALL];
  u64 sums[CELLS];
  u32 raw[CELLS], keys[CELLS];      // greatest of each cell
  int visit[CELLS];
  u64 totals[WARPS];
  Found found;
  u64 least;
  u32 bound;
  int visits, count, answer, biases;
  float room[WARPS];
  int bias_ids[NB];
  float bias_values[NB];
};
static_assert(sizeof(Work) <= SHARED, "sample_cuda.py: _shared");

DEVICE u64 pair_of(u32 key, int id) { return (u64)key << 32 | (u32)~id; }
DEVICE int id_of(u64 pair) { return (int)~(u32)pair; }
DEVICE u32 key_of(u64 pair) { return (u32)(pair >> 32); }

// ---- sums ------------------------------------------------------------------------------------

DEVICE u64 warp_upto(u64 own) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const u64 other = __shfl_up_sync(~0u, own, d);
    if (lane_id() >= d) own += other;
  }
  return own;
}

// The sum of what lower threads bring, and of what all bring.
DEVICE u64 sum_before(Work& w, u64 own, u64& total) {
  const u64 upto = warp_upto(own);
  if (lane_id() == 31) w.totals[threadIdx.x / 32] = upto;
  __syncthreads();
  u64 before = upto - own;
  total = 0;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) {
    if (i < (int)threadIdx.x / 32) before += w.totals[i];
    total += w.totals[i];
  }
  __syncthreads();
  return before;
}

// The first of N values at which the running sum, from `base` on, is `reached(base + their sum)`.
// Index -1 if it never is.
template <int N, class Value, class Reached>
DEVICE Found locate(Work& w, u64 base, const Value& value, const Reached& reached) {
  constexpr int EACH = (N + THREADS - 1) / THREADS;
  const int first = threadIdx.x * EACH;
  u64 own = 0, total;
#pragma unroll
  for (int e = 0; e < EACH; ++e)
    if (first + e < N) own += value(first + e);
  if (threadIdx.x == 0) w.found = {-1, 0};
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

// each(cell, the lane's keys) for the warp's share of the cells whose greatest is `least` or more.
// The next cell is on its way meanwhile.
template <bool RAW, class Each>
DEVICE void for_cells(const Work& w, const Row& r, u32 least, const Each& each) {
  const u32* cells = RAW ? w.raw : w.keys;
  const auto after = [&](int c) {
    for (c += WARPS; c < CELLS && cells[c] < least;) c += WARPS;
    return c;
  };
  float next[8];
  int c = after((int)threadIdx.x / 32 - WARPS);
  if (c < CELLS) load8(r.logits, c, next);
  while (c < CELLS) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = next[i];
    const int following = after(c);
    if (following < CELLS) load8(r.logits, following, next);
    u32 key[8];
    keys8<RAW>(r, c, x, key);
    each(c, key);
    c = following;
  }
}
// each(key, id) of this thread's logits of `least` or more.
template <bool RAW, class Each>
DEVICE void for_keys(const Work& w, const Row& r, u32 least, const Each& each) {
  for_cells<RAW>(w, r, least, [&](int c, const u32(&key)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (key[i] >= least) each(key[i], id8(c, i));
  });
}

// The first id, ascending, at which the running sum of `one` over ids is reached; w.sums holds each
// cell's sum. Sums made otherwise than by `one` may end a cell a little early: then its last id.
template <bool RAW, class One, class Reached>
DEVICE int find_id(Work& w, const Row& r, const One& one, const Reached& reached) {
  u64 total = 0;
  const auto keep_total = [&](u64 t) { return total = t, reached(t); };
  const Found cell = locate<CELLS>(w, 0, [&](int c) { return w.sums[c]; }, keep_total);
  if (threadIdx.x < 32 && cell.index >= 0) {
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
    if (threadIdx.x == 0) w.answer = id == NO_ID ? last : id;
  }
  if (threadIdx.x == 0 && cell.index < 0) w.answer = 0;
  __syncthreads();
  const int answer = w.answer;
  __syncthreads();
  return answer;
}

// w.sums: `one` over each cell's logits of `least` or more.
template <bool RAW, class One>
DEVICE void sum_cells(Work& w, const Row& r, u32 least, const One& one) {
  for (int c = threadIdx.x; c < CELLS; c += THREADS) w.sums[c] = 0;
  __syncthreads();
  for_cells<RAW>(w, r, least, [&](int c, const u32(&key)[8]) {
    u64 sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (key[i] >= least) sum += one(key[i], id8(c, i));
#pragma unroll
    for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
    if (lane_id() == 0) w.sums[c] = sum;
  });
  __syncthreads();
}

// ---- thresholds --------------------------------------------------------------------------------

// Which bin a key falls into, 0 the greatest; -1 if it lies outside [low, high].
struct Bins {
  u32 low, high;
  int shift;  // -1: steps of z, the last bin takes what is beyond
  float greatest, step;
  DEVICE int at(u32 key) const {
    if (key < low || key > high) return -1;
    if (shift >= 0) return (int)((high - key) >> shift);
    return (int)fminf((greatest - unorder(key)) * step, (float)(BINS - 1));
  }
  // No key of bin b is less.
  DEVICE u32 floor(int b) const {
    if (shift >= 0) return within(b).low;
    return b == BINS - 1 ? low : max(low, order(greatest - (float)(b + 3) / step));
  }
  // The keys of bin b and no others: a finer division.
  DEVICE Bins within(int b) const {
    Bins f = *this;
    if (shift >= 0) {
      f.high = high - ((u32)b << shift);
      f.low = max(low, f.high - ((1u << shift) - 1));
    } else {  // bins fall as keys rise
      u32 from = low, to = high;
      while (from < to) {  // the least key in a bin of at most b
        const u32 middle = from + (to - from) / 2;
        if (at(middle) <= b) to = middle;
        else from = middle + 1;
      }
      f.low = from, to = high;
      while (from < to) {  // the greatest in a bin of at least b
        const u32 middle = from + (to - from + 1) / 2;
        if (at(middle) >= b) from = middle;
        else to = middle - 1;
      }
      f.high = from;
    }
    f.shift = max(0, 21 - __clz(f.high - f.low));  // 32 - 11 bits
    return f;
  }
};

DEVICE void add_to(Work& w, int bin, u64 value) {
  const u32 low = (u32)value;
  const u32 high = (u32)(value >> 32) + (atomicAdd(&w.low[bin], low) + low < low);
  if (high) atomicAdd(&w.high[bin], high);
}

// Holds (key, id) and measure of the logits that `wanted(key, id)`; w.count may exceed ROOM.
template <bool RAW, class Wanted, class Measure>
DEVICE void hold(Work& w, const Row& r, u32 least, const Wanted& wanted, const Measure& measure) {
  if (threadIdx.x == 0) w.count = 0;
  __syncthreads();
  for_keys<RAW>(w, r, least, [&](u32 key, int id) {
    if (!wanted(key, id)) return;
    const int at = atomicAdd(&w.count, 1);
    if (at < ROOM) w.held[at] = pair_of(key, id), w.measures[at] = measure(key);
  });
  __syncthreads();
}

// Of all that `given` has, in descending order (ties by ascending id), the last one before which the
// sum of measures is not yet reached(total). Measures depend on keys alone and are 0 below `least`.
template <bool RAW, class Measure, class Reached>
DEVICE Kept select(Work& w, const Row& r, const Kept& given, u32 least, u32 most, float step,
                   const Measure& measure, const Reached& reached) {
  u64 above = 0, total = 0;
  least = max(given.key, least);
  Bins bins = {least, most, -1, unorder(most), step};
  for (int level = 0;; ++level) {
    for (int b = threadIdx.x; b < BINS; b += THREADS) w.low[b] = w.high[b] = 0;
    __syncthreads();
    for_keys<RAW>(w, r, bins.low, [&](u32 key, int id) {
      const int bin = bins.at(key);
      if (bin < 0 || !given.has(key, id)) return;
      const u64 value = measure(key);
      if (value) add_to(w, bin, value);
    });
    __syncthreads();
    const auto once = [&](u64 t) { return reached(level ? total : total = t); };
    const Found f = locate<BINS>(
        w, above, [&](int b) { return (u64)w.high[b] << 32 | w.low[b]; }, once);
    if (f.index < 0) return given;
    above = f.before;
    const Bins here = bins;
    const auto wanted = [&](u32 k, int i) { return here.at(k) == f.index && given.has(k, i); };
    hold<RAW>(w, r, here.floor(f.index), wanted, measure);
    if (w.count <= ROOM) break;
    bins = here.within(f.index);
    if (bins.low == bins.high) {  // more than ROOM equal ones: as many as are missing
      const u64 each = measure(bins.low);
      const auto enough = reached(total);
      u64 n = 1, step_up = 1ull << 20;
      for (; step_up; step_up >>= 1)
        if (!enough(above + (n + step_up - 1) * each)) n += step_up;
      const auto one = [&](u32 k, int id) { return (u64)(k == bins.low && given.has(k, id)); };
      sum_cells<RAW>(w, r, bins.low, one);
      const auto count = [=](u64) { return [=](u64 upto) { return upto >= n; }; };
      return {bins.low, find_id<RAW>(w, r, one, count)};
    }
  }
  const auto enough = reached(total);
  u64 last = ~0ull;
  for (int i = threadIdx.x; i < w.count; i += THREADS) {
    u64 before = above;
    for (int j = 0; j < w.count; ++j)
      if (w.held[j] > w.held[i]) before += w.measures[j];
    if (!enough(before)) last = min(last, w.held[i]);
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) last = min(last, __shfl_xor_sync(~0u, last, d));
  if (lane_id() == 0) w.totals[threadIdx.x / 32] = last;
  __syncthreads();
  for (int i = 0; i < WARPS; ++i) last = min(last, w.totals[i]);
  __syncthreads();
  return {key_of(last), id_of(last)};
}

// A lower bound of the k-th greatest key: the k-th greatest of the greatest keys of 128 groups of
// cells, or of 512. 1 where there are fewer.
template <bool RAW>
DEVICE u32 bound_of(Work& w, int k) {
  const u32* cells = RAW ? w.raw : w.keys;
  const int lanes = k <= SMALL ? 4 : 1, groups = THREADS / lanes;
  if (k > groups) return 1;
  u32 best = 0;
  for (int c = threadIdx.x; c < CELLS; c += THREADS) best = max(best, cells[c]);
  for (int d = 1; d < lanes; d *= 2) best = max(best, __shfl_xor_sync(~0u, best, d));
  if (threadIdx.x % lanes == 0) w.groups[threadIdx.x / lanes] = best;
  __syncthreads();
  if ((int)threadIdx.x < groups) {
    const u32 mine = w.groups[threadIdx.x];
    int rank = 0;
#pragma unroll 4
    for (int j = 0; j < groups; j += 4) {
      const uint4 v = *(const uint4*)(w.groups + j);
      rank += (v.x > mine || (v.x == mine && j < (int)threadIdx.x)) +
              (v.y > mine || (v.y == mine && j + 1 < (int)threadIdx.x)) +
              (v.z > mine || (v.z == mine && j + 2 < (int)threadIdx.x)) +
              (v.w > mine || (v.w == mine && j + 3 < (int)threadIdx.x));
    }
    if (rank == k - 1) w.bound = max(mine, 1u);
  }
  __syncthreads();
  return w.bound;
}

// The k greatest (k up to SMALL), ties to the lower id, in w.sorted; how many there are.
template <bool RAW>
DEVICE int greatest(Work& w, const Row& r, int k, u32 most) {
  const u32* cells = RAW ? w.raw : w.keys;
  const u32 least = k == 1 ? most : bound_of<RAW>(w, k);
  if (threadIdx.x == 0) w.visits = w.count = 0;
  __syncthreads();
  for (int c = threadIdx.x; c < CELLS; c += THREADS)
    if (cells[c] >= least) w.visit[atomicAdd(&w.visits, 1)] = c;
  __syncthreads();
  for (int v = threadIdx.x / 32; v < w.visits; v += 2 * WARPS) {
    float x[2][8];
#pragma unroll
    for (int j = 0; j < 2; ++j)
      if (v + j * WARPS < w.visits) load8(r.logits, w.visit[v + j * WARPS], x[j]);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (v + j * WARPS >= w.visits) break;
      const int c = w.visit[v + j * WARPS];
      u32 key[8];
      keys8<RAW>(r, c, x[j], key);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (key[i] >= least) {
          const int at = atomicAdd(&w.count, 1);
          if (at < ROOM) w.held[at] = pair_of(key[i], id8(c, i));
        }
    }
  }
  __syncthreads();
  if (w.count > ROOM) {  // few groups, or many equal, or all in one cell
    const auto one = [](u32) { return (u64)1; };
    const auto reached = [=](u64) { return [=](u64 upto) { return upto >= (u64)k; }; };
    const Kept kept = select<RAW>(w, r, {1, NO_ID}, least, most, BINS / 29.0f, one, reached);
    hold<RAW>(w, r, kept.key, [&](u32 key, int id) { return kept.has(key, id); }, one);
  }
  const int n = w.count;
  for (int i = threadIdx.x; i < n; i += THREADS) {
    const u64 mine = w.held[i];
    int rank = 0;
    for (int j = 0; j < n; ++j) rank += w.held[j] > mine;
    if (rank < k) w.sorted[rank] = mine;
  }
  __syncthreads();
  return min(n, k);
}
