// gated_delta_prepare: what of a tile of 64 tokens needs no state, for all tiles at once; the first
// launch of either form (delta_prefill_warps_mma.cu, delta_prefill_wgmma_sm90.cu).
//
// Grid (key heads, tiles): q and k to shared memory and, as the scan reads them, to memory (PACKED:
// v too), convolved where the node says so; decays summed in f64, norms, Q K^T and K K^T by
// mma.sync, then for each value head P, the factors of the scan and T (delta_prefill_inverse.cuh).
// Without the convolution 8,192 tokens of the 35B (27B) take an H200 95 (127) us:
// benchmarks/log/delta_rule/delta_prefill.md.
#pragma once
#include "delta_rule/prefill/delta_prefill_columns.cuh"
#include "delta_rule/prefill/delta_prefill_inverse.cuh"

constexpr int KP = KD / 8;                 // 16-byte pieces of a row of q or k
constexpr int DP = DS / 8;                 // of R and V'
constexpr int POSITIONS = DRAFTS ? 2 : 1;  // positions that a ring stores of its state
constexpr int FACTORS = 5;                 // rows of 64 floats of a (tile, value head), as below
// With |q|, |k| the norms' reciprocals:
// e^G |q| / sqrt(Dk), beta e^G |k|, beta, e^(Gc - G) |k|, e^Gc.
enum { QUERY, KEY, BETA, TAIL, LAST };

struct Prepare {
  union {
    struct {
      alignas(128) char q[TILE * KD * 2], k[TILE * KD * 2];
    };
    struct {  // once their products are made
      Triangle a[R];
      float high[R][TILE], low[R][TILE];  // G / ln 2 in two floats: small differences of large sums
      float beta[R][TILE];
      float q_norm[TILE], k_norm[TILE];
    };
  };
};

