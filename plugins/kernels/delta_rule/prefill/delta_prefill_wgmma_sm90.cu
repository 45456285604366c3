// gated_delta_chunk (prefill) on the warpgroup matrix unit, in two launches
// (delta_prefill_scan.cuh). Keys of 128 dimensions, 64 value columns a block.
//
// The scan, grid (columns / 64, value heads, sequences), computes the transposes, values by tokens:
//   R^T = beta V^T - (beta e^G) S K^T;  V'^T = R^T T^T;  O^T = e^G S Q^T + V'^T P^T;
//   S <- e^Gc S + (tail V')^T K
// so that every left operand (S, R^T, V'^T, tail V'^T) is what the same lanes hold of the product
// before: only what was fetched goes through shared memory, and the consumers, one warpgroup,
// never meet. What the next product does not need is issued in between and runs during the sums
// of single lanes: S Q^T in two halves, P V' behind the state's product. A warpgroup of producers
// fetches (delta_prefill_fetch_sm90.cuh). One block a multiprocessor.
// Precision: S, R, T, P and V' in two bf16 parts, tail V' in three. 8,192 tokens of the 27B, H200:
// 532 us with prepare (benchmarks/log/delta_rule/delta_prefill.md).
constexpr int THREADS = 256, RESIDENT = 1;
#include "delta_rule/prefill/delta_prefill_fetch_sm90.cuh"
#include "delta_rule/prefill/delta_prefill_state.cuh"

constexpr int OVERLAPPED = 4;  // k-steps of 16 of S Q^T's second half that run while R is made
using Mma = Wgmma16<false>;

// What a lane holds between two tiles.
struct State {
  float s[2][KD / 16][4];                 // S, by halves of its keys
  u32 high[KD / 16][4], low[KD / 16][4];  // S in two parts, as left operands
  u32 o[TILE / 16][4];                    // O^T, rounded: pairs of values, as stmatrix takes them
};

DEVICE void split_state(State& x) {
#pragma unroll
  for (int i = 0; i < KD / 16; i++)
    split_pair(x.high[i], x.low[i], x.s[i / 4][i % 4 * 2], x.s[i / 4][i % 4 * 2 + 1]);
}

// d (+)= a part of S, its columns 16 FIRST to 16 END, times the transpose of a tile of keys or
// queries.
template <bool FRESH, int FIRST = 0, int END = KD / 16>
DEVICE void ask_tokens(float (&d)[TILE / 8][4], const u32 (&part)[KD / 16][4], u64 tile) {
#pragma unroll
  for (int i = FIRST; i < END; i++) {
    const u64 at = tile + (u64)(i / 4 * (PANEL / 16) + i % 4 * 2);
    if (FRESH && i == FIRST) Mma::keys<true>(d, part[i], at);
    else Mma::keys<false>(d, part[i], at);
  }
}
// d (+)= x times the transpose of T or P in two parts. LOW: the product of both low parts too.
template <bool FRESH, bool LOW>
DEVICE void ask_triangle(float (&d)[TILE / 8][4], const u32 (&high)[TILE / 16][4],
                         const u32 (&low)[TILE / 16][4], u64 tile) {
  const u64 tile_low = tile + PANEL / 16;
#pragma unroll
  for (int i = 0; i < TILE / 16; i++) {
    if (FRESH && i == 0) Mma::keys<true>(d, low[i], tile + (u64)(i * 2));
    else Mma::keys<false>(d, low[i], tile + (u64)(i * 2));
    if (LOW) Mma::keys<false>(d, low[i], tile_low + (u64)(i * 2));
    Mma::keys<false>(d, high[i], tile_low + (u64)(i * 2));
    Mma::keys<false>(d, high[i], tile + (u64)(i * 2));
  }
}
// R^T in two parts, of d = S K^T: its tokens 16 FIRST to 16 END.
template <int FIRST, int END>
DEVICE void make_remainder(u32 (&high)[TILE / 16][4], u32 (&low)[TILE / 16][4],
                           const float (&d)[TILE / 8][4], const u8* values, const float* f,
                           const Lane& lane) {
#pragma unroll
  for (int i = FIRST; i < END; i++) {
    u32 v[4];
    load_matrix_transposed(v, values + lane.of_tile(i));
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int token = i * 16 + half * 8 + lane.pair;
      const float2 beta = *(const float2*)&f[BETA * TILE + token];
      const float2 key = *(const float2*)&f[KEY * TILE + token];
      const float* x = d[i * 2 + half];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const u32 pair = v[half * 2 + e];
        split(beta.x * low_bf16(pair) - key.x * x[e * 2],
              beta.y * high_bf16(pair) - key.y * x[e * 2 + 1], high[i][half * 2 + e],
              low[i][half * 2 + e]);
      }
    }
  }
}
// tail V'^T in three parts.
DEVICE void make_tails(u32 (&part)[3][TILE / 16][4], const float (&d)[TILE / 8][4], const float* f,
                       const Lane& lane) {
#pragma unroll
  for (int n = 0; n < TILE / 8; n++) {
    const float2 tail = *(const float2*)&f[TAIL * TILE + n * 8 + lane.pair];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int at = n % 2 * 2 + e;
      float x = d[n][e * 2] * tail.x, y = d[n][e * 2 + 1] * tail.y;
      const u32 high = part[0][n / 2][at] = pack_bf16(x, y);
      split(x - low_bf16(high), y - high_bf16(high), part[1][n / 2][at], part[2][n / 2][at]);
    }
  }
}

