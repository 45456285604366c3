// Prefill attention over paged keys and values by mma.sync, after `paged_append`
// (attention_prefill_mma.cu): two heads of a group in a block, two warps for each 32 queries.
//
// Both warps of a pair have the same 32 queries: a fragment of keys or values, widened once, is the
// operand of two products. Each warp computes the scores of one half of a tile's keys and the sums
// of one half of the dimensions; they exchange maxima and weights through shared memory. Shared
// memory holds one tile of keys and one of values: one is filled while the other is read. Tiles
// begin at multiples of KEYS: a query's bits do not depend on the start of its tile of queries.
// Figures: log/attention/attention_prefill_pair_mma.md.
// Macros: those of attention_kv_pages.cuh.
#include "attention/attention_prefill_pair_warp.cuh"

constexpr int COPIERS = THREADS / 2;  // threads that copy
constexpr int PASS = COPIERS * 16;    // bytes of one copy by each

struct Barriers {
  u64 full[2], empty[2];  // of keys, of values
  u64 scored;             // the early pairs have computed their first scores
};

// The pages of one sequence and kv head. The late pairs copy tiles. `which`: 0 keys, 1 values.
struct Source {
  const u8 *keys, *values;
  const int* pages;
  int head, end;
  u32 to;  // the tile of keys in shared memory
  Barriers& b;

  DEVICE int page(int tile) const { return tile * KEYS < end ? pages[tile * KEYS / PAGE] : 0; }
  DEVICE void fill(int which, int tile, int page) const {
    constexpr int ROWS = PASS / ROW;  // 8, or 4
    const int thread = threadIdx.x % COPIERS, row = thread / (ROW / 16);
    const int left = end - tile * KEYS - row;
    const u8* from = (which ? values : keys) + page_offset(page, head, tile * KEYS) + thread * 16;
    const u32 place = to + which * TILE + (thread * 16 ^ row << 4);
#pragma unroll
    for (int n = 0; n < TILE / PASS; n++) {
      copy_async((place ^ n * ROWS % 8 * 16) + n * PASS, from + n * PASS, n * ROWS < left ? 16 : 0);
    }
    barrier_arrive_after_copies(&b.full[which]);
  }
  // Waits until all warps have read the tile before.
  DEVICE void refill(int which, int tile, int page) const {
    barrier_wait(&b.empty[which], ~tile & 1);
    fill(which, tile, page);
  }
};

// One tile. SEEN: some query of the pair sees it. Of the two warps of a scheduler one is late: it
// starts after the other's first scores, so that the softmax of one overlaps the products of the
// other. Late warps copy, since no warp waits for their scores.
template <bool SEEN>
DEVICE void attend(Warp& x, const Source& from, int tile, int& page) {
  Barriers& b = from.b;
  const u32 phase = tile & 1;
  const bool late = x.pair >= PAIRS / 2;
  float s[2][OWN / 8][4] = {};
  if (late) {
    if (tile > 0) from.refill(1, tile, page);
    page = from.page(tile + 1);
  }
  barrier_wait(&b.full[0], phase);
  if constexpr (SEEN) scores(s, x);
  __syncwarp();
  if (tile == 0 && !late) barrier_arrive_warp(&b.scored, x.lane);
  barrier_arrive_warp(&b.empty[0], x.lane);
  if constexpr (SEEN) update_maxima(x, s, tile);
  if (late && (tile + 1) * KEYS < from.end) from.refill(0, tile + 1, page);
  barrier_wait(&b.full[1], phase);
  if constexpr (SEEN) sums(x, s);
  __syncwarp();
  barrier_arrive_warp(&b.empty[1], x.lane);
}

// The queries of both heads to the panels; rows from `count` on are zeros.
DEVICE void copy_queries(u32 to, const u16* from, int count) {
  const int warp = threadIdx.x >> 5, c = lane_id();
  const u32 place = to + c / 8 * PANEL + swizzled<LINE>(warp, c % 8);
#pragma unroll 4
  for (int n = 0; n < IN_BLOCK * QUERIES / WARPS; n++) {
    const int r = n * WARPS + warp, head = r / QUERIES, t = r % QUERIES;
    copy_async(place + n * WARPS * LINE, from + ((i64)t * HEADS + head) * D + c * 8,
               t < count ? 16 : 0);
  }
}

DYNAMIC_SHARED(paged_prefill_pair, VALUES_AT + TILE);

// Grid: (pairs of heads, rows), the last rows first: in a long sequence these read the most keys.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    paged_prefill_pair(const u16* queries, const float* kv_scale, const u8* keys, const u8* values,
                       const int* page_table, const int* slots, const int* starts,
                       const int* counts, u16* o, int most_pages) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ Barriers barriers;
  __shared__ float4 tallies[PAIRS][2][8];
  const int row = gridDim.y - 1 - blockIdx.y, head = blockIdx.x * IN_BLOCK;
  const int slot = slots[row], valid = counts[row], start = starts[row];  // loads in parallel
  const int count = slot >= 0 ? valid : 0;
  const int warp = threadIdx.x >> 5, lane = lane_id(), pair = warp >> 1, half = warp & 1;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) {
      barrier_init(&barriers.full[i], COPIERS);
      barrier_init(&barriers.empty[i], WARPS * WARP_ARRIVALS);
    }
    barrier_init(&barriers.scored, WARPS / 2 * WARP_ARRIVALS);
  }
  __syncthreads();
  wait_for_previous();
  const int t = pair % 2 * 32;  // the pair's first query of its head
  u16* const to = o + (((i64)row * QUERIES + t) * HEADS + head + pair / 2) * D + half * (D / 2);
  if (count > 0) {
    const u32 base = shared_address(shared);
    const Source from{keys,
                      values,
                      page_table + (i64)slot * most_pages,
                      head / GQA_GROUP,
                      start + count,
                      base + KEYS_AT,
                      barriers};
    const int tiles = (from.end + KEYS - 1) / KEYS;
    const int seen = min(tiles, (start + t + 31) / KEYS + 1);
    int page = from.page(0);
    copy_queries(base, queries + ((i64)row * QUERIES * HEADS + head) * D, count);
    if (pair >= PAIRS / 2) from.fill(0, 0, page), from.fill(1, 0, page);
    Warp x;
    x.shared = shared, x.tallies = &tallies[pair][0][0].x;
    x.lane = lane, x.half = half, x.pair = pair;
    set_up(x, base, start + t, KV_FP8 ? kv_scale[0] : 1.0f);
    commit_copies(), wait_copies<0>();
    __syncthreads();
#pragma unroll
    for (int step = 0; step < HELD; step++) {
#pragma unroll
      for (int m = 0; m < 2; m++) {
        load_matrix(x.held[step][m], (x.queries ^ step * 32) + m * 16 * LINE);
      }
    }
    if (pair >= PAIRS / 2) barrier_wait(&barriers.scored, 0);
    int i = 0;
#pragma unroll 1
    for (; i < seen; i++) attend<true>(x, from, i, page);
#pragma unroll 1
    for (; i < tiles; i++) attend<false>(x, from, i, page);
    add_totals(x);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int r = 8 * k + (lane >> 2);
      if (t + r >= count) continue;
      store_row(to + (i64)r * HEADS * D, x, k, (KV_FP8 ? kv_scale[1] : 1.0f) / x.sum[k]);
    }
  }
  for (int at = lane; at < 32 * (D / 16); at += 32) {
    const int r = at / (D / 16);
    if (t + r < count) continue;
    reinterpret_cast<uint4*>(to + (i64)r * HEADS * D)[at % (D / 16)] = make_uint4(0, 0, 0, 0);
  }
}
