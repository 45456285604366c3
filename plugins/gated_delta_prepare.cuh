// gated_delta_prepare: what of a tile needs no state (see gated_delta.cu), for all tiles at once.
//
// 246 us for 128 tiles of the 27B's heads on an H200, 80 % of the shared memory's rate: the decays
// are read again for each element of A and P, and A once a column in the substitution.
#pragma once
#include "gdn_tiles.cuh"

#define KP (KD / 8)              // 16-byte pieces of a row of q or k
#define DP (DS / 8)              // of R and V'
#define HV (HK * R)
#define WIDTH (2 * HK * KD + HV * VD)
#define TAILS (TILE * DS * 2)    // bytes of one part of tail V'
#define FACTORS 5                // rows of 64 floats of a (tile, value head), as below
// With |q|, |k| the norms' reciprocals:
// e^G |q| / sqrt(Dk), beta e^G |k|, beta, e^(Gc - G) |k|, e^Gc.
enum { QUERY, KEY, BETA, TAIL, LAST };

struct Prepare {
  alignas(128) char q[TILE * KD * 2];
  char k[TILE * KD * 2];
  float a[R][TILE][TILE];
  float high[R][TILE], low[R][TILE];  // G in two floats: small differences of large sums
  float beta[R][TILE];
  float q_norm[TILE], k_norm[TILE];
};

extern "C" __global__ void __launch_bounds__(256)
gated_delta_prepare(const u16* c, const u16* ba, const float* a_log, const float* dt_bias,
                    const int* slots, const int* counts, u16* t_out, u16* p_out, float* factors) {
  extern __shared__ char memory[];
  Prepare& s = *(Prepare*)(((u64)memory + 127) & ~127ull);
  const int row = blockIdx.y, head = blockIdx.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  wait_for_previous();
  let_next_start();
  const int valid = slots[row] < 0 ? 0 : counts[row];
  if (valid == 0) return;
  const u16* tokens = c + (long long)row * TILE * WIDTH;
  fetch<KP>(s.q, tokens + head * KD, WIDTH, valid);
  fetch<KP>(s.k, tokens + HK * KD + head * KD, WIDTH, valid);
  commit_copies();
  if (warp < R) {
    const int h = head * R + warp;
    const float speed = -expf(a_log[h]), bias = dt_bias[h];
    double sum[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int t = lane * 2 + i;
      const u16* rate = ba + ((long long)row * TILE + t) * 2 * HV + h;
      s.beta[warp][t] = t < valid ? sigmoid(from_bf16(rate[0])) : 0.f;
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
      float high = (float)sum[i];
      s.high[warp][lane * 2 + i] = high, s.low[warp][lane * 2 + i] = (float)(sum[i] - high);
    }
  }
  wait_copies<0>();
  __syncthreads();
  {  // norms: four threads a token
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
    s.q_norm[t] = 1.f / sqrtf(qq + 1e-6f) / sqrtf((float)KD), s.k_norm[t] = 1.f / sqrtf(kk + 1e-6f);
  }
  float d[4][2][4] = {};
  const int first = warp % 4 * 16;
#pragma unroll
  for (int i = 0; i < KD; i += 16) {
    u32 a[4], b[4];
    load_a<KP>(a, warp < 4 ? s.q : s.k, first, i, lane);
#pragma unroll
    for (int n = 0; n < 4; n++) load_b<KP>(b, s.k, i, n * 16, lane), mma_pair(d[n], a, b);
  }
  __syncthreads();
  for (int r = 0; r < R; r++) {
    const long long unit = (long long)row * HV + head * R + r;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int i = first + lane / 4 + half * 8, j = n * 8 + lane % 4 * 2;
        float v[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int gap_ok = warp < 4 ? j + e <= i : j + e < i;
          float gap = s.high[r][i] - s.high[r][j + e] + (s.low[r][i] - s.low[r][j + e]);
          float row_factor = warp < 4 ? s.q_norm[i] : s.k_norm[i] * s.beta[r][i];
          v[e] = gap_ok ? d[n / 2][n % 2][half * 2 + e] * row_factor * s.k_norm[j + e] * expf(gap)
                        : 0.f;
        }
        if (warp < 4) {
          u32 high, low;
          split(v[0], v[1], high, low);
          u16* to = p_out + unit * 2 * TILE * TILE + i * TILE + j;
          *(u32*)to = high, *(u32*)(to + TILE * TILE) = low;
        } else {
          *(float2*)&s.a[r][i][j] = {v[0], v[1]};
        }
      }
    if (threadIdx.x < TILE) {
      const int t = threadIdx.x;
      float* f = factors + unit * FACTORS * TILE + t;
      float grown = expf(s.high[r][t]), beta = s.beta[r][t];
      float last = s.high[r][TILE - 1];
      float gap = last - s.high[r][t] + (s.low[r][TILE - 1] - s.low[r][t]);
      f[QUERY * TILE] = grown * s.q_norm[t];
      f[KEY * TILE] = grown * s.k_norm[t] * beta;
      f[BETA * TILE] = beta;
      f[TAIL * TILE] = expf(gap) * s.k_norm[t];
      f[LAST * TILE] = expf(last);
    }
  }
  __syncthreads();
  const int r = threadIdx.x / TILE, column = threadIdx.x % TILE;
  for (int mine = r; mine < R; mine += 4) {  // (I + A) x = e_column
    float x[TILE];
#pragma unroll
    for (int i = 0; i < TILE; i++) {
      float sum[4] = {};
#pragma unroll
      for (int j = 0; j < i; j += 4) {
        float4 a = *(float4*)&s.a[mine][i][j];
        sum[0] = fmaf(a.x, x[j], sum[0]);
        if (j + 1 < i) sum[1] = fmaf(a.y, x[j + 1], sum[1]);
        if (j + 2 < i) sum[2] = fmaf(a.z, x[j + 2], sum[2]);
        if (j + 3 < i) sum[3] = fmaf(a.w, x[j + 3], sum[3]);
      }
      x[i] = (i == column ? 1.f : 0.f) - ((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
    u16* to = t_out + ((long long)row * HV + head * R + mine) * 2 * TILE * TILE + column;
#pragma unroll
    for (int i = 0; i < TILE; i++) {
      u16 high = to_bf16(x[i]);
      to[i * TILE] = high;
      to[TILE * TILE + i * TILE] = to_bf16(x[i] - from_bf16(high));
    }
  }
}