// O^T of a tile, through a corner of shared memory of the warp's own, to `out` (of its first
// value).
DEVICE void store_outputs(const State& x, u8* corner, u16* out, const Lane& lane, bool there) {
  __syncwarp();  // all have read the tile before
#pragma unroll
  for (int i = 0; i < TILE / 16; i++) {
    const u32 token = i * 16 + lane.token, turn = token >> 2 & 1;
    store_matrix_transposed(corner + token * 32 + (lane.half ^ turn) * 16, x.o[i]);
  }
  __syncwarp();
#pragma unroll 1  // registers
  for (int i = 0; i < TILE / 16; i++) {
    const u32 token = i * 16 + lane.id / 2, turn = token >> 2 & 1;
    const uint4 v = load_shared16(corner + token * 32 + (lane.id % 2 ^ turn) * 16);
    if (there) *(uint4*)(out + (i64)token * HV * VD + lane.id % 2 * 8) = v;
  }
}

// The first of the warp's 16 values among those of all heads.
DEVICE int column_of(const Lane& lane) {
  return blockIdx.y * VD + blockIdx.x * DS + lane.warp * 16;
}

// One tile, number n of this block's; `before`: where the tile before left its outputs to be
// stored. SAVE is called when the state is that behind the tile.
template <class Save>
DEVICE void scan_tile(State& x, Tiles& m, int n, u16* before, Save save) {
  const Lane lane;
  const float* f = m.f[n & 1];
  const u32 at = uniform(shared_address(&m.tile[n & 1]));
  const u64 keys = wgmma_tile(at + K_AT), queries = wgmma_tile(at);
  float d[TILE / 8][4], v[TILE / 8][4], o[TILE / 8][4];  // S K^T, V'^T, O^T
  barrier_wait(&m.full[n & 1], n >> 1 & 1);
  wgmma_fence();
  ask_tokens<true>(d, x.low, keys);
  ask_tokens<false>(d, x.high, keys);
  wgmma_commit();
  store_outputs(x, m.o[lane.warp], before + column_of(lane), lane, before != nullptr);
  wgmma_fence();
  ask_tokens<true>(o, x.low, queries);
  wgmma_commit();
  ask_tokens<false, 0, OVERLAPPED>(o, x.high, queries);
  wgmma_commit();
  wgmma_wait<2>();
  keep_order(d);
  const float last = f[LAST * TILE];
#pragma unroll
  for (int i = 0; i < KD / 2; i++) x.s[i / 32][i / 4 % 8][i % 4] *= last;
  u32 high[TILE / 16][4], low[TILE / 16][4];
  make_remainder<0, 2>(high, low, d, m.tile[n & 1].v, f, lane);
  wgmma_wait<1>();  // so that S's low parts need not be held any more
  make_remainder<2, TILE / 16>(high, low, d, m.tile[n & 1].v, f, lane);
  wgmma_wait<0>();
  keep_order(o);
  wgmma_fence();
  ask_triangle<true, true>(v, high, low, wgmma_tile(at + T_AT));
  wgmma_commit();
  ask_tokens<false, OVERLAPPED>(o, x.high, queries);
  wgmma_commit();
  wgmma_wait<1>();
  keep_order(v);
  u32 tails[3][TILE / 16][4];
  make_tails(tails, v, f, lane);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < TILE / 16; i++)
#pragma unroll
    for (int part = 2; part >= 0; part--)
#pragma unroll
      for (int half = 0; half < 2; half++)
        Mma::values<false>(x.s[half], tails[part][i],
                           wgmma_columns<TILE>(at + K_AT + half * PANEL) + (u64)(i * 128));
  wgmma_commit();
  wgmma_wait<1>();
  keep_order(o);
