// Prefill attention over paged keys and values by mma.sync, behind `paged_append`
// (attention_prefill_mma.cu): two heads of a group in a block, two warps for each 32 queries.
//
// Both warps of a pair have the same 32 queries, so that a fragment of keys or values serves two
// products, and a code is widened for both at once. Each makes the scores of one half of a tile's
// keys and the sums of one half of the dimensions; maxima and weights cross through shared memory.
// One tile of keys and one of values are there: keys come while values are read, values while keys
// are. Tiles begin at multiples of KEYS: a query's bits do not depend on where its tile of queries
// begins.
// Figures: log/attention/attention_prefill_pair_mma.md.
// Macros: those of paged_kv.cuh.
#include "attention/paged_pair_warp.cuh"

constexpr int LATE = THREADS / 2;  // threads that copy
constexpr int PASS = LATE * 16;    // bytes that a copy by each brings

struct Barriers {
  u64 full[2], empty[2];  // of keys, of values
  u64 begun;              // the early pairs have their first scores
};

// The pages of one sequence and kv head; the late half of the threads copies tiles.
// `which`: 0 keys, 1 values.
struct Source {
  const u8 *keys, *values;
  const int* pages;
  int head, end;
  u32 to;  // of the tile of keys
  Barriers& b;

  DEVICE int page(int tile) const { return tile * KEYS < end ? pages[tile * KEYS / PAGE] : 0; }
  DEVICE void fill(int which, int tile, int page) const {
    constexpr int ROWS = PASS / ROW;  // 8, or 4
    const int thread = threadIdx.x % LATE, row = thread / (ROW / 16);
    const int left = end - tile * KEYS - row;
    const u8* from = (which ? values : keys) + page_offset(page, head, tile * KEYS) + thread * 16;
    const u32 place = to + which * TILE + (thread * 16 ^ row << 4);
#pragma unroll
    for (int n = 0; n < TILE / PASS; n++) {
      copy_async((place ^ n * ROWS % 8 * 16) + n * PASS, from + n * PASS, n * ROWS < left ? 16 : 0);
    }
    barrier_arrive_after_copies(&b.full[which]);
  }
  // Once all warps have done with the one before.
  DEVICE void refill(int which, int tile, int page) const {
    barrier_wait(&b.empty[which], ~tile & 1);
    fill(which, tile, page);
  }
};

// One tile. SEEN: by some query of the pair. Of a scheduler's two warps one is late: it begins
// behind the other's first scores, so that one's softmax runs beside the other's products. Late
// warps copy: nobody is behind them.
template <bool SEEN>
DEVICE void attend(Warp& x, const Source& from, int tile, int& page) {
  Barriers& b = from.b;
  const u32 turn = tile & 1;
  const bool late = x.pair >= PAIRS / 2;
  float s[2][OWN / 8][4] = {};
  if (late) {
    if (tile > 0) from.refill(1, tile, page);
    page = from.page(tile + 1);
  }
  barrier_wait(&b.full[0], turn);
  if constexpr (SEEN) scores(s, x);
  __syncwarp();
  if (tile == 0 && !late) barrier_arrive_warp(&b.begun, x.lane);
  barrier_arrive_warp(&b.empty[0], x.lane);
  if constexpr (SEEN) settle(x, s, tile);
  if (late && (tile + 1) * KEYS < from.end) from.refill(0, tile + 1, page);
  barrier_wait(&b.full[1], turn);
  if constexpr (SEEN) sums(x, s);
  __syncwarp();
  barrier_arrive_warp(&b.empty[1], x.lane);
}

// The queries of both heads into the panels; those that are not there are zeros.
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

// Grid: (pairs of heads, rows), the last rows first: in one long sequence they have the most to
// read.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    paged_prefill_pair(const u16* queries, const float* kv_scale, const u8* keys, const u8* values,
                       const int* page_table, const int* slots, const int* starts,
                       const int* counts, u16* o, int most_pages) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ Barriers barriers;
  __shared__ float4 tallies[PAIRS][2][8];
  const int row = gridDim.y - 1 - blockIdx.y, head = blockIdx.x * IN_BLOCK;
  const int slot = slots[row], valid = counts[row], start = starts[row];  // on their way at once
  const int count = slot >= 0 ? valid : 0;
  const int warp = threadIdx.x >> 5, lane = lane_id(), pair = warp >> 1, half = warp & 1;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; i++) {
      barrier_init(&barriers.full[i], LATE);
      barrier_init(&barriers.empty[i], WARPS * WARP_ARRIVALS);
    }
    barrier_init(&barriers.begun, WARPS / 2 * WARP_ARRIVALS);
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
    if (pair >= PAIRS / 2) barrier_wait(&barriers.begun, 0);
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
