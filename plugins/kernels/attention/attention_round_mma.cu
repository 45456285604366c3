// Decode attention over the tokens of a round of drafts, one launch: attention_decode_mma.cu with
// several queries a row, which share one read of the keys and values.
//
// Work: the chunks of a query depend on its own length alone, as for a row of one token. A run is
// up to QUERIES neighbouring queries of a row with equal chunks; a work item is (run, chunk, kv
// head). A query's bits are those of attention_decode_mma.cu with READERS warps.
// Block: READERS rings of 16-token tiles; a team of QUERIES warps fills and reads each
// (attention_warp_team.cuh).
// Append: a work item computes the keys and values of the round's positions in its chunk from the
// activations, not from pages; the items of a row's last run store them.
// Figures: 27B, e4m3 pages, 1k, T = 4, H200, one query a reader: 10 us at 1 row
// (log/attention/attention_round_mma.md).
// Macros: those of attention_kv_pages.cuh and attention_merge.cuh; TOKENS (of a row), QUERIES,
// READERS, WARPS (QUERIES * READERS), STAGES, MERGE_BATCH (queries a merge), CHUNK, MOST_CHUNKS,
// BLOCKS (of a multiprocessor), SHARED (bytes).
#define CHUNK_STRIDE 1
#include "attention/attention_warp_team.cuh"

static_assert(WARPS == QUERIES * READERS, "a warp for each query of each reader");
constexpr int BATCH = 4;  // heads that a warp loads at once

// From the activations: the run's queries, and the round's keys and values of this chunk, to shared
// memory; if the item `appends`, keys and values to the pages too.
DEVICE void prepare(Block& b, const Item& u, const u16* qkv, const float* q_norm,
                    const float* k_norm, const float* inv_freq, const int* rope_offsets,
                    const float* kv_scale, u8* keys, u8* values, const int* pages, int warp,
                    int lane) {
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
                          : (made & 1 ? K_END : Q_END) + u.head / GROUPS_OF_KV * D;
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
        Place place = place_of<TOKENS>(rope_offsets, u.row, t, start + t);
        rotate(h, rotation_at(place, inv_freq, lane), lane);
      }
      if (made < 0) {
        put_query(b.queries[item / GQA_GROUP * COLUMNS + item % GQA_GROUP], h, lane);
      } else {
        Stored s = encode(h, KV_FP8 ? kv_scale[which] : 1.0f);
        put(b.fresh[2 * t + which], s, lane);
        if (u.appends && u.head % GROUPS_OF_KV == 0) {
          i64 to = page_offset(pages[(start + t) / PAGE], u.head / GROUPS_OF_KV, start + t);
          put((which ? values : keys) + to, s, lane);
        }
      }
    }
  }
}

// The block's sums over its readers, query by query: to the result if a query has one chunk, else
// to scratch memory, which holds `parts` chunks of each query.
DEVICE void merge_item(Block& b, const Item& done, Sums& x, float scale, const Out& out,
                       float4* sums, float2* tallies, int parts, int reader, int member, int lane) {
#pragma unroll 1
  for (int base = 0; base < QUERIES; base += MERGE_BATCH) {
    store_query_sums(b, x, reader, member, base, lane);
    __syncthreads();
#pragma unroll 1
    for (int n = base; n < min(base + MERGE_BATCH, done.queries); n++) {
      WorkItem query = done.query(n);
      if (done.chunk >= query.chunks) continue;
      uint2 gate = query.chunks == 1 ? gate_of(query, out.qkv, threadIdx.x) : uint2{};
      const i64 at = ((i64)query.row * HEAD_GROUPS + done.head) * parts + done.chunk;
      merge_warps(b, query, n - base, scale, out, gate, sums + at * QUADS,
                  tallies + at * GQA_GROUP * 2);
    }
    __syncthreads();
  }
}

