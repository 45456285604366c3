// Sampling: from logits to the next token of each row, its log-probability and the top ids.
//
// `sample_cells` reads the logits once: of each cell (256 ids) it keeps the greatest raw and the
// greatest penalised logit and the sum of exponentials. `sample_rows`, a block a row, works on
// those: the k-th greatest cell is a lower bound of the k-th greatest logit, so only k cells are
// read again, whatever the row's width. Top_k of up to SMALL and greedy end there (in f64); any
// other row searches its thresholds by bisection on the ordered bits, skipping cells that lie
// below, with weights as whole numbers (2^40 = the greatest), so that sums have no order.
// Ties go to the lowest id everywhere. No atomics on floats, no block waits for another.
//
// 248,320 logits a row, H200, us (rows 1 / 32 / 128): greedy 41 / 61 / 108, top_k 20 and top_p 0.95
// 75 / 94 / 143, plain 152 / 176 / 234, top_p alone 3762 / 3877 / 4341, all with 64-bit atomics
// in `block_total` and one cell at a time in `sum_row`; both are gone since, not yet timed.
//
// Macros: WIDTH (of a row), VOCAB, TOP, NB (biases a slot), PER (cells a warp).
#include "numeric.cuh"

constexpr int CELL = 256;
constexpr int CELLS = (WIDTH + CELL - 1) / CELL;
constexpr int SMALL = 64;
constexpr int ROOM = 1024;     // candidates held
constexpr int THREADS = 512;   // of sample_rows
constexpr int WARPS = THREADS / 32;
constexpr float ONE = 1099511627776.0f;  // the weight of the greatest, 2^40

struct Row {
  const float* logits;
  const int* seen;
  const int* bias_ids;
  const float* bias_values;
  int biases;  // entries to look at
  float repetition, inverse, presence, frequency;
  bool penalised;
};

DEVICE u32 order(float x) {
  const u32 bits = __float_as_uint(x + 0.0f);  // -0 becomes 0
  return bits ^ (bits >> 31 ? ~0u : 0x80000000u);
}
DEVICE float unorder(u32 key) {
  return __uint_as_float(key >> 31 ? key ^ 0x80000000u : ~key);
}
DEVICE bool is_finite(float x) { return fabsf(x) <= 3.402823466e38f; }
DEVICE float clean(float x) { return is_finite(x) ? x : 0.0f; }

DEVICE float penalise(const Row& r, int id, float z, int seen) {
  for (int i = 0; i < r.biases; ++i)
    if (r.bias_ids[i] == id) z = __fadd_rn(z, r.bias_values[i]);
  if (!r.penalised) return z;
  if (seen > 0) z = __fmul_rn(z, z > 0.0f ? r.inverse : r.repetition);
  const int generated = seen >> 1;
  z = __fsub_rn(z, __fmul_rn(r.frequency, (float)generated));
  return generated > 0 ? __fsub_rn(z, r.presence) : z;
}

DEVICE Row row_of(const float* logits, const int* seen, const float* sampling_f, int row, int slot) {
  const float* f = sampling_f + (u64)slot * 8;
  Row r;
  r.logits = logits + (u64)row * WIDTH;
  r.seen = seen + (u64)slot * WIDTH;
  r.repetition = f[3], r.presence = f[4], r.frequency = f[5];
  r.inverse = __fdiv_rn(1.0f, r.repetition);
  r.penalised = r.repetition != 1.0f || r.presence != 0.0f || r.frequency != 0.0f;
  r.biases = 0;
  return r;
}

// The biases of ids in [begin, end), in order, into shared memory. The whole block calls it.
DEVICE void find_biases(Row& r, const int* ids, const float* values, int slot, int begin, int end,
                        int* found_ids, float* found_values, int* found) {
  if (threadIdx.x < 32) {
    int n = 0;
    for (int i = threadIdx.x; i - (int)threadIdx.x < NB; i += 32) {
      const int id = i < NB ? ids[(u64)slot * NB + i] : -1;
      const bool mine = id >= 0 && id >= begin && id < end;
      const u32 all = __ballot_sync(~0u, mine);
      if (mine) {
        const int at = n + __popc(all & ((1u << threadIdx.x) - 1));
        found_ids[at] = id;
        found_values[at] = values[(u64)slot * NB + i];
      }
      n += __popc(all);
    }
    if (threadIdx.x == 0) *found = n;
  }
  __syncthreads();
  r.bias_ids = found_ids, r.bias_values = found_values, r.biases = *found;
}

