// The first pass of sampling: what is kept of each cell of 256 logits. See sample.cu.
#pragma once
#include "sample_row.cuh"

struct Cell {
  u32 raw, key;       // greatest raw and greatest penalised logit, ordered
  float sum, weight;  // Σ e^(x - greatest) of the raw ones; Σ e^((z - greatest) / heat)
};

// A warp's cell of any row. `bad` is set where a logit is not finite (it then counts as 0).
DEVICE Cell summarise(const Row& r, int cell, float heat, bool& bad) {
  float x[8];
  load8(r.logits, cell, x);
  float top = ABSENT;
  bad = false;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool there = id8(cell, i) < WIDTH;
    bad |= there && !is_finite(x[i]);
    x[i] = there ? clean(x[i]) : ABSENT;
    top = fmaxf(top, x[i]);
  }
  bad = __any_sync(~0u, bad);
  Cell s;
  s.raw = __reduce_max_sync(~0u, order(top));
  const float peak = unorder(s.raw);
  s.sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) s.sum += power(x[i] - peak);
  s.sum = warp_sum(s.sum);
  values8(r, cell, x);
  s.key = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (id8(cell, i) < VOCAB) s.key = max(s.key, order(x[i]));
  s.key = __reduce_max_sync(~0u, s.key);
  s.weight = 0;
  if (heat > 0.0f && s.key) {
    const Scale scale = scale_of(unorder(s.key), heat, 0.0f);
#pragma unroll
    for (int i = 0; i < 8; ++i) s.weight += scale.share(x[i]);
    s.weight = warp_sum(s.weight);
  }
  return s;
}

DEVICE void keep(const Cell& s, bool bad, float heat, u64 at, u32* raw_keys, u32* keys, float* sums,
                 float* weights) {
  raw_keys[at] = s.raw, keys[at] = s.key, sums[at] = bad ? -s.sum : s.sum;
  if (heat > 0.0f) weights[at] = s.weight;
}

// A warp reads PER cells; blockIdx = (part of the row, row). Where they need neither cleaning nor
// bias nor penalties they are summed up side by side, at some eight instructions a logit.
extern "C" __global__ void __launch_bounds__(256, 4)
    sample_cells(const float* logits, const int* seen, const float* sampling_f,
                 const int* sampling_i, const int* bias_ids, const float* bias_values,
                 const int* slots, u32* raw_keys, u32* keys, float* sums, float* weights) {
  __shared__ int found_ids[NB];
  __shared__ float found_values[NB];
  __shared__ int found;
  wait_for_previous();
  let_next_start();
  const int row = blockIdx.y, slot = slots[row];
  const int first = (blockIdx.x * 8 + (threadIdx.x >> 5)) * PER;
  float x[PER][8], top[PER];
#pragma unroll
  for (int c = 0; c < PER; ++c) load8(logits + (u64)row * WIDTH, first + c, x[c]);
  if (slot < 0) return;
  Row r = row_of(logits, seen, sampling_f, row, slot);
  const float heat = plain_heat(sampling_f + (u64)slot * 8, sampling_i[(u64)slot * 4]);
  if (r.penalised)
#pragma unroll
    for (int i = 0; i < PER; ++i)  // a sector of 32 bytes a lane
      if ((first + i) * CELL + (int)lane_id() * 8 < WIDTH)
        prefetch(r.seen + (first + i) * CELL + lane_id() * 8);
  const int begin = blockIdx.x * 8 * PER * CELL;
  find_biases(r, bias_ids, bias_values, slot, begin, begin + 8 * PER * CELL, found_ids,
              found_values, &found);
  const u64 at = (u64)row * CELLS + first;
  u32 size = 0;
#pragma unroll
  for (int c = 0; c < PER; ++c) {
    top[c] = x[c][0];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      top[c] = fmaxf(top[c], x[c][i]);
      size = max(size, __float_as_uint(x[c][i]) & 0x7fffffffu);
    }
  }
  const bool easy = !r.penalised && !r.biases && (first + PER) * CELL <= VOCAB;
  if (!easy || __any_sync(~0u, size > 0x7f7fffffu)) {
#pragma unroll 1
    for (int c = 0; c < PER && first + c < CELLS; ++c) {
      bool bad;
      const Cell s = summarise(r, first + c, heat, bad);
      if (lane_id() == 0) keep(s, bad, heat, at + c, raw_keys, keys, sums, weights);
    }
    return;
  }
  Cell s[PER];
#pragma unroll
  for (int c = 0; c < PER; ++c) s[c].raw = s[c].key = __reduce_max_sync(~0u, order(top[c]));
#pragma unroll
  for (int c = 0; c < PER; ++c) {
    const float peak = unorder(s[c].raw);
    const Scale scale = scale_of(peak, heat, 0.0f);
    s[c].sum = s[c].weight = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) s[c].sum += power(x[c][i] - peak);
    if (heat > 0.0f)
#pragma unroll
      for (int i = 0; i < 8; ++i) s[c].weight += scale.share(x[c][i]);
  }
#pragma unroll
  for (int d = 16; d; d >>= 1)
#pragma unroll
    for (int c = 0; c < PER; ++c) s[c].sum += __shfl_xor_sync(~0u, s[c].sum, d);
  if (heat > 0.0f)
#pragma unroll
    for (int c = 0; c < PER; ++c) s[c].weight = warp_sum(s[c].weight);
  Cell mine = s[0];  // lane c stores cell c
#pragma unroll
  for (int c = 1; c < PER; ++c) {
    const bool its = lane_id() == c;
    mine.raw = its ? s[c].raw : mine.raw, mine.key = mine.raw;
    mine.sum = its ? s[c].sum : mine.sum;
    mine.weight = its ? s[c].weight : mine.weight;
  }
  if (lane_id() < PER) keep(mine, false, heat, at + lane_id(), raw_keys, keys, sums, weights);
}
