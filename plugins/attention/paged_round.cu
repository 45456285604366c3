// Decode attention over the few tokens of a round of drafts, one launch: paged_decode.cu's work
// with several queries a row, whose keys and values are read once for all of them.
//
// Work: each query cuts its row into chunks by its own length, as if it were alone; a run is the
// neighbouring queries of a row (up to QUERIES) whose chunks are of one size, and a work item is
// (run, chunk, kv head). A query's bits are those of paged_decode.cu with as many walkers.
// Block: WALKERS rings of 16-token tiles, each filled and read by QUERIES warps, one for each query
// of the run, which meet once a tile.
// Append: positions from the round's start on are never read from pages: every item that covers
// some makes them from the activations; those of a row's last run store them.
// Figures: 27B, e4m3 pages, 1k, T = 4, H200: 10 us at 1 row, 162 at 128 (log/paged_round.md).
// Macros besides paged_kv.cuh's and paged_merge.cuh's: TOKENS (of a row), QUERIES, WALKERS, WARPS
// (their product), STAGES, AT_ONCE (queries merged at once), CHUNK, MOST_CHUNKS, BLOCKS (of a
// multiprocessor), SHARED (bytes).
#define APART 1
#include "attention/paged_walk.cuh"

static_assert(WARPS == QUERIES * WALKERS && STAGES > 1, "a warp for each query of each walker");
constexpr int SPLITS = (TOKENS + QUERIES - 1) / QUERIES + 3;
constexpr int RUNS = SPLITS < TOKENS ? SPLITS : TOKENS;   // of a row, at most
constexpr int AHEAD = QUERIES > 1 ? STAGES - 1 : STAGES;  // tiles under way while one is used
constexpr bool ROOMY = THREADS * BLOCKS <= 384;           // 168 registers for each
constexpr int BATCH = 4;                                  // heads that a warp loads at once

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

// A walker's way over its tiles of a work item, gone by QUERIES warps together: tile i begins at
// position begin + 16·(walker + i·WALKERS).
struct Walk {
  const u8 *keys, *values;
  const int* pages;
  u32 ring;
  int first, tiles, stored, head, thread, ids;  // thread: of those that go together

  DEVICE int position(int i) const { return first + 16 * WALKERS * i; }
  DEVICE void load(int i) {
    if ((i & 31) == 0) {  // the ids of the next 32 tiles, one a lane
      int ahead = i + (thread & 31);
      ids = ahead < tiles ? pages[position(ahead) / PAGE] : 0;
    }
    i64 from = page_offset(__shfl_sync(~0u, ids, i & 31), head, position(i));
    u32 to = ring + (i % STAGES) * 2 * TILE;
#pragma unroll
    for (int n = 0; n < (ROW + 32 * QUERIES - 1) / (32 * QUERIES); n++) {
      int at = n * 32 * QUERIES + thread, r = at / (ROW / 16), c = at % (ROW / 16);
      if (ROW % (32 * QUERIES) != 0 && at >= ROW) break;
      bool there = position(i) + r < stored;
      copy_async(to + swizzled<ROW>(r, c), keys + from + at * 16, there ? 16 : 0);
      copy_async(to + TILE + swizzled<ROW>(r, c), values + from + at * 16, there ? 16 : 0);
    }
  }
  // Puts the round's tokens below `end` into tile i if that is their place; cp.async left zeros.
  DEVICE void patch(int i, int end, u8* arena, const u8* fresh) const {
    int base = position(i), low = max(stored, base), n = min(end, base + 16) - low;
    u8* to = arena + (i % STAGES) * 2 * TILE;
#pragma unroll 1
    for (int at = thread; at < n * 2 * (ROW / 16); at += 32 * QUERIES) {
      int c = at % (ROW / 16), which = at / (ROW / 16) % 2, position = low + at / (ROW / 8);
      *reinterpret_cast<uint4*>(to + which * TILE + swizzled<ROW>(position - base, c)) =
          *reinterpret_cast<const uint4*>(fresh + (2 * (position - stored) + which) * ROW + c * 16);
    }
  }
};

DEVICE void meet_walker(int walker) {
  if constexpr (QUERIES == 1) __syncwarp();
  else meet(walker + 1, 32 * QUERIES);
}

