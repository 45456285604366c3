// Runs: neighbouring queries of a row with chunks of one size. Each block of attention_round_mma.cu
// lists all runs; a work item is (run, chunk, group of heads).
// Macros: those of attention_merge.cuh.
#pragma once
#include "attention/attention_online_softmax.cuh"

constexpr int SPLITS = (TOKENS + QUERIES - 1) / QUERIES + 3;
constexpr int RUNS = SPLITS < TOKENS ? SPLITS : TOKENS;  // of a row, at most

// Queries first … first + queries - 1 of a row; `length` of the last, 0 for an empty run.
struct Run {
  int first, queries, length, size;
};

// Calls each(run) for the runs of a row. The chunk size changes only at a length of 64 n or 64 n +
// 1.
template <class Each>
DEVICE void for_runs(int start, int live, Each each) {
  Run run = {};
#pragma unroll 1
  for (int t = 0; t <= TOKENS; t++) {
    int length = start + t + 1, size = run.size;
    if (t >= live) size = 0;
    else if (t == 0 || (length & 63) < 2) size = chunk_tokens(length);
    if (t > 0 && (t == TOKENS || size != run.size || run.queries == QUERIES)) {
      each(run);
      run.first = t, run.queries = 0;
    }
    run.queries++, run.size = size, run.length = size > 0 ? length : 0;
  }
}

// A run in the list. `chunk` packs: tokens of a chunk / 64 (20 bits), first, queries (4 bits each),
// and a bit for the row's last run.
DEVICE Row packed(const Run& run, int slot, int before, int live) {
  int last = run.first + run.queries == live;
  return {before, slot, run.length,
          run.size >> 6 | run.first << 20 | run.queries << 24 | last << 28};
}

// The whole block calls it, with a row a thread. A row has RUNS entries; unused ones have no chunk.
DEVICE void list_runs(Block& b, const int* slots, const int* starts, const int* counts, int rows,
                      int warp, int lane) {
  Row* list = b.rows;
  int* chunks = reinterpret_cast<int*>(b.tally);  // of each warp's rows
  int total = 0;
  for (int base = 0; base < rows; base += THREADS) {
    int r = base + threadIdx.x, slot = -1, start = 0, live = 0, n = 0;
    if (r < rows) {
      slot = slots[r];
      if (slot >= 0) start = starts[r], live = counts[r];
      for_runs(start, live, [&](const Run& run) { n += chunks_of(run.length, run.size); });
    }
    int before = count_before(n, total, chunks, warp, lane);
    if (r < rows) {
      Row* to = list + r * RUNS;
      for_runs(start, live, [&](const Run& run) {
        *to++ = packed(run, slot, before, live);
        before += chunks_of(run.length, run.size);
      });
      while (to < list + (r + 1) * RUNS) *to++ = {before, -1, 0, 0};
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) b.items = total * HEAD_GROUPS;
  __syncthreads();
}

// `row` of the base is the launch's; chunks and length are those of the run's last query.
struct Item : WorkItem {
  int run, first, queries, size, appends;

  // Positions that query q sees; 0 in an inert row.
  DEVICE int seen(int q) const { return length > 0 ? length - (queries - 1 - q) : 0; }
  DEVICE int start() const { return length - first - queries; }
  // For the merges: the token and the number of chunks of query q.
  DEVICE WorkItem query(int q) const {
    WorkItem u = *this;
    u.row = row * TOKENS + first + q, u.chunks = chunks_of(seen(q), size);
    return u;
  }
};

DEVICE Item item_at(int index, const Row* list, int rows) {
  Item u;
  int at = index / HEAD_GROUPS, low = 0, high = rows * RUNS;
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (list[middle].before <= at) low = middle;
    else high = middle;
  }
  int bits = list[low].chunk;
  u.run = low, u.row = low / RUNS, u.head = index % HEAD_GROUPS, u.chunk = at - list[low].before;
  u.slot = list[low].slot, u.length = list[low].length;
  u.size = (bits & 0xfffff) << 6, u.first = bits >> 20 & 15, u.queries = bits >> 24 & 15;
  u.appends = bits >> 28, u.chunks = chunks_of(u.length, u.size);
  u.begin = u.chunk * u.size, u.end = min(u.length, u.begin + u.size);
  return u;
}
