// The loop over tiles of keys and values of a team: TEAM warps that read each tile once for all
// queries of a run.
//
// A team takes STEP_TILES tiles of its reader at once. The columns are the heads of all queries,
// packed. A warp scores one tile with all columns (or, where warps share a tile, with some) and
// stores the weights in place of its keys. Then each warp adds its share of the values' dimensions
// for all columns. So keys and values are widened once (by SHARERS warps where a tile is shared),
// and the team meets once a step, and twice more if a score rises above its reference. The sums of
// a column run over the tiles in the order of `attend`, so a query has the bits of a row of one
// token.
// Macros: those of attention_merge.cuh.
#pragma once
#include "attention/attention_online_softmax.cuh"

// `meet`; whether any of the threads says so. With FOLLOWED always true.
DEVICE bool meet_any(u32 name, u32 threads, bool mine) {
  if (FOLLOWED) {
    meet(name, threads);
    return true;
  }
  u32 any;
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %3, 0; bar.red.or.pred p, %1, %2, p; selp.u32 %0, 1, 0, p; }"
      : "=r"(any)
      : "r"(name), "r"(threads), "r"((u32)mine)
      : "memory");
  return any;
}

constexpr int BEHIND = STEP_TILES * 2 * TILE;  // bytes of a step's keys and values
constexpr int SHARE = D / TEAM;                // a warp's dimensions of the values
static_assert(N <= TEAM && TEAM <= 4, "a lane has a column, and a warp the totals of a piece");
static_assert(SHARE % 32 == 0 && ROW >= 128 && ARENA % 128 == 0, "lines of all banks begin rows");

// A warp's sums of its share of the dimensions for all columns. Piece n is (n + member) % N, and
// `total` has the sums of the weights of the first.
struct TeamSums {
  float o[N][SHARE / 16][4], total[1][4];
};
// What a team shares behind its ring, by column: the references, and of a step in which some rise
// each tile's maximum, the references from the tile on, and the factors of the sums before it.
struct References {
  float top[32], peaks[STEP_TILES][32], tops[STEP_TILES][32], factors[STEP_TILES][32];
};
static_assert(sizeof(References) == REFERENCES, "REFERENCES is their size");
DEVICE References& references_of(Block& b, int reader) {
  return *reinterpret_cast<References*>(b.arena[reader] + ARENA - REFERENCES);
}
// A lane's column within pieces of eight.
DEVICE int lane_column(int lane) {
  const int g = lane >> 2, t = lane & 3;
  return 8 * (g >> 1) + 2 * t + (g & 1);
}

// The greatest of each lane's column, of pieces of scores: each step halves the columns of a lane.
DEVICE float column_maxima(const float (&s)[SCORED][4], int lane) {
  float m[8];
#pragma unroll
  for (int i = 0; i < 8; i++)
    m[i] = i < 2 * SCORED ? fmaxf(s[i / 2 % SCORED][i % 2], s[i / 2 % SCORED][2 + i % 2])
                          : minus_infinity();
#pragma unroll
  for (int half = 4; half; half /= 2) {
    const bool upper = lane & 4 * half;
#pragma unroll
    for (int i = 0; i < half; i++) {
      const float sent = upper ? m[i] : m[i + half], kept = upper ? m[i + half] : m[i];
      m[i] = fmaxf(kept, __shfl_xor_sync(~0u, sent, 4 * half));
    }
  }
  return m[0];
}

// One of the warps that score a tile. `queries`: the address of the lane's row and quarter of the
// first piece's first 32 dimensions; what is in rows without a query stays in their columns.
struct Scorer {
  u32 queries;
  int member, lane;

  DEVICE Scorer(const Block& b, int member, int lane) : member(member), lane(lane) {
    queries = shared_address(b.queries[8 * piece(0) + (lane & 7)]) + (lane >> 3) * 16;
  }
  DEVICE int piece(int n) const { return member / STEP_TILES * SCORED + n; }

