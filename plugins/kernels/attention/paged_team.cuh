// How attention_round_mma.cu processes the tiles of a row: by one warp, or by a team of QUERIES
// warps, which read a row's keys and values once for as many queries.
//
// Team: two warps score two queries, each the even or the odd steps of 16 dimensions, and change
// halves; a warp makes the weights of its own query, then adds up its share of the values'
// dimensions for all queries, whose weights it finds in shared memory. So keys are widened twice
// and values once, and a warp has as many sums as one that walks alone. With more than two tiles
// in the ring, a tile's values are added up beside the next one's scores, and the team meets once.
// Products and their order are those of `attend`, so that bits are one token's.
// Macros: those of paged_merge.cuh.
#pragma once
#include "attention/paged_runs.cuh"

constexpr bool LAGS = QUERIES > 1 && STAGES > 2;                      // values, by a tile
constexpr int AHEAD = QUERIES == 1 ? STAGES : LAGS ? STAGES - 2 : 1;  // tiles asked for, past one
static_assert(QUERIES == 1 || STAGES > 1, "a team's ring has a tile in use and one under way");

constexpr bool ROOMY = THREADS * BLOCKS <= 384;  // 168 registers for each

// A walker's way over its tiles of a work item, gone by QUERIES warps together: tile i begins at
// position begin + 16·(walker + i·WALKERS).
struct Walk {
  const u8 *keys, *values;
  const int* pages;
  u32 ring;
  int first, tiles, most, stored, head, ids;  // most: tiles of the walker that has most

  // Of those that go together.
  DEVICE static int thread() { return threadIdx.x % (32 * QUERIES); }
  DEVICE int position(int i) const { return first + 16 * WALKERS * i; }
  DEVICE u32 tile(int i) const { return ring + (i % STAGES) * 2 * TILE; }
  // Asks for tile i. Rows of 128 bytes or more differ in few bits of their places.
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
  // Puts the round's tokens below `end` into tile i if that is their place; cp.async left zeros.
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

DEVICE void meet_walker(int walker) {
  if constexpr (QUERIES == 1) __syncwarp();
  else meet(walker + 1, 32 * QUERIES);
}
DEVICE void meet_pair(int walker, int mine) {
  meet(1 + WALKERS + walker * (QUERIES / 2) + mine / 2, 64);
}

// A walker's way over work item `u`; its first tiles are asked for.
DEVICE Walk walk_of(Block& b, const Item& u, const u8* keys, const u8* values,
                    const int* page_table, int most_pages, int walker) {
  int first = u.begin + 16 * walker;
  int most = (u.end - u.begin + 16 * WALKERS - 1) / (16 * WALKERS);
  int tiles = first < u.end ? (u.end - first + 16 * WALKERS - 1) / (16 * WALKERS) : 0;
  Walk walk{keys,
            values,
            page_table + (i64)u.slot * most_pages,
            shared_address(b.arena[walker]),
            first,
            tiles,
            most,
            u.start(),
            u.head,
            0};
#pragma unroll
  for (int i = 0; i < AHEAD; i++) {
    if (i < tiles) walk.load(i, walk.tile(i));
    commit_copies();
  }
  return walk;
}

// Positions that a warp's own query sees, and the later one of its pair; 0 where it is not there.
struct Own {
  int seen, pair;
};

// A walker of one warp.
DEVICE void walk_tiles(Softmax& x, Walk& walk, const Queries<ROOMY>& q, Block& b, int end, Own own,
                       float log2_scale, int walker, int, int lane) {
  for (int i = 0; i < walk.tiles; i++) {
    wait_copies<AHEAD - 1>();
    __syncwarp();
    const int position = walk.position(i);
    if (position + 16 > walk.stored) {
      walk.patch(i, end, b.arena[walker], b.fresh[0]);
      __syncwarp();
    }
    if (own.seen > position) {
      attend(x, walk.tile(i), q, own.seen - position, log2_scale, lane);
    }
    __syncwarp();
    if (i + AHEAD < walk.tiles) walk.load(i + AHEAD, walk.tile(i + AHEAD));
    commit_copies();
  }
}
DEVICE void spill_queries(Block& b, Softmax& x, int walker, int, int, int lane) {
  spill(b, x, walker, 0, lane);
}

// A team's warp: sums of its SHARE of the dimensions for all queries, maxima and totals of its own.
constexpr int SHARE = D / QUERIES, PART = SHARE < 64 ? SHARE : 64;  // dimensions; those at once
static_assert(QUERIES == 1 || SHARE % 32 == 0, "a team's warps load 32 bytes of values or more");
struct TeamSums {
  float o[QUERIES][SHARE / 16][4];
  float top[2], sum[2];
};
constexpr u32 LIVE = 1, SHRUNK = 2;
// What a team knows of a tile's queries, 512 bytes each. First half of a query's scores, for the
// other warp of the pair; then, once that one has them, of its query: P^T, a lane's share of it;
// what the sums so far are to be multiplied by, by columns 2t and 2t + 1; whether it sees the tile,
// whether a maximum rose.
struct Weights {
  uint4 places[QUERIES][32];

