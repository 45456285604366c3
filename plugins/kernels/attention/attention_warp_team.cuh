// The loop of attention_round_mma.cu over tiles of keys and values, by readers. A reader has a ring
// of tiles; it is one warp, or a team of QUERIES warps that reads each tile once for all queries.
//
// Team: two warps score two queries. Each computes the even or the odd steps of 16 dimensions for
// both, and they exchange halves through shared memory. Each warp computes the softmax weights of
// one query, then adds up its share of the values' dimensions for all queries, with their weights
// from shared memory. Keys are widened twice and values once; a warp has as many accumulators as a
// reader of one warp. With more than two tiles in the ring, the values of a tile are added while
// the next tile is scored, and the team synchronises once a tile. Products run in the order of
// `attend`, so a query has the same bits as a row of one token.
// Macros: those of attention_merge.cuh.
#pragma once
#include "attention/attention_query_runs.cuh"

constexpr bool VALUES_LAG = QUERIES > 1 && STAGES > 2;                          // by one tile
constexpr int IN_FLIGHT = QUERIES == 1 ? STAGES : VALUES_LAG ? STAGES - 2 : 1;  // tiles
static_assert(QUERIES == 1 || STAGES > 1, "a team's ring has a tile in use and one in flight");

constexpr bool QUERIES_IN_REGISTERS = THREADS * BLOCKS <= 384;  // 168 registers a thread

// A reader's tiles of a work item: tile i begins at position begin + 16·(reader + i·READERS).
struct TileStream {
  const u8 *keys, *values;
  const int* pages;
  u32 ring;
  int first, tiles, most, stored, head, ids;  // most: the largest `tiles` of all readers

  DEVICE static int thread() { return threadIdx.x % (32 * QUERIES); }  // within the reader
  DEVICE int position(int i) const { return first + 16 * READERS * i; }
  DEVICE u32 tile(int i) const { return ring + (i % STAGES) * 2 * TILE; }
  // Starts the copies of tile i. Addresses of rows of 128 bytes or more differ in few bits.
  DEVICE void load(int i, u32 to) {
    if ((i & 31) == 0) {  // the ids of the next 32 tiles, one a lane
      int ahead = i + (thread() & 31);
      ids = ahead < tiles ? pages[position(ahead) / PAGE] : 0;
    }
    constexpr int EACH = 32 * QUERIES, CHUNKS = ROW / 16;
    const int r = thread() / CHUNKS, c = thread() % CHUNKS, left = stored - position(i) - r;
    i64 from = page_offset(__shfl_sync(~0u, ids, i & 31), head, position(i)) + thread() * 16;
    const u8 *key = keys + from, *value = values + from;
    const u32 place = to + swizzled<ROW>(r, c);
#pragma unroll
    for (int n = 0; n < (ROW + EACH - 1) / EACH; n++) {
      constexpr int ROWS = EACH / CHUNKS;
      if (ROW % EACH != 0 && n * EACH + thread() >= ROW) break;
      const u32 at = ROW < 128 ? to + swizzled<ROW>(r + n * ROWS, c)
                               : (place ^ (n * ROWS & 7) << 4) + n * ROWS * ROW;
      copy_async(at, key + n * EACH * 16, n * ROWS < left ? 16 : 0);
      copy_async(at + TILE, value + n * EACH * 16, n * ROWS < left ? 16 : 0);
    }
  }
  // Copies the round's tokens before `end` into tile i, where cp.async wrote zeros.
  DEVICE void patch(int i, int end, u8* arena, const u8* fresh) const {
    int base = position(i), low = max(stored, base), n = min(end, base + 16) - low;
    u8* to = arena + (i % STAGES) * 2 * TILE;
#pragma unroll 1
    for (int at = thread(); at < n * 2 * (ROW / 16); at += 32 * QUERIES) {
      int c = at % (ROW / 16), which = at / (ROW / 16) % 2, position = low + at / (ROW / 8);
      *reinterpret_cast<uint4*>(to + which * TILE + swizzled<ROW>(position - base, c)) =
          *reinterpret_cast<const uint4*>(fresh + (2 * (position - stored) + which) * ROW + c * 16);
    }
  }
};

DEVICE void sync_reader(int reader) {
  if constexpr (QUERIES == 1) __syncwarp();
  else meet(reader + 1, 32 * QUERIES);
}
DEVICE void sync_pair(int reader, int member) {
  meet(1 + READERS + reader * (QUERIES / 2) + member / 2, 64);
}

