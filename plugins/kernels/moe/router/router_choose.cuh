// The k greatest of a token's logits in shared memory, their softmax, and the shared expert's gate.
//
// Macros: EXPERTS, TOP_K, GATE (1: one more expert; its weight is the sigmoid of its logit).
#pragma once
#include "common/numeric.cuh"

constexpr int OUT = TOP_K + GATE;
constexpr int LANES = (EXPERTS + 31) / 32;  // logits a lane
static_assert(OUT <= 32, "what the tactics refuse");

// One warp. The greatest key is chosen first; a NaN comes last but is an expert like any other; key
// 0 is none. A lane has LANES consecutive experts, so that the first lane wins a tie.
template <class Gate>
DEVICE void choose(const float* logits, Gate gate_logit, int* ids, float* weights) {
  const int lane = lane_id();
  u32 keys[LANES];
#pragma unroll
  for (int i = 0; i < LANES; ++i)
    keys[i] = lane * LANES + i < EXPERTS ? ordered_key_nan_last(logits[lane * LANES + i]) : 0;
  int id = EXPERTS;
  float value = 0.0f, most = 0.0f;
#pragma unroll 1
  for (int k = 0; k < TOP_K; ++k) {
    u32 own = keys[0];
#pragma unroll
    for (int i = 1; i < LANES; ++i) own = max(own, keys[i]);
    const u32 best = __reduce_max_sync(~0u, own);
    const int winner = __ffs(__ballot_sync(~0u, own == best)) - 1;
    int place = 0;
    bool taken = lane != winner;
#pragma unroll
    for (int i = 0; i < LANES; ++i)
      if (!taken && keys[i] == best) keys[i] = 0, place = i, taken = true;
    place = __shfl_sync(~0u, place, winner);
    if (k == 0) most = key_value(best);
    if (lane == k) id = winner * LANES + place, value = key_value(best);
  }
  const float power = lane < TOP_K ? expf(value - most) : 0.0f;
  float share = __fdiv_rn(power, warp_sum(power));
  if (GATE && lane == TOP_K) share = sigmoid(gate_logit());
  if (lane < OUT) ids[lane] = id, weights[lane] = share;
}
