// Where top_p ends, for a row that draws by top_p alone: two passes over the cells that matter.
//
// Counting is cheaper than weighing. The first pass counts the logits in steps of z, which bounds
// the weight down to any step; the end of top_p lies where the bounds allow it, a few steps wide.
// The second pass weighs what lies above those and holds what lies among them, to be sorted out
// exactly in shared memory. Where too many would be held, the steps in question are divided once
// more.
#pragma once
#include "sampling/sample_select.cuh"

constexpr int STEPS = 2 * BINS;  // w.low and w.high together
constexpr float SLACK = 1e-4f;   // of a weight; sums of floats are off by far less

// each(cell, the lane's eight logits to choose from): as for_cells, of a row of finite logits.
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

// Narrows (top, bottom): what is above top is kept, what is below bottom is not. False if still
// more than ROOM logits lie between.
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
    const u64 base = __float2ull_rn(block_sum<THREADS>(above, w.room) * Scale::ONE);
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
    if (count <= ROOM) return true;
    if (!(bottom < top)) return false;
  }
  return false;
}

// `kept` by top_p, whose end is where `target` is reached, and w.sums the kept weights by cell.
// `dropped` is the weight of the rest. False where too many logits lie about the end.
DEVICE bool nucleus(RowMemory& w, const Row& r, const Scale& scale, double target, double dropped,
                    Kept& kept) {
  // Were the end any lower, all ids together would weigh less than what is dropped.
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
        if (at < ROOM) w.held[at] = pair_of(ordered_key(z[i]), id8(c, i));
      }
    }
    sum = warp_sum(sum);
    if (lane() == 0) w.sums[c] = __float2ull_rn(sum * Scale::ONE);
  });
  __syncthreads();
  const int held = w.count;
  __syncthreads();  // whoever searches next counts anew
  if (held > ROOM) return false;
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
