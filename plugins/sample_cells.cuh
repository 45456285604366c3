// The first pass of sampling: what is kept of each cell of 256 logits. See sample.cu.
#pragma once
#include "sample_row.cuh"

struct Cell {
  u32 raw, key;       // greatest raw and greatest penalised logit, ordered
  float sum, weight;  // Σ e^(x - greatest) of the raw ones; Σ e^((z - greatest) / heat)
};

DEVICE float power(float x) {  // e^x of x <= 0
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * 1.4426950408889634f));
  return e;
}

// A warp's cell. `bad` is set where a logit is not finite (it then counts as 0). Most cells need
// neither cleaning nor penalties: those cost six instructions a logit.
DEVICE Cell summarise(const Row& r, int cell, float (&x)[8], float heat, bool& bad) {
  const bool whole = (cell + 1) * CELL <= WIDTH;
  float top = x[0];
  u32 size = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    top = fmaxf(top, x[i]);
    size = max(size, __float_as_uint(x[i]) & 0x7fffffffu);
  }
  bad = __any_sync(~0u, size > 0x7f7fffffu);
  if (bad || !whole) {
    top = __int_as_float(0xff800000);  // what does not exist
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] = id8(cell, i) < WIDTH ? clean(x[i]) : __int_as_float(0xff800000);
      top = fmaxf(top, x[i]);
    }
  }
  Cell s;
  s.raw = __reduce_max_sync(~0u, order(top));
  const float peak = unorder(s.raw);
  s.sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) s.sum += power(x[i] - peak);
  s.sum = warp_sum(s.sum);
  s.key = s.raw;
  if (r.penalised || r.biases || (cell + 1) * CELL > VOCAB) {
    int marks[8] = {};
    if (r.penalised) load8(r.seen, cell, marks);
    s.key = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int id = id8(cell, i);
      x[i] = id < VOCAB ? penalise(r, id, x[i], marks[i]) : __int_as_float(0xff800000);
      if (id < VOCAB) s.key = max(s.key, order(x[i]));
    }
    s.key = __reduce_max_sync(~0u, s.key);
  }
  s.weight = 0;
  if (heat > 0.0f && s.key) {
    const Scale scale = {unorder(s.key), heat, __fdiv_rn(1.0f, heat), 0.0f};
#pragma unroll
    for (int i = 0; i < 8; ++i) s.weight += scale.share(x[i]);
    s.weight = warp_sum(s.weight);
  }
  return s;
}

// A warp reads PER cells; blockIdx = (part of the row, row).
extern "C" __global__ void __launch_bounds__(256, 3)
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
  float x[PER][8];
#pragma unroll
  for (int c = 0; c < PER; ++c) load8(logits + (u64)row * WIDTH, first + c, x[c]);
  if (slot < 0) return;
  Row r = row_of(logits, seen, sampling_f, row, slot);
  const float heat = plain_heat(sampling_f + (u64)slot * 8, sampling_i[(u64)slot * 4]);
  const int begin = blockIdx.x * 8 * PER * CELL;
  find_biases(r, bias_ids, bias_values, slot, begin, begin + 8 * PER * CELL, found_ids,
              found_values, &found);
#pragma unroll
  for (int c = 0; c < PER; ++c) {
    if (first + c >= CELLS) return;
    bool bad;
    const Cell s = summarise(r, first + c, x[c], heat, bad);
    if (lane_id() == 0) {
      const u64 at = (u64)row * CELLS + first + c;
      raw_keys[at] = s.raw, keys[at] = s.key, sums[at] = bad ? -s.sum : s.sum;
      if (heat > 0.0f) weights[at] = s.weight;
    }
  }
}
