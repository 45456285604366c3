// Prefill attention over paged keys and values by wgmma, after `paged_append`
// (attention_prefill_mma.cu), with the warp specialisation of FlashAttention-3.
//
// A block has the 64 queries of one tile of two heads of a group, a consumer warpgroup a head. Both
// read the same tiles of 64 keys and values, two of each in shared memory, which a producer
// warpgroup fills (attention_kv_stages_sm90.cuh). A consumer issues the sums of one tile with the
// scores of the next; its softmax overlaps the other consumer's products. Tiles begin at multiples
// of 64: a query's bits do not depend on the start of its tile of queries.
// Figures: log/attention/attention_prefill_wgmma_sm90.md.
// For few queries after a long context SPLITS blocks share a tile's keys (split-KV): the last
// warpgroup of a head adds the parts in ascending order. Bits then depend on the tile's start too.
// Macros: those of attention_kv_pages.cuh; SPLITS, HELD (of a query's 16 pieces of 16 dimensions,
// the number in registers), CONSUMER_REGISTERS, PRODUCER_REGISTERS (of a thread).
#include "attention/attention_kv_stages_sm90.cuh"
#include "common/wgmma16_sm90.cuh"

constexpr int CONSUMERS = 2, THREADS = (CONSUMERS + 1) * GROUP, STEPS = D / 16;
static_assert(GQA_GROUP % CONSUMERS == 0, "both heads of a block have one kv head");
constexpr int LEAST = 8;          // tiles of keys of a block, at least
constexpr float LOWEST = -1e30f;  // below any score: the maximum of a row that sees no key
// Shared memory: the queries of two heads, then the rings of attention_kv_stages_sm90.cuh.
constexpr int KEYS_AT = CONSUMERS * HALF_TILE, VALUES_AT = KEYS_AT + STAGES * HALF_TILE;

struct Consumer {
  u32 queries, keys,
      values;  // addresses, uniform: this head's queries, the first tile of each ring
  float o[D / 8][4], s[KEYS / 8][4];
  float top[2], sum[2], shrink[2];  // of rows g and g + 8
  u32 p[KEYS / 16][4];
  u32 held[HELD ? HELD : 1][4];
  float scale;  // of a score, to base 2
  int first;    // position of row g
  Barriers& b;
};

// The start of k-step `step` of a tile, in a descriptor's units.
template <int ROWS>
DEVICE u64 step_of(u64 tile, int step) {
  return tile + (u64)(step / 4 * (ROWS * 8) + step % 4 * 2);
}

DEVICE void issue_scores(Consumer& x, int tile) {
  using Mma = Wgmma16<KV_FP8>;
  const u64 keys = wgmma_tile(x.keys + tile % STAGES * HALF_TILE);
  const u64 queries = wgmma_tile(x.queries);
  barrier_wait(&x.b.full[0][tile % STAGES], tile / STAGES & 1);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    const u64 at = step_of<KEYS>(keys, step);
    if (step < HELD) {
      if (step == 0) Mma::keys<true>(x.s, x.held[0], at);
      else Mma::keys<false>(x.s, x.held[step < HELD ? step : 0], at);
    } else {
      const u64 a = step_of<QUERIES>(queries, step);
      if (step == 0) Mma::keys<true>(x.s, a, at);
      else Mma::keys<false>(x.s, a, at);
    }
  }
  wgmma_commit();
}

DEVICE void issue_sums(Consumer& x, int tile) {
  const u64 values = wgmma_columns<KEYS>(x.values + tile % STAGES * HALF_TILE);
  barrier_wait(&x.b.full[1][tile % STAGES], tile / STAGES & 1);
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < KEYS / 16; n++) {
    Wgmma16<KV_FP8>::values<false>(x.o, x.p[n], values + (u64)(n * 128));
  }
  wgmma_commit();
}

DEVICE void release(Consumer& x, int which, int tile) {
  if (lane_id() == 0) barrier_arrive(&x.b.empty[which][tile % STAGES]);
}

