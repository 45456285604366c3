// gated_delta_chunk (prefill) by mma.sync, in two launches (delta_prefill_scan.cuh); the scan's
// warps do not wait for one another's sums.
//
// The scan, grid (columns / DS, value heads, sequences), a warp for 16 values, computes
// transposes, values by tokens:
//   R^T = beta V^T - (beta e^G) S K^T;  V'^T = R^T T^T;  O^T = e^G S Q^T + V'^T P^T;
//   S <- e^Gc S + (tail V')^T K
// so that every left operand (S, R^T, V'^T, tail V'^T) is what the same lanes hold of the product
// before. Only what was fetched is in shared memory; T and P without the blocks that are zeros, as
// fragments (PACKED of delta_prefill_prepare.cuh). The block meets twice a tile, for the copies.
// Precision: S, R, T, P, V' and tail V' in two bf16 parts each. 4,096 tokens of the 35B on 48
// multiprocessors of an H200: 467 us with prepare (benchmarks/log/delta_rule/delta_prefill.md).
constexpr int THREADS = DS * 2, RESIDENT = 1;
#include "delta_rule/prefill/delta_prefill_state.cuh"

static_assert(KD % 16 == 0 && DS % 16 == 0 && TILE == 64 && PACKED, "unsupported sizes");

struct Scan {  // what was fetched of a tile; keys are read to its end
  alignas(128) char k[2][TILE * KD * 2];
  char q[TILE * KD * 2];
  char v[TILE * DS * 2];
  char t[2][PART * 2], p[2][PART * 2];  // high, low
  float f[2][FACTORS * TILE];
};
typedef float Tokens[BLOCKS][2][4];  // accumulators of a warp's 16 values by 64 tokens
typedef float State[KD / 16][2][4];  // by 128 keys

