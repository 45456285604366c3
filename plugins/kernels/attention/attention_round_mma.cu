// Decode attention over the tokens of a round of drafts, one launch: attention_decode_mma.cu with
// several queries a row, which share one read of the keys and values.
//
// Work: the chunks of a query depend on its own length alone, as for a row of one token. A run is
// up to QUERIES neighbouring queries of a row with equal chunks; a work item is (run, chunk, kv
// head). A query's bits are those of attention_decode_mma.cu with READERS warps.
// Block: READERS rings of 16-token tiles; a team of TEAM warps fills and reads each
// (attention_warp_team.cuh).
// Append: a work item computes the keys and values of the round's positions in its chunk from the
// activations, not from pages; the items of a row's last run store them.
// Figures: 8 rows of 131k, 27B, e4m3 pages, T = 4, H200: 502 us, one token 481
// (log/attention/attention_round_mma.md).
// Macros: those of attention_kv_pages.cuh and attention_merge.cuh; TOKENS (of a row), QUERIES,
// READERS, TEAM, STEP_TILES (tiles of a team's step), WARPS (TEAM * READERS), STAGES, MERGE_BATCH
// (queries a merge), CHUNK, MOST_CHUNKS, BLOCKS (of a multiprocessor), SHARED (bytes).
#define CHUNK_STRIDE 1
#include "attention/attention_query_runs.cuh"
#if TEAM > 1
#include "attention/attention_warp_team.cuh"
#else
typedef Softmax TeamSums;
DEVICE void attend_tiles(TeamSums& x, TileStream& stream, Block& b, float log2_scale, int reader,
                         int, int lane) {
  attend_tiles(x, stream, b, log2_scale, reader, lane);
}
DEVICE void store_query_sums(Block& b, const TeamSums& x, int reader, int, int, int lane) {
  store_sums(b, x, reader, lane);
}
#endif

static_assert(WARPS == TEAM * READERS && (TEAM > 1 || QUERIES == 1), "a team reads for a run");
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
        put_query(b.queries[item], h, lane);
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

static_assert(MERGE_BATCH == 1 || QUADS % 32 == 0, "a warp has pieces of one query");

// The place of a query's chunk in scratch memory, which holds `parts` chunks of each query.
DEVICE i64 place_of_chunk(const WorkItem& query, int chunk, int parts) {
  return ((i64)query.row * HEAD_GROUPS + query.head) * parts + chunk;
}

// The block's sums over its readers: to the result if a query has one chunk, else to scratch
// memory.
DEVICE void merge_item(Block& b, const Item& done, TeamSums& x, float scale, const Out& out,
                       float4* sums, float2* tallies, int parts, int reader, int member, int lane) {
#pragma unroll 1
  for (int base = 0; base < QUERIES; base += MERGE_BATCH) {
    store_query_sums(b, x, reader, member, base, lane);
    __syncthreads();
    const int live = min(MERGE_BATCH, done.queries - base);
#pragma unroll 1
    for (int i = forget(threadIdx.x); i - lane < live * QUADS; i += THREADS) {
      const int n = min(i / QUADS, live - 1), piece = i - n * QUADS;
      const WorkItem query = done.query(base + n);
      if (done.chunk >= query.chunks) continue;
      const uint2 gate = query.chunks == 1 ? gate_of(query, out.qkv, piece) : uint2{};
      const i64 at = place_of_chunk(query, done.chunk, parts);
      merge_warps(b, query, n, piece, scale, out, gate, sums + at * QUADS,
                  tallies + at * GQA_GROUP * 2);
    }
    __syncthreads();
  }
}

// The merge after a work item of a run of several chunks. Counters of a run and its group of heads:
// arrived FANs, then the arrived chunks of each.
DEVICE void merge_run(Block& b, const Item& u, float scale, const Out& out, float4* sums,
                      float2* tallies, int* arrivals, int parts) {
  const int first = u.chunk / FAN * FAN, groups = (u.chunks + FAN - 1) / FAN;
  int* counters = arrivals + (u.run * HEAD_GROUPS + u.head) * (FAN + 1);
  if (!arrive_last(b, counters + 1 + u.chunk / FAN, min(FAN, u.chunks - first))) return;
#pragma unroll 1
  for (int step = 1;; step = FAN) {
    merge_parts<2>(u.queries * QUADS, step, scale, out, sums, tallies, [&](int i) {
      const int n = min(i / QUADS, u.queries - 1);
      const WorkItem query = u.query(n);
      const bool merged = step > 1 ? query.chunks > FAN : query.chunks > 1;
      const int all = step > 1 ? (query.chunks + FAN - 1) / FAN : query.chunks - first;
      const i64 at = place_of_chunk(query, step > 1 ? 0 : first, parts);
      const int count = i < u.queries * QUADS && merged ? max(0, min(FAN, all)) : 0;
      return Merge{query, i - n * QUADS, count, at, step > 1 || query.chunks <= FAN};
    });
    if (step > 1 || groups == 1 || !arrive_last(b, counters, groups)) return;
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
  int reader = warp / TEAM, member = warp % TEAM;
  constexpr bool SCALED = QUANT == 1 || QUANT == 3;
  if (SCALED && threadIdx.x < COPIES) b.scales[threadIdx.x] = scales[threadIdx.x];
  list_runs(b, slots, starts, counts, rows, warp, lane);
  const auto is_item = [&](int index) { return index < b.items; };
  int index = blockIdx.x;
  // The work item's tiles; its first ones are loaded while the chunks of the one before are merged,
  // and before the wait: the previous launch does not write earlier positions.
  const auto stream_at = [&](const Item& u) {
    const int* pages = page_table + (i64)u.slot * most_pages;
    return stream_of(b.arena[reader], keys, values, pages, u.begin, u.end, u.start(),
                     u.head / GROUPS_OF_KV, reader, member);
  };
  const auto start = [&](int index) {
    if (!is_item(index)) return;
    TileStream stream = stream_at(item_at(index, b.rows, rows));
    stream.start();
  };
  start(index);
  wait_for_previous();
  launch_dependents();
  while (is_item(index)) {
    // What depends on them is not kept in registers from item to item.
    warp = forget(warp), lane = forget(lane), reader = warp / TEAM, member = warp % TEAM;
    const Item u = item_at(index, b.rows, rows);
    TileStream stream = stream_at(u);
    stream.find_pages(stream.first);  // again: not in registers during the merge
    if (u.length > 0) {
      prepare(b, u, qkv, q_norm, k_norm, inv_freq, rope_offsets, kv_scale, keys, values,
              stream.pages, warp, lane);
    }
    if (threadIdx.x == 0) b.visible = u.seen(0), b.queries_now = u.queries;
    __syncthreads();
    float log2_scale = 1.44269504f * rsqrtf((float)D) * (KV_FP8 ? kv_scale[0] : 1.0f);
    TeamSums x = {};
    attend_tiles(x, stream, b, log2_scale, reader, member, lane);
    wait_copies<0>();
    __syncthreads();
    Item done =
        item_at(forget(index), b.rows, rows);  // again: cheaper than registers through the loop
    float scale = KV_FP8 ? kv_scale[1] : 1.0f;
    int parts = min(MOST_CHUNKS, (most_pages * PAGE + CHUNK - 1) / CHUNK);
    merge_item(b, done, x, scale, out, sums, tallies, parts, reader, member, lane);
    start(index += gridDim.x);
    if (done.chunks > 1) merge_run(b, done, scale, out, sums, tallies, arrivals, parts);
  }
}
