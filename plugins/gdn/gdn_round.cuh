// gdn_round.cu: shared memory, and what of a round needs no state: the convolution, norms, rates,
// decays and the dot products of its keys and queries with the keys before them.
//
// All stands by position, counted from `done` (round_ring.py): entry i of a window is position
// done - MAX_LAG + i. Records are read before griddepcontrol.wait (PDL): none that this round
// writes is live. The order of every sum is that of gdn_decode.cu.
// Macros: those of gdn_decode_parts.cuh, DRAFTS, TILE (most tokens of a row).
#pragma once
#include "gdn/gdn_decode_parts.cuh"

constexpr int AHEAD = DRAFTS + TILE;  // positions from `done` on that a round may meet
constexpr int WINDOW = MAX_LAG + AHEAD;
constexpr int ROWS = G * VD;            // value rows of this block
constexpr int COLUMNS = TAPS + DRAFTS;  // of the convolution's state

struct Round {
#if STAGES
  alignas(128) char state[WARPS][STAGES][CHUNK];
  u64 full[WARPS][STAGES];
#endif
  alignas(16) float deltas[WINDOW][ROWS];
  float keys[WINDOW][KD];
  float c[TILE][LOCAL];  // q, k, v by token; then q normalised
  float o[TILE][ROWS];
#if FUSED
  float gate[TILE][ROWS];  // norm weight * silu(z)
#endif
  float g[G][WINDOW];                   // logarithms of decays
  float decay[AHEAD][G][RECORDS];       // over a position and the n before it
  float key_dots[TILE][G][2][MAX_LAG];  // k and q times the key of so much age, with its decay
  float dots[TILE];                     // k q
  float beta[TILE][G];
};

// Where a row stands: its slot's ring, its first position and tokens, what is stored.
struct Place {
  const float* ring;
  float* ring_out;
  int start, tokens, done, base;
  DEVICE int behind() const { return start - done; }  // accepted tokens whose folds are not stored
  DEVICE int entry(int position) const { return position - done + MAX_LAG; }
};

DEVICE int record_at(int position) { return (u32)(position + 16 * KEPT) % KEPT * RECORD; }
// The position before which the stored rows of a fold group stand, and the group's phase at `done`.
DEVICE int phase_of(const Place& p, int head, int row) {
  return (u32)(p.done + (head * VD + row) / FOLD_ROWS) % RECORDS;
}
DEVICE int since_of(const Place& p, int head, int row) {
  return max(p.base, p.done - phase_of(p, head, row));
}

DEVICE Place place_of(const float* ring, float* ring_out, int start, int tokens, int head) {
  const float* header = ring + KEPT * RECORD;
  Place p = {ring, ring_out, start, tokens, start, 0};
  if (start > 0) {
    p.done = min(max((int)header[head], start - DRAFTS), start);
    p.base = (int)header[HV + head];
  }
  return p;
}

// What lives of the records before `start`.
DEVICE void fetch_records(Round& s, const Place& p, int head) {
  const int oldest = p.done - MAX_LAG;
  for (int i = threadIdx.x; i < (MAX_LAG + DRAFTS) * (KD / 4); i += THREADS) {
    const int position = oldest + i / (KD / 4), e = i % (KD / 4) * 4;
    if (position >= p.base && position < p.start)
      copy_async(&s.keys[i / (KD / 4)][e],
                 p.ring + record_at(position) + KEYS_AT + head / R * KD + e);
  }
  for (int i = threadIdx.x; i < (MAX_LAG + DRAFTS) * (ROWS / 4); i += THREADS) {
    const int position = oldest + i / (ROWS / 4), row = i % (ROWS / 4) * 4;
    if (position >= since_of(p, head, row) && position < p.start)
      copy_async(&s.deltas[i / (ROWS / 4)][row], p.ring + record_at(position) + head * VD + row);
  }
  commit_copies();
  for (int i = threadIdx.x; i < (MAX_LAG + DRAFTS) * G; i += THREADS) {
    const int position = oldest + i / G;
    if (position < p.start)
      s.g[i % G][i / G] =
          position >= p.base ? p.ring[record_at(position) + DECAYS_AT + head + i % G] : 0.f;
  }
}