  DEVICE void scores(float (&s)[SCORED][4], u32 keys) const {
    float odd[SCORED][4] = {};
    keys += swizzled<ROW>(lane & 15, lane >> 4);
    const auto piece_at = [&](int i) {
      return (keys ^ 32 * (i & 3)) + 128 * (i >> 2);
    };  // 32 bytes
#pragma unroll
    for (int c = 0; c < D / 32; c++) {
      u32 a[2][4], r[4];
      if constexpr (KV_FP8) {
        load_matrix(r, piece_at(c));
        widen(r[0], a[0][0], a[0][2]), widen(r[1], a[0][1], a[0][3]);
        widen(r[2], a[1][0], a[1][2]), widen(r[3], a[1][1], a[1][3]);
      } else {
        load_matrix(a[0], piece_at(2 * c));
        load_matrix(a[1], piece_at(2 * c + 1));
      }
#pragma unroll
      for (int n = 0; n < SCORED; n++) {
        u32 q[4];
        load_matrix(q, queries + n * 8 * PITCH * 2 + 64 * c);
        mma16(s[n], a[0], q[0], q[1]), mma16(odd[n], a[1], q[2], q[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < SCORED; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) s[n][i] += odd[n][i];
    }
  }
  // Scores at positions that a query does not see become -infinity; each query of the run sees one
  // more than the query before.
  DEVICE void hide(float (&s)[SCORED][4], const Block& b, int position, int end) const {
    const int first = 8 * piece(0) + 2 * (forget(lane) & 3);  // not kept in registers in the loop
#pragma unroll
    for (int n = 0; n < SCORED; n++) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int query = (first + 8 * n + (i & 1)) / GQA_GROUP;
        const int seen = min(b.visible + min(query, b.queries_now - 1), end) - position;
        s[n][i] = (lane >> 2) + (i >> 1) * 8 < seen ? s[n][i] : minus_infinity();
      }
    }
  }
  // Weights relative to the references `top`; whether a score is above one by more than RISE.
  DEVICE bool store_weights(u8* weights, const float (&s)[SCORED][4], const float* top,
                            float log2_scale) const {
    u32* to = reinterpret_cast<u32*>(weights) + lane;
    bool rises = false;
#pragma unroll
    for (int n = 0; n < SCORED; n++) {
      const float2 by = *reinterpret_cast<const float2*>(top + 8 * piece(n) + 2 * (lane & 3));
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float power = power_of(s[n][i], log2_scale, i & 1 ? by.y : by.x);
        rises |= power > RISE, v[i] = exp2_fast(power);
      }
      to[64 * piece(n)] = pack16(v[0], v[1]), to[64 * piece(n) + 32] = pack16(v[2], v[3]);
    }
    return rises;
  }
};

// The warp's share of the values of a step. `values`: the address of this lane's row and half of
// the share's first 32 bytes in the first tile; `weights`: of the lane's rows of pieces' halves,
// two pieces at a time, in the ring's first slot. With RISES the sums before each tile are
// multiplied by its factors.
template <bool RISES>
DEVICE void add_team_values(TeamSums& x, u32 values, const u32 (&weights)[(N + 1) / 2], int slot,
                            const References& references, int member, int lane) {
  constexpr int EACH = KV_FP8 ? 2 : 1;  // fragments of 16 dimensions in 32 bytes
  constexpr int NEXT = TEAM > STEP_TILES ? WEIGHTS : 2 * TILE;
#pragma unroll(RISES ? 1 : STEP_TILES)
  for (int k = 0; k < STEP_TILES; k++) {
    u32 p[N + 1][2];
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      u32 r[4];
      load_matrix_transposed(r, weights[n / 2] + slot + k * NEXT);
      p[n][0] = r[0], p[n][1] = r[1], p[n + 1][0] = r[2], p[n + 1][1] = r[3];
    }
    if constexpr (RISES) {
#pragma unroll
      for (int n = 0; n < N; n++) {
        const float* by = references.factors[k] + 8 * ((n + member) % N) + 2 * (lane & 3);
        const float pair[2] = {by[0], by[1]};
        multiply(x.o[n], pair);
        if (n == 0) multiply(x.total, pair);
      }
    }
    add_weights(x.total[0], p[0][0], p[0][1]);
#pragma unroll
    for (int c = 0; c < SHARE / 16; c += EACH) {
      const int piece = c / EACH;  // of 32 bytes
      u32 a[EACH][4], r[4];
      load_matrix_transposed(r, (values ^ 32 * (piece & 3)) + 128 * (piece >> 2) + k * 2 * TILE);
      widen_values(a, r);
#pragma unroll
      for (int n = 0; n < N; n++) {
#pragma unroll
        for (int e = 0; e < EACH; e++) mma16(x.o[n][c + e], a[e], p[n][0], p[n][1]);
      }
    }
  }
}