// The reader's tiles of work item `u`; starts the copies of the first ones.
DEVICE TileStream start_stream(Block& b, const Item& u, const u8* keys, const u8* values,
                               const int* page_table, int most_pages, int reader) {
  int first = u.begin + 16 * reader;
  int most = (u.end - u.begin + 16 * READERS - 1) / (16 * READERS);
  int tiles = first < u.end ? (u.end - first + 16 * READERS - 1) / (16 * READERS) : 0;
  TileStream stream{keys,
                    values,
                    page_table + (i64)u.slot * most_pages,
                    shared_address(b.arena[reader]),
                    first,
                    tiles,
                    most,
                    u.start(),
                    u.head / GROUPS_OF_KV,
                    0};
#pragma unroll
  for (int i = 0; i < IN_FLIGHT; i++) {
    if (i < tiles) stream.load(i, stream.tile(i));
    commit_copies();
  }
  return stream;
}

// Positions that the warp's query sees, and that the later query of its pair sees; 0 for a query
// that the run does not have.
struct Visible {
  int seen, pair;
};

DEVICE void attend_tiles(Softmax& x, TileStream& stream, const Queries<QUERIES_IN_REGISTERS>& q,
                         Block& b, int end, Visible visible, float log2_scale, int reader, int,
                         int lane) {
  for (int i = 0; i < stream.tiles; i++) {
    wait_copies<IN_FLIGHT - 1>();
    __syncwarp();
    const int position = stream.position(i);
    if (position + 16 > stream.stored) {
      stream.patch(i, end, b.arena[reader], b.fresh[0]);
      __syncwarp();
    }
    if (visible.seen > position) {
      attend(x, stream.tile(i), q, visible.seen - position, log2_scale, lane);
    }
    __syncwarp();
    if (i + IN_FLIGHT < stream.tiles) stream.load(i + IN_FLIGHT, stream.tile(i + IN_FLIGHT));
    commit_copies();
  }
}
DEVICE void store_query_sums(Block& b, Softmax& x, int reader, int, int, int lane) {
  store_sums(b, x, reader, 0, lane);
}

// A team's warp: sums of its SHARE of the dimensions for all queries; maxima and totals of one.
constexpr int SHARE = D / QUERIES, PART = SHARE < 64 ? SHARE : 64;  // dimensions; in one pass
static_assert(QUERIES == 1 || SHARE % 32 == 0, "a team's warps load 32 bytes of values or more");
struct TeamSums {
  float o[QUERIES][SHARE / 16][4];
  float top[2], sum[2];
};
constexpr u32 LIVE = 1, SHRUNK = 2;
// The state that a team shares of a tile, 512 bytes a query. First half of a query's scores, for
// the other warp of the pair. Once that warp has read them, the place holds, of its query: P^T by
// lane; the factors of earlier sums, for columns 2t and 2t + 1; the flags LIVE (the query sees the
// tile) and SHRUNK (a maximum rose).
struct Weights {
  uint4 places[QUERIES][32];

  DEVICE float4* half(int q) { return reinterpret_cast<float4*>(places[q]); }
  DEVICE uint2* p(int q) { return reinterpret_cast<uint2*>(places[q ^ 1]); }
  DEVICE float2* shrink(int q) { return reinterpret_cast<float2*>(places[q ^ 1] + 16); }
  DEVICE u32* state(int q) { return reinterpret_cast<u32*>(places[q ^ 1] + 18); }
};
static_assert(QUERIES == 1 || (VALUES_LAG ? 2 : 1) * sizeof(Weights) == WEIGHTS,
              "WEIGHTS load_operand them");
static_assert(QUERIES == 1 || (ROW >= 128 && ARENA % 128 == 0), "lines of all banks begin rows");
static_assert(QUERIES == 1 || 1 + READERS + READERS * QUERIES / 2 <= 16, "named barriers are 16");

// The even or odd steps of both queries of a pair, in registers or in shared memory, as `Queries`.
template <bool KEPT>
struct PairQueries {
  u32 q[2][D / 32][2];
  DEVICE u32 at(int query, int n, int half) const { return q[query][n][half]; }
};
template <>
struct PairQueries<false> {
  const u16* from;
  DEVICE u32 at(int query, int n, int half) const {
    return *reinterpret_cast<const u32*>(from + query * COLUMNS * PITCH + 32 * n + 8 * half);
  }
};
// The address of a lane's head. Columns beyond the group repeat the first; their sums are not read.
DEVICE const u16* pair_queries(const Block& b, int member, int lane) {
  const int g = lane >> 2, t = lane & 3;
  return &b.queries[(member & ~1) * COLUMNS + (g < GQA_GROUP ? g : 0)][16 * (member & 1) + 2 * t];
}
DEVICE void load_operand(PairQueries<false>& x, const Block& b, int member, int lane) {
  x.from = pair_queries(b, member, lane);
}
DEVICE void load_operand(PairQueries<true>& x, const Block& b, int member, int lane) {
  const PairQueries<false> all{pair_queries(b, member, lane)};
#pragma unroll
  for (int n = 0; n < D / 32; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) x.q[i >> 1][n][i & 1] = all.at(i >> 1, n, i & 1);
  }
}
template <bool KEPT>
DEVICE void load_operand(Queries<KEPT>& x, const Block& b, int member, int lane) {
  load_queries(x, b.queries + member * COLUMNS, lane);
}

