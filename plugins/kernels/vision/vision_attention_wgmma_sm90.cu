// Attention of an image's patches by wgmma, after `vision_turn` (vision_attention_turn_fma.cu),
// with the overlaps of FlashAttention-3.
//
// A block has 64 queries of a head for each of its CONSUMERS warpgroups. All read the same tiles of
// KEYS keys and values, three of each in shared memory, which a thread of a producer warpgroup
// fills by TMA bulk copies. A consumer asks for the scores of a tile, then for the sums of the tile
// before; its softmax overlaps the products of the others, and of two consumers these sums.
// Figures: log/vision/vision_attention.md.
// Macros: those of vision_attention_tiles.cuh; CONSUMERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS
// (of a thread).
#include "common/wgmma16_sm90.cuh"
#include "vision/vision_attention_tiles.cuh"

constexpr int GROUP = 128, THREADS = (CONSUMERS + 1) * GROUP, STAGES = 3;
// Shared memory: the queries of all consumers, a ring of tiles of keys, one of values.
constexpr int KEYS_AT = CONSUMERS * QUERY_TILE, VALUES_AT = KEYS_AT + STAGES * TILE;
DYNAMIC_SHARED(vision_attend_groups, VALUES_AT + STAGES * TILE);
using Mma = Wgmma16<false>;

struct Barriers {
  u64 queries, full[2][STAGES], empty[2][STAGES];  // of keys, of values
};

struct Consumer : Softmax {
  u32 queries, keys, values;  // addresses, uniform: this warpgroup's tile, the first of each ring
};

DEVICE void issue_scores(Consumer& x, Barriers& b, int tile) {
  const u32 keys = x.keys + tile % STAGES * TILE;
  barrier_wait(&b.full[0][tile % STAGES], tile / STAGES & 1);
  wgmma_fence();
#pragma unroll
  for (int panel = 0; panel < PANELS; panel++) {
    const u64 a = wgmma_narrow(x.queries) + (u64)(panel * QUERIES * 2);
    const u64 k = wgmma_narrow(keys) + (u64)(panel * KEYS * 2);
    if (panel == 0) Mma::keys<true>(x.s, a, k);
    else Mma::keys<false>(x.s, a, k);
  }
  wgmma_commit();
}

DEVICE void issue_sums(Consumer& x, Barriers& b, int tile) {
  const u64 values = wgmma_narrow_columns<KEYS>(x.values + tile % STAGES * TILE);
  barrier_wait(&b.full[1][tile % STAGES], tile / STAGES & 1);
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < KEYS / 16; n++) {
    Mma::values<false>(x.o, x.p[n], values + (u64)(n * 32));
  }
  wgmma_commit();
}

DEVICE void release(Barriers& b, int which, int tile) {
  if (lane_id() == 0) barrier_arrive(&b.empty[which][tile % STAGES]);
}

// Scores and softmax of `tile`, the sums of the tile before.
template <bool MASKED>
DEVICE void advance(Consumer& x, Barriers& b, int tile, int left) {
  issue_scores(x, b, tile);
  issue_sums(x, b, tile - 1);
  wgmma_wait<1>();
  keep_order(x.s);
  release(b, 0, tile);
  weigh<MASKED>(x, left);
  if (CONSUMERS == 2) settle(x.sum[0] + x.sum[1]);  // of three the registers are too few
  wgmma_wait<0>();
  keep_order(x.o);
  release(b, 1, tile - 1);
  rescale(x);
}

DEVICE void consume(Consumer& x, Barriers& b, int live, int tiles) {
  begin(x);
  barrier_wait(&b.queries, 0);
  issue_scores(x, b, 0);
  wgmma_wait<0>();
  keep_order(x.s);
  release(b, 0, 0);
  weigh<true>(x, live);
  x.shrink[0] = x.shrink[1] = 1.0f;  // no earlier sums
  rescale(x);
#pragma unroll 1
  for (int i = 1; i < tiles - 1; i++) advance<false>(x, b, i, KEYS);
  if (tiles > 1) advance<true>(x, b, tiles - 1, live - (tiles - 1) * KEYS);
  issue_sums(x, b, tiles - 1);
  wgmma_wait<0>();
  keep_order(x.o);
}

// By one thread. `keys`, `values`: of the head.
DEVICE void produce(u8* shared, Barriers& b, const u8* queries, const u8* keys, const u8* values,
                    int tiles) {
  barrier_expect(&b.queries, CONSUMERS * QUERY_TILE);
  bulk_load(shared, queries, CONSUMERS * QUERY_TILE, &b.queries);
#pragma unroll 1
  for (int i = 0; i < tiles; i++) {
    const int stage = i % STAGES;
#pragma unroll
    for (int which = 0; which < 2; which++) {
      u64* const full = &b.full[which][stage];
      if (i >= STAGES) barrier_wait(&b.empty[which][stage], (i / STAGES + 1) & 1);
      barrier_expect(full, TILE);
      bulk_load(shared + (which ? VALUES_AT : KEYS_AT) + stage * TILE,
                (which ? values : keys) + (i64)i * TILE, TILE, full);
    }
  }
}

// Grid: (rows / rows of a block, heads).
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    vision_attend_groups(const u8* queries, const u8* keys, const u8* values, const int* live,
                         u16* y, int rows) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ Barriers barriers;
  const int group = threadIdx.x / GROUP, head = blockIdx.y;
  const int first = blockIdx.x * CONSUMERS * QUERIES;  // the block's first query
  const i64 before = (i64)head * rows * ROW;
  if (threadIdx.x == 0) {
    barrier_init(&barriers.queries, 1);
    for (int i = 0; i < 2 * STAGES; i++) {
      barrier_init(&barriers.full[0][0] + i, 1);
      barrier_init(&barriers.empty[0][0] + i, CONSUMERS * 4);
    }
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_previous();
  const int count = live[0], tiles = (count + KEYS - 1) / KEYS;
  if (first >= count) return;
  if (group == CONSUMERS) {
    fewer_registers<PRODUCER_REGISTERS>();
    if (threadIdx.x % GROUP == 0) {
      produce(shared, barriers, queries + before + (i64)first * ROW, keys + before, values + before,
              tiles);
    }
  } else {
    more_registers<CONSUMER_REGISTERS>();
    const u32 base = shared_address(shared);
    Consumer x;
    x.queries = uniform(base + group * QUERY_TILE);
    x.keys = uniform(base + KEYS_AT), x.values = uniform(base + VALUES_AT);
    consume(x, barriers, count, tiles);
    store(y, x, head, first + group * QUERIES + (threadIdx.x % GROUP >> 5) * 16, count);
  }
}
