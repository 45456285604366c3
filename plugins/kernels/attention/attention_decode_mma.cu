// Decode attention over paged keys and values, one launch: norm, RoPE, append, attend, merge
// (split-KV, as FlashDecoding).
//
// Work: a row of length n is cut into equal chunks of a size that depends on n alone; a work item
// is (row, chunk, group of heads): those of a kv head, or, where more than eight share one, a part
// of them. The grid is the number of resident blocks; each block lists the items from `starts` and
// strides over them. The block of a row's last chunk appends the key and value.
// Block: each warp has a ring of 16-token tiles, which it fills by cp.async, so the loop over
// tokens needs no block barrier.
// Merge: a block's warps through shared memory; the chunks of a (row, kv head) in groups of eight
// in ascending order, by the block that arrives last. A row's bits depend on its own length alone.
// Figures: 128 rows of 1k, 27B, e4m3 pages, H200: 78.3 us behind a full launch (floor 62;
// log/attention/attention_decode_mma.md).
// Macros: those of attention_kv_pages.cuh and attention_merge.cuh; WARPS, STAGES, CHUNK (tokens of
// a chunk, about), MOST_CHUNKS (of a row), BLOCKS (of a multiprocessor), SHARED (bytes).
#include "common/early.cuh"
#include "attention/attention_online_softmax.cuh"

DEVICE int length_of(int slot, int start, int count) {
  return slot >= 0 && count > 0 ? start + 1 : 0;
}
// The whole block calls it, with a row a thread.
DEVICE void list_rows(Block& b, const int* slots, const int* starts, const int* counts, int rows,
                      int warp, int lane) {
  Row* list = b.rows;
  int* chunks = reinterpret_cast<int*>(b.tally);  // of each warp's rows
  int total = 0;
  for (int base = 0; base < rows; base += THREADS) {
    int r = base + threadIdx.x, n = 0;
    Row row = {};
    if (r < rows) {
      row.slot = slots[r], row.length = length_of(row.slot, starts[r], counts[r]);
      row.chunk = chunk_tokens(row.length);
      n = chunks_of(row.length, row.chunk);
    }
    row.before = count_before(n, total, chunks, warp, lane);
    if (r < rows) list[r] = row;
    __syncthreads();
  }
  if (threadIdx.x == 0) list[rows].before = total;
  __syncthreads();
}

DEVICE WorkItem item_at(int index, const Row* list, int rows) {
  WorkItem u;
  int at = index / HEAD_GROUPS, low = 0, high = rows;
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (list[middle].before <= at) low = middle;
    else high = middle;
  }
  u.row = low, u.head = index % HEAD_GROUPS, u.chunk = at - list[low].before;
  u.chunks = list[low + 1].before - list[low].before;
  u.slot = list[low].slot, u.length = list[low].length;
  u.begin = u.chunk * list[low].chunk;
  u.end = min(u.length, u.begin + list[low].chunk);
  return u;
}

// This warp's tiles of work item `u`; starts the copies of the first ones.
DEVICE TileStream start_item(Block& b, const WorkItem& u, const u8* keys, const u8* values,
                             const int* pages, int warp) {
  TileStream stream = stream_of(b.arena[warp], keys, values, pages, u.begin, u.end, u.length - 1,
                                u.head / GROUPS_OF_KV, warp, 0);
  stream.start();
  return stream;
}

// Inputs of `prepare` that no launch writes: they are loaded early to hide their latency.
struct Constants {
  float q_norm[VEC], k_norm[VEC];
  Rotation rotation;
};

DEVICE Constants load_constants(const float* q_norm, const float* k_norm, const float* inv_freq,
                                const Place& place, int lane) {
  Constants c;
  load_floats(c.q_norm, q_norm + lane * VEC), load_floats(c.k_norm, k_norm + lane * VEC);
  c.rotation = rotation_at(place, inv_freq, lane);
  return c;
}

// The group's queries to shared memory; in a row's last chunk also the append.
DEVICE void prepare(Block& b, const WorkItem& u, const u16* qkv, const Constants& constants,
                    const float* kv_scale, u8* keys, u8* values, const int* table, int warp,
                    int lane) {
  const u16* token = qkv + (i64)u.row * WIDTH;
  int items = GQA_GROUP + (u.end == u.length ? 2 : 0), at = u.length - 1;
  RawHead raws[ITEMS_PER_WARP];
#pragma unroll
  for (int i = 0; i < ITEMS_PER_WARP; i++) {
    int item = warp + i * WARPS;
    int from = item < GQA_GROUP    ? (u.head * GQA_GROUP + item) * 2 * D
               : item == GQA_GROUP ? Q_END + u.head / GROUPS_OF_KV * D
                                   : K_END + u.head / GROUPS_OF_KV * D;
    if (i == 0 || item < items) raws[i] = load_raw(token + from, lane);  // in bounds; no store_sums
  }
  int page = table[at / PAGE];
#pragma unroll
  for (int i = 0; i < ITEMS_PER_WARP; i++) {
    int item = warp + i * WARPS;
    if (item >= items) break;
    Head h = widened(raws[i]);
    if (item <= GQA_GROUP) {
      if (item < GQA_GROUP) normalise(h, constants.q_norm);
      else normalise(h, constants.k_norm);
      rotate(h, constants.rotation, lane);
    }
    if (item < GQA_GROUP) {
      put_query(b.queries[item], h, lane);
    } else {
      int which = item - GQA_GROUP;
      Stored s = encode(h, KV_FP8 ? kv_scale[which] : 1.0f);
      put(b.fresh[which], s, lane);
      if (u.head % GROUPS_OF_KV != 0) continue;  // another group stores it
      put((which ? values : keys) + page_offset(page, u.head / GROUPS_OF_KV, at), s, lane);
    }
  }
}