// The pair's scores over half of the steps. `keys`: the address of this lane's row and piece of the
// tile's first 64 bytes.
DEVICE void half_scores(float (&s)[2][4], u32 keys, const PairQueries<QUERIES_IN_REGISTERS>& q) {
#pragma unroll
  for (int k = 0; k < ROW / 64; k++) {
    u32 r[4];
    load_matrix(r, (keys ^ 64 * (k & 1)) + 128 * (k >> 1));
    if constexpr (KV_FP8) {
      u32 a[4], b[4];
      widen(r[0], a[0], a[2]), widen(r[1], a[1], a[3]);
      widen(r[2], b[0], b[2]), widen(r[3], b[1], b[3]);
#pragma unroll
      for (int i = 0; i < 2; i++) mma16(s[i], a, q.at(i, 2 * k, 0), q.at(i, 2 * k, 1));
#pragma unroll
      for (int i = 0; i < 2; i++) mma16(s[i], b, q.at(i, 2 * k + 1, 0), q.at(i, 2 * k + 1, 1));
    } else {
#pragma unroll
      for (int i = 0; i < 2; i++) mma16(s[i], r, q.at(i, k, 0), q.at(i, k, 1));
    }
  }
}
DEVICE u32 key_address(int member, int lane) {
  const int piece = lane >> 4, odd = member & 1;
  return swizzled<ROW>(lane & 15, KV_FP8 ? 2 * piece + odd : piece + 2 * odd);
}

// `pair`: positions that the pair sees, `seen`: positions that the warp's query sees.
DEVICE void team_weights(Weights& w, TeamSums& x, u32 keys,
                         const PairQueries<QUERIES_IN_REGISTERS>& q, int seen, int pair,
                         float log2_scale, int reader, int member, int lane) {
  u32 state = 0;
  if (pair > 0) {
    float s[2][4] = {};
    half_scores(s, keys, q);
    const bool odd = member & 1;
    w.half(member)[lane] = odd ? make_float4(s[0][0], s[0][1], s[0][2], s[0][3])
                               : make_float4(s[1][0], s[1][1], s[1][2], s[1][3]);
#pragma unroll
    for (int i = 0; i < 4; i++) s[0][i] = odd ? s[1][i] : s[0][i];
    sync_pair(reader, member);
    const float4 other = w.half(member ^ 1)[lane];
    s[1][0] = other.x, s[1][1] = other.y, s[1][2] = other.z, s[1][3] = other.w;
    __syncwarp();
    if (seen > 0) {
      u32 p[2];
      state = LIVE;
      softmax_weights(p, x.top, x.sum, s, seen, log2_scale, lane, [&](const float (&by)[2]) {
        state = LIVE | SHRUNK;
        if (lane < 4) w.shrink(member)[lane] = make_float2(by[0], by[1]);
      });
      w.p(member)[lane] = make_uint2(p[0], p[1]);
    }
  }
  if (lane == 0) *w.state(member) = state;
  if (FOLLOWED && pair <= 0) sync_pair(reader, member);
}

template <int M, int N>
DEVICE void add_products(float (&o)[M][4], int first, const u32 (&a)[N][4], uint2 p) {
#pragma unroll
  for (int n = 0; n < N; n++) mma16(o[first + n], a[n], p.x, p.y);
}

