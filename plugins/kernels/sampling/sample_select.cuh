// Thresholds of a row by histograms, and the k greatest logits.
//
// A threshold (the k-th logit, the end of top_p) is found by a histogram of the logits in BINS
// steps. While its bin has more than FEW logits, that bin is divided again; then they are compared
// directly.
#pragma once
#include "sampling/sample_work.cuh"

// Bins of keys, bin 0 the greatest; the index is -1 for keys outside [low, high].
struct Bins {
  u32 low, high;
  int shift;  // -1: steps of z; the last bin has all lower keys
  float greatest, step;
  DEVICE int at(u32 key) const {
    if (key < low || key > high) return -1;
    if (shift >= 0) return (int)((high - key) >> shift);
    return (int)fminf((greatest - key_value(key)) * step, (float)(BINS - 1));
  }
  // A lower bound of the keys of bin b.
  DEVICE u32 floor(int b) const {
    if (shift >= 0) return within(b).low;
    return b == BINS - 1 ? low : max(low, ordered_key(greatest - (float)(b + 3) / step));
  }
  // A finer division: bins over the keys of bin b.
  DEVICE Bins within(int b) const {
    u32 from = low, to = high;
    if (shift >= 0) {
      to = high - ((u32)b << shift);
      from = max(low, to - ((1u << shift) - 1));
    } else {               // bins fall as keys rise
      while (from < to) {  // the least key in a bin of at most b
        const u32 middle = from + (to - from) / 2;
        if (at(middle) <= b) to = middle;
        else from = middle + 1;
      }
      const u32 least = from;
      to = high;
      while (from < to) {  // the greatest in a bin of at least b
        const u32 middle = from + (to - from + 1) / 2;
        if (at(middle) >= b) from = middle;
        else to = middle - 1;
      }
      to = from, from = least;
    }
    return between(from, to);
  }
  DEVICE static Bins between(u32 low, u32 high) {
    return {low, high, max(0, 21 - __clz(high - low)), 0.0f, 0.0f};  // 32 - 11 bits
  }
};

DEVICE void add_to(RowMemory& w, int bin, u64 value) {
  const u32 low = (u32)value;
  const u32 high = (u32)(value >> 32) + (atomicAdd(&w.low[bin], low) + low < low);
  if (high) atomicAdd(&w.high[bin], high);
}

// Sources of candidates, the row's logits or w.held: each(key, id) for keys of `least` or more.
template <bool RAW>
struct OfRow {
  const Row& r;
  template <class Each>
  DEVICE void operator()(RowMemory& w, u32 least, const Each& each) const {
    for_keys<RAW>(w, r, least, each);
  }
};
struct OfHeld {
  int count;
  template <class Each>
  DEVICE void operator()(RowMemory& w, u32 least, const Each& each) const {
    for (int i = thread(); i < count; i += THREADS) {
      const u64 pair = w.held[i];
      if (key_of(pair) >= least) each(key_of(pair), id_of(pair));
    }
  }
};

// The id of the n-th logit with key `key` that `given` keeps, ascending; w.visit counts by cell.
template <class Source>
DEVICE int nth_of(RowMemory& w, const Source& source, const Kept& given, u32 key, u64 n) {
  const Found cell = locate<CELLS>(
      w, 0, [&](int c) { return (u64)w.visit[c]; },
      [=](u64) { return [=](u64 upto) { return upto >= n; }; });
  u32* there = w.low;  // a bit for each id of the cell
  if (thread() < CELL / 32) there[thread()] = 0;
  __syncthreads();
  source(w, key, [&](u32 k, int id) {
    if (k == key && id / CELL == cell.index && given.has(k, id))
      atomicOr(&there[id % CELL / 32], 1u << id % 32);
  });
  __syncthreads();
  int left = (int)(n - cell.before), id = cell.index * CELL;
  for (int i = 0; i < CELL; ++i, ++id)
    if ((there[i / 32] >> i % 32 & 1) && --left == 0) break;
  __syncthreads();
  return id;
}

// The last of w.few[count], in descending order, before which `above` plus their measures are not
// enough.
template <class Enough>
DEVICE Kept last_of_few(RowMemory& w, int count, u64 above, const Enough& enough) {
  u64 last = ~0ull;
  for (int i = thread(); i < count; i += THREADS) {
    u64 before = above;
#ifdef RANKS
#pragma unroll 4  // registers
#endif
    for (int j = 0; j < count; ++j)
      if (w.few[j] > w.few[i]) before += w.measures[j];
    if (!enough(before)) last = min(last, w.few[i]);
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) last = min(last, __shfl_xor_sync(~0u, last, d));
  if (lane() == 0) w.totals[thread() / 32] = last;
  __syncthreads();
  for (int i = 0; i < WARPS; ++i) last = min(last, w.totals[i]);
  __syncthreads();
  return {key_of(last), id_of(last)};
}