  DEVICE float4* half(int q) { return reinterpret_cast<float4*>(places[q]); }
  DEVICE uint2* p(int q) { return reinterpret_cast<uint2*>(places[q ^ 1]); }
  DEVICE float2* shrink(int q) { return reinterpret_cast<float2*>(places[q ^ 1] + 16); }
  DEVICE u32* state(int q) { return reinterpret_cast<u32*>(places[q ^ 1] + 18); }
};
static_assert(QUERIES == 1 || (LAGS ? 2 : 1) * sizeof(Weights) == WEIGHTS, "WEIGHTS hold them");
static_assert(QUERIES == 1 || (ROW >= 128 && ARENA % 128 == 0), "lines of all banks begin rows");
static_assert(QUERIES == 1 || 1 + WALKERS + WALKERS * QUERIES / 2 <= 16, "named barriers are 16");

// The even or odd steps of both queries of a pair, in registers or read each time, as Queries.
template <bool KEPT>
struct Pair {
  u32 q[2][D / 32][2];
  DEVICE u32 at(int query, int n, int half) const { return q[query][n][half]; }
};
template <>
struct Pair<false> {
  const u16* from;
  DEVICE u32 at(int query, int n, int half) const {
    return *reinterpret_cast<const u32*>(from + query * COLUMNS * PITCH + 32 * n + 8 * half);
  }
};
// Where a lane's head begins; columns beyond the group repeat its first one, nobody reads theirs.
DEVICE const u16* pair_of(const Block& b, int mine, int lane) {
  const int g = lane >> 2, t = lane & 3;
  return &b.queries[(mine & ~1) * COLUMNS + (g < GQA_GROUP ? g : 0)][16 * (mine & 1) + 2 * t];
}
DEVICE void hold(Pair<false>& x, const Block& b, int mine, int lane) {
  x.from = pair_of(b, mine, lane);
}
DEVICE void hold(Pair<true>& x, const Block& b, int mine, int lane) {
  const Pair<false> all{pair_of(b, mine, lane)};
#pragma unroll
  for (int n = 0; n < D / 32; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) x.q[i >> 1][n][i & 1] = all.at(i >> 1, n, i & 1);
  }
}
template <bool KEPT>
DEVICE void hold(Queries<KEPT>& x, const Block& b, int mine, int lane) {
  load_queries(x, b.queries + mine * COLUMNS, lane);
}

