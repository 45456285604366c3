// Prefill attention over paged keys and values on Hopper's warpgroup matrix unit, behind
// `paged_append` (paged_prefill.cu): FlashAttention-3's division of labour.
//
// A block has the 64 queries of one tile of two heads of a group, a warpgroup each, which read the
// same keys and values in tiles of 64 tokens, two of each in shared memory. A third warpgroup fills
// them: bf16 pages by cp.async; e4m3 codes by TMA bulk copies, then through registers, where they
// become f16 (a code is exact in it). A consumer asks for this tile's sums and the next one's
// scores at once; its softmax runs beside the other consumer's products. Tiles begin at multiples of 64: a query's bits do not depend
// on where its tile of queries begins (benchmarks/log/paged_pairs.md).
// Macros besides those of paged_kv.cuh: HELD (of a query's 16 pieces of 16 dimensions, those in
// registers), MOST, REST (registers of a consumer's and a producer's thread).
#include "attention/paged_kv.cuh"
#include "common/wgmma16.cuh"

constexpr int QUERIES = 64, KEYS = 64, GROUP = 128, CONSUMERS = 2, STAGES = 2;
constexpr int THREADS = (CONSUMERS + 1) * GROUP;
constexpr int PANEL = KEYS * 128, PANELS = D / 64;  // 64 dimensions of a tile
constexpr int HALF_TILE = PANELS * PANEL;           // keys or values of a tile
constexpr int STEPS = D / 16;
constexpr int CODES = KEYS * ROW;  // bytes of e4m3 keys or values of a tile
static_assert(D == 256 && PAGE % KEYS == 0 && GQA_GROUP % CONSUMERS == 0, "unsupported sizes");

// Shared memory: queries, STAGES tiles of keys, as many of values; e4m3: the codes of one of each.
constexpr int KEYS_AT = CONSUMERS * HALF_TILE, VALUES_AT = KEYS_AT + STAGES * HALF_TILE;

struct Barriers {
  u64 full[2][STAGES], empty[2][STAGES];  // of keys, of values
  u64 codes[2];
};

// Where a tile of queries reads from: one sequence, one kv head.
struct Source {
  const u8 *keys, *values;
  const int* pages;
  int head, end, tiles;

  DEVICE int page(int tile) const { return tile < tiles ? pages[tile * KEYS / PAGE] : 0; }
};

// --- Producer --------------------------------------------------------------------------------

// One half of a tile into shared memory. `which`: 0 keys, 1 values.
struct Producer {
  const Source& s;
  u32 tiles;  // of shared memory
  Barriers& b;
  int warp, lane;

  DEVICE const u8* half(int which, int page, int tile) const {
    return (which ? s.values : s.keys) + page_offset(page, s.head, tile * KEYS);
  }
  DEVICE u32 place(int which, int tile) const {
    return tiles + (which * STAGES + tile % STAGES) * HALF_TILE;
  }
  DEVICE void wait_empty(int which, int tile) const {
    if (tile >= STAGES) barrier_wait(&b.empty[which][tile % STAGES], (tile / STAGES + 1) & 1);
  }
  DEVICE void announce(int which, int tile) const {
    fence_async();  // wgmma reads through the async proxy
    barrier_arrive(&b.full[which][tile % STAGES]);
  }
};

// The address, opaque: what is added to it stands in the instructions.
DEVICE const u8* kept(const u8* from) {
  asm volatile("" : "+l"(from));
  return from;
}

// bf16: a warp copies a row at once. A half is announced when the one after it is under way.
DEVICE void copy_half(const Producer& p, int which, int tile, int page) {
  p.wait_empty(which, tile);
  const u8* from = kept(p.half(which, page, tile) + p.warp * ROW + p.lane * 16);
  const u32 to = p.place(which, tile) + (p.lane >> 3) * PANEL + p.warp * 128;
  const u32 even = to + (((p.lane & 7) ^ p.warp) << 4);
  const u32 odd = to + (((p.lane & 7) ^ (p.warp + 4)) << 4);
  const int left = p.s.end - tile * KEYS;
  if (left >= KEYS) {
#pragma unroll
    for (int n = 0; n < KEYS / 4; n++) {
      copy_async((n & 1 ? odd : even) + n * 512, from + n * 4 * ROW);
    }
  } else {
#pragma unroll 1
    for (int n = 0; n < KEYS / 4; n++) {
      const bool there = 4 * n + p.warp < left;
      copy_async((n & 1 ? odd : even) + n * 512, from + (there ? n * 4 * ROW : 0), there ? 16 : 0);
    }
  }
  commit_copies();
}