// The scores of a tile become weights relative to the new maximum; `shrink` is the factor of the
// earlier sums.
template <bool MASKED>
DEVICE void softmax_weights(Consumer& x, int tile) {
  float higher[2] = {x.top[0], x.top[1]};
  const int ahead = x.first - tile * KEYS - 2 * (lane_id() & 3);
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (MASKED && 8 * n + (i & 1) > ahead + (i >> 1) * 8) x.s[n][i] = minus_infinity();
      higher[i >> 1] = fmaxf(higher[i >> 1], x.s[n][i]);
    }
  }
#pragma unroll
  for (int j = 0; j < 2; j++) {
    higher[j] = fmaxf(higher[j], __shfl_xor_sync(~0u, higher[j], 1));
    higher[j] = fmaxf(higher[j], __shfl_xor_sync(~0u, higher[j], 2));
    x.shrink[j] = exp2_fast((x.top[j] - higher[j]) * x.scale);
    x.top[j] = higher[j], x.sum[j] *= x.shrink[j];
  }
  const float base[2] = {x.top[0] * x.scale, x.top[1] * x.scale};
#pragma unroll
  for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x.s[n][i] = exp2_fast(fmaf(x.s[n][i], x.scale, -base[i >> 1]));
      x.sum[i >> 1] += x.s[n][i];
    }
  }
}

// Scales the earlier sums where a maximum rose; packs the weights as operands.
DEVICE void rescale_sums(Consumer& x) {
  if (__any_sync(~0u, x.shrink[0] != 1.0f || x.shrink[1] != 1.0f)) {
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) x.o[n][i] *= x.shrink[i >> 1];
    }
  }
#pragma unroll
  for (int n = 0; n < KEYS / 16; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float* pair = &x.s[2 * n + (i >> 1)][(i & 1) * 2];
      x.p[n][i] = pack16(pair[0], pair[1]);
    }
  }
}

// Sums of tile - 1, after its softmax; scores and softmax of `tile`.
template <bool MASKED>
DEVICE void advance(Consumer& x, int tile) {
  issue_sums(x, tile - 1);
  issue_scores(x, tile);
  wgmma_wait<1>();
  release(x, 1, tile - 1);
  wgmma_wait<0>();
  keep_order(x.s);
  keep_order(x.o);
  release(x, 0, tile);
  softmax_weights<MASKED>(x, tile);
  rescale_sums(x);
}

DEVICE void consume(Consumer& x, int tiles, int whole) {
  issue_scores(x, 0);
  wgmma_wait<0>();
  keep_order(x.s);
  release(x, 0, 0);
  softmax_weights<true>(x, 0);
  x.shrink[0] = x.shrink[1] = 1.0f;  // no earlier sums
  rescale_sums(x);
  int i = 1;
#pragma unroll 1
  for (; i < whole; i++) advance<false>(x, i);
#pragma unroll 1
  for (; i < tiles; i++) advance<true>(x, i);
  issue_sums(x, tiles - 1);
  wgmma_wait<0>();
  keep_order(x.o);
}

// This head's queries to shared memory, by its warpgroup; rows from `count` on are zeros.
DEVICE void load_queries(Consumer& x, const u16* from, int count, int group) {
#pragma unroll 4
  for (int at = threadIdx.x % GROUP; at < QUERIES * (D / 8); at += GROUP) {
    const int r = at / (D / 8), c = at % (D / 8);
    copy_async(x.queries + c / 8 * (QUERIES * 128) + swizzled<128>(r, c % 8),
               from + (i64)r * HEADS * D + c * 8, r < count ? 16 : 0);
  }
  commit_copies();
  wait_copies<0>();
  fence_async();
  meet(1 + group, GROUP);
#pragma unroll
  for (int step = 0; step < HELD; step++) {
    const int row = (threadIdx.x % GROUP >> 5) * 16 + (lane_id() & 15);
    load_matrix(x.held[step], x.queries + step / 4 * (QUERIES * 128) +
                                  swizzled<128>(row, step % 4 * 2 + (lane_id() >> 4)));
  }
}

