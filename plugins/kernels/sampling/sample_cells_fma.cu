// First pass of sampling (sample_rows_fma.cu): one read of the logits, which are summarised by
// cells of 256 ids. A warp summarises PER cells at a time that need no cleaning, bias or penalties.
// The pass is a separate source, so that the second pass is compiled once for all numbers of rows.
// Variants: benchmarks/log/sampling/sample.md.
//
// Macros: WIDTH (of a row), VOCAB, BIASES (of a slot), PER (cells a warp); TILE (tokens of a row of
// the launch, if each has a row of logits); RANKS (if ranks share a row; each of two ranks
// summarises its part of a cell on their border).
#include "sampling/sample_summary.cuh"

DEVICE void keep(const Cell& s, bool bad, float heat, u64 at, u32* raw_keys, u32* keys, float* sums,
                 float* weights) {
  raw_keys[at] = s.raw, keys[at] = s.key, sums[at] = bad ? -s.sum : s.sum;
  if (heat > 0.0f) weights[at] = s.weight;
}

// Bit c: cell first + c needs `summarise`: it has a logit that is not finite, an id that is never
// chosen, a bias, or, in a row with penalties, an id that was seen. In other cells raw and
// penalised logits are equal.
DEVICE u32 hard_cells(const Row& r, int first, const float (&x)[PER][8]) {
  u32 hard = 0;
#pragma unroll
  for (int c = 0; c < PER; ++c) {
    u32 size = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) size = max(size, __float_as_uint(x[c][i]) & 0x7fffffffu);
    const bool part = (first + c + 1) * CELL > VOCAB || !r.ids.has_cell(first + c);
    if (size > 0x7f7fffffu || part) hard |= 1u << c;
  }
  if (r.penalised)
#pragma unroll 2
    for (int c = 0; c < PER; ++c) {
      int token_counts[8];
      load8(r.token_counts, first + c, token_counts);
#pragma unroll
      for (int i = 1; i < 8; ++i) token_counts[0] |= token_counts[i];
      if (token_counts[0]) hard |= 1u << c;
    }
  for (int i = 0; i < r.biases; ++i) {
    const int c = r.bias_ids[i] / CELL - first;
    if (c >= 0 && c < PER) hard |= 1u << c;
  }
  if (r.penalised) for_drafts(first, PER, [&](int id) { hard |= 1u << (id / CELL - first); });
  return __reduce_or_sync(~0u, hard);
}

// Bit c: the mask excludes an id of cell first + c; bit 16 + c: it excludes all of them.
DEVICE u32 masked_cells(const Row& r, int first) {
  static_assert(PER * CELL / 32 <= 32 && PER <= 16, "a lane a word, a half of the bits each");
  if (r.mask < 0) return 0;
  const u32 word = lane_id() < PER * CELL / 32 ? r.word(first * (CELL / 32) + lane_id()) : 0u;
  const u32 all = __ballot_sync(~0u, word == ~0u), some = __ballot_sync(~0u, word != 0u);
  u32 masked = 0;
#pragma unroll
  for (int c = 0; c < PER; ++c) {
    const u32 its = 0xffu << c * 8;
    if (!(some & its)) masked |= 0x10000u << c;
    else if ((all & its) != its) masked |= 1u << c;
  }
  return masked;
}

// Summarises PER cells together, some eight instructions a logit. Lane c stores cell c unless its
// bit of `hard` is set; no id of it is chosen if bit 16 + c is set.
DEVICE void summarise_easy(const float (&x)[PER][8], u32 hard, float heat, u64 at, u32* raw_keys,
                           u32* keys, float* sums, float* weights) {
  Cell s[PER];
#pragma unroll
  for (int c = 0; c < PER; ++c) {
    float top = x[c][0];
#pragma unroll
    for (int i = 1; i < 8; ++i) top = fmaxf(top, x[c][i]);
    s[c].raw = __reduce_max_sync(~0u, ordered_key(top));
  }
#pragma unroll
  for (int c = 0; c < PER; ++c) {
    const float peak = key_value(s[c].raw);
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
  Cell mine = s[0];
#pragma unroll
  for (int c = 1; c < PER; ++c) {
    const bool its = lane_id() == c;
    mine.raw = its ? s[c].raw : mine.raw;
    mine.sum = its ? s[c].sum : mine.sum;
    mine.weight = its ? s[c].weight : mine.weight;
  }
  const u32 c = lane_id();
  mine.key = hard >> (16 + c) & 1 ? 0u : mine.raw;
  if (c < PER && !(hard >> c & 1)) keep(mine, false, heat, at + c, raw_keys, keys, sums, weights);
}

// A warp reads PER cells; blockIdx = (part of the row, row).
extern "C" __global__ void __launch_bounds__(256, 4)
    sample_cells(const float* logits, const int* token_counts, const float* sampling_f,
                 const int* sampling_i, const int* bias_ids, const float* bias_values,
                 const int* bias_until, const u32* allow, const int* slots, const int* starts,
                 const int* counts, const int* ids, u32* raw_keys, u32* keys, float* sums,
                 float* weights, int rank) {
  __shared__ int found_ids[BIASES];
  __shared__ float found_values[BIASES];
  __shared__ int found;
  constexpr int BLOCK = 8 * PER;
  wait_then_launch_dependents();
  const int row = blockIdx.y;
  const Place place = place_of(row, slots, starts, counts);
  const int slot = place.slot;
  const Ids own = ids_of(rank);
  const int begin = own.first_cell() + blockIdx.x * BLOCK, first = begin + (threadIdx.x >> 5) * PER;
  float x[PER][8];
#pragma unroll
  for (int c = 0; c < PER; ++c) load8(logits_of(logits, row, own), own, first + c, x[c]);
  if (slot < 0) return;
  Row r = row_of(logits, token_counts, sampling_f, sampling_i, allow, row, slot, own);
  const float heat = plain_heat(sampling_f + (u64)slot * 8, sampling_i[(u64)slot * 4]);
  find_drafts(ids, row, place.drafts);
  find_biases(r, bias_ids, bias_values, bias_until, slot, place.position, begin * CELL,
              (begin + BLOCK) * CELL, found_ids, found_values, &found);
  const u64 at = (u64)row * CELLS + first;
  const u32 hard = hard_cells(r, first, x) | masked_cells(r, first);
  summarise_easy(x, hard, heat, at, raw_keys, keys, sums, weights);
#pragma unroll 1
  for (int c = 0; c < PER && first + c < own.cells_end(); ++c) {
    if (!(hard >> c & 1)) continue;
    bool bad;
    r.mask = mask_of(sampling_i, again(slots, row));
    const Cell s = summarise(r, first + c, heat, bad);
    if (lane_id() == 0) keep(s, bad, heat, at + c, raw_keys, keys, sums, weights);
  }
}