// A walker's way over work item `u`; its first tiles are asked for.
DEVICE Walk walk_of(Block& b, const Item& u, const u8* keys, const u8* values,
                    const int* page_table, int most_pages, int walker, int thread) {
  int first = u.begin + 16 * walker;
  int tiles = first < u.end ? (u.end - first + 16 * WALKERS - 1) / (16 * WALKERS) : 0;
  Walk walk{keys,
            values,
            page_table + (i64)u.slot * most_pages,
            shared_address(b.arena[walker]),
            first,
            tiles,
            u.start(),
            u.head,
            thread,
            0};
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    if (i < tiles) walk.load(i);
    commit_copies();
  }
  return walk;
}

// What is made of the activations: queries of the run into shared memory, and the round's keys and
// values that lie in this chunk; where `appends`, also into the pages.
DEVICE void prepare(Block& b, const Item& u, const u16* qkv, const float* q_norm,
                    const float* k_norm, const float* inv_freq, const float* kv_scale, u8* keys,
                    u8* values, const int* pages, int warp, int lane) {
  float weights[2][VEC];
  load_floats(weights[0], q_norm + lane * VEC), load_floats(weights[1], k_norm + lane * VEC);
  const int start = u.start(), heads = u.queries * GQA_GROUP;
  const int oldest = max(0, u.begin - start), items = heads + 2 * max(0, u.end - start - oldest);
  const u16* token = qkv + (i64)u.row * TOKENS * WIDTH;
#pragma unroll 1
  for (int base = warp; base < items; base += BATCH * WARPS) {
    RawHead raws[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      int item = min(base + i * WARPS, items - 1), made = item - heads;
      int t = made < 0 ? u.first + item / GQA_GROUP : oldest + made / 2;
      int from = made < 0 ? (u.head * GQA_GROUP + item % GQA_GROUP) * 2 * D
                          : (made & 1 ? K_END : Q_END) + u.head * D;
      raws[i] = load_raw(token + (i64)t * WIDTH + from, lane);
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      int item = base + i * WARPS, made = item - heads, which = made & 1;
      if (item >= items) break;
      Head h = widened(raws[i]);
      int t = made < 0 ? u.first + item / GQA_GROUP : oldest + made / 2;
      if (made < 0 || which == 0) {
        if (made < 0) normalise(h, weights[0]);
        else normalise(h, weights[1]);
        rotate(h, turn_of(start + t, inv_freq, lane), lane);
      }
      if (made < 0) {
        put_query(b.queries[item / GQA_GROUP * COLUMNS + item % GQA_GROUP], h, lane);
      } else {
        Stored s = encode(h, KV_FP8 ? kv_scale[which] : 1.0f);
        put(b.fresh[2 * t + which], s, lane);
        if (u.appends) {
          i64 to = page_offset(pages[(start + t) / PAGE], u.head, start + t);
          put((which ? values : keys) + to, s, lane);
        }
      }
    }
  }
}

// The block's sums over its walkers, query by query: to the result where a query has one chunk,
// else to the scratch, which has room for `parts` chunks of each.
DEVICE void merge_item(Block& b, const Item& done, Softmax& x, float scale, const Out& out,
                       float4* sums, float2* tallies, int parts, int walker, int mine, int lane) {
#pragma unroll 1
  for (int base = 0; base < QUERIES; base += AT_ONCE) {
    if (mine >= base && mine < base + AT_ONCE) spill(b, x, walker, mine - base, lane);
    __syncthreads();
#pragma unroll 1
    for (int n = base; n < min(base + AT_ONCE, done.queries); n++) {
      WorkItem query = done.query(n);
      if (done.chunk >= query.chunks) continue;
      uint2 gate = query.chunks == 1 ? gate_of(query, out.qkv, threadIdx.x) : uint2{};
      const i64 at = ((i64)query.row * KV_HEADS + done.head) * parts + done.chunk;
      merge_warps(b, query, n - base, scale, out, gate, sums + at * QUADS,
                  tallies + at * GQA_GROUP * 2);
    }
    __syncthreads();
  }
}