DEVICE void load8(const float* from, int cell, float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int id = cell * CELL + i * 128 + lane_id() * 4;
    float4 v = make_float4(0, 0, 0, 0);
    if (id < WIDTH) v = __ldg((const float4*)(from + id));
    x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
  }
}
DEVICE void load8(const int* from, int cell, int (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int id = cell * CELL + i * 128 + lane_id() * 4;
    int4 v = make_int4(0, 0, 0, 0);
    if (id < WIDTH) v = *(const int4*)(from + id);
    x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
  }
}
DEVICE int id8(int cell, int i) { return cell * CELL + (i >> 2) * 128 + lane_id() * 4 + (i & 3); }

// The ordered bits of a lane's eight logits of a cell, 0 where there is none to choose.
template <bool RAW>
DEVICE void keys8(const Row& r, int cell, u32 (&key)[8]) {
  float x[8];
  int seen[8] = {};
  load8(r.logits, cell, x);
  if (!RAW && r.penalised) load8(r.seen, cell, seen);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int id = id8(cell, i);
    const float z = RAW ? clean(x[i]) : penalise(r, id, clean(x[i]), seen[i]);
    key[i] = id < (RAW ? WIDTH : VOCAB) ? order(z) : 0u;
  }
}

// --- Pass 1: a warp reads PER cells; blockIdx = (part of the row, row) -----------------------

extern "C" __global__ void __launch_bounds__(256, 2)
    sample_cells(const float* logits, const int* seen, const float* sampling_f, const int* bias_ids,
                 const float* bias_values, const int* slots, u32* raw_keys, u32* keys, float* sums) {
  __shared__ int found_ids[NB];
  __shared__ float found_values[NB];
  __shared__ int found;
  wait_for_previous();
  let_next_start();
  const int row = blockIdx.y, slot = slots[row];
  if (slot < 0) return;
  Row r = row_of(logits, seen, sampling_f, row, slot);
  const int first = (blockIdx.x * 8 + (threadIdx.x >> 5)) * PER;
  float x[PER][8];
#pragma unroll
  for (int c = 0; c < PER; ++c) load8(r.logits, first + c, x[c]);
  const int begin = blockIdx.x * 8 * PER * CELL;
  find_biases(r, bias_ids, bias_values, slot, begin, begin + 8 * PER * CELL, found_ids,
              found_values, &found);
#pragma unroll
  for (int c = 0; c < PER; ++c) {
    const int cell = first + c;
    if (cell >= CELLS) return;
    int marks[8] = {};
    if (r.penalised) load8(r.seen, cell, marks);
    u32 raw = 0, best = 0;
    bool bad = false;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int id = id8(cell, i);
      if (id >= WIDTH) continue;
      bad |= !is_finite(x[c][i]);
      x[c][i] = clean(x[c][i]);
      raw = max(raw, order(x[c][i]));
      if (id < VOCAB) best = max(best, order(penalise(r, id, x[c][i], marks[i])));
    }
    raw = __reduce_max_sync(~0u, raw);
    best = __reduce_max_sync(~0u, best);
    const float top = unorder(raw);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (id8(cell, i) < WIDTH) sum += __expf(x[c][i] - top);
    sum = warp_sum(sum);
    bad = __any_sync(~0u, bad);
    if (lane_id() == 0) {
      const u64 at = (u64)row * CELLS + cell;
      raw_keys[at] = raw, keys[at] = best, sums[at] = bad ? -sum : sum;
    }
  }
}

// --- Pass 2 ----------------------------------------------------------------------------------

struct Work {
  u32 raw[CELLS], keys[CELLS];  // greatest of each cell
  u64 sums[CELLS];
  u64 held[ROOM];      // (key, ~id)
  u64 sorted[SMALL];
  int visit[SMALL];
  int visits, count, answer;
  u64 totals[WARPS];
  float room[WARPS];
  int bias_ids[NB];
  float bias_values[NB];
  int biases;
};

DEVICE u64 pair_of(u32 key, int id) { return (u64)key << 32 | (u32)~id; }
DEVICE int id_of(u64 pair) { return (int)~(u32)pair; }

