// The draw of a row: from a few candidates (in f64), from all ids by the cells' sums, or by
// thresholds over the whole row.
#pragma once
#include "sampling/sample_nucleus.cuh"

struct Rule {
  float temperature, top_p, min_p;
  int top_k;
  double u;
};

// ((x0 >> 8) + 0.5) · 2^-24 of Philox4x32-10 at counter (position, 0, 0, 0).
DEVICE double uniform(u32 position, u32 k0, u32 k1) {
  u32 x0 = position, x1 = 0, x2 = 0, x3 = 0;
  for (int round = 0; round < 10; ++round) {
    const u32 h0 = __umulhi(0xD2511F53u, x0), l0 = 0xD2511F53u * x0;
    const u32 h1 = __umulhi(0xCD9E8D57u, x2), l1 = 0xCD9E8D57u * x2;
    x0 = h1 ^ x1 ^ k0, x1 = l1, x2 = h0 ^ x3 ^ k1, x3 = l0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return ((double)(x0 >> 8) + 0.5) * 0x1p-24;
}

// The draw from the first n of w.sorted, n up to SMALL.
DEVICE int draw_sorted(RowMemory& w, const Rule& rule, int n) {
  __shared__ double weights[SMALL];
  const int me = thread();
  if (me < n) {
    const double z = key_value(key_of(w.sorted[me])), z0 = key_value(key_of(w.sorted[0]));
    const double weight = exp((z - z0) / (double)rule.temperature);
    weights[me] = weight < (double)rule.min_p ? 0.0 : weight;
  }
  if (me == 0) w.count = n, w.answer = NO_ID;
  __syncthreads();
  if (rule.top_p < 1.0f && me > 0 && me < n) {
    double before = 0, total = 0;
    for (int i = 0; i < n; ++i) {
      before += i < me ? weights[i] : 0.0;
      total += weights[i];
    }
    if (before >= (double)rule.top_p * total) atomicMin(&w.count, me);
  }
  __syncthreads();
  const int kept = w.count;
  if (me < kept) {
    const int id = id_of(w.sorted[me]);
    double upto = 0, all = 0;
    for (int i = 0; i < kept; ++i) {
      all += weights[i];
      upto += id_of(w.sorted[i]) <= id ? weights[i] : 0.0;
    }
    if (upto > rule.u * all) atomicMin(&w.answer, id);
  }
  __syncthreads();
  return w.answer;
}

// A predicate for running sums: the sum exceeds u · total.
DEVICE auto beyond(double u) {
  return [=](u64 total) { return [=](u64 upto) { return (double)upto > u * (double)total; }; };
}

// w.sums: the weights of cells, from those of the first pass, which are relative to each cell's
// greatest logit.
DEVICE void weigh_cells(RowMemory& w, const Scale& scale, const float* weights) {
  for (int c = thread(); c < CELLS; c += THREADS)
    w.sums[c] =
        w.keys[c] ? __float2ull_rn(weights[c] * scale.share(key_value(w.keys[c])) * Scale::ONE) : 0;
  __syncthreads();
}

// The draw from all ids; `others` as in sample_rows_fma.cu.
template <class Others>
DEVICE int draw_plain(RowMemory& w, Row& r, const Rule& rule, const Scale& scale,
                      const float* weights, Others& others) {
  weigh_cells(w, scale, weights);
  if constexpr (Others::MANY) {
    const auto its = [&](int c) { return w.sums[c]; };
    const Found cell = locate<CELLS>(w, 0, its, beyond(rule.u));
    if (cell.index >= 0) others.bring_cell(r, cell.index);
  }
  return find_id<false>(w, r, [&](u32 key, int) { return scale.weight(key); }, beyond(rule.u));
}

// The draw by any other rule: top_k, then top_p of the kept ids, then the draw.
DEVICE int draw_row(RowMemory& w, const Row& r, const Rule& rule, const Scale& scale, u32 most) {
  const float step = BINS / (Scale::DEPTH * rule.temperature);
  const OfRow<false> row = {r};
  Kept kept = {1, NO_ID};
  if (rule.top_k > 0 && rule.top_k < VOCAB) {
    const u64 k = rule.top_k;
    const Bins bins = {bound_of<false>(w, rule.top_k), most, -1, scale.greatest, step};
    kept = select(
        w, row, kept, bins, 0, [](u32) { return (u64)1; },
        [=](u64) { return [=](u64 upto) { return upto >= k; }; });
  }
  const auto weigh = [&](u32 key) { return scale.weight(key); };
  if (rule.top_p < 1.0f) {
    const Bins bins = {scale.least(), most, -1, scale.greatest, step};
    kept = select(w, row, kept, bins, 0, weigh, [&](u64 total) {
      const double target = (double)rule.top_p * (double)total;
      return [=](u64 upto) { return upto > 0 && (double)upto >= target; };
    });
  }
  const auto one = [&](u32 key, int id) { return kept.has(key, id) ? scale.weight(key) : 0; };
  sum_cells<false>(w, r, max(kept.key, scale.least()), one);
  return find_id<false>(w, r, one, beyond(rule.u));
}

// The draw by top_p alone. Returns false if more than MAX_HELD ids are near its end.
DEVICE bool draw_nucleus(RowMemory& w, const Row& r, const Rule& rule, const Scale& scale,
                         const float* weights, int& token) {
  weigh_cells(w, scale, weights);
  const double total = (double)sum_of_cells(w);
  Kept kept;
  if (!nucleus(w, r, scale, (double)rule.top_p * total, (1.0 - (double)rule.top_p) * total, kept))
    return false;
  const auto one = [&](u32 key, int id) { return kept.has(key, id) ? scale.weight(key) : 0; };
  token = find_id<false>(w, r, one, beyond(rule.u));
  return true;
}
