// delta_decode_fma.cu's sizes, shared memory, convolution, sums over lanes and state elements.
//
// Macros: HK, R (key heads, value heads of each), KD, VD (dimensions of a key and a value), G
// (value heads of a block), WARPS, STAGES, STATE_BYTES (of a state element), TAPS, FUSED, RING.
#pragma once
#include "delta_rule/replay_ring.cuh"
#include "delta_rule/delta_rule.cuh"

constexpr int LANES = KD * STATE_BYTES / 16;
constexpr int EPL = 16 / STATE_BYTES;    // elements per lane of a row
constexpr int ACCESS_ROWS = 32 / LANES;  // rows of one 16-byte access of a warp
constexpr int ACCESSES = LANES < 16 ? LANES / 2 : STATE_BYTES == 4 ? 8 : 4;
constexpr int CHUNK_ROWS = ACCESSES * ACCESS_ROWS;
constexpr int CHUNK = ACCESSES * 512;  // bytes
constexpr int PER_HEAD = VD / CHUNK_ROWS;
constexpr int CHUNKS = G * PER_HEAD;
constexpr int THREADS = WARPS * 32;
constexpr int CHANNELS = 2 * HK * KD + HV * VD;
constexpr int LOCAL = 2 * KD + G * VD;  // channels of this block: q, k, then its value rows by head
constexpr int KEY_BLOCKS = R / G;       // blocks that read the same q and k

static_assert(!RING || VD % FOLD_ROWS == 0 && FOLD_ROWS % CHUNK_ROWS == 0,
              "sizes the plan must refuse");
static_assert(VD % CHUNK_ROWS == 0 && VD % 4 == 0 && KD % 4 == 0 && R % G == 0 && G <= WARPS,
              "sizes the plan must refuse");

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

// Channel of the model for a channel of this block, whose first value head is `head`.
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

DEVICE void unpack(float (&s)[EPL], uint4 raw) {
#if STATE_BYTES == 4
  s[0] = __uint_as_float(raw.x), s[1] = __uint_as_float(raw.y);
  s[2] = __uint_as_float(raw.z), s[3] = __uint_as_float(raw.w);
#else
  u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; i++) s[2 * i] = low_bf16(words[i]), s[2 * i + 1] = high_bf16(words[i]);
#endif
}
DEVICE uint4 packed(const float (&s)[EPL]) {
#if STATE_BYTES == 4
  return {__float_as_uint(s[0]), __float_as_uint(s[1]), __float_as_uint(s[2]),
          __float_as_uint(s[3])};
#else
  return {pack_bf16(s[0], s[1]), pack_bf16(s[2], s[3]), pack_bf16(s[4], s[5]),
          pack_bf16(s[6], s[7])};
#endif
}