// A step in which some reference rises: the references become those after the step, and the weights
// are relative to those at the warp's own tile.
DEVICE void raise_references(References& x, const Scorer& scorer, const float (&s)[SCORED][4],
                             u8* weights, float log2_scale, int reader) {
  const int lane = scorer.lane, mine = scorer.member % STEP_TILES, own = lane_column(lane);
  const float peak = column_maxima(s, lane);
  if (own < 8 * SCORED) x.peaks[mine][8 * scorer.piece(0) + own] = peak;
  float top = x.top[own];
  meet(reader + 1, 32 * TEAM);
  const bool writes = own / (8 * SCORED) == scorer.member / STEP_TILES;
#pragma unroll
  for (int k = 0; k < STEP_TILES; k++) {
    const float next = raised(x.peaks[k][own], log2_scale, top);
    if (writes && k == mine) x.tops[k][own] = next, x.factors[k][own] = exp2_fast(top - next);
    top = next;
  }
  if (mine == STEP_TILES - 1 && writes) x.top[own] = top;
  __syncwarp();
  scorer.store_weights(weights, s, x.tops[mine], log2_scale);
  meet(reader + 1, 32 * TEAM);
}

DEVICE void attend_tiles(TeamSums& x, TileStream& stream, Block& b, float log2_scale, int reader,
                         int member, int lane) {
  u8* const arena = b.arena[reader];
  References& references = references_of(b, reader);
  const int mine = member % STEP_TILES, own_tile = mine * 2 * TILE;
  const int own_weights = TEAM > STEP_TILES ? BEHIND + mine * WEIGHTS : own_tile;
  const int bytes = member * SHARE * (ROW / D);
  const u32 value =
      shared_address(arena) + TILE + bytes / 128 * 128 +
      swizzled<ROW>((lane & 7) + ((lane >> 4) << 3), bytes % 128 / 16 + (lane >> 3 & 1));
  u32 weight[(N + 1) / 2];
#pragma unroll
  for (int n = 0; n < N; n += 2) {
    const int piece = (n + (lane >> 4) + member) % N;
    weight[n / 2] =
        shared_address(arena) + (TEAM > STEP_TILES ? BEHIND : 0) + 256 * piece + (lane & 15) * 16;
  }
  const Scorer scorer(b, member, lane);
  if (member == 0) references.top[lane] = LOWEST;
  meet(reader + 1, 32 * TEAM);
  int position = stream.first;
#pragma unroll 1
  for (int i = 0; i < stream.steps; i++) {
    const int slot = i % STAGES * SLOT;
    wait_copies<IN_FLIGHT - 1>();
    __syncwarp();
    if (position + 16 > stream.stored) {
      stream.patch(position, arena + slot + own_tile, b.fresh[0]);
    }
    if (TEAM > STEP_TILES) meet(reader + 1, 32 * TEAM);
    float s[SCORED][4] = {};
    if (position < stream.end) scorer.scores(s, stream.ring + slot);
    if (position + 16 > min(stream.stored, stream.end)) scorer.hide(s, b, position, stream.end);
    __syncwarp();  // the weights are where the keys were
    u8* const weights = arena + slot + own_weights;
    bool rises = scorer.store_weights(weights, s, references.top, log2_scale);
    rises = meet_any(reader + 1, 32 * TEAM, rises);
    if (i + IN_FLIGHT < stream.steps) {
      stream.load(i + IN_FLIGHT, position + IN_FLIGHT * TileStream::STRIDE);
    }
    commit_copies();
    if (rises) {
      raise_references(references, scorer, s, weights, log2_scale, reader);
      add_team_values<true>(x, value + slot, weight, slot, references, member, lane);
    } else {
      add_team_values<false>(x, value + slot, weight, slot, references, member, lane);
    }
    position += TileStream::STRIDE;
  }
}
// Sums of queries base … base + MERGE_BATCH - 1 to the reader's arena.
DEVICE void store_query_sums(Block& b, const TeamSums& x, int reader, int member, int base,
                             int lane) {
  lane = forget(lane), member = forget(member);  // nothing of this in registers through the loop
  const int g = lane >> 2;
#pragma unroll
  for (int n = 0; n < N; n++) {
    const int piece = (n + member) % N;
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int column = 8 * piece + 2 * (lane & 3) + j, head = column % GQA_GROUP;
      const int query = column / GQA_GROUP, slot = query - base;
      if (query >= QUERIES || slot < 0 || slot >= MERGE_BATCH) continue;
      if (n == 0 && member < N && g == 0) {
        b.tally[slot * READERS + reader][head] =
            make_float2(references_of(b, reader).top[column], x.total[0][j]);
      }
      float* row = reinterpret_cast<float*>(b.arena[reader] + slot * MERGE) + head * WIDE;
#pragma unroll
      for (int c = 0; c < SHARE / 16; c++) {
#pragma unroll
        for (int i = j; i < 4; i += 2) row[member * SHARE + dimension(c, i, lane)] = x.o[n][c][i];
      }
    }
  }
}