// The merge after a work item of a run of several chunks; counters of a (run, kv head): one of its
// groups, then one for each group.
DEVICE void merge_run(Block& b, const Item& u, float scale, const Out& out, float4* sums,
                      float2* tallies, int* arrivals, int parts) {
  int group = u.chunk / FAN, groups = (u.chunks + FAN - 1) / FAN;
  int* counters = arrivals + (u.run * KV_HEADS + u.head) * (FAN + 1);
  if (!arrive_last(b, counters + 1 + group, min(FAN, u.chunks - group * FAN))) return;
#pragma unroll 1
  for (int q = 0; q < u.queries; q++) {
    WorkItem query = u.query(q);
    int count = min(FAN, query.chunks - group * FAN);
    if (query.chunks == 1 || count < 1) continue;
    const i64 at = ((i64)query.row * KV_HEADS + u.head) * parts + group * FAN;
    merge_parts(query, count, 1, scale, out, sums + at * QUADS, tallies + at * GQA_GROUP * 2,
                query.chunks <= FAN);
  }
  if (groups == 1 || !arrive_last(b, counters, groups)) return;
#pragma unroll 1
  for (int q = 0; q < u.queries; q++) {
    WorkItem query = u.query(q);
    if (query.chunks <= FAN) continue;
    const i64 at = ((i64)query.row * KV_HEADS + u.head) * parts;
    merge_parts(query, (query.chunks + FAN - 1) / FAN, FAN, scale, out, sums + at * QUADS,
                tallies + at * GQA_GROUP * 2, true);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    paged_round(const u16* qkv, const float* q_norm, const float* k_norm, const float* inv_freq,
                const float* kv_scale, u8* keys, u8* values, const int* page_table,
                const int* slots, const int* starts, const int* counts, u16* o, const float* scales,
                u8* q0, u8* s0, u8* q1, u8* s1, float4* sums, float2* tallies, int* arrivals,
                int rows, int most_pages) {
  extern __shared__ __align__(128) u8 shared[];
  Block& b = *reinterpret_cast<Block*>(shared);
  const Out out{o, qkv, b.scales, {q0, q1}, {s0, s1}};
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  int walker = warp / QUERIES, mine = warp % QUERIES, thread = mine * 32 + lane;
  constexpr bool SCALED = QUANT == 1 || QUANT == 3;
  if (SCALED && threadIdx.x < COPIES) b.scales[threadIdx.x] = scales[threadIdx.x];
  list_runs(b, slots, starts, counts, rows, warp, lane);
  int items = b.rows[rows * RUNS].before * KV_HEADS;
  int index = blockIdx.x;
  Item u = {};
  Walk walk = {};
  // Earlier positions are older than the previous launch: fetched before waiting for it.
  if (index < items) {
    u = item_at(index, b.rows, rows);
    walk = walk_of(b, u, keys, values, page_table, most_pages, walker, thread);
  }
  wait_for_previous();
  launch_dependents();
  while (index < items) {
    if (u.length > 0) {
      prepare(b, u, qkv, q_norm, k_norm, inv_freq, kv_scale, keys, values, walk.pages, warp, lane);
    }
    __syncthreads();
    Queries<ROOMY> q;
    load_queries(q, b.queries + mine * COLUMNS, lane);
    float log2_scale = 1.44269504f * rsqrtf((float)D) * (KV_FP8 ? kv_scale[0] : 1.0f);
    int end = u.end, own = mine < u.queries ? min(end, u.seen(mine)) : 0;
    Softmax x = {};
    x.top[0] = x.top[1] = minus_infinity();
    for (int i = 0; i < walk.tiles; i++) {
      wait_copies<AHEAD - 1>();
      meet_walker(walker);
      if (QUERIES > 1) {  // all are done with the tile before: its place is free
        if (i + AHEAD < walk.tiles) walk.load(i + AHEAD);
        commit_copies();
      }
      int position = walk.position(i);
      if (position + 16 > walk.stored) {
        walk.patch(i, end, b.arena[walker], b.fresh[0]);
        meet_walker(walker);
      }
      if (own > position) {
        attend(x, walk.ring + (i % STAGES) * 2 * TILE, q, own - position, log2_scale, lane);
      }
      if (QUERIES == 1) {
        __syncwarp();
        if (i + AHEAD < walk.tiles) walk.load(i + AHEAD);
        commit_copies();
      }
    }
    wait_copies<0>();
    __syncthreads();
    Item done = item_at(index, b.rows, rows);  // again: cheaper than registers through the loop
    float scale = KV_FP8 ? kv_scale[1] : 1.0f;
    int parts = min(MOST_CHUNKS, (most_pages * PAGE + CHUNK - 1) / CHUNK);
    merge_item(b, done, x, scale, out, sums, tallies, parts, walker, mine, lane);
    index += gridDim.x;
    if (index < items) {  // the next item's tiles are loaded while this one's chunks are merged
      u = item_at(index, b.rows, rows);
      walk = walk_of(b, u, keys, values, page_table, most_pages, walker, thread);
    }
    if (done.chunks > 1) merge_run(b, done, scale, out, sums, tallies, arrivals, parts);
  }
}