struct Token {  // of one value head
  float high, low, beta;
};
// G of a value head's tokens, summed in f64 by a warp, and beta, two tokens a lane; zeros behind
// the last valid token.
DEVICE void sum_decays(Token (&tokens)[2], const u16* ba, const float* a_log, const float* dt_bias,
                       int row, int head, int valid, int warp, int lane) {
  const int h = head * R + warp;
  const float speed = -expf(a_log[h]), bias = dt_bias[h];
  double sum[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int t = lane * 2 + i;
    const u16* rate = ba + ((i64)row * TILE + t) * 2 * HV + h;
    tokens[i].beta = t < valid ? sigmoid(from_bf16(rate[0])) : 0.f;
    sum[i] = t < valid ? (double)(speed * softplus(from_bf16(rate[HV]) + bias)) : 0.0;
  }
  double total = sum[0] + sum[1], before = total;
#pragma unroll
  for (int off = 1; off < 32; off *= 2) {
    double other = __shfl_up_sync(~0u, before, off);
    if (lane >= off) before += other;
  }
  before -= total;
  sum[0] += before, sum[1] += sum[0];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    sum[i] *= 1.4426950408889634;
    tokens[i].high = (float)sum[i], tokens[i].low = (float)(sum[i] - tokens[i].high);
  }
}
// q and k to shared memory and to `keys`; PACKED: v to `values`.
DEVICE void fill_columns(Prepare& s, const Convolution& m, u16* keys, u16* values, int row,
                         int head) {
  constexpr int QUADS = (2 * KD + (PACKED ? R * VD : 0)) / 4, TOKENS = 16, AHEAD = 4;
#pragma unroll 1
  for (int i = threadIdx.x; i < QUADS * (TILE / TOKENS); i += 256) {
    const int own = i % QUADS * 4, first = i / QUADS * TOKENS;
    const int value = head * R * VD + own - 2 * KD, key = own / KD * HK * KD + head * KD + own % KD;
    make_columns<TOKENS, AHEAD>(
        m, row, own < 2 * KD ? key : VALUES_AT + value, first, [] {},
        [&](int t, const Quad& y) {
          if (own < 2 * KD) {
            const u32 to =
                own / KD * (TILE * KD * 2) + at<KP>(t, forget(own) % KD / 8) + own % 8 * 2;
            *(Quad*)(s.q + to) = *(Quad*)((char*)keys + to) = y;
          } else *(Quad*)(values + ((i64)row * TILE + t) * HV * VD + value) = y;
        });
  }
}
// The norms' reciprocals of q and k, four threads a token.
DEVICE float2 reciprocal_norms(const Prepare& s) {
  const int t = threadIdx.x / 4, part = threadIdx.x % 4;
  float qq = 0.f, kk = 0.f;
  for (int i = part; i < KP; i += 4) {
    float x[8];
    unpack8(*(uint4*)(s.q + at<KP>(t, i)), x);
#pragma unroll
    for (int e = 0; e < 8; e++) qq = fmaf(x[e], x[e], qq);
    unpack8(*(uint4*)(s.k + at<KP>(t, i)), x);
#pragma unroll
    for (int e = 0; e < 8; e++) kk = fmaf(x[e], x[e], kk);
  }
  qq = lane_sum<4>(qq), kk = lane_sum<4>(kk);
  return {1.f / sqrtf(qq + 1e-6f) / sqrtf((float)KD), 1.f / sqrtf(kk + 1e-6f)};
}
// Of value head r, from d, the products of the tile's rows: P to memory by warps 0-3, A to shared
// memory by warps 4-7; both zero above the diagonal.
DEVICE void decay_products(Prepare& s, const float (&d)[BLOCKS][2][4], u16* p, int r, int warp,
                           int lane) {
  const int own = warp % 4, top = own * 16 + lane / 4;  // this lane's rows: top, top + 8
  float high[2], low[2], factor[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int i = top + half * 8;
    high[half] = s.high[r][i], low[half] = s.low[r][i];
    factor[half] = warp < 4 ? s.q_norm[i] : s.k_norm[i] * s.beta[r][i];
  }
#pragma unroll
  for (int n = 0; n < BLOCKS; n++) {
    if (n > own && (PACKED || warp >= 4)) break;
    u32 upper[4] = {}, lower[4] = {};
#pragma unroll
    for (int right = 0; right < 2; right++) {
      if (n > own) break;
      const int j = n * 16 + right * 8 + lane % 4 * 2;
      const float2 h = *(float2*)&s.high[r][j], l = *(float2*)&s.low[r][j];
      const float2 k = *(float2*)&s.k_norm[j];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int last = top + half * 8 - (warp < 4 ? 0 : 1);  // the last column that counts
        const float* x = &d[n][right][half * 2];
        float y = exp2_fast(high[half] - h.x + (low[half] - l.x)) * factor[half] * k.x;
        float z = exp2_fast(high[half] - h.y + (low[half] - l.y)) * factor[half] * k.y;
        y = j <= last ? x[0] * y : 0.f, z = j + 1 <= last ? x[1] * z : 0.f;
        if (warp >= 4 && n == own)
          *(float2*)((float*)s.a[r].diagonal[n] + (top % 16 + half * 8) * 16 + j % 16) = {y, z};
        split(y, z, upper[half * 2 + right], lower[half * 2 + right]);
      }
    }
    if (warp < 4) {
      store_block(p, own, n, upper, lane), store_block(p + PART, own, n, lower, lane);
    } else if (n < own) {
      char* const to = s.a[r].below[own * (own - 1) / 2 + n][0] + lane * 16;
      *(uint4*)to = {upper[0], upper[1], upper[2], upper[3]};
      *(uint4*)(to + BLOCK) = {lower[0], lower[1], lower[2], lower[3]};
    }
  }
}
// What the scan multiplies token t's rows by, of value head r.
DEVICE void store_factors(const Prepare& s, float* factors, i64 tile_head, int r, int t) {
  float* f = factors + tile_head * FACTORS * TILE + t;
  float grown = exp2_fast(s.high[r][t]), beta = s.beta[r][t];
  float last = s.high[r][TILE - 1];
  float gap = last - s.high[r][t] + (s.low[r][TILE - 1] - s.low[r][t]);
  f[QUERY * TILE] = grown * s.q_norm[t];
  f[KEY * TILE] = grown * s.k_norm[t] * beta;
  f[BETA * TILE] = beta;
  f[TAIL * TILE] = exp2_fast(gap) * s.k_norm[t];
  f[LAST * TILE] = exp2_fast(last);
}

