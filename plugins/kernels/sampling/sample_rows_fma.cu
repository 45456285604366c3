// Sampling: from logits to the next token of each row, its log-probability and the top ids.
//
// sample_cells (sample_cells_fma.cu) reads the logits once and stores, for each cell of 256 ids,
// the greatest raw and penalised logit and the sums of exponentials. sample_rows has a block a row.
// It finds the greatest logits (20 for the report, up to SMALL for greedy and top_k) in the cells
// with a maximum above a bound derived from all maxima: about 30 cells for 20 logits. A row that
// draws from all ids finds its cell by the cells' sums. top_p alone takes two more passes
// (sample_nucleus.cuh); other rules find their thresholds by histograms (sample_select.cuh). Ties
// go to the lowest id. No float atomics. Rows without penalties do not read `token_counts`.
// Figures: 248,320 logits, H200, 1 / 32 / 128 rows: greedy 10 / 22 / 48 us, top_p alone 147 / 171 /
// 226; a read of the logits takes 30 at 128 (variants: benchmarks/log/sampling/sample.md).
// Blocks wait only for blocks of other ranks that share the vocabulary (sample_ranks.cuh).
// Macros: WIDTH (of a row), VOCAB, TOP, BIASES (a slot's), TILE, RANKS as in sample_cells_fma.cu;
// with RANKS also MAIL (sample_ranks.cuh).
#include "sampling/sample_draw.cuh"
#ifdef RANKS
#include "sampling/sample_ranks.cuh"
#else
struct Others {  // none
  static constexpr bool MANY = false;
  DEVICE int few(RowMemory& w, const Row& r, int k, u32 most) const {
    return greatest<false>(w, r, k, most);
  }
  DEVICE float logit(const Row& r, int token) const { return clean(r.logits[token]); }
};
#endif

struct Operands {
  const float* logits;
  const int* token_counts;
  const float* sampling_f;
  const int* sampling_i;
  const int* bias_ids;
  const float* bias_values;
  const int* bias_until;
  const u32* allow;
  const int *slots, *starts, *counts, *ids;
  const u32 *raw_keys, *keys;
  float *sums, *weights;
  int* tokens;
  float* logprobs;
  int* top_ids;
  float* top_logprobs;
  int* ok;
  const int* emit;
  int* last_tokens;
};

// Removes from w.sorted the ids that are never chosen; returns the number left.
DEVICE int keep_allowed(RowMemory& w, const Row& r, int n) {
  if (thread() < 32) {
    int kept = 0;
    for (int i = 0; i < n; i += 32) {
      const int at = i + (int)thread();
      const u64 pair = at < n ? w.sorted[at] : 0;
      const bool mine = at < n && id_of(pair) < VOCAB && allows(r, id_of(pair));
      const u32 all = __ballot_sync(~0u, mine);
      if (mine) w.sorted[kept + __popc(all & ((1u << thread()) - 1))] = pair;
      kept += __popc(all);
      __syncwarp();
    }
    if (thread() == 0) w.count = kept;
  }
  __syncthreads();
  const int kept = w.count;
  __syncthreads();
  return kept;
}

// The number of greatest logits that a rule chooses from, if at most SMALL; else 0.
DEVICE int few_of(const Rule& rule) {
  const int k = rule.temperature <= 0.0f ? 1 : min(rule.top_k, VOCAB);
  return k > 0 && k <= SMALL ? k : 0;
}

DEVICE int choose(RowMemory& w, Row& r, const Rule& rule, int n_top, u32 most, const float* weights,
                  Others& others) {
  const int k = few_of(rule);
  if (k) {
    const bool there = !r.penalised && !r.biases && keep_allowed(w, r, n_top) >= k;
    const int n = there ? k : others.few(w, r, k, most);
    return k == 1 ? id_of(w.sorted[0]) : draw_sorted(w, rule, n);
  }
  const Scale scale = scale_of(key_value(most), rule.temperature, rule.min_p);
  if (weights && rule.top_p >= 1.0f) return draw_plain(w, r, rule, scale, weights, others);
#ifdef RANKS
  others.bring_all(r);
#endif
  int token;
  if (weights && draw_nucleus(w, r, rule, scale, weights, token)) return token;
  return draw_row(w, r, rule, scale, most);
}