// The sum over the block of whole numbers. (A 64-bit atomic in shared memory is a loop that 16
// warps fight over: 0.5 us.)
template <class T>
DEVICE T block_total(Work& w, T value) {
#pragma unroll
  for (int d = 16; d; d >>= 1) value += __shfl_xor_sync(~0u, value, d);
  if (lane_id() == 0) w.totals[threadIdx.x / 32] = (u64)value;
  __syncthreads();
  u64 total = 0;
#pragma unroll
  for (int i = 0; i < WARPS; ++i) total += w.totals[i];
  __syncthreads();
  return (T)total;
}

// The greatest t in [low, high] for which enough(t), given enough(low).
template <class Enough>
DEVICE u32 bisect(u32 low, u32 high, const Enough& enough) {
  while (low < high) {
    const u32 middle = low + (high - low + 1) / 2;
    if (enough(middle)) low = middle;
    else high = middle - 1;
  }
  return low;
}

DEVICE int count_cells(Work& w, const u32* cells, u32 least) {
  int n = 0;
  for (int c = threadIdx.x; c < CELLS; c += THREADS) n += cells[c] >= least;
  return block_total(w, n);
}

// Lists the cells that may hold one of the k greatest, lowest ids first: those above t, the
// k-th greatest cell, and as many at t as are still missing. Each brings one logit of t or more.
DEVICE void list_cells(Work& w, const u32* cells, int k, u32 t) {
  const int above = count_cells(w, cells, t + 1);
  if (threadIdx.x < 32) {
    int n = 0, ties = 0;
    for (int c0 = 0; c0 < CELLS; c0 += 32) {
      const int c = c0 + threadIdx.x;
      const u32 key = c < CELLS ? cells[c] : 0;
      const u32 tied = __ballot_sync(~0u, key == t);
      const u32 before = (1u << threadIdx.x) - 1;
      const bool mine = key > t || (key == t && ties + __popc(tied & before) < k - above);
      const u32 all = __ballot_sync(~0u, mine);
      if (mine) w.visit[n + __popc(all & before)] = c;
      n += __popc(all);
      ties += __popc(tied);
    }
    if (threadIdx.x == 0) w.visits = n, w.count = 0;
  }
  __syncthreads();
}

// How many logits of the listed cells are `least` or more.
template <bool RAW>
DEVICE int count_listed(Work& w, const Row& r, u32 least) {
  int n = 0;
  for (int v = threadIdx.x / 32; v < w.visits; v += WARPS) {
    u32 key[8];
    keys8<RAW>(r, w.visit[v], key);
#pragma unroll
    for (int i = 0; i < 8; ++i) n += key[i] >= least;
  }
  return block_total(w, n);
}

// Holds the logits of the listed cells that are `least` or more; w.count may exceed ROOM.
template <bool RAW>
DEVICE void hold(Work& w, const Row& r, u32 least) {
  for (int v = threadIdx.x / 32; v < w.visits; v += WARPS) {
    u32 key[8];
    keys8<RAW>(r, w.visit[v], key);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (key[i] >= least) {
        const int at = atomicAdd(&w.count, 1);
        if (at < ROOM) w.held[at] = pair_of(key[i], id8(w.visit[v], i));
      }
  }
  __syncthreads();
}

// Holds `more` logits equal to t, lowest ids first. One warp works.
template <bool RAW>
DEVICE void hold_ties(Work& w, const Row& r, u32 t, int more) {
  if (threadIdx.x < 32) {
    int n = w.count;
    const int end = n + more;
    for (int v = 0; v < w.visits && n < end; ++v) {
      u32 key[8];
      keys8<RAW>(r, w.visit[v], key);
      for (int half = 0; half < 2; ++half) {
        int own = 0;
        for (int i = 0; i < 4; ++i) own += key[half * 4 + i] == t;
        int upto = own;
        for (int d = 1; d < 32; d *= 2) {
          const int other = __shfl_up_sync(~0u, upto, d);
          if (threadIdx.x >= d) upto += other;
        }
        int at = n + upto - own;
        for (int i = 0; i < 4; ++i)
          if (key[half * 4 + i] == t) {
            if (at < end) w.held[at] = pair_of(t, id8(w.visit[v], half * 4 + i));
            ++at;
          }
        n += __shfl_sync(~0u, upto, 31);
      }
    }
    if (threadIdx.x == 0) w.count = min(n, end);
  }
  __syncthreads();
}

