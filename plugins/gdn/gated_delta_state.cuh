// The state of gated_delta.cu's scan: how it is read and stored, and with RING how it is caught up
// from the replay ring (replay_ring.py). DRAFTS: before that the folds are made that rounds have
// left, with the sums of a step (gdn_round.cu) in their order.
#pragma once
#include "gdn/gated_delta_prepare.cuh"

#if STATE_BYTES == 4
using state_t = float;
DEVICE float load_state(const state_t* p) { return *p; }
DEVICE void store_state(state_t* p, float x) { *p = x; }
#else
using state_t = u16;
DEVICE float load_state(const state_t* p) { return from_bf16(*p); }
DEVICE void store_state(state_t* p, float x) { *p = to_bf16(x); }
#endif

#if DRAFTS
// Brings rows n of a warp's part of S^T, which lag `lag` tokens, up to the recorded position q, as
// a step folds them.
DEVICE void fold(float (&acc)[2][4], const float* ring, int q, int lag, int n, int row, int pair) {
  const int head = blockIdx.y, lane = threadIdx.x % 32;
  const int first = head * VD + blockIdx.x * DS + n * 16 + pair;
  auto record = [&](int age) { return ring + (u32)(q + 16 * KEPT - age) % KEPT * RECORD; };
  float since = lane >= 1 && lane <= lag ? record(lane)[DECAYS_AT + head] : 0.f;
#pragma unroll
  for (int off = 1; off < RECORDS; off *= 2) {
    float before = __shfl_up_sync(~0u, since, off);
    if (lane >= off) since += before;
  }
  const float decay = expf(__fadd_rn(record(0)[DECAYS_AT + head], since));
  const float all = __shfl_sync(~0u, decay, lag);
#pragma unroll
  for (int i = 0; i < 8; i++) acc[i / 4][i % 4] *= all;
#pragma unroll 1
  for (int age = 1; age <= lag + 1; age++) {  // then the position's own
    const float grown = __shfl_sync(~0u, decay, age <= lag ? age - 1 : 0);
    const float* from = record(age <= lag ? age : 0);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float delta = from[first + i / 4 * 8 + i % 2], d = age <= lag ? grown * delta : delta;
      acc[i / 4][i % 4] =
          fmaf(d, from[KEYS_AT + head / R * KD + row + i % 4 / 2 * 8], acc[i / 4][i % 4]);
    }
  }
#if STATE_BYTES == 2
#pragma unroll
  for (int i = 0; i < 8; i++) acc[i / 4][i % 4] = from_bf16(to_bf16(acc[i / 4][i % 4]));
#endif
}
#endif

#if RING
// Adds what the ring holds to a warp's part of S^T, as the last tile's product leaves it.
DEVICE void catch_up(float (&acc)[DS / 16][2][4], const float* ring, int start, const float* told,
                     int row, int pair) {
  const int head = blockIdx.y, column = head * VD + blockIdx.x * DS;
#if DRAFTS
  auto record = [&](int age) { return ring + (u32)(start + 16 * KEPT - age) % KEPT * RECORD; };
  const int done = min(max((int)told[0], start - DRAFTS), start), base = (int)told[1];
#else
  auto record = [&](int age) { return ring + (u32)(start + RECORDS - age) % RECORDS * RECORD; };
  const int lag = start - (int)told[0];
#endif
#pragma unroll
  for (int n = 0; n < DS / 16; n++) {
#if DRAFTS
    int phase = (u32)(done + (column + n * 16) / FOLD_ROWS) % RECORDS;
    int stored = max(base, done - phase);
#pragma unroll 1
    for (int q = done; q < start; q++, phase++)
      if (phase == MAX_LAG)
        fold(acc[n], ring, q, q - stored, n, row, pair), stored = q + 1, phase = -1;
    const int last = start - stored;
#else
    const int phase = (u32)(start + (column + n * 16) / FOLD_ROWS) % RECORDS,
              last = min(lag, phase);
#endif
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