// The warp's share of the values, PART dimensions at a time. `values`: the address of this lane's
// row and half of the share's first 32 bytes.
DEVICE void add_team_values(TeamSums& x, u32 values, Weights& w, int lane) {
  constexpr int N = PART / 16, EACH = KV_FP8 ? 2 : 1;  // tiles of 16 dimensions; of 32 bytes
  u32 state[QUERIES], all = LIVE, any = 0;
  uint2 p[QUERIES];
#pragma unroll
  for (int q = 0; q < QUERIES; q++) {
    p[q] = w.p(q)[lane], state[q] = *w.state(q);
    all &= state[q], any |= state[q];
  }
  if (any & SHRUNK) {
#pragma unroll
    for (int q = 0; q < QUERIES; q++) {
      if (!(state[q] & SHRUNK)) continue;
      const float2 by = w.shrink(q)[lane & 3];
      multiply(x.o[q], {by.x, by.y});
    }
  }
#pragma unroll
  for (int part = 0; part < SHARE / PART; part++) {
    u32 a[N][4];
#pragma unroll
    for (int n = 0; n < N; n += EACH) {
      const int c = (part * N + n) / EACH;
      u32 r[4];
      load_matrix_transposed(r, (values ^ 32 * (c & 3)) + 128 * (c >> 2));
      widen_values(a + n, r);
    }
    if (all) {
#pragma unroll
      for (int q = 0; q < QUERIES; q++) add_products(x.o[q], part * N, a, p[q]);
    } else {
#pragma unroll
      for (int q = 0; q < QUERIES; q++) {
        if (state[q] & LIVE) add_products(x.o[q], part * N, a, p[q]);
      }
    }
  }
}

// FOLLOWED: racecheck reports false hazards where the warps of a block pass unequal numbers of
// barriers. Under it all warps pass the same number: the added barriers follow another one directly
// and so do not order anything else.
DEVICE void attend_tiles(TeamSums& x, TileStream& stream,
                         const PairQueries<QUERIES_IN_REGISTERS>& q, Block& b, int end,
                         Visible visible, float log2_scale, int reader, int member, int lane) {
  Weights* weights = reinterpret_cast<Weights*>(b.arena[reader] + RING);
  Weights* before = weights + (VALUES_LAG ? 1 : 0);
  const u32 last = stream.ring + RING - 2 * TILE;
  u32 tile = stream.ring, one = last;            // one: the tile before
  u32 two = last - (VALUES_LAG ? 2 * TILE : 0);  // the tile before that
  const u32 key = key_address(member, lane);
  const int bytes = member * SHARE * (ROW / D);
  const u32 value =
      TILE + bytes / 128 * 128 +
      swizzled<ROW>((lane & 7) + ((lane >> 4) << 3), bytes % 128 / 16 + (lane >> 3 & 1));
  int position = stream.first;
  for (int i = 0; i < stream.tiles; i++) {
    wait_copies<IN_FLIGHT - 1>();
    sync_reader(reader);  // all copies have arrived, and the next slot is free
    const bool fresh = position + 16 > stream.stored;
    if (FOLLOWED && !fresh) sync_reader(reader);
    if (i + IN_FLIGHT < stream.tiles) stream.load(i + IN_FLIGHT, VALUES_LAG ? two : one);
    commit_copies();
    if (fresh) {
      stream.patch(i, end, b.arena[reader], b.fresh[0]);
      sync_reader(reader);
    }
    if (VALUES_LAG && i > 0) add_team_values(x, one + value, *before, lane);
    team_weights(*weights, x, tile + key, q, visible.seen - position, visible.pair - position,
                 log2_scale, reader, member, lane);
    if (!VALUES_LAG) {
      sync_reader(reader);
      add_team_values(x, tile + value, *weights, lane);
    }
    Weights* other = before;
    before = weights, weights = other;
    two = one, one = tile, tile = tile == last ? stream.ring : tile + 2 * TILE;
    position += 16 * READERS;
  }
  if (VALUES_LAG && stream.tiles > 0) {
    sync_reader(reader);
    add_team_values(x, one + value, *before, lane);
  }
  if (FOLLOWED && VALUES_LAG && stream.tiles == 0) sync_reader(reader);
  for (int i = stream.tiles; FOLLOWED && i < stream.most; i++) {
    for (int n = VALUES_LAG ? 2 : 3; n; n--) sync_reader(reader);
    sync_pair(reader, member);
  }
}
// Sums of queries base … base + MERGE_BATCH - 1 to the reader's arena.
DEVICE void store_query_sums(Block& b, TeamSums& x, int reader, int member, int base, int lane) {
#pragma unroll
  for (int q = 0; q < QUERIES; q++) {
    if (q < base || q >= base + MERGE_BATCH) continue;
    const int slot = q - base;
    float* rows = reinterpret_cast<float*>(b.arena[reader] + slot * MERGE) + member * SHARE;
    put_sums(b.tally[slot * READERS + reader], rows, x.o[q], x.top, x.sum, q == member, lane);
  }
}

#if QUERIES > 1
typedef TeamSums Sums;
typedef PairQueries<QUERIES_IN_REGISTERS> QueryOperand;
#else
typedef Softmax Sums;
typedef Queries<QUERIES_IN_REGISTERS> QueryOperand;
#endif
