// The scan's state, of its three forms: how it is read and stored, and with RING how it is caught
// up from the replay ring (replay_ring.py). DRAFTS: before that the folds are made that rounds have
// left, with the sums of a step (delta_decode_fma.cu) in their order.
#pragma once
#include "delta_rule/prefill/delta_prefill_scan.cuh"

// What a lane holds of S, of 16 values that fold together: element i is that of value value(i) and
// key key(i).
struct Rows {  // accumulators of S, values by keys, of one warp's 16 values
  int row, pair;
  DEVICE int value(int i) const { return row + i % 4 / 2 * 8; }
  DEVICE int key(int i) const { return i / 4 * 8 + pair + i % 2; }
  // Where row `of` of the states has elements 2 i and 2 i + 1, `column` the warp's first value.
  template <class T>
  DEVICE T* in_state(T* states, int of, int column, int i) const {
    return states + (((i64)of * HV * VD + column + row + i % 2 * 8) * KD + pair) + i / 2 * 8;
  }
};
DEVICE float2 load_pair(const float* p) { return *(const float2*)p; }
DEVICE float2 load_pair(const u16* p) { return state_pair(*(const u32*)p); }

// Two neighbouring blocks of 8 columns of an accumulator as a left operand, in two parts.
DEVICE void split_pair(u32 (&high)[4], u32 (&low)[4], const float (&x)[4], const float (&y)[4]) {
  split(x[0], x[1], high[0], low[0]), split(x[2], x[3], high[1], low[1]);
  split(y[0], y[1], high[2], low[2]), split(y[2], y[3], high[3], low[3]);
}

#if DRAFTS
// Brings values first … first + 15, which lag `lag` tokens, up to the recorded position q, as a
// step folds them.
DEVICE void fold(float (&acc)[KD / 2], const Rows& held, const float* ring, int q, int lag,
                 int first) {
  const int head = blockIdx.y, lane = threadIdx.x % 32;
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
  for (int i = 0; i < KD / 2; i++) acc[i] *= all;
#pragma unroll 1
  for (int age = 1; age <= lag + 1; age++) {  // then the position's own
    const float grown = __shfl_sync(~0u, decay, age <= lag ? age - 1 : 0);
    const float *from = record(age <= lag ? age : 0), *k = from + KEYS_AT + head / R * KD;
#pragma unroll
    for (int i = 0; i < KD / 2; i++) {
      const float delta = from[first + held.value(i)], d = age <= lag ? grown * delta : delta;
      acc[i] = fmaf(d, k[held.key(i)], acc[i]);
    }
  }
#if STATE_BYTES == 2
#pragma unroll
  for (int i = 0; i < KD / 2; i += 2) {
    const float2 pair = state_pair(state_word(acc[i], acc[i + 1]));
    acc[i] = pair.x, acc[i + 1] = pair.y;
  }
#endif
}
#endif

// Adds what row `source` of the rings holds to values `column` … `column` + 15 of all heads'
// HV * VD, before tile `row`.
DEVICE void catch_up(float (&acc)[KD / 2], const Rows& held, const Operands& m, int source, int row,
                     int column) {
#if RING
  const int head = blockIdx.y, start = m.starts[row];
  const float *ring = m.ring_in + (i64)source * SLOT_RING, *positions = m.bases + row * POSITIONS;
#if DRAFTS
  auto record = [&](int age) { return ring + (u32)(start + 16 * KEPT - age) % KEPT * RECORD; };
  const int done = min(max((int)positions[0], start - DRAFTS), start), base = (int)positions[1];
  int phase = (u32)(done + column / FOLD_ROWS) % RECORDS;
  int stored = max(base, done - phase);
#pragma unroll 1
  for (int q = done; q < start; q++, phase++)
    if (phase == MAX_LAG) fold(acc, held, ring, q, q - stored, column), stored = q + 1, phase = -1;
  const int last = start - stored;
#else
  auto record = [&](int age) { return ring + (u32)(start + RECORDS - age) % RECORDS * RECORD; };
  const int lag = start - (int)positions[0];
  const int phase = (u32)(start + column / FOLD_ROWS) % RECORDS, last = min(lag, phase);
#endif
  float since = 0.f;
  for (int age = 1; age <= last; age++) since += record(age)[DECAYS_AT + head];
  const float decay = expf(since);
#pragma unroll
  for (int i = 0; i < KD / 2; i++) acc[i] *= decay;
  since = 0.f;
#pragma unroll 1
  for (int age = 1; age <= last; age++) {
    const float *from = record(age), grown = expf(since);
    const float *d = from + column, *k = from + KEYS_AT + head / R * KD;
#pragma unroll
    for (int i = 0; i < KD / 2; i++)
      acc[i] = fmaf(grown * d[held.value(i)], k[held.key(i)], acc[i]);
    since += from[DECAYS_AT + head];
  }
#endif
}

// S of a warp's values, `column` the first of them, before tile `row`; x is all zeros.
DEVICE void load_rows(float (&x)[KD / 2], const Rows& held, const Operands& m, int row,
                      int column) {
  const int source = m.sources[row];
#pragma unroll
  for (int i = 0; i < KD / 4; i++) {
    const float2 pair = load_pair(held.in_state(m.state_in, source, column, i));
    x[i * 2] = pair.x, x[i * 2 + 1] = pair.y;
  }
  catch_up(x, held, m, source, row, column);
}
// To the ring of row `of` of the states: after tile `row` nothing is pending.
DEVICE void settle_ring(const Operands& m, int of, int row) {
#if RING
  const int head = blockIdx.y;
  if ((DRAFTS || head == 0) && blockIdx.x == 0 && threadIdx.x < POSITIONS)
    m.ring_out[position_at(of, threadIdx.x, head)] = (float)(m.starts[row] + m.counts[row]);
#endif
}
