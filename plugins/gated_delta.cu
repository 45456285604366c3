// gated_delta_chunk (prefill): the delta rule over tiles of 64 tokens, in two launches.
//
// prepare (gated_delta_prepare.cuh), a block a (tile, key head), all tiles at once: for each value
// head the decays' sums G, P = (Q K^T) . D and T = (I + A)^-1. scan, a block a (sequence, value
// head, DS value columns), tile after tile, the state S^T in the accumulators of the last product:
//   R = beta V - (beta e^G) K S^T;  V' = T R;  O = e^G Q S^T + P V';
//   S^T <- e^Gc S^T + K^T (tail V')
// which is the reference's U - W S^T with T applied last: nothing but T and P is stored between
// the launches. q and k stay bf16; their norms are factors of rows.
// RING: the first tile's state is caught up from the replay ring of decode steps (delta_ring.py),
// and the ring's `base` moves behind the last token.
// Precision: f32 accumulators; what is no bf16 number is split into two, high + low (S, R, T, P,
// V'), and tail V', which the state sums up, into three: with nearly equal keys T R cancels.
// 8192 tokens in one sequence, 27B, H200: 960 us, of it scan 774 (variants:
// benchmarks/log/gated_delta.md).
#include "gated_delta_prepare.cuh"

constexpr int SPARE = 2 * KD > 3 * TILE ? 2 * KD : 3 * TILE;  // rows of DS columns
struct Scan {
  alignas(128) char k[KBUFFERS][TILE * KD * 2];
  char q[TILE * KD * 2];
  char t[2][TILE * TILE * 2];  // high, low
  char p[2][TILE * TILE * 2];
  char v[TILE * DS * 2];
  char s[SPARE * DS * 2];    // S^T high, low; then tail V' in three parts
  char r[2][TILE * DS * 2];  // R high, low; then V' high, low
  float f[2][FACTORS * TILE];
};

#if STATE_BYTES == 4
typedef float state_t;
DEVICE float load_state(const state_t* p) { return *p; }
DEVICE void store_state(state_t* p, float x) { *p = x; }
#else
typedef u16 state_t;
DEVICE float load_state(const state_t* p) { return from_bf16(*p); }
DEVICE void store_state(state_t* p, float x) { *p = to_bf16(x); }
#endif

// Whether a sequence, or an inert row, begins at row i: so are the units of the scan cut.
DEVICE bool begins(const int* slots, int i) {
  return i == 0 || slots[i] < 0 || slots[i] != slots[i - 1];
}

#if RING
// Adds what the ring holds to a warp's part of S^T, as the last tile's product leaves it.
DEVICE void catch_up(float (&acc)[DS / 16][2][4], const float* ring, int start, int lag, int row,
                     int pair) {
  const int head = blockIdx.y, column = head * VD + blockIdx.x * DS;
  auto record = [&](int age) { return ring + (u32)(start + RECORDS - age) % RECORDS * RECORD; };
#pragma unroll
  for (int n = 0; n < DS / 16; n++) {
    const int phase = (u32)(start + (column + n * 16) / FOLDS) % RECORDS, last = min(lag, phase);
    float since = 0.f;
    for (int age = 1; age <= last; age++) since += record(age)[DECAYS_AT + head];
    const float decay = expf(since);
#pragma unroll
    for (int i = 0; i < 8; i++) acc[n][i / 4][i % 4] *= decay;
    since = 0.f;
#pragma unroll 1
    for (int age = 1; age <= last; age++) {
      const float *from = record(age), *d = from + column + n * 16 + pair, grown = expf(since);
      const float* k = from + KEYS_AT + head / R * KD + row;
#pragma unroll
      for (int i = 0; i < 8; i++)
        acc[n][i / 4][i % 4] =
            fmaf(grown * d[i / 4 * 8 + i % 2], k[i % 4 / 2 * 8], acc[n][i / 4][i % 4]);
      since += from[DECAYS_AT + head];
    }
  }
}
#endif

typedef float Part[DS / 16][2][4];  // a warp's 16 rows of a product with DS columns

// A unit: rows begin to end of one value head's DS columns, and what a thread does of them.
struct Unit {
  const u16* c;
  const float* factors;
  int begin, end, last_valid, head, column;
  int warp, lane, g, p2;  // the fragments' row and first column of a pair
  int first;              // of this warp's 16 tokens of a tile

  DEVICE int valid(int row) const { return row + 1 < end ? TILE : last_valid; }

