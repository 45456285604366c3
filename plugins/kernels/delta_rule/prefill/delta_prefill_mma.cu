// gated_delta_chunk (prefill): the delta rule over tiles of 64 tokens, in two launches.
//
// prepare (delta_prefill_prepare.cuh), all tiles at once: for each value head the decays' sums G,
// P = (Q K^T) . D and T = (I + A)^-1. scan, grid (columns / DS, value heads, sequences): tile after
// tile, the state S^T in the accumulators of the last product:
//   R = beta V - (beta e^G) K S^T;  V' = T R;  O = e^G Q S^T + P V';
//   S^T <- e^Gc S^T + K^T (tail V')
// the reference's U - W S^T with T applied last, so that only T and P are stored between the
// launches. q and k stay bf16; their norms are factors of rows.
// The first tile's state is that of row `sources`, with RING caught up (delta_prefill_state.cuh); a
// sequence's last tile leaves its own in the slot, a tile that saves in that row too, and the ring
// there says that nothing is pending.
// Precision: f32 accumulators; f32 operands are split into two bf16, high + low (S, R, T, P, V'),
// and tail V', which the state sums up, into three: with nearly equal keys T R cancels.
// 8192 tokens in one sequence, 27B, H200: 960 us, of it scan 774 (log/delta_rule/delta_prefill.md).
constexpr int THREADS = 256, RESIDENT = 2;
#include "delta_rule/prefill/delta_prefill_state.cuh"

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

