// The summary of a cell of logits; all sums over a cell are in this order.
#pragma once
#include "sampling/sample_row.cuh"

struct Cell {
  u32 raw, key;       // greatest raw and greatest penalised logit, ordered
  float sum, weight;  // Σ e^(x - greatest) of the raw ones; Σ e^((z - greatest) / heat)
};

// A warp summarises a cell of any row. `bad`: a logit is not finite (it counts as 0).
DEVICE Cell summarise(const Row& r, int cell, float heat, bool& bad) {
  float x[8];
  load8(r, cell, x);
  float top = minus_infinity();
  bad = false;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool there = r.ids.has(id8(cell, i));
    bad |= there && !is_finite(x[i]);
    x[i] = there ? clean(x[i]) : minus_infinity();
    top = fmaxf(top, x[i]);
  }
  bad = __any_sync(~0u, bad);
  Cell s;
  s.raw = __reduce_max_sync(~0u, ordered_key(top));
  const float peak = key_value(s.raw);
  s.sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) s.sum += power(x[i] - peak);
  s.sum = warp_sum(s.sum);
  values8(r, cell, x);
  s.key = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) s.key = max(s.key, choice_key(x[i]));
  s.key = __reduce_max_sync(~0u, s.key);
  s.weight = 0;
  if (heat > 0.0f && s.key) {
    const Scale scale = scale_of(key_value(s.key), heat, 0.0f);
#pragma unroll
    for (int i = 0; i < 8; ++i) s.weight += scale.share(x[i]);
    s.weight = warp_sum(s.weight);
  }
  return s;
}