DEVICE void store_row(u16* o, const Consumer& x, int j, float scale, int t) {
  if constexpr (KV_FP8) {
#pragma unroll
    for (int c = 0; c < D / 16; c++) {  // four dimensions in neighbouring tiles
      const float *e = &x.o[2 * c][2 * j], *f = &x.o[2 * c + 1][2 * j];
      *reinterpret_cast<uint2*>(o + 16 * c + 4 * t) =
          make_uint2(pack_bf16(e[0] * scale, e[1] * scale), pack_bf16(f[0] * scale, f[1] * scale));
    }
  } else {
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
      *reinterpret_cast<u32*>(o + 8 * n + 2 * t) =
          pack_bf16(x.o[n][2 * j] * scale, x.o[n][2 * j + 1] * scale);
    }
  }
}

// A row's total: the sum over its four lanes.
DEVICE void add_totals(Consumer& x) {
#pragma unroll
  for (int j = 0; j < 2; j++) {
    x.sum[j] += __shfl_xor_sync(~0u, x.sum[j], 1);
    x.sum[j] += __shfl_xor_sync(~0u, x.sum[j], 2);
  }
}

DEVICE void store(u16* o, Consumer& x, int count, float scale) {
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int t = 16 * (threadIdx.x % GROUP >> 5) + (lane_id() >> 2) + 8 * j;
    if (t < count) store_row(o + (i64)t * HEADS * D, x, j, scale / x.sum[j], lane_id() & 3);
  }
}

DEVICE void store_zeros(u16* o, int from) {
  for (int at = threadIdx.x % GROUP; at < (QUERIES - from) * (D / 8); at += GROUP) {
    u16* row = o + (i64)(from + at / (D / 8)) * HEADS * D;
    reinterpret_cast<uint4*>(row)[at % (D / 8)] = make_uint4(0, 0, 0, 0);
  }
}

// Scratch memory of the parts of one tile and head: sums [parts, D / 8, thread], each thread's two
// maxima and totals, the number of parts that have arrived.
struct SplitSums {
  float4 *sums, *tallies;
  int* arrivals;
  int parts;

  DEVICE float4* sum(int part) const { return sums + (i64)part * (D / 8) * GROUP; }
};

// Stores this part's sums. True in the last warpgroup to arrive, with the sums of all parts.
DEVICE bool merge_splits(Consumer& x, const SplitSums& m, int part, int thread, int group,
                         int* last) {
#pragma unroll
  for (int n = 0; n < D / 8; n++) {
    m.sum(part)[n * GROUP + thread] = make_float4(x.o[n][0], x.o[n][1], x.o[n][2], x.o[n][3]);
  }
  m.tallies[part * GROUP + thread] = make_float4(x.top[0], x.sum[0], x.top[1], x.sum[1]);
  meet(1 + group, GROUP);
  if (thread == 0) {
    last[group] = count_up(m.arrivals) == m.parts - 1;
    if (last[group]) *m.arrivals = 0;
  }
  meet(1 + group, GROUP);
  if (!last[group]) return false;
  float total[2] = {}, top[2] = {LOWEST, LOWEST};
#pragma unroll 1
  for (int i = 0; i < m.parts; i++) {
    const float4 tally = __ldcg(&m.tallies[i * GROUP + thread]);
    top[0] = fmaxf(top[0], tally.x), top[1] = fmaxf(top[1], tally.z);
  }
#pragma unroll
  for (int n = 0; n < D / 8; n++) x.o[n][0] = x.o[n][1] = x.o[n][2] = x.o[n][3] = 0.0f;
#pragma unroll 1
  for (int i = 0; i < m.parts; i++) {
    const float4 tally = __ldcg(&m.tallies[i * GROUP + thread]);
    const float by[2] = {exp2_fast((tally.x - top[0]) * x.scale),
                         exp2_fast((tally.z - top[1]) * x.scale)};
    total[0] = fmaf(tally.y, by[0], total[0]), total[1] = fmaf(tally.w, by[1], total[1]);
#pragma unroll
    for (int n = 0; n < D / 8; n++) {
      const float4 o = __ldcg(&m.sum(i)[n * GROUP + thread]);
      x.o[n][0] = fmaf(o.x, by[0], x.o[n][0]), x.o[n][1] = fmaf(o.y, by[0], x.o[n][1]);
      x.o[n][2] = fmaf(o.z, by[1], x.o[n][2]), x.o[n][3] = fmaf(o.w, by[1], x.o[n][3]);
    }
  }
  x.sum[0] = total[0], x.sum[1] = total[1];
  return true;
}