// The greatest of w.raw and of w.keys, in all threads.
DEVICE void find_most(const RowMemory& w, u32& raw_most, u32& most) {
  __shared__ u32 tops[2][WARPS];
  raw_most = most = 0;
  for (int c = thread(); c < CELLS; c += THREADS)
    raw_most = max(raw_most, w.raw[c]), most = max(most, w.keys[c]);
  raw_most = __reduce_max_sync(~0u, raw_most), most = __reduce_max_sync(~0u, most);
  if (lane() == 0) tops[0][thread() / 32] = raw_most, tops[1][thread() / 32] = most;
  __syncthreads();
  for (int i = 0; i < WARPS; ++i)
    raw_most = max(raw_most, tops[0][i]), most = max(most, tops[1][i]);
}

// Loads the keys of this rank's cells to shared memory, zeros for other cells. Returns true if a
// cell has a logit that is not finite.
DEVICE bool read_cells(const Operands& o, u64 cells, Ids own, RowMemory& w, const float* sums) {
  bool bad = false;
  for (int c = thread(); c < CELLS; c += THREADS) {
    const bool mine = !Others::MANY || (c >= own.first_cell() && c < own.cells_end());
    w.raw[c] = mine ? o.raw_keys[cells + c] : 0u, w.keys[c] = mine ? o.keys[cells + c] : 0u;
    bad |= mine && sums[c] < 0.0f;
  }
  return bad;
}

// Stores the row's `n` greatest logits as log-probabilities.
DEVICE void write_tops(const RowMemory& w, int n, float peak, float log_sum, int* ids,
                       float* logprobs) {
  if (thread() >= TOP) return;
  const bool there = (int)thread() < n;
  const u64 pair = there ? w.sorted[thread()] : 0;
  ids[thread()] = there ? id_of(pair) : 0;
  logprobs[thread()] = there ? key_value(key_of(pair)) - peak - log_sum : 0.0f;
}