// beta and the decay's logarithm of every token and head, from the last thread down: the first are
// those that convolve.
DEVICE void make_rates(Round& s, const Place& p, const act* ba, const float* a_log,
                       const float* dt_bias, int head) {
  for (int i = THREADS - 1 - threadIdx.x; i < p.tokens * G; i += THREADS) {
    const int j = i / G, mine = i % G, h = head + mine;
    const float b = widen(ba[(i64)j * 2 * HV + h]), a = widen(ba[(i64)j * 2 * HV + HV + h]);
    const float g = __fmul_rn(-expf(a_log[h]), softplus(a + dt_bias[h]));
    s.g[mine][p.entry(p.start + j)] = g;
    s.beta[j][mine] = sigmoid(b);
    p.ring_out[record_at(p.start + j) + DECAYS_AT + h] = g;
  }
}

// A token's unit key and scaled unit query, their product, and the key's record.
DEVICE void make_units(Round& s, const Place& p, int j, int head, int lane) {
  float k[EPL], q[EPL], kk = 0.f, qq = 0.f, dot = 0.f;
  const int at = lane % LANES * EPL;
#pragma unroll
  for (int e = 0; e < EPL; e++) {
    q[e] = s.c[j][at + e], k[e] = s.c[j][KD + at + e];
    kk = fmaf(k[e], k[e], kk), qq = fmaf(q[e], q[e], qq);
  }
  kk = 1.f / sqrtf(lane_sum<LANES>(kk) + 1e-6f);
  qq = 1.f / sqrtf(lane_sum<LANES>(qq) + 1e-6f) * (1.f / sqrtf((float)KD));
#pragma unroll
  for (int e = 0; e < EPL; e++) k[e] *= kk, q[e] *= qq, dot = fmaf(k[e], q[e], dot);
  dot = lane_sum<LANES>(dot);
  __syncwarp();
  if (lane >= LANES) return;
  if (lane == 0) s.dots[j] = dot;
  float* record = p.ring_out + record_at(p.start + j) + KEYS_AT + head / R * KD + at;
#pragma unroll
  for (int e = 0; e < EPL; e += 4) {
    const float4 key = {k[e], k[e + 1], k[e + 2], k[e + 3]};
    *(float4*)&s.keys[p.entry(p.start + j)][at + e] = key;
    *(float4*)&s.c[j][at + e] = {q[e], q[e + 1], q[e + 2], q[e + 3]};
    if (head % R == 0) *(float4*)(record + e) = key;
  }
}
// Of the i-th position from `done`: the decay over it and the n before it, n below RECORDS.
DEVICE void sum_decays(Round& s, int i, int mine, int lane) {
  float since = lane >= 1 && lane <= MAX_LAG ? s.g[mine][MAX_LAG + i - lane] : 0.f;
#pragma unroll
  for (int off = 1; off < RECORDS; off *= 2) {
    float before = __shfl_up_sync(~0u, since, off);
    if (lane >= off) since += before;
  }
  if (lane < RECORDS) s.decay[i][mine][lane] = expf(__fadd_rn(s.g[mine][MAX_LAG + i], since));
}
DEVICE void dot_keys(Round& s, const Place& p, int warp, int lane) {
  const int all = p.tokens * MAX_LAG, at = lane % LANES * EPL;
#pragma unroll 1
  for (int t = warp * ACCESS_ROWS; t < all; t += WARPS * ACCESS_ROWS) {
    const int task = min(t + lane / LANES, all - 1), j = task / MAX_LAG, age = 1 + task % MAX_LAG;
    const int here = p.entry(p.start + j);
    float kk = 0.f, qk = 0.f;
#pragma unroll
    for (int e = 0; e < EPL; e++) {
      const float key = s.keys[here - age][at + e];
      kk = fmaf(s.keys[here][at + e], key, kk), qk = fmaf(s.c[j][at + e], key, qk);
    }
    kk = lane_sum<LANES>(kk), qk = lane_sum<LANES>(qk);
    for (int mine = lane % LANES; mine < G; mine += LANES) {
      const float decay = s.decay[p.behind() + j][mine][age - 1];
      s.key_dots[j][mine][0][age - 1] = decay * kk, s.key_dots[j][mine][1][age - 1] = decay * qk;
    }
  }
}