#pragma unroll
  for (int i = 0; i < TILE / 8; i++) {
    const float2 grown = *(const float2*)&f[QUERY * TILE + i * 8 + lane.pair];
    o[i][0] *= grown.x, o[i][1] *= grown.y, o[i][2] *= grown.x, o[i][3] *= grown.y;
  }
#pragma unroll
  for (int i = 0; i < TILE / 16; i++) split_pair(high[i], low[i], v[i * 2], v[i * 2 + 1]);
  wgmma_fence();
  ask_triangle<false, false>(o, high, low, wgmma_tile(at + P_AT));
  wgmma_commit();
  wgmma_wait<1>();
  keep_order(x.s[0]), keep_order(x.s[1]);
  split_state(x);
  save();
  wgmma_wait<0>();
  keep_order(o);
#pragma unroll
  for (int i = 0; i < TILE / 4; i++)
    x.o[i / 4][i % 4] = pack_bf16(o[i / 2][i % 2 * 2], o[i / 2][i % 2 * 2 + 1]);
  barrier_arrive_warp(&m.empty[n & 1], lane.id);
}

// Words 2 i and 2 i + 1 of a lane's rows of S (of row + 8 where `half`), as a state has them: in
// bf16 they are S's high part.
DEVICE void store_words(float* p, const State& x, int i, int half) {
  const float* from = x.s[i / 8][i % 8] + half * 2;
  *(float2*)p = {from[0], from[1]};
}
DEVICE void store_words(u16* p, const State& x, int i, int half) {
#if STATE_F16
  const float* from = x.s[i / 8][i % 8] + half * 2;
  *(u32*)p = state_word(from[0], from[1]);
#else
  *(u32*)p = x.high[i / 2][i % 2 * 2 + half];
#endif
}

// One sequence; n tiles came before and, at the end, with it. Its place is read from shared
// memory again: registers are few.
DEVICE void scan_sequence(Tiles& m, const Operands& at, Sequence own, int& n) {
  const int begin = own.begin;
  Bounds& bounds = m.bounds[threadIdx.x / 32];
  bounds = {begin, own.end, own.live(), own.slot};
  __syncwarp();
  State x = {};
  if (bounds.slot >= 0 && at.starts[begin] != 0) {
    const Lane lane;
    load_rows(reinterpret_cast<float (&)[KD / 2]>(x.s), Rows{lane.row, lane.pair}, at, begin,
              column_of(lane));
  }
  // To row `of` of the states, that behind tile `row`.
  auto leave = [&](int of, int row) {
    const Lane lane;
    const Rows held{lane.row, lane.pair};
#pragma unroll
    for (int i = 0; i < KD / 4; i++)
      store_words(held.in_state(at.state_out, of, column_of(lane), i), x, i / 2, i % 2);
    settle_ring(at, of, row);
  };
  split_state(x);
  constexpr i64 STRIDE = (i64)TILE * HV * VD;
#pragma unroll 1
  for (int row = begin; row < bounds.live; row++, n++) {
    scan_tile(x, m, n, row > bounds.begin ? at.o + (row - 1) * STRIDE : nullptr, [&] {
      if (const int to = at.saves[row]; to >= 0) leave(to, row);
    });
  }
  const Lane lane;
  u16* const out = at.o + column_of(lane);
  const auto [first, behind, live, slot] = bounds;
  if (live > first) store_outputs(x, m.o[lane.warp], out + (live - 1) * STRIDE, lane, true);
  if (live < behind) {  // nothing to do, but its outputs are finite
#pragma unroll
    for (int i = 0; i < TILE / 16; i++)
      *(uint4*)(out + live * STRIDE + (i64)(i * 16 + lane.id / 2) * HV * VD + lane.id % 2 * 8) =
          uint4{};
    if (slot >= 0 && at.saves[live] >= 0) leave(at.saves[live], live);
  }
  if (slot >= 0) leave(slot, behind - 1);
  __syncwarp();  // all have read its place
}

DYNAMIC_SHARED(gated_delta_scan, sizeof(Tiles));
DEVICE void scan_block(const Operands& m) {
  extern __shared__ __align__(1024) u8 shared_memory[];
  Tiles& tiles = *(Tiles*)shared_memory;
  begin_barriers(tiles);
  wait_then_launch_dependents();
  int n = 0;
  if (uniform(threadIdx.x / GROUP) == 0) {  // else ptxas sees wgmma in a divergent path
    each_sequence<uniform>(m, [&](const Sequence& own) { scan_sequence(tiles, m, own, n); });
  } else {
    each_sequence<uniform>(m, [&](const Sequence& own) { fetch_sequence(tiles, m, own, n); });
  }
}