// Of the source's logits that `given` keeps, in descending order (ties by ascending id), the last
// one before which reached(`above` + the measures so far) is false. Measures depend on keys only
// and are 0 outside `bins`. Does not change w.sums.
template <class Source, class Measure, class Reached>
DEVICE Kept select(RowMemory& w, const Source& source, const Kept& given, Bins bins, u64 above,
                   const Measure& measure, const Reached& reached) {
  u64 total = 0;
  bins.low = max(bins.low, given.key);
  for (int level = 0;; ++level) {
    for (int b = thread(); b < BINS; b += THREADS) w.low[b] = w.high[b] = 0;
    if (thread() == 0) w.count = 0;
    __syncthreads();
    source(w, bins.low, [&](u32 key, int id) {
      const int bin = bins.at(key);
      if (bin < 0 || !given.has(key, id)) return;
      const u64 value = measure(key);
      if (value) add_to(w, bin, value);
    });
    __syncthreads();
    const auto once = [&](u64 t) { return reached(level ? total : total = t); };
    const Found f =
        locate<BINS>(w, above, [&](int b) { return (u64)w.high[b] << 32 | w.low[b]; }, once);
    if (f.index < 0) return given;
    above = f.before;
    source(w, bins.floor(f.index), [&](u32 key, int id) {
      if (bins.at(key) != f.index || !given.has(key, id)) return;
      const int at = atomicAdd(&w.count, 1);
      if (at < FEW) w.few[at] = pair_of(key, id), w.measures[at] = measure(key);
    });
    __syncthreads();
    const auto enough = reached(total);
    if (w.count <= FEW) return last_of_few(w, w.count, above, enough);
    bins = bins.within(f.index);
    if (bins.low == bins.high) {  // many equal keys: lowest ids first
      const u64 each = measure(bins.low);
      u64 n = 1;
      for (u64 step = 1ull << 20; step; step >>= 1)
        if (!enough(above + (n + step - 1) * each)) n += step;
      for (int c = thread(); c < CELLS; c += THREADS) w.visit[c] = 0;
      __syncthreads();
      source(w, bins.low, [&](u32 key, int id) {
        if (key == bins.low && given.has(key, id)) atomicAdd(&w.visit[id / CELL], 1);
      });
      __syncthreads();
      return {bins.low, nth_of(w, source, given, bins.low, n)};
    }
    __syncthreads();
  }
}

// A lower bound of the k-th greatest key: the k-th greatest of the maxima of 128 or 512 groups of
// cells; 1 if fewer groups have a key.
template <bool RAW>
DEVICE u32 bound_of(RowMemory& w, int k) {
  const u32* cells = RAW ? w.raw : w.keys;
  const int lanes = k <= SMALL ? 4 : 1, groups = THREADS / lanes;
  if (k > groups) return 1;
  u32 best = 0;
  for (int c = thread(); c < CELLS; c += THREADS) best = max(best, cells[c]);
  for (int d = 1; d < lanes; d *= 2) best = max(best, __shfl_xor_sync(~0u, best, d));
  if (thread() % lanes == 0) w.groups[thread() / lanes] = best;
  __syncthreads();
  if ((int)thread() < groups) {
    const u32 mine = w.groups[thread()];
    int rank = 0;
#pragma unroll 4
    for (int j = 0; j < groups; j += 4) {
      const uint4 v = *(const uint4*)(w.groups + j);
      rank += (v.x > mine || (v.x == mine && j < (int)thread())) +
              (v.y > mine || (v.y == mine && j + 1 < (int)thread())) +
              (v.z > mine || (v.z == mine && j + 2 < (int)thread())) +
              (v.w > mine || (v.w == mine && j + 3 < (int)thread()));
    }
    if (rank == k - 1) w.bound = max(mine, 1u);
  }
  __syncthreads();
  return w.bound;
}

// The k greatest (k up to SMALL), ties to the lower id, to w.sorted; returns their number.
template <bool RAW>
DEVICE int greatest(RowMemory& w, const Row& r, int k, u32 most) {
  const u32* cells = RAW ? w.raw : w.keys;
  const u32 least = k == 1 ? most : bound_of<RAW>(w, k);
  if (thread() == 0) w.visits = w.count = 0;
  __syncthreads();
  for (int c = thread(); c < CELLS; c += THREADS)
    if (cells[c] >= least) w.visit[atomicAdd(&w.visits, 1)] = c;
  __syncthreads();
  for (int v = thread() / 32; v < w.visits; v += 2 * WARPS) {
    float x[2][8] = {};  // as `next` of for_cells
#pragma unroll
    for (int j = 0; j < 2; ++j)
      if (v + j * WARPS < w.visits) load8(r, w.visit[v + j * WARPS], x[j]);
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
          if (at < FEW) w.held[at] = pair_of(key[i], id8(c, i));
        }
    }
  }
  __syncthreads();
  if (w.count > FEW) {  // few groups, or many equal, or all in one cell
    __syncthreads();    // all threads have read the count before `select` resets it
    const auto one = [](u32) { return (u64)1; };
    const auto reached = [=](u64) { return [=](u64 upto) { return upto >= (u64)k; }; };
    const Bins bins = {least, most, -1, key_value(most), BINS / Scale::DEPTH};
    const Kept kept = select(w, OfRow<RAW>{r}, {1, NO_ID}, bins, 0, one, reached);
    if (thread() == 0) w.count = 0;
    __syncthreads();
    for_keys<RAW>(w, r, kept.key, [&](u32 key, int id) {
      if (kept.has(key, id)) w.held[atomicAdd(&w.count, 1)] = pair_of(key, id);
    });
    __syncthreads();
  }
  const int n = w.count;
  for (int i = thread(); i < n; i += THREADS) {
    const u64 mine = w.held[i];
    int rank = 0;
    for (int j = 0; j < n; ++j) rank += w.held[j] > mine;
    if (rank < k) w.sorted[rank] = mine;
  }
  __syncthreads();
  return min(n, k);
}
