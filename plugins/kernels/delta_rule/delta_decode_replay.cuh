// delta_decode_fma.cu with a replay ring: what a block reads of the records of tokens that its
// state does not hold yet, and what it writes of this token. Layout and meaning: replay_ring.py.
//
// Records are read before griddepcontrol.wait (PDL): the one that this token overwrites is not
// live. Keys stay in the registers of the lanes that multiply them (EPL elements a lane, as of k
// and q); deltas go to shared memory by age, zero where a value row has already folded them in.
#pragma once
#include "delta_rule/delta_decode_parts.cuh"

// Records of which a lane has part of the keys.
constexpr int LANE_KEYS = (MAX_LAG + WARPS * ACCESS_ROWS - 1) / (WARPS * ACCESS_ROWS);

// A row's slot's ring, this token's record, its position p, p - base.
struct RingPosition {
  const float* ring;
  float* record;
  int start, lag;
  bool fresh;
};
struct Records {
  float key[LANE_KEYS ? LANE_KEYS : 1][EPL];
  float since;  // lane n: sum of the logarithms of the decays of the n newest
};

DEVICE const float* record_of(const RingPosition& p, int age) {
  return p.ring + record_at(p.start - age);
}
// Of a value row of the block: (p + m) mod L of its fold group m; it folds at L - 1 = MAX_LAG and
// lags by min(p.lag, phase) tokens.
DEVICE int phase_of(const RingPosition& p, int head, int row) {
  return (u32)(p.start + (head * VD + row) / FOLD_ROWS) % RECORDS;
}
DEVICE int age_of(int i, int warp, int lane) {
  return 1 + (i * WARPS + warp) * ACCESS_ROWS + lane / LANES;
}
// The value head of the block that this warp makes the rates of; none from G on.
DEVICE int head_of_rates(int warp) { return (WARPS / 2 - 1 - warp + WARPS) % WARPS; }

#if RING
DEVICE void fetch_records(Shared& s, Records& r, const RingPosition& p, int head, int warp,
                          int lane) {
#pragma unroll
  for (int i = 0; i < LANE_KEYS; i++) {
    const int age = age_of(i, warp, lane);
    const bool live = age <= MAX_LAG && age <= p.lag;
    const float* from = record_of(p, age) + KEYS_AT + head / R * KD + lane % LANES * EPL;
#pragma unroll
    for (int e = 0; e < EPL; e += 4) {
      float4 k = live ? *(const float4*)(from + e) : float4{};
      r.key[i][e] = k.x, r.key[i][e + 1] = k.y, r.key[i][e + 2] = k.z, r.key[i][e + 3] = k.w;
    }
  }
  for (int i = threadIdx.x; i < MAX_LAG * G * VD / 4; i += THREADS) {
    const int age = 1 + i / (G * VD / 4), row = i % (G * VD / 4) * 4;
    const bool live = age <= min(p.lag, phase_of(p, head, row));
    copy_async(&s.deltas[age - 1][row], record_of(p, age) + head * VD + row, live ? 16 : 0);
  }
  commit_copies();
  const int mine = head_of_rates(warp);
  r.since = 0.f;
  if (mine < G) {
    if (lane >= 1 && lane <= min(p.lag, MAX_LAG))
      r.since = record_of(p, lane)[DECAYS_AT + head + mine];
#pragma unroll
    for (int off = 1; off < RECORDS; off *= 2) {
      float before = __shfl_up_sync(~0u, r.since, off);
      if (lane >= off) r.since += before;
    }
  }
}

// Dot products of k and q with the records' keys, by head with the decay since; the keys go to
// shared memory for the chunks that fold.
DEVICE void dot_keys(Shared& s, const Records& r, const float (&k)[EPL], const float (&q)[EPL],
                     int warp, int lane) {
#pragma unroll
  for (int i = 0; i < LANE_KEYS; i++) {
    const int age = age_of(i, warp, lane);
    float kk = 0.f, qk = 0.f;
#pragma unroll
    for (int e = 0; e < EPL; e++)
      kk = fmaf(k[e], r.key[i][e], kk), qk = fmaf(q[e], r.key[i][e], qk);
    kk = lane_sum<LANES>(kk), qk = lane_sum<LANES>(qk);
    if (age > MAX_LAG) continue;
    put(&s.keys[age - 1][lane % LANES * EPL], r.key[i]);
    for (int mine = lane % LANES; mine < G; mine += LANES) {
      const float decay = s.decay[mine][age - 1];
      s.key_dots[mine][0][age - 1] = decay * kk, s.key_dots[mine][1][age - 1] = decay * qk;
    }
  }
}

// Adds the records 1…n to rows of a head's state that have decayed over them; `row`, the first in
// this block, and those ACCESS_ROWS apart.
DEVICE void replay(const Shared& s, float (&x)[ACCESSES][EPL], int n, int mine, int row, int lane) {
#pragma unroll 1
  for (int j = 0; j < n; j++) {
    float key[EPL];
    const float decay = s.decay[mine][j];
#pragma unroll
    for (int e = 0; e < EPL; e += 4) {
      float4 k = *(const float4*)&s.keys[j][lane % LANES * EPL + e];
      key[e] = k.x, key[e + 1] = k.y, key[e + 2] = k.z, key[e + 3] = k.w;
    }
#pragma unroll
    for (int r = 0; r < ACCESSES; r++) {
      const float d = decay * s.deltas[j][row + r * ACCESS_ROWS];
#pragma unroll
      for (int e = 0; e < EPL; e++) x[r][e] = fmaf(d, key[e], x[r][e]);
    }
  }
}

// This token's record without its deltas: the key, and `base` at position 0.
DEVICE void append_record(const RingPosition& p, const float (&k)[EPL], int head, int warp,
                          int lane) {
  if (head % R == 0 && warp == 0 && lane < LANES)
    put(p.record + KEYS_AT + head / R * KD + lane * EPL, k);
  // At position 0 everything folds, this token with it.
  if (head == 0 && p.fresh && threadIdx.x == THREADS - 1) p.record[RECORD - 1] = 1.f;
}
#endif