// The k greatest (k up to SMALL), ties to the lower id, in w.sorted; how many there are.
template <bool RAW>
DEVICE int greatest(Work& w, const Row& r, int k, u32 most) {
  const u32* cells = RAW ? w.raw : w.keys;
  u32 t = k == 1 ? most : bisect(1, most, [&](u32 m) { return count_cells(w, cells, m) >= k; });
  list_cells(w, cells, k, t);
  hold<RAW>(w, r, t);
  if (w.count > ROOM) {  // many equal or all in one cell
    t = bisect(t, most, [&](u32 m) { return count_listed<RAW>(w, r, m) >= k; });
    if (threadIdx.x == 0) w.count = 0;
    __syncthreads();
    hold<RAW>(w, r, t + 1);
    hold_ties<RAW>(w, r, t, k - w.count);
  }
  const int n = w.count;
  for (int i = threadIdx.x; i < n; i += THREADS) {
    const u64 mine = w.held[i];
    int rank = 0;
    for (int j = 0; j < n; ++j) rank += w.held[j] > mine;
    if (rank < k) w.sorted[rank] = mine;
  }
  __syncthreads();
  return min(n, k);
}

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

struct Rule {
  float temperature, top_p, min_p;
  int top_k;
  double u;
};

// The draw from the first n of w.sorted. One warp works, a lane two candidates.
DEVICE int draw_sorted(Work& w, const Rule& rule, int n) {
  __shared__ double weights[SMALL];
  if ((int)threadIdx.x < n) {
    const double z = unorder((u32)(w.sorted[threadIdx.x] >> 32));
    const double z0 = unorder((u32)(w.sorted[0] >> 32));
    const double weight = exp((z - z0) / (double)rule.temperature);
    weights[threadIdx.x] = weight < (double)rule.min_p ? 0.0 : weight;
  }
  __syncthreads();
  double total = 0;
  for (int i = 0; i < n; ++i) total += weights[i];
  if (threadIdx.x == 0) {
    w.count = n;
    w.answer = 1 << 30;
  }
  __syncthreads();
  if (rule.top_p < 1.0f && threadIdx.x > 0 && (int)threadIdx.x < n) {
    double before = 0;
    for (int i = 0; i < (int)threadIdx.x; ++i) before += weights[i];
    if (before >= (double)rule.top_p * total) atomicMin(&w.count, (int)threadIdx.x);
  }
  __syncthreads();
  const int kept = w.count;
  if ((int)threadIdx.x < kept) {
    const int id = id_of(w.sorted[threadIdx.x]);
    double upto = 0, all = 0;
    for (int i = 0; i < kept; ++i) {
      all += weights[i];
      if (id_of(w.sorted[i]) <= id) upto += weights[i];
    }
    if (upto > rule.u * all) atomicMin(&w.answer, id);
  }
  __syncthreads();
  return w.answer;
}

// --- Any other rule: thresholds over the whole row -------------------------------------------

// What is kept: keys above `key`, and equal ones up to `id`; of these what min_p leaves.
struct Kept {
  u32 key;
  int id;
  DEVICE bool has(u32 k, int i) const { return k > key || (k == key && i <= id); }
};

struct Scale {
  float greatest, temperature, min_p;
  DEVICE u64 weight(u32 key) const {
    const float e = expf(__fdiv_rn(__fsub_rn(unorder(key), greatest), temperature));
    return e < min_p ? 0 : (u64)__float2ull_rn(e * ONE);
  }
};

