// The end of top_p, for a row that draws by top_p alone: two passes over the cells with weight.
//
// The first pass counts logits in steps of z, which costs less than their weights. The counts bound
// the weight above each step, and so the end of top_p to a range of a few steps. The second pass
// sums the weights above the range and stores the logits within it in shared memory, for an exact
// selection. If there are more than MAX_HELD of them, the range is divided into finer steps first.
#pragma once
#include "sampling/sample_select.cuh"

constexpr int STEPS = 2 * BINS;  // w.low and w.high together
constexpr float SLACK = 1e-4f;   // relative, of a weight; errors of the float sums are far smaller

// each(cell, the lane's eight logits after bias, penalties and mask): as for_cells, for a row of
// finite logits.
template <class Each>
DEVICE void for_values(const RowMemory& w, const Row& r, u32 least, const Each& each) {
  for_cells<false>(w, r, least, [&](int c, float (&x)[8]) {
    values8(r, c, x);
    each(c, x);
  });
}

DEVICE u64 sum_of_cells(RowMemory& w) {
  u64 own = 0, total;
  for (int c = thread(); c < CELLS; c += THREADS) own += w.sums[c];
  sum_before(w, own, total);
  return total;
}

// Narrows (top, bottom): top_p keeps logits above top and drops logits below bottom. Returns false
// if more than MAX_HELD logits are between them.
DEVICE bool narrow(RowMemory& w, const Row& r, const Scale& scale, double target, float& top,
                   float& bottom) {
  u32* counts = w.low;
  for (int level = 0; level < 3; ++level) {
    for (int b = thread(); b < STEPS; b += THREADS) counts[b] = 0;
    __syncthreads();
    const float width = (top - bottom) / (STEPS - 1), per_width = (STEPS - 1) / (top - bottom);
    float above = 0;
    for_values(w, r, ordered_key(bottom), [&](int, const float (&z)[8]) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (z[i] < bottom) continue;
        if (z[i] > top) above += scale.share(z[i]);
        else atomicAdd(&counts[min(__float2int_rn((top - z[i]) * per_width), STEPS - 1)], 1u);
      }
    });
    const u64 base = __float2ull_rn(block_sum<THREADS>(above, w.partial) * Scale::ONE);
    __syncthreads();
    const auto least_weight = [&](int b) {  // of a step, by its lower end
      const float z = top - ((float)b + 0.51f) * width;
      return counts[b] ? counts[b] * __float2ull_rn(scale.share(z) * Scale::ONE) : 0;
    };
    const double growth = exp(1.02 * (double)width / (double)scale.temperature);
    const Found first = locate<STEPS>(w, base, least_weight, [=](u64) {
      return [=](u64 upto) { return (double)upto * growth >= target * (1.0 - SLACK); };
    });
    const Found last = locate<STEPS>(w, base, least_weight, [=](u64) {
      return [=](u64 upto) { return (double)upto >= target * (1.0 + SLACK); };
    });
    const int from = first.index < 0 ? 0 : first.index, to = last.index < 0 ? STEPS : last.index;
    u64 own = 0, count;
    for (int b = thread(); b < STEPS; b += THREADS)
      if (b >= from - 2 && b <= to + 2) own += counts[b];
    sum_before(w, own, count);
    const float was = top;
    if (from > 1) top = was - (float)(from - 1) * width;
    if (to + 1 < STEPS) bottom = fmaxf(bottom, was - (float)(to + 1) * width);
    if (count <= MAX_HELD) return true;
    if (!(bottom < top)) return false;
  }
  return false;
}

// Sets `kept`, the end of top_p, at which the weights reach `target`, and w.sums, the kept weights
// by cell. `dropped`: the weight beyond the end. Returns false if too many logits are near the end.
DEVICE bool nucleus(RowMemory& w, const Row& r, const Scale& scale, double target, double dropped,
                    Kept& kept) {
  // A lower bound: below it even VOCAB ids have less weight than `dropped`.
  const float share = (float)(dropped / Scale::ONE / VOCAB);
  const float depth = fminf(Scale::DEPTH, fmaxf(0.01f, 0.01f - logf(share)));
  float top = scale.greatest, bottom = top - depth * scale.temperature;
  target = fmax(target, 1.0);  // at least one id
  if (!(bottom < top) || !narrow(w, r, scale, target, top, bottom)) return false;
  for (int c = thread(); c < CELLS; c += THREADS) w.sums[c] = 0;
  if (thread() == 0) w.count = 0;
  __syncthreads();
  for_values(w, r, ordered_key(bottom), [&](int c, const float (&z)[8]) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (z[i] > top) {
        sum += scale.share(z[i]);
      } else if (z[i] >= bottom) {
        const int at = atomicAdd(&w.count, 1);
        if (at < MAX_HELD) w.held[at] = pair_of(ordered_key(z[i]), id8(c, i));
      }
    }
    sum = warp_sum(sum);
    if (lane() == 0) w.sums[c] = __float2ull_rn(sum * Scale::ONE);
  });
  __syncthreads();
  const int held = w.count;
  __syncthreads();  // before the next search resets the count
  if (held > MAX_HELD) return false;
  const u64 above = sum_of_cells(w);
  const Bins bins = Bins::between(ordered_key(bottom), ordered_key(top));
  const auto weigh = [&](u32 key) { return scale.weight(key); };
  kept = select(w, OfHeld{held}, {bins.low, NO_ID}, bins, above, weigh,
                [=](u64) { return [=](u64 upto) { return upto > 0 && (double)upto >= target; }; });
  for (int i = thread(); i < held; i += THREADS) {
    const u64 pair = w.held[i];
    if (kept.has(key_of(pair), id_of(pair)))
      atomicAdd(&w.sums[id_of(pair) / CELL], scale.weight(key_of(pair)));
  }
  __syncthreads();
  return true;
}
