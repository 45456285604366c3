// Runs: neighbouring queries of a row whose chunks are of one size. The list of them that each
// block of attention_round_mma.cu makes, and a work item (run, chunk, kv head) of it.
//
// Macros: those of paged_merge.cuh.
#pragma once
#include "attention/paged_walk.cuh"

constexpr int SPLITS = (TOKENS + QUERIES - 1) / QUERIES + 3;
constexpr int RUNS = SPLITS < TOKENS ? SPLITS : TOKENS;  // of a row, at most

// Queries first … first + queries - 1 of a row; `length` of the last, 0 where they are not there.
struct Run {
  int first, queries, length, size;
};

// Calls each(run) for the runs of a row. Where chunks change their size, a length is a multiple of
// 64 or the one behind it.
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

// A run in the list: `chunk` has tokens of its chunks / 64 (20 bits), first, queries (4 bits each)
// and whether it is the row's last one that is there.
DEVICE Row packed(const Run& run, int slot, int before, int live) {
  int last = run.first + run.queries == live;
  return {before, slot, run.length,
          run.size >> 6 | run.first << 20 | run.queries << 24 | last << 28};
}

// By the whole block, a row a thread; RUNS entries a row, those left over without a chunk.
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
    int sum = n;
#pragma unroll
    for (int s = 1; s < 32; s <<= 1) {
      int other = __shfl_up_sync(~0u, sum, s);
      if (lane >= s) sum += other;
    }
    if (lane == 31) chunks[warp] = sum;
    __syncthreads();
    int before = total + sum - n;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      int other = chunks[w];
      total += other;
      if (w < warp) before += other;
    }
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
  if (threadIdx.x == 0) list[rows * RUNS].before = total;
  __syncthreads();
}

// `row` of the base is the launch's; chunks and length are those of the run's last query.
struct Item : WorkItem {
  int run, first, queries, size, appends;

  // Positions that query q sees; 0 where it is not there.
  DEVICE int seen(int q) const { return length > 0 ? length - (queries - 1 - q) : 0; }
  DEVICE int start() const { return length - first - queries; }
  // What the merges need to know of query q: its token and its own chunks.
  DEVICE WorkItem query(int q) const {
    WorkItem u = *this;
    u.row = row * TOKENS + first + q, u.chunks = chunks_of(seen(q), size);
    return u;
  }
};

DEVICE Item item_at(int index, const Row* list, int rows) {
  Item u;
  int at = index / KV_HEADS, low = 0, high = rows * RUNS;
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (list[middle].before <= at) low = middle;
    else high = middle;
  }
  int bits = list[low].chunk;
  u.run = low, u.row = low / RUNS, u.head = index % KV_HEADS, u.chunk = at - list[low].before;
  u.slot = list[low].slot, u.length = list[low].length;
  u.size = (bits & 0xfffff) << 6, u.first = bits >> 20 & 15, u.queries = bits >> 24 & 15;
  u.appends = bits >> 28, u.chunks = chunks_of(u.length, u.size);
  u.begin = u.chunk * u.size, u.end = min(u.length, u.begin + u.size);
  return u;
}