DEVICE void produce_copies(const Producer& p) {
  int page = p.s.page(0);
#pragma unroll 1
  for (int i = 0; i < p.s.tiles; i++) {
    const int next = p.s.page(i + 1);
    copy_half(p, 0, i, page);
    if (i > 0) wait_copies<1>(), p.announce(1, i - 1);
    copy_half(p, 1, i, page);
    wait_copies<1>(), p.announce(0, i);
    page = next;
  }
  wait_copies<0>(), p.announce(1, p.s.tiles - 1);
}

// e4m3: two warps do the keys and two the values. The codes of a tile come by one TMA bulk copy; a
// lane has 16 of each fourth row. Eight lanes read 128 bytes of codes in a row and write eight bank
// groups: in every second panel neighbouring chunks change places, here, in the queries and in the
// sums. Dimensions come in the order of `slot_of`.
DEVICE void convert(const Producer& p, u32 raw, u32 to, int rows) {
  const int row = (p.warp & 1) * 2 + (p.lane >> 4), panel = p.lane >> 2 & 3;
  const int chunk = (p.lane & 3) * 2 + (panel & 1);
  to += panel * PANEL + row * 128;
  raw += row * ROW + (p.lane & 15) * 16;
  const u32 first = to + ((chunk ^ row) << 4), second = first ^ 16;
#pragma unroll 4
  for (int n = 0; n < KEYS / 4; n++) {
    uint4 c = load_shared16(raw + n * 4 * ROW);
    if (4 * n + row >= rows) c = make_uint4(0, 0, 0, 0);
    u32 low[4], high[4];
    widen(c.x, low[0], high[0]), widen(c.y, low[1], high[1]);
    widen(c.z, low[2], high[2]), widen(c.w, low[3], high[3]);
    const u32 turned = n & 1 ? 64 : 0;  // rows 4 to 7 of eight
    store_shared16((first ^ turned) + n * 512, low[0], low[1], low[2], low[3]);
    store_shared16((second ^ turned) + n * 512, high[0], high[1], high[2], high[3]);
  }
}

DEVICE void produce_codes(const Producer& p) {
  const int which = p.warp >> 1;
  const u32 raw = p.tiles + (2 * STAGES) * HALF_TILE + which * CODES;
  const bool first = (p.warp & 1) == 0 && p.lane == 0;
  u64* const arrived = &p.b.codes[which];
  int page = p.s.page(0);
#pragma unroll 1
  for (int i = 0; i < p.s.tiles; i++) {
    if (i == 0 && first) {
      barrier_expect(arrived, CODES), bulk_load(raw, p.half(which, page, 0), CODES, arrived);
    }
    page = p.s.page(i + 1);
    p.wait_empty(which, i);
    barrier_wait(arrived, i & 1);
    convert(p, raw, p.place(which, i), p.s.end - i * KEYS);
    p.announce(which, i);
    meet(CONSUMERS + 1 + which, 64);  // the codes are read
    if (i + 1 < p.s.tiles && first) {
      barrier_expect(arrived, CODES), bulk_load(raw, p.half(which, page, i + 1), CODES, arrived);
    }
  }
}

// --- Consumers -------------------------------------------------------------------------------

struct Consumer {
  u32 queries, keys, values;  // uniform: this head's queries, the first tile of each ring
  float o[D / 8][4], s[KEYS / 8][4];
  float top[2], sum[2], shrink[2];  // of rows g and g + 8
  u32 p[KEYS / 16][4];
  u32 held[HELD ? HELD : 1][4];
  float scale;  // of a score, to base 2
  int first;    // position of row g
  Barriers& b;
};

// Where k-step `step` of a tile begins, in a descriptor's units.
template <int ROWS>
DEVICE u64 step_of(u64 tile, int step) {
  return tile + (u64)(step / 4 * (ROWS * 8) + step % 4 * 2);
}