// A block of T or P.
DEVICE void load_block(u32 (&b)[4], const char* part, int row, int column, int lane) {
  load_block(b, part + (row * (row + 1) / 2 + column) * BLOCK, lane);
}
// d = S K^T, o = S Q^T; S in two parts. `overlapped` is called after the first products start.
template <class Overlapped>
DEVICE void multiply_state(Tokens& d, Tokens& o, const State& s, const char* keys,
                           const char* queries, int lane, Overlapped overlapped) {
  u32 b[2][BLOCKS][4], high[4], low[4];
  auto load = [&](int step) {  // by turns of keys and queries, a step ahead
#pragma unroll
    for (int n = 0; n < BLOCKS; n++)
      load_b<KP>(b[step % 2][n], step % 2 ? queries : keys, step / 2 * 16, n * 16, lane);
  };
  load(0);
#pragma unroll
  for (int step = 0; step < KD / 8; step++) {
    if (step + 1 < KD / 8) load(step + 1);
    if (step % 2 == 0) split_pair(high, low, s[step / 2][0], s[step / 2][1]);
    Tokens& to = step % 2 ? o : d;
#pragma unroll
    for (int n = 0; n < BLOCKS; n++) mma_pair(to[n], high, b[step % 2][n]);
#pragma unroll
    for (int n = 0; n < BLOCKS; n++) mma_pair(to[n], low, b[step % 2][n]);
    if (step == 1) overlapped();
  }
}
// R^T's tokens 16 i … of d = S K^T, in two parts.
DEVICE void make_remainder(u32 (&high)[4], u32 (&low)[4], const float (&d)[2][4],
                           const char* values, const float* f, int i, int warp, int lane) {
  u32 v[4];
  const int token = i * 16 + lane % 4 * 2;
  load_matrix_transposed(
      v, values + at<DP>(i * 16 + (lane & 7) + (lane >> 4) * 8, warp * 2 + (lane >> 3 & 1)));
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float2 beta = *(const float2*)&f[BETA * TILE + token + half * 8];
    const float2 key = *(const float2*)&f[KEY * TILE + token + half * 8];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const u32 pair = v[half * 2 + e];
      split(beta.x * low_bf16(pair) - key.x * d[half][e * 2],
            beta.y * high_bf16(pair) - key.y * d[half][e * 2 + 1], high[half * 2 + e],
            low[half * 2 + e]);
    }
  }
}
// v = R^T T^T, R^T made of d.
DEVICE void solve(Tokens& v, const Tokens& d, const Scan& s, const float* f, int warp, int lane) {
#pragma unroll
  for (int j = 0; j < BLOCKS; j++) {
    u32 high[4], low[4];
    make_remainder(high, low, d[j], s.v, f, j, warp, lane);
    u32 b[2][BLOCKS][4];
#pragma unroll
    for (int i = j; i < BLOCKS; i++)
      load_block(b[0][i], s.t[0], i, j, lane), load_block(b[1][i], s.t[1], i, j, lane);
#pragma unroll
    for (int i = j; i < BLOCKS; i++) mma_pair(v[i], low, b[0][i]);
#pragma unroll
    for (int i = j; i < BLOCKS; i++) mma_pair(v[i], high, b[1][i]);
#pragma unroll
    for (int i = j; i < BLOCKS; i++) mma_pair(v[i], high, b[0][i]);
  }
}
// x += (tail V')^T K; o += V'^T P^T; V' and tail V' in two parts.
template <class Overlapped>
DEVICE void advance(State& x, Tokens& o, const Tokens& v, const Scan& s, const char* keys,
                    const float* f, int lane, Overlapped overlapped) {
#pragma unroll
  for (int j = 0; j < BLOCKS; j++) {
    u32 b[KD / 16][4], high[4], low[4];
#pragma unroll
    for (int n = 0; n < KD / 16; n++) load_b_inner<KP>(b[n], keys, j * 16, n * 16, lane);
#pragma unroll
    for (int w = 0; w < 4; w++) {
      const float2 tail = *(const float2*)&f[TAIL * TILE + j * 16 + w / 2 * 8 + lane % 4 * 2];
      const float* const pair = &v[j][w / 2][w % 2 * 2];
      split(pair[0] * tail.x, pair[1] * tail.y, high[w], low[w]);
    }
#pragma unroll
    for (int n = 0; n < KD / 16; n++) mma_pair(x[n], low, b[n]);
#pragma unroll
    for (int n = 0; n < KD / 16; n++) mma_pair(x[n], high, b[n]);
    if (j == 0) overlapped();
    u32 p[2][BLOCKS][4];
    split_pair(high, low, v[j][0], v[j][1]);
#pragma unroll
    for (int i = j; i < BLOCKS; i++)
      load_block(p[0][i], s.p[0], i, j, lane), load_block(p[1][i], s.p[1], i, j, lane);
#pragma unroll
    for (int i = j; i < BLOCKS; i++) mma_pair(o[i], high, p[1][i]);
#pragma unroll
    for (int i = j; i < BLOCKS; i++) mma_pair(o[i], low, p[0][i]);
#pragma unroll
    for (int i = j; i < BLOCKS; i++) mma_pair(o[i], high, p[0][i]);
  }
}
// O^T to `out` of the warp's first value.
DEVICE void store_outputs(const Tokens& o, u16* out, int lane) {
  out += (i64)(lane / 4) * HV * VD + lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < TILE / 8; i++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float* pair = &o[i / 2][i % 2][e * 2];
      *(u32*)(out + i * 8 * HV * VD + e * 8) = transpose_matrix(pack_bf16(pair[0], pair[1]));
    }
}

DEVICE void store_pair(float* p, float x, float y) { *(float2*)p = {x, y}; }
DEVICE void store_pair(u16* p, float x, float y) { *(u32*)p = state_word(x, y); }

// The copies of one sequence's tiles, all threads'.
struct Fetch {
  Scan& s;
  const Operands& m;
  Sequence own;