  DEVICE void fetch_k(Scan& s, int row) const {
    fetch<KP>(s.k[row % KBUFFERS], c + (i64)row * TILE * WIDTH + (HK + head / R) * KD, WIDTH,
              valid(row));
  }
  DEVICE void fetch_qvf(Scan& s, int row) const {
    const float* f = factors + ((i64)row * HV + head) * FACTORS * TILE;
    if (threadIdx.x < FACTORS * TILE / 4)
      copy_async(s.f[row % 2] + threadIdx.x * 4, f + threadIdx.x * 4);
    const u16* tokens = c + (i64)row * TILE * WIDTH;
    fetch<KP>(s.q, tokens + head / R * KD, WIDTH, valid(row));
    fetch<DP>(s.v, tokens + 2 * HK * KD + column, WIDTH, valid(row));
  }
  // T or P: high and low parts.
  DEVICE void fetch_square(char (&to)[2][TILE * TILE * 2], const u16* all, int row) const {
    const u16* from = all + ((i64)row * HV + head) * 2 * TILE * TILE;
    fetch<8>(to[0], from, TILE, TILE);
    fetch<8>(to[1], from + TILE * TILE, TILE, TILE);
  }
};

// S^T to shared memory, high and low.
DEVICE void put_state(Scan& s, const Unit& u, const Part& acc) {
#pragma unroll
  for (int n = 0; n < DS / 8; n++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 high, low;
      split(acc[n / 2][n % 2][half * 2], acc[n / 2][n % 2][half * 2 + 1], high, low);
      u32 to = at<DP>(u.warp * 16 + u.g + half * 8, n) + u.p2 * 2;
      *(u32*)(s.s + to) = high, *(u32*)(s.s + KD * DS * 2 + to) = low;
    }
}

// d: Q S^T in warps 0-3, which it stays, and K S^T in warps 4-7, which put R to shared memory.
DEVICE void meet_state(Scan& s, const Unit& u, const char* keys, const float* f, Part& d) {
  product<KD>(
      [&](Fragments<1>& x, int i) {
        load_a<KP>(x.a[0], u.warp < 4 ? s.q : keys, u.first, i, u.lane);
#pragma unroll
        for (int n = 0; n < DS / 16; n++) {
          load_b_inner<DP>(x.b[0][n], s.s, i, n * 16, u.lane);
          load_b_inner<DP>(x.b[1][n], s.s + KD * DS * 2, i, n * 16, u.lane);
        }
      },
      [&](Fragments<1>& x) {
#pragma unroll
        for (int n = 0; n < DS / 16; n++)
          mma_pair(d[n], x.a[0], x.b[0][n]), mma_pair(d[n], x.a[0], x.b[1][n]);
      });
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int i = u.first + u.g + half * 8;
    const float factor = f[(u.warp < 4 ? QUERY : KEY) * TILE + i], beta = f[BETA * TILE + i];
#pragma unroll
    for (int n = 0; n < DS / 8; n++) {
      float* x = &d[n / 2][n % 2][half * 2];
      x[0] *= factor, x[1] *= factor;
      if (u.warp >= 4) {
        const u32 to = at<DP>(i, n) + u.p2 * 2, v = *(u32*)(s.v + to);
        u32 high, low;
        split(beta * low_bf16(v) - x[0], beta * high_bf16(v) - x[1], high, low);
        *(u32*)(s.r[0] + to) = high, *(u32*)(s.r[1] + to) = low;
      }
    }
  }
}

// V' = T R, 16 columns a warp. T's upper blocks are zeros; leaving them out costs more than it
// saves.
DEVICE void solve(const Scan& s, const Unit& u, int pair, float (&made)[2][4]) {
  product<TILE, 2>(
      [&](Fragments<2>& x, int i) {
        load_a<8>(x.a[0], s.t[0], u.first, i, u.lane);
        load_a<8>(x.a[1], s.t[1], u.first, i, u.lane);
        load_b_inner<DP>(x.b[0][0], s.r[0], i, pair * 16, u.lane);
        load_b_inner<DP>(x.b[1][0], s.r[1], i, pair * 16, u.lane);
      },
      [&](Fragments<2>& x) {
        mma_pair(made, x.a[0], x.b[0][0]), mma_pair(made, x.a[1], x.b[0][0]);
        mma_pair(made, x.a[0], x.b[1][0]), mma_pair(made, x.a[1], x.b[1][0]);
      });
}

