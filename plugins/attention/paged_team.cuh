// The way of a walker of paged_round.cu over its tiles: by one warp, or by a team of QUERIES warps,
// which read a row's keys and values once for as many queries.
//
// Team: a warp makes the weights of its own query, then adds up its share of the values'
// dimensions for all queries, whose weights it finds in shared memory: so values are widened once,
// and a warp has as many sums as one that walks alone. With more than two tiles in the ring, a
// tile's values are added up beside the next one's scores, and the team meets once a tile.
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
  int first, tiles, stored, head, ids;

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

// A walker's way over work item `u`; its first tiles are asked for.
DEVICE Walk walk_of(Block& b, const Item& u, const u8* keys, const u8* values,
                    const int* page_table, int most_pages, int walker) {
  int first = u.begin + 16 * walker;
  int tiles = first < u.end ? (u.end - first + 16 * WALKERS - 1) / (16 * WALKERS) : 0;
  Walk walk{keys,
            values,
            page_table + (i64)u.slot * most_pages,
            shared_address(b.arena[walker]),
            first,
            tiles,
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

// A walker of one warp.
DEVICE void walk_tiles(Softmax& x, Walk& walk, const Queries<ROOMY>& q, Block& b, int end, int own,
                       float log2_scale, int walker, int, int lane) {
  for (int i = 0; i < walk.tiles; i++) {
    wait_copies<AHEAD - 1>();
    __syncwarp();
    const int position = walk.position(i);
    if (position + 16 > walk.stored) {
      walk.patch(i, end, b.arena[walker], b.fresh[0]);
      __syncwarp();
    }
    if (own > position) attend(x, walk.tile(i), q, own - position, log2_scale, lane);
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
// What a team knows of a tile's queries: P^T, a lane's share of it; what the sums so far are to be
// multiplied by, by columns 2t and 2t + 1; whether the query sees the tile, whether a maximum rose.
struct Weights {
  uint2 p[QUERIES][32];
  float2 shrink[QUERIES][4];
  u8 state[16];
};
static_assert(QUERIES == 1 || 2 * sizeof(Weights) <= WEIGHTS, "WEIGHTS are two of Weights");
static_assert(QUERIES == 1 || (ROW >= 128 && ARENA % 128 == 0), "lines of all banks begin rows");

// `keys`: where this lane's row and half of the tile's first 32 bytes are.
DEVICE void weights_of(Weights& w, TeamSums& x, u32 keys, const Queries<ROOMY>& q, int seen,
                       float log2_scale, int mine, int lane) {
  u32 state = 0;
  if (seen > 0) {
    float s[2][4] = {};
    scores(s, q, [=](int c) { return (keys ^ 32 * (c & 3)) + 128 * (c >> 2); });
    u32 p[2];
    state = LIVE;
    soften(p, x.top, x.sum, s, seen, log2_scale, lane, [&](const float (&by)[2]) {
      state = LIVE | SHRUNK;
      if (lane < 4) w.shrink[mine][lane] = make_float2(by[0], by[1]);
    });
    w.p[mine][lane] = make_uint2(p[0], p[1]);
  }
  if (lane == 0) w.state[mine] = (u8)state;
}

template <int M, int N>
DEVICE void add_products(float (&o)[M][4], int first, const u32 (&a)[N][4], uint2 p) {
#pragma unroll
  for (int n = 0; n < N; n++) mma16(o[first + n], a[n], p.x, p.y);
}

// The warp's share of the values, PART dimensions at a time. `values`: where this lane's row and
// half of the share's first 32 bytes are.
DEVICE void add_values(TeamSums& x, u32 values, const Weights& w, int lane) {
  constexpr int N = PART / 16, EACH = KV_FP8 ? 2 : 1;  // tiles of 16 dimensions; of 32 bytes
  constexpr u32 ALL = QUERIES == 2 ? 0x0101 : 0x01010101;
  const u32 states = *reinterpret_cast<const u32*>(w.state);
  uint2 p[QUERIES];
#pragma unroll
  for (int q = 0; q < QUERIES; q++) p[q] = w.p[q][lane];
  if (states & ALL * SHRUNK) {
#pragma unroll
    for (int q = 0; q < QUERIES; q++) {
      if (!(states >> 8 * q & SHRUNK)) continue;
      const float2 by = w.shrink[q][lane & 3];
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
    if ((states & ALL) == ALL) {
#pragma unroll
      for (int q = 0; q < QUERIES; q++) add_products(x.o[q], part * N, a, p[q]);
    } else {
#pragma unroll
      for (int q = 0; q < QUERIES; q++) {
        if (states >> 8 * q & LIVE) add_products(x.o[q], part * N, a, p[q]);
      }
    }
  }
}

DEVICE void walk_tiles(TeamSums& x, Walk& walk, const Queries<ROOMY>& q, Block& b, int end, int own,
                       float log2_scale, int walker, int mine, int lane) {
  Weights* weights = reinterpret_cast<Weights*>(b.arena[walker] + RING);
  Weights* before = weights + 1;
  const u32 last = walk.ring + RING - 2 * TILE;
  u32 tile = walk.ring, one = last, two = last - (LAGS ? 2 * TILE : 0);  // and those before it
  const u32 key = swizzled<ROW>(lane & 15, lane >> 4);
  const int bytes = mine * SHARE * (ROW / D);
  const u32 value =
      TILE + bytes / 128 * 128 +
      swizzled<ROW>((lane & 7) + ((lane >> 4) << 3), bytes % 128 / 16 + (lane >> 3 & 1));
  int position = walk.first;
  for (int i = 0; i < walk.tiles; i++) {
    wait_copies<AHEAD - 1>();
    meet_walker(walker);  // the copies of all; nobody needs what the next ones overwrite
    if (i + AHEAD < walk.tiles) walk.load(i + AHEAD, LAGS ? two : one);
    commit_copies();
    if (position + 16 > walk.stored) {
      walk.patch(i, end, b.arena[walker], b.fresh[0]);
      meet_walker(walker);
    }
    if (LAGS && i > 0) add_values(x, one + value, *before, lane);
    weights_of(*weights, x, tile + key, q, own - position, log2_scale, mine, lane);
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
#else
typedef Softmax Sums;
#endif