DEVICE void sample_row(const Operands& o, int row, Ids own, RowMemory& w, Others& others) {
  const Place place = place_of(row, o.slots, o.starts, o.counts);
  int slot = place.slot;
  const u64 cells = (u64)row * CELLS;
  int* top_ids = o.top_ids + row * TOP;
  float* top_logprobs = o.top_logprobs + row * TOP;
  if (slot < 0) {
    if (thread() == 0) o.tokens[row] = 0, o.logprobs[row] = 0.0f, o.ok[row] = 0;
    if (thread() < TOP) top_ids[thread()] = 0, top_logprobs[thread()] = 0.0f;
    return;
  }
  Row r = row_of(o.logits, o.token_counts, o.sampling_f, o.sampling_i, o.allow, row, slot, own);
  float *sums = o.sums + cells, *weights = o.weights + cells;
  bool bad = read_cells(o, cells, own, w, sums);
  const float* f = o.sampling_f + (u64)slot * 8;
  const int* i4 = o.sampling_i + (u64)slot * 4;
  u32 position = (u32)place.position, seed0 = i4[1], seed1 = i4[2];
  bool emits = !DRAFTED && o.emit[row] > 0;
  Rule rule = {f[0], f[1], f[2], i4[0], 0.0};
  const bool plain = plain_heat(f, rule.top_k) > 0.0f;
  find_drafts(o.ids, row, place.drafts);
  find_biases(r, o.bias_ids, o.bias_values, o.bias_until, slot, place.position, 0, WIDTH,
              w.bias_ids, w.bias_values, &w.biases);
  u32 raw_most, most;
  find_most(w, raw_most, most);
  // Four more, since some may be ids that are never chosen.
  const int k_top = rule.top_k > TOP && rule.top_k <= SMALL ? rule.top_k : TOP;
  const int k_list = min(k_top + 4, SMALL);
#ifdef RANKS
  const bool differ = r.penalised || r.biases || r.mask >= 0 || VOCAB < WIDTH;
  RowState& state = others.state;
  if (thread() == 0)
    state.rule = rule, state.slot = slot, state.emits = emits, state.position = position,
    state.seeds[0] = seed0, state.seeds[1] = seed1;
  others.exchange(w, r, k_list, differ ? few_of(rule) : 0, raw_most, most,
                  plain ? rule.temperature : 0.0f, sums, weights, bad);
  rule = state.rule, position = state.position, seed0 = state.seeds[0], seed1 = state.seeds[1];
  const int n_top = state.n_tops;
  find_most(w, raw_most, most);
#endif
  const bool fine = !__syncthreads_or(bad);
  float peak = key_value(raw_most);
  float part = 0;
  for (int c = thread(); c < CELLS; c += THREADS)
    part += fabsf(sums[c]) * expf(key_value(w.raw[c]) - peak);
  float log_sum = logf(block_sum<THREADS>(part, w.partial));
#ifndef RANKS
  const int n_top = greatest<true>(w, r, k_list, raw_most);
#endif
  write_tops(w, n_top, peak, log_sum, top_ids, top_logprobs);
  u64 candidate = (int)thread() < n_top ? w.sorted[thread()] : 0;
#ifdef RANKS
  if (thread() == 0) state.peak = peak, state.log_sum = log_sum;
#endif
  __syncthreads();

  int token = 0;
  if (fine && most) {
    rule.u = uniform(position, seed0, seed1);
    token = choose(w, r, rule, n_top, most, plain ? weights : nullptr, others);
  }
#ifdef RANKS
  candidate = (int)thread() < state.n_tops ? state.tops[thread()] : 0;
  peak = state.peak, log_sum = state.log_sum, slot = state.slot, emits = state.emits;
#endif
  // The token's raw logit: usually one of the greatest; else it is loaded.
  const bool mine = candidate && id_of(candidate) == token;
  const bool known = __syncthreads_or(mine);
  if (known ? mine : thread() == 0) {
    const float logit = known ? key_value(key_of(candidate)) : others.logit(r, token);
    o.tokens[row] = token;
    o.logprobs[row] = logit - peak - log_sum;
    o.ok[row] = fine;
    if (emits) o.last_tokens[slot] = token;
  }
}

DYNAMIC_SHARED(sample_rows, sizeof(RowMemory));
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sample_rows(const float* logits, const int* token_counts, const float* sampling_f,
                const int* sampling_i, const int* bias_ids, const float* bias_values,
                const int* bias_until, const u32* allow, const int* slots, const int* starts,
                const int* counts, const int* ids, const u32* raw_keys, const u32* keys,
                float* sums, float* weights, int* tokens, float* logprobs, int* top_ids,
                float* top_logprobs, int* ok, const int* emit, int* last_tokens, int rows,
                int syncs, float* whole_rows, const u64* peers, int rank) {
  extern __shared__ __align__(16) u8 memory[];
  wait_then_launch_dependents();
  const Operands o = {logits,     token_counts, sampling_f, sampling_i, bias_ids,   bias_values,
                      bias_until, allow,        slots,      starts,     counts,     ids,
                      raw_keys,   keys,         sums,       weights,    tokens,     logprobs,
                      top_ids,    top_logprobs, ok,         emit,       last_tokens};
#ifdef RANKS
  __shared__ RowState state;
  if (threadIdx.x == 0) state.block = blockIdx.x;
  Others others = {peers, rank, state, whole_rows, launches_so_far(peers, rank)};
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    sample_row(o, row, ids_of(forget(rank)), *(RowMemory*)memory, others);
    __syncthreads();
  }
  others.leave(syncs);
#else
  Others others;
  sample_row(o, blockIdx.x, ids_of(0), *(RowMemory*)memory, others);
#endif
}