  // PIECES of 16 bytes, as they are in memory.
  template <int PIECES>
  DEVICE void copy(void* to, const void* from) const {
#pragma unroll
    for (int u = 0; u < (PIECES + THREADS - 1) / THREADS; u++) {
      const int i = u * THREADS + threadIdx.x;
      if (PIECES % THREADS == 0 || i < PIECES)
        copy_async((char*)to + i * 16, (const char*)from + i * 16);
    }
  }
  DEVICE i64 tile_head(int row) const { return (i64)row * HV + blockIdx.y; }
  DEVICE const u16* queries(int row) const {
    return m.keys + ((i64)row * HK + blockIdx.y / R) * HEAD_KEYS;
  }
  DEVICE void keys(int row) const { copy<TILE * KP>(s.k[row % 2], queries(row) + HEAD_KEYS / 2); }
  DEVICE void outputs(int row) const { copy<PART / 4>(s.p, m.p + tile_head(row) * 2 * PART); }
  DEVICE void rest(int row) const {
    copy<FACTORS * TILE / 4>(s.f[row % 2], m.factors + tile_head(row) * FACTORS * TILE);
    copy<TILE * KP>(s.q, queries(row));
    copy<PART / 4>(s.t, m.t + tile_head(row) * 2 * PART);
    const u16* v = m.values + (i64)row * TILE * HV * VD + blockIdx.y * VD + blockIdx.x * DS;
#pragma unroll
    for (int i = threadIdx.x; i < TILE * DP; i += THREADS)
      copy_async(s.v + at<DP>(i / DP, i % DP), v + i / DP * HV * VD + i % DP * 8);
  }
};

// One sequence.
DEVICE void scan_sequence(Scan& s, const Operands& m, Sequence own) {
  const int head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = head * VD + blockIdx.x * DS + warp * 16;  // the warp's first value
  const int begin = own.begin, end = own.end, slot = own.slot, live = own.live();
  const Rows held{lane / 4, lane % 4 * 2};
  const Fetch fetched{s, m, own};
  if (begin < live) fetched.keys(begin), fetched.rest(begin);
  commit_copies();
  State x = {};
  if (slot >= 0 && m.starts[begin] != 0)
    load_rows(reinterpret_cast<float (&)[KD / 2]>(x), held, m, begin, column);
  // To row `of` of the states, that behind tile `row`.
  auto leave = [&](int of, int row) {
#pragma unroll
    for (int i = 0; i < KD / 4; i++) {
      const float* const from = &x[i / 4][i / 2 % 2][i % 2 * 2];
      store_pair(held.in_state(m.state_out, of, column, i), from[0], from[1]);
    }
    settle_ring(m, of, row);
  };
  u16* out = m.o + (i64)begin * TILE * HV * VD + column;
#pragma unroll 1
  for (int row = begin; row < live; row++, out += TILE * HV * VD) {
    wait_copies<0>();
    __syncthreads();  // all have read P and the keys of the tile before
    const int save = slot >= 0 ? m.saves[row] : -1;  // here, for its latency
    const char* keys = s.k[row % 2];
    const float* f = s.f[row % 2];
    Tokens d = {}, o = {}, v = {};
    multiply_state(d, o, x, keys, s.q, lane, [&] {
      fetched.outputs(row);
      commit_copies();
      if (row + 1 < live) fetched.keys(row + 1);
      commit_copies();
    });
    solve(v, d, s, f, warp, lane);
    wait_copies<1>();
    __syncthreads();  // all have read queries, values and T
    const float grown = f[LAST * TILE];
#pragma unroll
    for (int i = 0; i < KD / 2; i++) x[i / 8][i / 4 % 2][i % 4] *= grown;
#pragma unroll
    for (int i = 0; i < TILE / 8; i++) {
      const float2 by = *(const float2*)&f[QUERY * TILE + i * 8 + held.pair];
      float* const to = o[i / 2][i % 2];
      to[0] *= by.x, to[1] *= by.y, to[2] *= by.x, to[3] *= by.y;
    }
    advance(x, o, v, s, keys, f, lane, [&] {
      if (row + 1 < live) fetched.rest(row + 1);
      commit_copies();
    });
    store_outputs(o, out, lane);
    if (save >= 0) leave(save, row);
  }
  wait_copies<0>();
  if (live < end) {  // nothing to do, but its outputs are finite
    for (int i = lane; i < TILE * 2; i += 32)
      *(uint4*)(out + (i64)(i / 2) * HV * VD + i % 2 * 8) = uint4{};
    if (slot >= 0 && m.saves[live] >= 0) leave(m.saves[live], live);
  }
  if (slot >= 0) leave(slot, end - 1);
}

DYNAMIC_SHARED(gated_delta_scan, sizeof(Scan));
DEVICE void scan_block(const Operands& m) {
  extern __shared__ __align__(128) char shared_memory[];
  Scan& s = *(Scan*)shared_memory;
  wait_then_launch_dependents();
  each_sequence(m, [&](const Sequence& own) {
    scan_sequence(s, m, own);
    __syncthreads();
  });
}
