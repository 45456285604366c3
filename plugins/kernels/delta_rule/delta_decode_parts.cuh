// delta_decode_fma.cu's sizes, shared memory, convolution and sums over lanes.
//
// Macros: those of delta_state.cuh, TAPS, FUSED, EPS (of the norm).
#pragma once
#include "delta_rule/delta_state.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int CHANNELS = 2 * HK * KD + HV * VD;
constexpr int LOCAL = 2 * KD + G * VD;  // channels of this block: q, k, then its value rows by head
constexpr int KEY_BLOCKS = R / G;       // blocks that read the same q and k

static_assert(VD % 4 == 0 && KD % 4 == 0 && R % G == 0 && G <= WARPS, "the plan must refuse");

struct Shared {
#if STAGES
  alignas(128) char state[WARPS][STAGES][CHUNK];
  u64 full[WARPS][STAGES];
#endif
  alignas(16) float c[LOCAL];
  float o[G * VD];
#if FUSED
  float gate[G * VD];  // norm weight * silu(z)
#endif
#if RING
  alignas(16) float deltas[MAX_LAG][G * VD];  // deltas of the records by age, zero where not live
  alignas(16) float keys[MAX_LAG][KD];
  float key_dots[G][2][MAX_LAG];  // k and q times a record's key, with its decay
#endif
  float decay[G][RECORDS];  // over this token and the n newest records
  float beta[G];
  int last;  // whether this block shifts q's and k's part of the convolution's state
};

constexpr int QUADS = (LOCAL + 4 * THREADS - 1) / (4 * THREADS);

// Channel of the model for a channel of this block; `head`: its first value head.
DEVICE int channel_of(int i, int head) {
  if (i < 2 * KD) return (i < KD ? 0 : HK * KD) + head / R * KD + i % KD;
  return 2 * HK * KD + head * VD + i - 2 * KD;
}

#if FUSED
// Four neighbouring channels of a thread: what the convolution needs, loaded before the launch
// before this one is over, and the token itself after.
struct Quad {
  act4 taps[TAPS];
  float w[4][TAPS];
  int channel;
};
DEVICE void load_taps(Quad& q, const act* old, bool fresh) {
#pragma unroll
  for (int j = 0; j < TAPS - 1; j++)
    q.taps[j] = fresh ? act4{} : *(const act4*)(old + j * CHANNELS + q.channel);
}
DEVICE void load_weights(Quad& q, const float* weight) {
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const float* w = weight + (q.channel + e) * TAPS;
    if constexpr (TAPS == 4) {
      float4 all = __ldg((const float4*)w);
      q.w[e][0] = all.x, q.w[e][1] = all.y, q.w[e][2] = all.z, q.w[e][3] = all.w;
    } else {
#pragma unroll
      for (int j = 0; j < TAPS; j++) q.w[e][j] = __ldg(w + j);
    }
  }
}
DEVICE void convolve(float* c, const Quad& q) {
  float made[4];
#pragma unroll
  for (int e = 0; e < 4; e++) {
    float y = 0.f;
#pragma unroll
    for (int j = 0; j < TAPS; j++) y = fmaf(q.w[e][j], widen(q.taps[j].v[e]), y);
    made[e] = rounded(silu(y));
  }
  *(float4*)c = {made[0], made[1], made[2], made[3]};
}
DEVICE void shift(const Quad& q, act* next) {
#pragma unroll
  for (int j = 0; j < TAPS - 1; j++) *(act4*)(next + j * CHANNELS + q.channel) = q.taps[j + 1];
}
#endif

// N sums over the lanes up to FROM apart at once: afterwards v[0] is the sum of value number
// (lane's bits, high to low); halves are exchanged, so each step halves the values.
template <int N = 2 * ACCESSES, int FROM = LANES / 2>
DEVICE float transposed_sum(float (&v)[N], int lane) {
  int n = N;
#pragma unroll
  for (int off = FROM; off; off /= 2) {
    if (n > 1) {
      n /= 2;
      bool upper = lane & off;
#pragma unroll
      for (int i = 0; i < N / 2; i++)
        if (i < n) {
          float send = upper ? v[i] : v[i + n], keep = upper ? v[i + n] : v[i];
          v[i] = keep + __shfl_xor_sync(~0u, send, off);
        }
    } else {
      v[0] += __shfl_xor_sync(~0u, v[0], off);
    }
  }
  return v[0];
}