DEVICE void ask_scores(Consumer& x, int tile) {
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

DEVICE void ask_sums(Consumer& x, int tile) {
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

// The scores of a tile become weights, to the new maximum; `shrink` is what older sums shrink by.
template <bool MASKED>
DEVICE void soften(Consumer& x, int tile) {
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

// Older sums shrink where a maximum rose; weights become operands.
DEVICE void settle(Consumer& x) {
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

// From tile - 1, whose weights are ready, to tile.
template <bool MASKED>
DEVICE void advance(Consumer& x, int tile) {
  ask_sums(x, tile - 1);
  ask_scores(x, tile);
  wgmma_wait<1>();
  release(x, 1, tile - 1);
  wgmma_wait<0>();
  keep_order(x.s);
  keep_order(x.o);
  release(x, 0, tile);
  soften<MASKED>(x, tile);
  settle(x);
}

DEVICE void consume(Consumer& x, int tiles, int whole) {
  ask_scores(x, 0);
  wgmma_wait<0>();
  keep_order(x.s);
  release(x, 0, 0);
  soften<true>(x, 0);
  x.shrink[0] = x.shrink[1] = 1.0f;  // nothing is there yet
  settle(x);
  int i = 1;
#pragma unroll 1
  for (; i < whole; i++) advance<false>(x, i);
#pragma unroll 1
  for (; i < tiles; i++) advance<true>(x, i);
  ask_sums(x, tiles - 1);
  wgmma_wait<0>();
  keep_order(x.o);
}

// This head's queries into shared memory, by its warpgroup; those that are not there are zeros.
DEVICE void load_queries(Consumer& x, const u16* from, int count, int group) {
#pragma unroll 4
  for (int at = threadIdx.x % GROUP; at < QUERIES * (D / 8); at += GROUP) {
    const int r = at / (D / 8), c = at % (D / 8);
    const int turned = KV_FP8 ? c / 8 & 1 : 0;  // as `convert` has it
    copy_async(x.queries + c / 8 * (QUERIES * 128) + swizzled<128>(r, c % 8 ^ turned),
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
      const int turned = c / 4 & 1;     // as `convert` has it
      const float *e = &x.o[2 * c + turned][2 * j], *f = &x.o[2 * c + 1 - turned][2 * j];
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

// The rows of a lane to the result; zeros beyond the tile's tokens.
DEVICE void store(u16* o, Consumer& x, int count, float scale) {
#pragma unroll
  for (int j = 0; j < 2; j++) {
    float sum = x.sum[j];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int t = 16 * (threadIdx.x % GROUP >> 5) + (lane_id() >> 2) + 8 * j;
    if (t < count) store_row(o + (i64)t * HEADS * D, x, j, scale / sum, lane_id() & 3);
  }
}

DEVICE void store_zeros(u16* o, int from) {
  for (int at = threadIdx.x % GROUP; at < (QUERIES - from) * (D / 8); at += GROUP) {
    u16* row = o + (i64)(from + at / (D / 8)) * HEADS * D;
    reinterpret_cast<uint4*>(row)[at % (D / 8)] = make_uint4(0, 0, 0, 0);
  }
}

// Grid: (rows, pairs of heads), the last rows first: in one long sequence they have the most to
// read.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    paged_pairs(const u16* queries, const float* kv_scale, const u8* keys, const u8* values,
                const int* page_table, const int* slots, const int* starts, const int* counts,
                u16* o, int most_pages) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ Barriers barriers;
  const int row = gridDim.x - 1 - blockIdx.x, group = threadIdx.x / GROUP;
  const int head = blockIdx.y * CONSUMERS + group, slot = slots[row];
  const int count = slot >= 0 ? counts[row] : 0, start = count > 0 ? starts[row] : 0;
  const i64 first = ((i64)row * QUERIES * HEADS + head) * D;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2 * STAGES; i++) {
      barrier_init(&barriers.full[0][0] + i, KV_FP8 ? GROUP / 2 : GROUP);
      barrier_init(&barriers.empty[0][0] + i, CONSUMERS * 4);
    }
    barrier_init(&barriers.codes[0], 1), barrier_init(&barriers.codes[1], 1);
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_previous();
  const u32 base = shared_address(shared);
  const int tiles = (start + count + KEYS - 1) / KEYS;
  if (group == CONSUMERS) {
    fewer_registers<REST>();
    const Source source{keys,
                        values,
                        page_table + (i64)max(slot, 0) * most_pages,
                        (int)blockIdx.y * CONSUMERS / GQA_GROUP,
                        start + count,
                        tiles};
    const int warp = threadIdx.x % GROUP >> 5;
    const Producer p{source, base + KEYS_AT, barriers, warp, (int)lane_id()};
    if (count > 0) {
      if constexpr (KV_FP8) produce_codes(p);
      else produce_copies(p);
    }
  } else {
    more_registers<MOST>();
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
      x.top[0] = x.top[1] = minus_infinity();
      x.scale = 1.44269504f * rsqrtf((float)D) * (KV_FP8 ? kv_scale[0] : 1.0f);
      x.first = start + 16 * (threadIdx.x % GROUP >> 5) + (lane_id() >> 2);
      load_queries(x, queries + first, count, group);
      consume(x, tiles, min(tiles, start / KEYS));
      store(o + first, x, count, KV_FP8 ? kv_scale[1] : 1.0f);
    }
    store_zeros(o + first, count);
  }
}