// The merge after work item `index`, which is of a row of several chunks. Counters of a row and its
// group of heads: arrived FANs, then the arrived chunks of each.
DEVICE void merge_row(Block& b, const WorkItem& u, int index, float scale, const Out& out,
                      float4* sums, float2* tallies, int* arrivals) {
  const i64 first = index - (i64)u.chunk * HEAD_GROUPS;
  const int group = u.chunk / FAN, groups = (u.chunks + FAN - 1) / FAN;
  int* counters = arrivals + (u.row * HEAD_GROUPS + u.head) * (FAN + 1);
  int count = min(FAN, u.chunks - group * FAN), step = 1;
  i64 at = first + (i64)group * FAN * HEAD_GROUPS;
  if (!arrive_last(b, counters + 1 + group, count)) return;
#pragma unroll 1
  while (true) {
    const bool last = step > 1 || groups == 1;
    merge_parts<(WARPS > 4 ? 2 : 1)>(QUADS, step, scale, out, sums, tallies, [&](int i) {
      return Merge{u, i, i < QUADS ? count : 0, at, last};
    });
    if (last || !arrive_last(b, counters, groups)) return;
    count = groups, step = FAN, at = first;
  }
}

DYNAMIC_SHARED(paged_decode, sizeof(Block));

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    paged_decode(const u16* qkv, const float* q_norm, const float* k_norm, const float* inv_freq,
                 const int* rope_offsets, const float* kv_scale, u8* keys, u8* values,
                 const int* page_table, const int* slots, const int* starts, const int* counts,
                 u16* o, const float* scales, u8* q0, u8* s0, u8* q1, u8* s1, float4* sums,
                 float2* tallies, int* arrivals, int rows, int most_pages) {
  extern __shared__ __align__(128) u8 shared[];
  Block& b = *reinterpret_cast<Block*>(shared);
  const Out out{o, qkv, b.scales, {q0, q1}, {s0, s1}};
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  constexpr bool SCALED = QUANT == 1 || QUANT == 3;
  if (SCALED && threadIdx.x < COPIES) b.scales[threadIdx.x] = scales[threadIdx.x];
  list_rows(b, slots, starts, counts, rows, warp, lane);
  int items = b.rows[rows].before * HEAD_GROUPS;
  int index = blockIdx.x;
  WorkItem u = {};
  TileStream stream = {};
  // The previous launch does not write earlier positions: they are loaded before the wait.
  if (index < items) {
    u = item_at(index, b.rows, rows);
    stream = start_item(b, u, keys, values, page_table + (i64)u.slot * most_pages, warp);
  }
  wait_and_let_next_begin();
  while (index < items) {
    if (u.length > 0) {
      Place place = place_of<1>(rope_offsets, u.row, 0, u.length - 1);
      Constants constants = load_constants(q_norm, k_norm, inv_freq, place, lane);
      prepare(b, u, qkv, constants, kv_scale, keys, values, stream.pages, warp, lane);
    }
    __syncthreads();
    float log2_scale = 1.44269504f * rsqrtf((float)D) * (KV_FP8 ? kv_scale[0] : 1.0f);
    Softmax x = {};
    attend_tiles(x, stream, b, log2_scale, warp, lane);
    wait_copies<0>();
    uint2 gate = u.chunks == 1 ? gate_of(u, qkv, threadIdx.x) : uint2{};
    store_sums(b, x, warp, lane);
    __syncthreads();
    WorkItem done = item_at(index, b.rows, rows);  // again: cheaper than registers through the loop
    const int at = index;
    float scale = KV_FP8 ? kv_scale[1] : 1.0f;
#pragma unroll 1  // its registers would add to those of the loop over tokens
    for (int i = threadIdx.x; i - lane < QUADS; i += THREADS) {
      uint2 next = done.chunks == 1 ? gate_of(done, qkv, i + THREADS) : uint2{};
      merge_warps(b, done, 0, i, scale, out, gate, sums + (i64)at * QUADS,
                  tallies + (i64)at * GQA_GROUP * 2);
      gate = next;
    }
    __syncthreads();
    index += gridDim.x;
    if (index < items) {  // the next item's tiles are loaded while this one's chunks are merged
      u = item_at(index, b.rows, rows);
      stream = start_item(b, u, keys, values, page_table + (i64)u.slot * most_pages, warp);
    }
    if (done.chunks > 1) merge_row(b, done, at, scale, out, sums, tallies, arrivals);
  }
}