// One sequence of one value head's DS columns.
DEVICE void scan_sequence(Scan& s, const Operands& m, Sequence own) {
  const int head = blockIdx.y, column = head * VD + blockIdx.x * DS;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, p2 = lane % 4 * 2;
  const int begin = own.begin, end = own.end, slot = own.slot;
  const bool holds = warp * 16 < KD;  // this warp's rows of S^T exist
  float acc[DS / 16][2][4] = {};
  auto in_state = [&](int of, int n, int e) {
    const int value = column + n * 8 + p2 + e % 2;
    return ((i64)of * HV * VD + value) * KD + warp * 16 + g + e / 2 * 8;
  };
  if (holds && slot >= 0 && m.starts[begin] != 0) {
    const int source = m.sources[begin];
#pragma unroll
    for (int n = 0; n < DS / 8; n++)
#pragma unroll
      for (int e = 0; e < 4; e++)
        acc[n / 2][n % 2][e] = load_state(m.state_in + in_state(source, n, e));
    const Columns held{warp * 16 + g, p2};
#pragma unroll
    for (int n = 0; n < DS / 16; n++)
      catch_up(reinterpret_cast<float (&)[8]>(acc[n]), held, m, source, begin, column + n * 16);
  }
  // To row `of` of the states, that behind tile `row`.
  auto leave = [&](int of, int row) {
    if (holds)
#pragma unroll
      for (int n = 0; n < DS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          store_state(m.state_out + in_state(of, n, e), acc[n / 2][n % 2][e]);
    settle_ring(m, of, row);
  };

  auto fetch_k = [&](int row) {
    const int valid = own.valid(row);
    fetch<KP>(s.k[row % KBUFFERS], m.c + (i64)row * TILE * WIDTH + (HK + head / R) * KD, WIDTH,
              valid);
  };
  auto fetch_qvf = [&](int row) {
    const int valid = own.valid(row);
    const float* f = m.factors + ((i64)row * HV + head) * FACTORS * TILE;
    if (threadIdx.x < FACTORS * TILE / 4)
      copy_async(s.f[row % 2] + threadIdx.x * 4, f + threadIdx.x * 4);
    const u16* tokens = m.c + (i64)row * TILE * WIDTH;
    fetch<KP>(s.q, tokens + head / R * KD, WIDTH, valid);
    fetch<DP>(s.v, tokens + 2 * HK * KD + column, WIDTH, valid);
  };
  auto fetch_parts = [&](char* high, const u16* from, int row) {  // of T or P
    from += ((i64)row * HV + head) * 2 * TILE * TILE;
    fetch<8>(high, from, TILE, TILE);
    fetch<8>(high + TILE * TILE * 2, from + TILE * TILE, TILE, TILE);
  };
  // Three groups of copies a tile, waited for one by one: (k, q, v, factors), T, P.
  if (own.valid(begin) > 0) fetch_k(begin), fetch_qvf(begin);
  commit_copies();
  if (own.valid(begin) > 0) fetch_parts(s.t[0], m.t, begin);
  commit_copies();
  if (own.valid(begin) > 0) fetch_parts(s.p[0], m.p, begin);
  commit_copies();

#pragma unroll 1
  for (int row = begin; row < end; row++) {
    const bool more = row + 1 < end && own.valid(row + 1) > 0;
    const float* f = s.f[row % 2];
    u16* out = m.o + (i64)row * TILE * HV * VD + column;
    if (own.valid(row) == 0) {  // nothing to do, but its outputs are finite
      for (int i = threadIdx.x; i < TILE * DP; i += 256)
        *(uint4*)(out + (i64)(i / DP) * HV * VD + i % DP * 8) = uint4{};
      if (slot >= 0 && m.saves[row] >= 0) leave(m.saves[row], row);
      continue;
    }
    if (holds)
#pragma unroll
      for (int n = 0; n < DS / 8; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32 high, low;
          split(acc[n / 2][n % 2][half * 2], acc[n / 2][n % 2][half * 2 + 1], high, low);
          u32 to = at<DP>(warp * 16 + g + half * 8, n) + p2 * 2;
          *(u32*)(s.s + to) = high, *(u32*)(s.s + KD * DS * 2 + to) = low;
        }
    wait_copies<KBUFFERS == 1 ? 0 : 2>();
    __syncthreads();
    const char* keys = s.k[row % KBUFFERS];
    const int first = warp % 4 * 16;
    float d[DS / 16][2][4] = {};  // warps 0-3: Q S^T, 4-7: K S^T
    product<KD>(
        [&](Fragments<1>& x, int i) {
          load_a<KP>(x.a[0], warp < 4 ? s.q : keys, first, i, lane);
#pragma unroll
          for (int n = 0; n < DS / 16; n++) {
            load_b_inner<DP>(x.b[0][n], s.s, i, n * 16, lane);
            load_b_inner<DP>(x.b[1][n], s.s + KD * DS * 2, i, n * 16, lane);
          }
        },
        [&](Fragments<1>& x) {
#pragma unroll
          for (int n = 0; n < DS / 16; n++)
            mma_pair(d[n], x.a[0], x.b[0][n]), mma_pair(d[n], x.a[0], x.b[1][n]);
        });
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int i = first + g + half * 8;
      const float factor = f[(warp < 4 ? QUERY : KEY) * TILE + i], beta = f[BETA * TILE + i];
#pragma unroll
      for (int n = 0; n < DS / 8; n++) {
        float* x = &d[n / 2][n % 2][half * 2];
        x[0] *= factor, x[1] *= factor;
        if (warp >= 4) {
          const u32 to = at<DP>(i, n) + p2 * 2, v = *(u32*)(s.v + to);
          u32 high, low;
          split(beta * low_bf16(v) - x[0], beta * high_bf16(v) - x[1], high, low);
          *(u32*)(s.r[0] + to) = high, *(u32*)(s.r[1] + to) = low;
        }
      }
    }
    wait_copies<1>();
    __syncthreads();
    if (more) fetch_qvf(row + 1);
    if (more && KBUFFERS > 1) fetch_k(row + 1);
    commit_copies();
    const int pair = warp / 4;  // this warp's 16 columns of V'
    float made[2][4] = {};
    if (pair < DS / 16)
      product<TILE, 2>(  // T's upper blocks are zeros; leaving them out costs more than it saves
          [&](Fragments<2>& x, int i) {
            load_a<8>(x.a[0], s.t[0], first, i, lane), load_a<8>(x.a[1], s.t[1], first, i, lane);
            load_b_inner<DP>(x.b[0][0], s.r[0], i, pair * 16, lane);
            load_b_inner<DP>(x.b[1][0], s.r[1], i, pair * 16, lane);
          },
          [&](Fragments<2>& x) {
            mma_pair(made, x.a[0], x.b[0][0]), mma_pair(made, x.a[1], x.b[0][0]);
            mma_pair(made, x.a[0], x.b[1][0]), mma_pair(made, x.a[1], x.b[1][0]);
          });
    __syncthreads();
    if (pair < DS / 16)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int i = first + g + half * 8;
        const float tail = f[TAIL * TILE + i];
#pragma unroll
        for (int n = 0; n < 2; n++) {
          const u32 to = at<DP>(i, pair * 2 + n) + p2 * 2;
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
    const float last = f[LAST * TILE];
    wait_copies<1>();
    __syncthreads();
    if (more) fetch_parts(s.t[0], m.t, row + 1);
    commit_copies();
    if (holds) {
#pragma unroll
      for (int n = 0; n < DS / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) acc[n / 2][n % 2][e] *= last;
      product<TILE, 1, 3>(
          [&](Fragments<1, 3>& x, int i) {
            load_a_transposed<KP>(x.a[0], keys, warp * 16, i, lane);
#pragma unroll
            for (int n = 0; n < DS / 16; n++)
#pragma unroll
              for (int part = 0; part < 3; part++)
                load_b_inner<DP>(x.b[part][n], s.s + part * TAILS, i, n * 16, lane);
          },
          [&](Fragments<1, 3>& x) {
#pragma unroll
            for (int n = 0; n < DS / 16; n++)
#pragma unroll
              for (int part = 2; part >= 0; part--) mma_pair(acc[n], x.a[0], x.b[part][n]);
          });
    }
    if (warp < 4) {
      product<TILE, 2>(
          [&](Fragments<2>& x, int i) {
            load_a<8>(x.a[0], s.p[0], first, i, lane), load_a<8>(x.a[1], s.p[1], first, i, lane);
#pragma unroll
            for (int n = 0; n < DS / 16; n++) {
              load_b_inner<DP>(x.b[0][n], s.r[0], i, n * 16, lane);
              load_b_inner<DP>(x.b[1][n], s.r[1], i, n * 16, lane);
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
          *(u32*)(out + (i64)(first + g + half * 8) * HV * VD + n * 8 + p2) =
              pack_bf16(d[n / 2][n % 2][half * 2], d[n / 2][n % 2][half * 2 + 1]);
    }
    __syncthreads();
    if (more) fetch_parts(s.p[0], m.p, row + 1);
    if (more && KBUFFERS == 1) fetch_k(row + 1);
    commit_copies();
    if (slot >= 0 && m.saves[row] >= 0) leave(m.saves[row], row);
  }
  wait_copies<0>();
  if (slot >= 0) leave(slot, end - 1);
}

DEVICE void scan_block(const Operands& m) {
  extern __shared__ __align__(128) char shared_memory[];
  Scan& s = *(Scan*)shared_memory;
  wait_for_previous();
  launch_dependents();
  each_sequence(m, [&](const Sequence& own) {
    scan_sequence(s, m, own);
    __syncthreads();
  });
}