// The pair's scores by half of the steps; `keys`: where this lane's row and piece of the tile's
// first 64 bytes are.
DEVICE void half_scores(float (&s)[2][4], u32 keys, const Pair<ROOMY>& q) {
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
DEVICE u32 key_place(int mine, int lane) {
  const int piece = lane >> 4, odd = mine & 1;
  return swizzled<ROW>(lane & 15, KV_FP8 ? 2 * piece + odd : piece + 2 * odd);
}

// `pair`: positions that the pair sees, `seen`: those that the warp's own query does.
DEVICE void weights_of(Weights& w, TeamSums& x, u32 keys, const Pair<ROOMY>& q, int seen, int pair,
                       float log2_scale, int walker, int mine, int lane) {
  u32 state = 0;
  if (pair > 0) {
    float s[2][4] = {};
    half_scores(s, keys, q);
    const bool odd = mine & 1;
    w.half(mine)[lane] = odd ? make_float4(s[0][0], s[0][1], s[0][2], s[0][3])
                             : make_float4(s[1][0], s[1][1], s[1][2], s[1][3]);
#pragma unroll
    for (int i = 0; i < 4; i++) s[0][i] = odd ? s[1][i] : s[0][i];
    meet_pair(walker, mine);
    const float4 other = w.half(mine ^ 1)[lane];
    s[1][0] = other.x, s[1][1] = other.y, s[1][2] = other.z, s[1][3] = other.w;
    __syncwarp();
    if (seen > 0) {
      u32 p[2];
      state = LIVE;
      soften(p, x.top, x.sum, s, seen, log2_scale, lane, [&](const float (&by)[2]) {
        state = LIVE | SHRUNK;
        if (lane < 4) w.shrink(mine)[lane] = make_float2(by[0], by[1]);
      });
      w.p(mine)[lane] = make_uint2(p[0], p[1]);
    }
  }
  if (lane == 0) *w.state(mine) = state;
  if (FOLLOWED && pair <= 0) meet_pair(walker, mine);
}

template <int M, int N>
DEVICE void add_products(float (&o)[M][4], int first, const u32 (&a)[N][4], uint2 p) {
#pragma unroll
  for (int n = 0; n < N; n++) mma16(o[first + n], a[n], p.x, p.y);
}

// The warp's share of the values, PART dimensions at a time. `values`: where this lane's row and
// half of the share's first 32 bytes are.
DEVICE void add_values(TeamSums& x, u32 values, Weights& w, int lane) {
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

// FOLLOWED: racecheck reports hazards across barriers where warps of a block have passed unequally
// many. There all pass as many, by further ones right beside another of theirs, which so order
// nothing more.
DEVICE void walk_tiles(TeamSums& x, Walk& walk, const Pair<ROOMY>& q, Block& b, int end, Own own,
                       float log2_scale, int walker, int mine, int lane) {
  Weights* weights = reinterpret_cast<Weights*>(b.arena[walker] + RING);
  Weights* before = weights + (LAGS ? 1 : 0);
  const u32 last = walk.ring + RING - 2 * TILE;
  u32 tile = walk.ring, one = last, two = last - (LAGS ? 2 * TILE : 0);  // and those before it
  const u32 key = key_place(mine, lane);
  const int bytes = mine * SHARE * (ROW / D);
  const u32 value =
      TILE + bytes / 128 * 128 +
      swizzled<ROW>((lane & 7) + ((lane >> 4) << 3), bytes % 128 / 16 + (lane >> 3 & 1));
  int position = walk.first;
  for (int i = 0; i < walk.tiles; i++) {
    wait_copies<AHEAD - 1>();
    meet_walker(walker);  // the copies of all; nobody needs what the next ones overwrite
    const bool fresh = position + 16 > walk.stored;
    if (FOLLOWED && !fresh) meet_walker(walker);
    if (i + AHEAD < walk.tiles) walk.load(i + AHEAD, LAGS ? two : one);
    commit_copies();
    if (fresh) {
      walk.patch(i, end, b.arena[walker], b.fresh[0]);
      meet_walker(walker);
    }
    if (LAGS && i > 0) add_values(x, one + value, *before, lane);
    weights_of(*weights, x, tile + key, q, own.seen - position, own.pair - position, log2_scale,
               walker, mine, lane);
    if (!LAGS) {
      meet_walker(walker);
      add_values(x, tile + value, *weights, lane);
    }
    Weights* other = before;
    before = weights, weights = other;
    two = one, one = tile, tile = tile == last ? walk.ring : tile + 2 * TILE;
    position += 16 * WALKERS;
  }
  if (LAGS && walk.tiles > 0) {
    meet_walker(walker);
    add_values(x, one + value, *before, lane);
  }
  if (FOLLOWED && LAGS && walk.tiles == 0) meet_walker(walker);
  for (int i = walk.tiles; FOLLOWED && i < walk.most; i++) {
    for (int n = LAGS ? 2 : 3; n; n--) meet_walker(walker);
    meet_pair(walker, mine);
  }
}
// Queries base … base + AT_ONCE - 1 into the places of the walker's arena.
DEVICE void spill_queries(Block& b, TeamSums& x, int walker, int mine, int base, int lane) {
#pragma unroll
  for (int q = 0; q < QUERIES; q++) {
    if (q < base || q >= base + AT_ONCE) continue;
    const int slot = q - base;
    float* rows = reinterpret_cast<float*>(b.arena[walker] + slot * MERGE) + mine * SHARE;
    put_sums(b.tally[slot * WALKERS + walker], rows, x.o[q], x.top, x.sum, q == mine, lane);
  }
}

#if QUERIES > 1
typedef TeamSums Sums;
typedef Pair<ROOMY> Held;
#else
typedef Softmax Sums;
typedef Queries<ROOMY> Held;
#endif