DYNAMIC_SHARED(paged_pairs, (CONSUMERS + 2 * STAGES) * HALF_TILE);

// Grid: (rows, pairs of heads, SPLITS), the last rows first: in a long sequence these read the most
// keys.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    paged_pairs(const u16* queries, const float* kv_scale, const u8* keys, const u8* values,
                const int* page_table, const int* slots, const int* starts, const int* counts,
                u16* o, float4* sums, float4* tallies, int* arrivals, int most_pages) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ Barriers barriers;
  __shared__ int last[CONSUMERS];
  const int row = gridDim.x - 1 - blockIdx.x, group = threadIdx.x / GROUP;
  const int head = blockIdx.y * CONSUMERS + group, slot = slots[row], part = blockIdx.z;
  const int count = slot >= 0 ? counts[row] : 0, start = count > 0 ? starts[row] : 0;
  const int all = (start + count + KEYS - 1) / KEYS;  // tiles of keys
  const int each = max(LEAST, (all + SPLITS - 1) / SPLITS), before = part * each;
  const int tiles = min(each, all - before);
  const i64 first = ((i64)row * QUERIES * HEADS + head) * D;
  if (SPLITS > 1 && part > 0 && tiles <= 0) return wait_for_previous();  // as in paged_append
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * STAGES; i++) {
      barrier_init(&barriers.full[0][0] + i, KV_FP8 ? GROUP / 2 : GROUP);
      barrier_init(&barriers.empty[0][0] + i, CONSUMERS * 4);
    }
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_previous();
  const u32 base = shared_address(shared);
  const int thread = threadIdx.x % GROUP, warp = thread >> 5;
  if (group == CONSUMERS) {
    fewer_registers<PRODUCER_REGISTERS>();
    const Source source{keys,
                        values,
                        page_table + (i64)max(slot, 0) * most_pages,
                        (int)blockIdx.y * CONSUMERS / GQA_GROUP,
                        before * KEYS,
                        start + count,
                        tiles};
    const Producer p{source, base + KEYS_AT, barriers, warp, (int)lane_id()};
    if (count > 0) {
      if constexpr (KV_FP8) produce_codes(p);
      else produce_copies(p);
    }
  } else {
    more_registers<CONSUMER_REGISTERS>();
    bool stores = true;
    if (count > 0) {
      Consumer x = {uniform(base + group * HALF_TILE),
                    uniform(base + KEYS_AT),
                    uniform(base + VALUES_AT),
                    {},
                    {},
                    {},
                    {},
                    {},
                    {},
                    {},
                    0.0f,
                    0,
                    barriers};
      x.top[0] = x.top[1] = LOWEST;
      x.scale = 1.44269504f * rsqrtf((float)D) * (KV_FP8 ? kv_scale[0] : 1.0f);
      x.first = start + 16 * warp + (lane_id() >> 2) - before * KEYS;
      load_queries(x, queries + first, count, group);
      consume(x, tiles, min(tiles, start / KEYS - before));
      add_totals(x);
      if (SPLITS > 1 && all > each) {
        const i64 place = ((i64)row * HEADS + head) * SPLITS;
        const SplitSums m{sums + place * (D / 8) * GROUP, tallies + place * GROUP,
                          arrivals + row * HEADS + head, (all + each - 1) / each};
        stores = merge_splits(x, m, part, forget(threadIdx.x) % GROUP, group, last);
      }
      if (stores) store(o + first, x, count, KV_FP8 ? kv_scale[1] : 1.0f);
    }
    if (stores) store_zeros(o + first, count);
  }
}