// f(lane's sum over a cell) over the cells whose greatest is `least` or more.
template <class One>
DEVICE u64 sum_row(Work& w, const Row& r, u32 least, const One& one) {
  u64 sum = 0;
  for (int c0 = threadIdx.x / 32; c0 < CELLS; c0 += 4 * WARPS) {
    u32 key[4][8];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int c = c0 + j * WARPS;
      const bool some = c < CELLS && w.keys[c] >= least;
#pragma unroll
      for (int i = 0; i < 8; ++i) key[j][i] = 0;
      if (some) keys8<false>(r, c, key[j]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (key[j][i] >= least) sum += one(key[j][i], id8(c0 + j * WARPS, i));
  }
  return block_total(w, sum);
}

// Sums `one` over each cell, then finds the first id, ascending, whose cumulated sum exceeds
// `bound(total)`.
template <class One, class Bound>
DEVICE int first_beyond(Work& w, const Row& r, u32 least, const One& one, const Bound& bound) {
  for (int c = threadIdx.x / 32; c < CELLS; c += WARPS) {
    u64 sum = 0;
    if (w.keys[c] >= least) {
      u32 key[8];
      keys8<false>(r, c, key);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (key[i] >= least) sum += one(key[i], id8(c, i));
    }
#pragma unroll
    for (int d = 16; d; d >>= 1) sum += __shfl_xor_sync(~0u, sum, d);
    if (lane_id() == 0) w.sums[c] = sum;
  }
  u64 own = 0;
  __syncthreads();
  for (int c = threadIdx.x; c < CELLS; c += THREADS) own += w.sums[c];
  const double limit = bound(block_total(w, own));
  if (threadIdx.x < 32) {
    u64 before = 0;
    int found = CELLS;
    for (int c0 = 0; c0 < CELLS && found == CELLS; c0 += 32) {
      const int c = c0 + threadIdx.x;
      u64 upto = c < CELLS ? w.sums[c] : 0;
      for (int d = 1; d < 32; d *= 2) {
        const u64 other = __shfl_up_sync(~0u, upto, d);
        if (threadIdx.x >= d) upto += other;
      }
      const u32 beyond = __ballot_sync(~0u, c < CELLS && (double)(before + upto) > limit);
      const int hit = beyond ? __ffs(beyond) - 1 : 31;
      const u64 here = __shfl_sync(~0u, upto, hit);
      if (beyond) {
        found = c0 + hit;
        before += here - w.sums[found];
      } else {
        before += here;
      }
    }
    int id = 0;
    if (found < CELLS) {
      u32 key[8];
      keys8<false>(r, found, key);
      id = 1 << 30;
      for (int half = 0; half < 2; ++half) {
        u64 part[4], sum = 0;
        for (int i = 0; i < 4; ++i) {
          const u32 k = key[half * 4 + i];
          part[i] = k >= least ? one(k, id8(found, half * 4 + i)) : 0;
          sum += part[i];
        }
        u64 upto = sum;
        for (int d = 1; d < 32; d *= 2) {
          const u64 other = __shfl_up_sync(~0u, upto, d);
          if (threadIdx.x >= d) upto += other;
        }
        u64 at = before + upto - sum;
        for (int i = 3; i >= 0; --i) {
          u64 with = at;
          for (int j = 0; j <= i; ++j) with += part[j];
          if ((double)with > limit && part[i]) id = min(id, id8(found, half * 4 + i));
        }
        before += __shfl_sync(~0u, upto, 31);
      }
      id = __reduce_min_sync(~0u, id);
    }
    if (threadIdx.x == 0) w.answer = id;
  }
  __syncthreads();
  const int answer = w.answer;
  __syncthreads();
  return answer;
}

// The id of the n-th logit equal to `key` that `kept` has, ascending.
DEVICE int nth_tie(Work& w, const Row& r, const Kept& kept, u32 key, u64 n) {
  return first_beyond(
      w, r, key, [=](u32 k, int id) { return (u64)(k == key && kept.has(k, id)); },
      [=](u64) { return (double)n - 0.5; });
}

DEVICE int draw_row(Work& w, const Row& r, const Rule& rule, u32 most) {
  const Scale scale = {unorder(most), rule.temperature, rule.min_p};
  Kept kept = {1, 1 << 30};
  if (rule.top_k > 0 && rule.top_k < VOCAB) {
    const u64 k = rule.top_k;
    const auto one = [](u32, int) { return (u64)1; };
    u32 low = 1;  // the k-th greatest cell is a bound
    if (rule.top_k <= CELLS)
      low = bisect(1, most, [&](u32 m) { return count_cells(w, w.keys, m) >= rule.top_k; });
    const u32 t = bisect(low, most, [&](u32 m) { return sum_row(w, r, m, one) >= k; });
    const u64 above = t == ~0u ? 0 : sum_row(w, r, t + 1, one);
    const int last = nth_tie(w, r, kept, t, k - above);
    kept = {t, last};
  }
  const auto weigh = [&](u32 key, int id) { return kept.has(key, id) ? scale.weight(key) : 0; };
  if (rule.top_p < 1.0f) {
    const double target = (double)rule.top_p * (double)sum_row(w, r, kept.key, weigh);
    u32 t = most;
    u64 ties = 1;
    if (target > 0) {
      // Below 2^-41 of the greatest weights are zero.
      const u32 least = order(__fsub_rn(scale.greatest, 29.0f * rule.temperature));
      t = bisect(min(most, max(kept.key, least)), most,
                 [&](u32 m) { return (double)sum_row(w, r, m, weigh) >= target; });
      const u64 above = t == most ? 0 : sum_row(w, r, t + 1, weigh);
      const u64 each = scale.weight(t);
      ties = 1;
      while (each && (double)(above + ties * each) < target) {
        const double missing = target - (double)(above + ties * each);
        ties += max(1ull, (u64)(missing / (double)each));
      }
    }
    const int last = nth_tie(w, r, kept, t, ties);
    kept = {t, last};
  }
  const auto final_weight = [&](u32 key, int id) {
    return kept.has(key, id) ? scale.weight(key) : 0;
  };
  return first_beyond(w, r, kept.key, final_weight,
                      [&](u64 total) { return rule.u * (double)total; });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sample_rows(const float* logits, const int* seen, const float* sampling_f,
                const int* sampling_i, const int* bias_ids, const float* bias_values,
                const int* slots, const int* starts, const int* counts, const int* emit,
                const u32* raw_keys, const u32* keys, const float* sums, int* tokens,
                float* logprobs, int* top_ids, float* top_logprobs, int* ok, int* last_tokens) {
  extern __shared__ __align__(16) u8 memory[];
  Work& w = *(Work*)memory;
  wait_for_previous();
  let_next_start();
  const int row = blockIdx.x, slot = slots[row];
  top_ids += row * TOP, top_logprobs += row * TOP;
  if (slot < 0) {
    if (threadIdx.x == 0) tokens[row] = 0, logprobs[row] = 0.0f, ok[row] = 0;
    if (threadIdx.x < TOP) top_ids[threadIdx.x] = 0, top_logprobs[threadIdx.x] = 0.0f;
    return;
  }
  Row r = row_of(logits, seen, sampling_f, row, slot);
  find_biases(r, bias_ids, bias_values, slot, 0, WIDTH, w.bias_ids, w.bias_values, &w.biases);
  u32 raw_most = 0, most = 0;
  bool bad = false;
  for (int c = threadIdx.x; c < CELLS; c += THREADS) {
    const u64 at = (u64)row * CELLS + c;
    w.raw[c] = raw_keys[at], w.keys[c] = keys[at];
    raw_most = max(raw_most, w.raw[c]), most = max(most, w.keys[c]);
    bad |= sums[at] < 0.0f;
  }
  __shared__ u32 tops[2][WARPS];
  raw_most = __reduce_max_sync(~0u, raw_most), most = __reduce_max_sync(~0u, most);
  if (lane_id() == 0) tops[0][threadIdx.x / 32] = raw_most, tops[1][threadIdx.x / 32] = most;
  const bool fine = !__syncthreads_or(bad);
  for (int i = 0; i < WARPS; ++i) raw_most = max(raw_most, tops[0][i]), most = max(most, tops[1][i]);
  const float peak = unorder(raw_most);
  float part = 0;
  for (int c = threadIdx.x; c < CELLS; c += THREADS)
    part += fabsf(sums[(u64)row * CELLS + c]) * expf(unorder(w.raw[c]) - peak);
  const float log_sum = logf(block_sum<THREADS>(part, w.room));
  const int n_top = greatest<true>(w, r, TOP, raw_most);
  if (threadIdx.x < TOP) {
    const bool there = (int)threadIdx.x < n_top;
    const u64 pair = there ? w.sorted[threadIdx.x] : 0;
    top_ids[threadIdx.x] = there ? id_of(pair) : 0;
    top_logprobs[threadIdx.x] = there ? unorder((u32)(pair >> 32)) - peak - log_sum : 0.0f;
  }
  __syncthreads();

  const float* f = sampling_f + (u64)slot * 8;
  const int* i4 = sampling_i + (u64)slot * 4;
  Rule rule = {f[0], f[1], f[2], i4[0], 0.0};
  int token = 0;
  if (fine) {
    rule.u = uniform((u32)(starts[row] + counts[row]), (u32)i4[1], (u32)i4[2]);
    if (rule.temperature <= 0.0f || rule.top_k == 1) {
      greatest<false>(w, r, 1, most);
      token = id_of(w.sorted[0]);
    } else if (rule.top_k > 0 && rule.top_k <= SMALL) {
      const int n = greatest<false>(w, r, rule.top_k, most);
      token = draw_sorted(w, rule, n);
    } else {
      token = draw_row(w, r, rule, most);
    }
  }
  if (threadIdx.x == 0) {
    tokens[row] = token;
    logprobs[row] = clean(r.logits[token]) - peak - log_sum;
    ok[row] = fine;
    if (emit[row] > 0) last_tokens[slot] = token;
  }
}