// Whether a sequence, or an inert row, begins at row i: so are rows cut into sequences.
DEVICE bool begins(const int* slots, int i) {
  return i == 0 || slots[i] < 0 || slots[i] != slots[i - 1];
}
// Where the ring of a row of the states has number i of what it tells.
DEVICE i64 position_at(int of, int i, int head) {
  return (i64)of * SLOT_RING + (DRAFTS ? KEPT * RECORD + i * HV + head : RECORD - 1);
}

DYNAMIC_SHARED(gated_delta_prepare, sizeof(Prepare));
extern "C" __global__ void __launch_bounds__(256, 3)
    gated_delta_prepare(const u16* x, int x_width, const float* conv_weight, const u16* conv_in,
                        u16* conv_out, const u16* ba, const float* a_log, const float* dt_bias,
                        const int* slots, const int* starts, const int* counts, const int* sources,
                        const int* saves, const float* ring, float* bases, u16* keys, u16* values,
                        u16* t_out, u16* p_out, float* factors, int rows) {
  extern __shared__ __align__(128) char memory[];
  Prepare& s = *(Prepare*)memory;
  const int row = blockIdx.y, head = blockIdx.x;
  wait_then_launch_dependents();
  if (slots[row] < 0) return;
#if RING  // the scan will overwrite this
  if (head == 0 && threadIdx.x < POSITIONS && begins(slots, row) && starts[row])
    bases[row * POSITIONS + threadIdx.x] = ring[position_at(sources[row], threadIdx.x, 0)];
#endif
  fill_columns(s,
               {x, x_width, WIDTH, conv_weight, conv_in, conv_out, slots, starts, counts, sources,
                saves, rows},
               keys + ((i64)row * HK + head) * HEAD_KEYS, values, row, head);
  const int valid = counts[row];
  if (valid == 0) return;
  const int thread = forget(threadIdx.x), warp = thread / 32, lane = thread % 32;
  __syncthreads();
  const float2 norms = reciprocal_norms(s);
  float d[BLOCKS][2][4] = {};  // warps 0-3: Q K^T, 4-7: K K^T
#pragma unroll 4
  for (int i = 0; i < KD;
       i += 16) {  // by 4: registers. Above the diagonal too: warps stay together
    u32 a[4], b[4];
    load_a<KP>(a, warp < 4 ? s.q : s.k, warp % 4 * 16, i, lane);
#pragma unroll
    for (int n = 0; n < BLOCKS; n++) load_b<KP>(b, s.k, i, n * 16, lane), mma_pair(d[n], a, b);
  }
  __syncthreads();
  if (warp < R) {
    Token own[2];
    sum_decays(own, ba, a_log, dt_bias, row, head, valid, warp, lane);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      s.high[warp][lane * 2 + i] = own[i].high, s.low[warp][lane * 2 + i] = own[i].low;
      s.beta[warp][lane * 2 + i] = own[i].beta;
    }
  }
  if (lane % 4 == 0) s.q_norm[threadIdx.x / 4] = norms.x, s.k_norm[threadIdx.x / 4] = norms.y;
  __syncthreads();
  const i64 tile_head = (i64)row * HV + head * R;
#pragma unroll 1
  for (int r = 0; r < R; r++) {
    decay_products(s, d, p_out + (tile_head + r) * 2 * PART, r, warp, lane);
    if (threadIdx.x < TILE) store_factors(s, factors, tile_head + r, r, threadIdx.x);
  }
  __syncthreads();
  for (int i = threadIdx.x / 16; i < R * BLOCKS; i += 16)
    invert_diagonal(s.a[i / BLOCKS].diagonal[i % BLOCKS], lane % 16);
  __syncthreads();
  for (int i = warp; i < R * BLOCKS; i += 8)  // long columns first
    invert_column(s.a[i % R], t_out + (tile_head + i % R) * 2 * PART, i / R, lane);
}