// The merge after a work item of a run of several chunks. Counters of a run and its group of heads:
// arrived FANs, then the arrived chunks of each.
DEVICE void merge_run(Block& b, const Item& u, float scale, const Out& out, float4* sums,
                      float2* tallies, int* arrivals, int parts) {
  int group = u.chunk / FAN, groups = (u.chunks + FAN - 1) / FAN;
  int* counters = arrivals + (u.run * HEAD_GROUPS + u.head) * (FAN + 1);
  if (!arrive_last(b, counters + 1 + group, min(FAN, u.chunks - group * FAN))) return;
#pragma unroll 1
  for (int q = 0; q < u.queries; q++) {
    WorkItem query = u.query(q);
    int count = min(FAN, query.chunks - group * FAN);
    if (query.chunks == 1 || count < 1) continue;
    const i64 at = ((i64)query.row * HEAD_GROUPS + u.head) * parts + group * FAN;
    merge_parts(query, count, 1, scale, out, sums + at * QUADS, tallies + at * GQA_GROUP * 2,
                query.chunks <= FAN);
  }
  if (groups == 1 || !arrive_last(b, counters, groups)) return;
#pragma unroll 1
  for (int q = 0; q < u.queries; q++) {
    WorkItem query = u.query(q);
    if (query.chunks <= FAN) continue;
    const i64 at = ((i64)query.row * HEAD_GROUPS + u.head) * parts;
    merge_parts(query, (query.chunks + FAN - 1) / FAN, FAN, scale, out, sums + at * QUADS,
                tallies + at * GQA_GROUP * 2, true);
  }
}

DYNAMIC_SHARED(paged_round, sizeof(Block));

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    paged_round(const u16* qkv, const float* q_norm, const float* k_norm, const float* inv_freq,
                const int* rope_offsets, const float* kv_scale, u8* keys, u8* values,
                const int* page_table, const int* slots, const int* starts, const int* counts,
                u16* o, const float* scales, u8* q0, u8* s0, u8* q1, u8* s1, float4* sums,
                float2* tallies, int* arrivals, int rows, int most_pages) {
  extern __shared__ __align__(128) u8 shared[];
  Block& b = *reinterpret_cast<Block*>(shared);
  const Out out{o, qkv, b.scales, {q0, q1}, {s0, s1}};
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  int reader = warp / QUERIES, member = warp % QUERIES;
  constexpr bool SCALED = QUANT == 1 || QUANT == 3;
  if (SCALED && threadIdx.x < COPIES) b.scales[threadIdx.x] = scales[threadIdx.x];
  list_runs(b, slots, starts, counts, rows, warp, lane);
  int items = b.rows[rows * RUNS].before * HEAD_GROUPS;
  int index = blockIdx.x;
  Item u = {};
  TileStream stream = {keys, values};
  // The previous launch does not write earlier positions: they are loaded before the wait.
  if (index < items) {
    u = item_at(index, b.rows, rows);
    stream = start_stream(b, u, keys, values, page_table, most_pages, reader);
  }
  wait_for_previous();
  launch_dependents();
  while (index < items) {
    if (u.length > 0) {
      prepare(b, u, qkv, q_norm, k_norm, inv_freq, rope_offsets, kv_scale, keys, values,
              stream.pages, warp, lane);
    }
    __syncthreads();
    QueryOperand q;
    load_operand(q, b, member, lane);
    float log2_scale = 1.44269504f * rsqrtf((float)D) * (KV_FP8 ? kv_scale[0] : 1.0f);
    const int end = u.end, later = min(member | 1, u.queries - 1);
    const Visible visible{member < u.queries ? min(end, u.seen(member)) : 0,
                          (member & ~1) < u.queries ? min(end, u.seen(later)) : 0};
    Sums x = {};
    x.top[0] = x.top[1] = minus_infinity();
    attend_tiles(x, stream, q, b, end, visible, log2_scale, reader, member, lane);
    wait_copies<0>();
    __syncthreads();
    Item done = item_at(index, b.rows, rows);  // again: cheaper than registers through the loop
    float scale = KV_FP8 ? kv_scale[1] : 1.0f;
    int parts = min(MOST_CHUNKS, (most_pages * PAGE + CHUNK - 1) / CHUNK);
    merge_item(b, done, x, scale, out, sums, tallies, parts, reader, member, lane);
    index += gridDim.x;
    if (index < items) {  // the next item's tiles are loaded while this one's chunks are merged
      u = item_at(index, b.rows, rows);
      stream = start_stream(b, u, keys, values, page_table, most_pages, reader);
    }
    if (done.chunks > 1) merge_run(b, done, scale, out, sums, tallies, arrivals, parts);
  }
}
