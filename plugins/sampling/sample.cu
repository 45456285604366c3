// Sampling: from logits to the next token of each row, its log-probability and the top ids.
//
// sample_cells (sample_cells.cu) reads the logits once: of each cell (256 ids) it keeps the
// greatest raw and penalised logit and the sum of exponentials. sample_rows, a block a row, works
// on those. The 20 greatest logits, and what greedy and top_k of up to SMALL choose from, lie in
// the few cells that reach a bound taken from the cells' own maxima (about 30 cells for 20 logits).
// A row that draws from all ids finds its cell by the cells' sums. top_p alone takes two more
// passes (sample_nucleus.cuh), any other rule searches its thresholds by histograms
// (sample_select.cuh). Ties go to the lowest id. No float atomics; no block waits for another. Rows
// without penalties do not read `token_counts`.
// Figures: 248,320 logits, H200, 1 / 32 / 128 rows: greedy 10 / 22 / 48 us, top_p alone 147 / 171 /
// 226; a read of the logits takes 30 at 128 (variants: benchmarks/log/sample.md).
// Macros: WIDTH (of a row), VOCAB, TOP, BIASES (a slot's), SHARED (bytes of dynamic shared memory),
// TILE as in sample_cells.cu.
#include "sampling/sample_draw.cuh"

DEVICE int choose(RowMemory& w, const Row& r, const Rule& rule, int n_top, u32 most,
                  const float* weights) {
  const bool greedy = rule.temperature <= 0.0f;
  const int k = greedy ? 1 : min(rule.top_k, VOCAB);
  if (k > 0 && k <= SMALL) {
    int n = n_top;
    bool there = false;
    if (!r.penalised && !r.biases) {  // the raw ones, less those that are never chosen
      if (threadIdx.x < 32) {
        int kept = 0;
        for (int i = 0; i < n; i += 32) {
          const int at = i + (int)threadIdx.x;
          const u64 pair = at < n ? w.sorted[at] : 0;
          const bool mine = at < n && id_of(pair) < VOCAB && allows(r, id_of(pair));
          const u32 all = __ballot_sync(~0u, mine);
          if (mine) w.sorted[kept + __popc(all & ((1u << threadIdx.x) - 1))] = pair;
          kept += __popc(all);
          __syncwarp();
        }
        if (threadIdx.x == 0) w.count = kept;
      }
      __syncthreads();
      there = w.count >= k;
      __syncthreads();
    }
    n = there ? k : greatest<false>(w, r, k, most);
    return k == 1 ? id_of(w.sorted[0]) : draw_sorted(w, rule, n);
  }
  const Scale scale = scale_of(key_value(most), rule.temperature, rule.min_p);
  if (weights && rule.top_p >= 1.0f) return draw_plain(w, r, rule, scale, weights);
  int token;
  if (weights && draw_nucleus(w, r, rule, scale, weights, token)) return token;
  return draw_row(w, r, rule, scale, most);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sample_rows(const float* logits, const int* token_counts, const float* sampling_f,
                const int* sampling_i, const int* bias_ids, const float* bias_values,
                const int* bias_until, const u32* allow, const int* slots, const int* starts,
                const int* counts, const int* ids, const u32* raw_keys, const u32* keys,
                const float* sums, const float* weights, int* tokens, float* logprobs, int* top_ids,
                float* top_logprobs, int* ok, const int* emit, int* last_tokens) {
  extern __shared__ __align__(16) u8 memory[];
  __shared__ u32 tops[2][WARPS];
  RowMemory& w = *(RowMemory*)memory;
  wait_for_previous();
  launch_dependents();
  const int row = blockIdx.x;
  const Place place = place_of(row, slots, starts, counts);
  const int slot = place.slot;
  const u64 cells = (u64)row * CELLS;
  top_ids += row * TOP, top_logprobs += row * TOP;
  if (slot < 0) {
    if (threadIdx.x == 0) tokens[row] = 0, logprobs[row] = 0.0f, ok[row] = 0;
    if (threadIdx.x < TOP) top_ids[threadIdx.x] = 0, top_logprobs[threadIdx.x] = 0.0f;
    return;
  }
  Row r = row_of(logits, token_counts, sampling_f, sampling_i, allow, row, slot);
  u32 raw_most = 0, most = 0;
  bool bad = false;
  for (int c = threadIdx.x; c < CELLS; c += THREADS) {
    w.raw[c] = raw_keys[cells + c], w.keys[c] = keys[cells + c];
    raw_most = max(raw_most, w.raw[c]), most = max(most, w.keys[c]);
    bad |= sums[cells + c] < 0.0f;
  }
  const float* f = sampling_f + (u64)slot * 8;
  const int* i4 = sampling_i + (u64)slot * 4;
  const u32 position = (u32)place.position, seed0 = i4[1], seed1 = i4[2];
  const bool emits = !DRAFTED && emit[row] > 0;
  Rule rule = {f[0], f[1], f[2], i4[0], 0.0};
  raw_most = __reduce_max_sync(~0u, raw_most), most = __reduce_max_sync(~0u, most);
  if (lane_id() == 0) tops[0][threadIdx.x / 32] = raw_most, tops[1][threadIdx.x / 32] = most;
  find_drafts(ids, row, place.drafts);
  find_biases(r, bias_ids, bias_values, bias_until, slot, place.position, 0, WIDTH, w.bias_ids,
              w.bias_values, &w.biases);
  const bool fine = !__syncthreads_or(bad);
  for (int i = 0; i < WARPS; ++i)
    raw_most = max(raw_most, tops[0][i]), most = max(most, tops[1][i]);
  const float peak = key_value(raw_most);
  float part = 0;
  for (int c = threadIdx.x; c < CELLS; c += THREADS)
    part += fabsf(sums[cells + c]) * expf(key_value(w.raw[c]) - peak);
  const float log_sum = logf(block_sum<THREADS>(part, w.room));
  // A few more, since ids that are never chosen may be among them.
  const int k_top = rule.top_k > TOP && rule.top_k <= SMALL ? rule.top_k : TOP;
  const int n_top = greatest<true>(w, r, min(k_top + 4, SMALL), raw_most);
  if (threadIdx.x < TOP) {
    const bool there = (int)threadIdx.x < n_top;
    const u64 pair = there ? w.sorted[threadIdx.x] : 0;
    top_ids[threadIdx.x] = there ? id_of(pair) : 0;
    top_logprobs[threadIdx.x] = there ? key_value(key_of(pair)) - peak - log_sum : 0.0f;
  }
  const u64 candidate = (int)threadIdx.x < n_top ? w.sorted[threadIdx.x] : 0;
  __syncthreads();

  int token = 0;
  if (fine && most) {
    rule.u = uniform(position, seed0, seed1);
    const bool plain = plain_heat(f, rule.top_k) > 0.0f;
    token = choose(w, r, rule, n_top, most, plain ? weights + cells : nullptr);
  }
  // The token's raw logit: mostly one of the greatest, else it is read.
  const bool mine = candidate && id_of(candidate) == token;
  const bool known = __syncthreads_or(mine);
  if (known ? mine : threadIdx.x == 0) {
    const float logit = known ? key_value(key_of(candidate)) : clean(r.logits[token]);
    tokens[row] = token;
    logprobs[row] = logit - peak - log_sum;
    ok[row] = fine;
    if (emits) last_tokens[slot] = token;
  }
}