// V' in the place of R, in two parts, and tail V' in the place of S^T, in three.
DEVICE void put_values(Scan& s, const Unit& u, int pair, const float* f,
                       const float (&made)[2][4]) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int i = u.first + u.g + half * 8;
    const float tail = f[TAIL * TILE + i];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const u32 to = at<DP>(i, pair * 2 + n) + u.p2 * 2;
      float x = made[n][half * 2], y = made[n][half * 2 + 1];
      u32 high, low;
      split(x, y, high, low);
      *(u32*)(s.r[0] + to) = high, *(u32*)(s.r[1] + to) = low;
      x *= tail, y *= tail, high = pack_bf16(x, y);
      *(u32*)(s.s + to) = high, x -= low_bf16(high), y -= high_bf16(high);
      split(x, y, high, low);
      *(u32*)(s.s + TAILS + to) = high, *(u32*)(s.s + 2 * TAILS + to) = low;
    }
  }
}

// S^T <- e^Gc S^T + K^T (tail V').
DEVICE void update_state(const Scan& s, const Unit& u, const char* keys, float last, Part& acc) {
#pragma unroll
  for (int n = 0; n < DS / 8; n++)
#pragma unroll
    for (int e = 0; e < 4; e++) acc[n / 2][n % 2][e] *= last;
  product<TILE, 1, 3>(
      [&](Fragments<1, 3>& x, int i) {
        load_a_transposed<KP>(x.a[0], keys, u.warp * 16, i, u.lane);
#pragma unroll
        for (int n = 0; n < DS / 16; n++)
#pragma unroll
          for (int part = 0; part < 3; part++)
            load_b_inner<DP>(x.b[part][n], s.s + part * TAILS, i, n * 16, u.lane);
      },
      [&](Fragments<1, 3>& x) {
#pragma unroll
        for (int n = 0; n < DS / 16; n++)
#pragma unroll
          for (int part = 2; part >= 0; part--) mma_pair(acc[n], x.a[0], x.b[part][n]);
      });
}

// O = d + P V', written as bf16.
DEVICE void write_outputs(const Scan& s, const Unit& u, Part& d, u16* out) {
  product<TILE, 2>(
      [&](Fragments<2>& x, int i) {
        load_a<8>(x.a[0], s.p[0], u.first, i, u.lane);
        load_a<8>(x.a[1], s.p[1], u.first, i, u.lane);
#pragma unroll
        for (int n = 0; n < DS / 16; n++) {
          load_b_inner<DP>(x.b[0][n], s.r[0], i, n * 16, u.lane);
          load_b_inner<DP>(x.b[1][n], s.r[1], i, n * 16, u.lane);
        }
      },
      [&](Fragments<2>& x) {
#pragma unroll
        for (int n = 0; n < DS / 16; n++) {
          mma_pair(d[n], x.a[1], x.b[0][n]), mma_pair(d[n], x.a[0], x.b[1][n]);
          mma_pair(d[n], x.a[0], x.b[0][n]);
        }
      });
#pragma unroll
  for (int n = 0; n < DS / 8; n++)
#pragma unroll
    for (int half = 0; half < 2; half++)
      *(u32*)(out + (i64)(u.first + u.g + half * 8) * HV * VD + n * 8 + u.p2) =
          pack_bf16(d[n / 2][n % 2][half * 2], d[n / 2][n % 2][half * 2 + 1]);
}

// A unit's tiles one after the other, from S^T in `acc` to S^T in `acc`. `holds`: this warp's rows
// of S^T exist. Three groups of copies a tile are waited for one by one: (k, q, v, factors), T, P.
DEVICE void scan_tiles(Scan& s, const Unit& u, const u16* t_in, const u16* p_in, u16* o, bool holds,
                       Part& acc) {
  if (u.valid(u.begin) > 0) u.fetch_k(s, u.begin), u.fetch_qvf(s, u.begin);
  commit_copies();
  if (u.valid(u.begin) > 0) u.fetch_square(s.t, t_in, u.begin);
  commit_copies();
  if (u.valid(u.begin) > 0) u.fetch_square(s.p, p_in, u.begin);
  commit_copies();

#pragma unroll 1
  for (int row = u.begin; row < u.end; row++) {
    const bool more = row + 1 < u.end && u.valid(row + 1) > 0;
    const float* f = s.f[row % 2];
    u16* out = o + (i64)row * TILE * HV * VD + u.column;
    if (u.valid(row) == 0) {  // nothing to do, but its outputs are finite
      for (int i = threadIdx.x; i < TILE * DP; i += 256)
        *(uint4*)(out + (i64)(i / DP) * HV * VD + i % DP * 8) = uint4{};
      continue;
    }
    if (holds) put_state(s, u, acc);
    wait_copies<KBUFFERS == 1 ? 0 : 2>();
    __syncthreads();
    const char* keys = s.k[row % KBUFFERS];
    Part d = {};
    meet_state(s, u, keys, f, d);
    wait_copies<1>();
    __syncthreads();
    if (more) u.fetch_qvf(s, row + 1);
    if (more && KBUFFERS > 1) u.fetch_k(s, row + 1);
    commit_copies();
    const int pair = u.warp / 4;  // this warp's 16 columns of V'
    float made[2][4] = {};
    if (pair < DS / 16) solve(s, u, pair, made);
    __syncthreads();
    if (pair < DS / 16) put_values(s, u, pair, f, made);
    const float last = f[LAST * TILE];
    wait_copies<1>();
    __syncthreads();
    if (more) u.fetch_square(s.t, t_in, row + 1);
    commit_copies();
    if (holds) update_state(s, u, keys, last, acc);
    if (u.warp < 4) write_outputs(s, u, d, out);
    __syncthreads();
    if (more) u.fetch_square(s.p, p_in, row + 1);
    if (more && KBUFFERS == 1) u.fetch_k(s, row + 1);
    commit_copies();
  }
  wait_copies<0>();
}

// One unit: the state in, its tiles, the state out.
DEVICE void scan_unit(Scan& s, const u16* c, const state_t* state_in, state_t* state_out,
                      const int* slots, const int* starts, const int* counts, const u16* t_in,
                      const u16* p_in, const float* factors, u16* o, const float* ring_in,
                      float* ring_out, const float* bases, int begin, int end) {
  const int head = blockIdx.y, column = head * VD + blockIdx.x * DS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, p2 = lane % 4 * 2;
  const int slot = slots[begin], last_valid = slot < 0 ? 0 : counts[end - 1];
  const bool holds = warp * 16 < KD;
  Part acc = {};
  const i64 state = ((i64)slot * HV * VD + column) * KD + warp * 16 + g;
  if (holds && slot >= 0 && starts[begin] != 0)
#pragma unroll
    for (int n = 0; n < DS / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        acc[n / 2][n % 2][e] = load_state(state_in + state + (n * 8 + p2 + e % 2) * KD + e / 2 * 8);
#if RING
  if (holds && slot >= 0 && starts[begin] != 0)
    catch_up(acc, ring_in + (i64)slot * RECORDS * RECORD, starts[begin],
             starts[begin] - (int)bases[begin], warp * 16 + g, p2);
  if (slot >= 0 && head == 0 && blockIdx.x == 0 && threadIdx.x == 0)
    ring_out[(i64)slot * RECORDS * RECORD + RECORD - 1] =
        (float)(starts[end - 1] + counts[end - 1]);
#endif
  const Unit u = {c,      factors, begin, end, last_valid, head,
                  column, warp,    lane,  g,   p2,         warp % 4 * 16};
  scan_tiles(s, u, t_in, p_in, o, holds, acc);
  if (holds && slot >= 0)
#pragma unroll
    for (int n = 0; n < DS / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        store_state(state_out + state + (n * 8 + p2 + e % 2) * KD + e / 2 * 8,
                    acc[n / 2][n % 2][e]);
}

// The first row of unit number `unit`, or `rows` beyond the last unit.
DEVICE int unit_begin(const int* slots, int rows, int unit) {
  for (int base = 0; base < rows; base += 32) {
    const int i = base + threadIdx.x % 32;
    u32 cuts = __ballot_sync(~0u, i < rows && begins(slots, i));
    const int here = __popc(cuts);
    if (unit < here) {
      while (unit--) cuts &= cuts - 1;
      return base + __ffs(cuts) - 1;
    }
    unit -= here;
  }
  return rows;
}

extern "C" __global__ void __launch_bounds__(256, 2)
    gated_delta_scan(const u16* c, const state_t* state_in, state_t* state_out, const int* slots,
                     const int* starts, const int* counts, const u16* t_in, const u16* p_in,
                     const float* factors, u16* o, const float* ring_in, float* ring_out,
                     const float* bases, int rows) {
  extern __shared__ __align__(128) char memory[];
  Scan& s = *(Scan*)memory;
  wait_for_previous();
  let_next_start();
#pragma unroll 1
  for (int unit = blockIdx.z;; unit += gridDim.z) {
    const int begin = unit_begin(slots, rows, unit);
    if (begin == rows) return;
    const int end = unit_begin(slots, rows, unit + 1);
    scan_unit(s, c, state_in, state_out, slots, starts, counts, t_in, p_in, factors, o, ring_in,
              ring_out, bases, begin, end);
    __syncthreads();
  }
}
