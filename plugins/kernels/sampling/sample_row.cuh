// A row of logits: cells of 256 ids, eight ids of a cell a lane, bias, penalties, mask. Floats are
// compared as ordered keys (numeric.cuh); -infinity, the logit of an excluded id, has key 0.
//
// With TILE each token of a launch's row has a row of logits. The drafts before a token count as
// generated: they are added to `token_counts` in their cells.
#pragma once
#include "common/numeric.cuh"

#ifdef TILE
constexpr bool DRAFTED = true;
#else
constexpr bool DRAFTED = false;
#endif

// This thread and its lane. With MAIL, where a block loops over rows, the value is opaque to the
// compiler: else it hoists everything that depends on it out of the loop, and registers spill.
#ifdef MAIL
DEVICE u32 thread() { return forget(threadIdx.x); }
#else
DEVICE u32 thread() { return threadIdx.x; }
#endif
DEVICE u32 lane() { return thread() & 31; }

constexpr int CELL = 256;
constexpr int CELLS = (WIDTH + CELL - 1) / CELL;
constexpr int WORDS = (WIDTH + 31) / 32;  // of a row's mask
constexpr float FLOOR = 3.0e38f;          // logits of allowed ids are at least -FLOOR

// The ids of a row, or of a rank's share of it (SHARE ids).
struct Ids {
  int begin, end;
#ifdef RANKS
  DEVICE bool has(int id) const { return id >= begin && id < end; }
  DEVICE bool has_cell(int c) const { return c * CELL >= begin && (c + 1) * CELL <= end; }
#else
  DEVICE bool has(int id) const { return id < WIDTH; }
  DEVICE bool has_cell(int c) const { return true; }
#endif
  DEVICE int first_cell() const { return begin / CELL; }
  DEVICE int cells_end() const { return (end + CELL - 1) / CELL; }
};
#ifdef RANKS
constexpr int SHARE = WIDTH / RANKS;
DEVICE Ids ids_of(int rank) { return {rank * SHARE, (rank + 1) * SHARE}; }
#else
constexpr int SHARE = WIDTH;
DEVICE Ids ids_of(int rank) { return {0, WIDTH}; }
#endif
// The address of id 0 of a row, from that of the first id of the share.
DEVICE const float* logits_of(const float* logits, int row, Ids ids) {
  return logits + (i64)row * SHARE - ids.begin;
}

struct Penalties {
  float repetition, inverse, presence, frequency;
};
#ifdef RANKS  // in shared memory, to save registers
DEVICE Penalties& kept_penalties() {
  __shared__ Penalties kept;
  return kept;
}
#endif

struct Row {
  const float* logits;
  Ids ids;
  const int* token_counts;
  const int* bias_ids;
  const float* bias_values;
  int biases;  // number of entries
#ifndef RANKS
  Penalties penalties;
#endif
  bool penalised;
  const u32* allow;  // bits of the allowed ids, from word `mask` on
  int mask;          // -1: all ids are allowed
  DEVICE u32 word(int i) const { return i < WORDS ? allow[mask + i] : 0u; }
};

// The target of a row of logits: its slot (−1: not sampled), the position of the new token, the
// number of drafts before it.
struct Place {
  int slot, position, drafts;
};
DEVICE Place place_of(int at, const int* slots, const int* starts, const int* counts) {
#ifdef TILE
  const int row = at / TILE, j = at % TILE;
  return {j < counts[row] ? slots[row] : -1, starts[row] + j + 1, j};
#else
  return {slots[at], starts[at] + counts[at], 0};
#endif
}

// The slot of a sampled row of logits, loaded again to save a register.
DEVICE int again(const int* slots, int at) {
#ifdef TILE
  return __ldcg(slots + at / TILE);
#else
  return __ldcg(slots + at);
#endif
}

DEVICE bool is_finite(float x) { return fabsf(x) <= 3.402823466e38f; }
DEVICE float clean(float x) { return is_finite(x) ? x : 0.0f; }

DEVICE float penalise(const Row& r, int id, float z, int token_count) {
#pragma unroll 1  // code size: the function is inlined in many places
  for (int i = 0; i < r.biases; ++i)
    if (r.bias_ids[i] == id) z = __fadd_rn(z, r.bias_values[i]);
  if (!r.penalised) return z;
#ifdef RANKS
  const Penalties& p = kept_penalties();
#else
  const Penalties& p = r.penalties;
#endif
  if (token_count > 0) z = __fmul_rn(z, z > 0.0f ? p.inverse : p.repetition);
  const int generated = token_count >> 1;
  z = __fsub_rn(z, __fmul_rn(p.frequency, (float)generated));
  return generated > 0 ? __fsub_rn(z, p.presence) : z;
}

DEVICE int mask_of(const int* sampling_i, int slot) {
  return __ldcg(sampling_i + (u64)slot * 4 + 3) == 1 ? slot * WORDS : -1;
}

DEVICE Row row_of(const float* logits, const int* token_counts, const float* sampling_f,
                  const int* sampling_i, const u32* allow, int row, int slot, Ids ids) {
  const float* f = sampling_f + (u64)slot * 8;
  Row r;
  r.logits = logits_of(logits, row, ids), r.ids = ids;
  r.token_counts = token_counts + (u64)slot * WIDTH;
  const Penalties p = {f[3], __fdiv_rn(1.0f, f[3]), f[4], f[5]};
  r.penalised = p.repetition != 1.0f || p.presence != 0.0f || p.frequency != 0.0f;
#ifdef RANKS
  if (thread() == 0) kept_penalties() = p;  // the caller synchronises before it reads them
#else
  r.penalties = p;
#endif
  r.biases = 0;
  r.allow = allow;
  r.mask = mask_of(sampling_i, slot);
  return r;
}

// The drafts before the token, in shared memory: element 0 is their number. The caller synchronises
// before it reads them.
#ifdef TILE
DEVICE int* found_drafts() {
  __shared__ int found[TILE];
  return found;
}
#endif
DEVICE void find_drafts(const int* ids, int at, int drafts) {
#ifdef TILE
  const int d = thread();
  if (d <= drafts) found_drafts()[d] = d ? ids[at / TILE * TILE + d] : drafts;
#endif
}
// each(id) for the drafts in cells first … first + cells - 1.
template <class Each>
DEVICE void for_drafts(int first, int cells, const Each& each) {
#ifdef TILE
#pragma unroll 1
  for (int d = 1; d <= found_drafts()[0]; ++d) {
    const int id = found_drafts()[d];
    if ((u32)(id / CELL - first) < (u32)cells) each(id);
  }
#endif
}

// The biases of ids in [begin, end) that apply at `position`, in order, to shared memory. The whole
// block calls it.
DEVICE void find_biases(Row& r, const int* ids, const float* values, const int* until, int slot,
                        int position, int begin, int end, int* found_ids, float* found_values,
                        int* found) {
  if (thread() < 32) {
    int n = 0;
    for (int i = thread(); i - (int)thread() < BIASES; i += 32) {
      const int id = i < BIASES ? ids[(u64)slot * BIASES + i] : -1;
      bool mine = id >= 0 && id >= begin && id < end;
      if (mine) mine = position < until[(u64)slot * BIASES + i];
      const u32 all = __ballot_sync(~0u, mine);
      if (mine) {
        const int at = n + __popc(all & ((1u << thread()) - 1));
        found_ids[at] = id;
        found_values[at] = values[(u64)slot * BIASES + i];
      }
      n += __popc(all);
    }
    if (thread() == 0) *found = n;
  }
  __syncthreads();
  r.bias_ids = found_ids, r.bias_values = found_values, r.biases = *found;
}

DEVICE void load8(const float* from, Ids ids, int cell, float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int id = cell * CELL + i * 128 + lane() * 4;
    float4 v = make_float4(0, 0, 0, 0);
    if (ids.has(id)) v = __ldcg((const float4*)(from + id));
    x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
  }
}
DEVICE void load8(const Row& r, int cell, float (&x)[8]) { load8(r.logits, r.ids, cell, x); }
DEVICE void load8(const int* from, int cell, int (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int id = cell * CELL + i * 128 + lane() * 4;
    int4 v = make_int4(0, 0, 0, 0);
    if (id < WIDTH) v = *(const int4*)(from + id);
    x[4 * i] = v.x, x[4 * i + 1] = v.y, x[4 * i + 2] = v.z, x[4 * i + 3] = v.w;
  }
}
DEVICE int id8(int cell, int i) { return cell * CELL + (i >> 2) * 128 + lane() * 4 + (i & 3); }

DEVICE bool allows(const Row& r, int id) { return r.mask < 0 || (r.word(id / 32) >> id % 32 & 1); }

// Sets the logits of masked ids of a cell to -infinity.
DEVICE void mask8(const Row& r, int cell, float (&x)[8]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const u32 bits = r.word(cell * (CELL / 32) + half * 4 + lane() / 8) >> lane() % 8 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& z = x[half * 4 + i];
      z = bits >> i & 1 ? fmaxf(z, -FLOOR) : minus_infinity();
    }
  }
}

// Applies bias, penalties and mask to the clean raw logits of a cell: -infinity for excluded ids.
DEVICE void values8(const Row& r, int cell, float (&x)[8]) {
  if (r.penalised || r.biases) {
    int token_counts[8] = {};
    if (r.penalised) {
      load8(r.token_counts, cell, token_counts);
      for_drafts(cell, 1, [&](int id) {
#pragma unroll
        for (int i = 0; i < 8; ++i) token_counts[i] += id8(cell, i) == id ? 2 : 0;
      });
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = penalise(r, id8(cell, i), x[i], token_counts[i]);
  }
  if (r.mask >= 0) mask8(r, cell, x);
  if ((cell + 1) * CELL > VOCAB)
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = id8(cell, i) < VOCAB ? x[i] : minus_infinity();
#ifdef RANKS
  if (!r.ids.has_cell(cell))
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = r.ids.has(id8(cell, i)) ? x[i] : minus_infinity();
#endif
}

// The ordered key of a logit; 0 for -infinity, an excluded id.
DEVICE u32 choice_key(float x) { return x > minus_infinity() ? ordered_key(x) : 0u; }

// The ordered keys of a lane's eight logits of a cell; 0 for excluded ids.
template <bool RAW>
DEVICE void keys8(const Row& r, int cell, float (&x)[8], u32 (&key)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = clean(x[i]);
  if (!RAW) values8(r, cell, x);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    key[i] = !RAW ? choice_key(x[i]) : r.ids.has(id8(cell, i)) ? ordered_key(x[i]) : 0u;
}
template <bool RAW>
DEVICE void keys8(const Row& r, int cell, u32 (&key)[8]) {
  float x[8];
  load8(r, cell, x);
  keys8<RAW>(r, cell, x, key);
}

// A threshold: it keeps greater keys, and equal keys of ids up to `id`.
struct Kept {
  u32 key;
  int id;
  DEVICE bool has(u32 k, int i) const { return k > key || (k == key && i <= id); }
};

DEVICE float power(float x) {  // e^x of x <= 0
  return exp2_fast(x * 1.4426950408889634f);
}

// The weight of a logit, e^((z - greatest) / temperature), or 0 if min_p drops it; also as an
// integer in units of 2^-40, so that sums do not depend on their order.
struct Scale {
  static constexpr float ONE = 1099511627776.0f, DEPTH = 29.0f;  // e^-29 · ONE rounds to 0
  float greatest, temperature, reciprocal, min_p;
  DEVICE float share(float z) const {
    const float d = z - greatest, q = d * reciprocal;
    return power(q > -1e4f ? fmaf(fmaf(-q, temperature, d), reciprocal, q) : q);
  }
  DEVICE u64 weight(u32 key) const {
    const float e = share(key_value(key));
    return e < min_p ? 0 : __float2ull_rn(e * ONE);
  }
  // Keys below this one have no weight.
  DEVICE u32 least() const {
    const float depth = min_p > 0.0f ? fminf(DEPTH, 1e-3f + fmaxf(0.0f, -logf(min_p))) : DEPTH;
    return ordered_key(greatest - depth * temperature);
  }
};
DEVICE Scale scale_of(float greatest, float temperature, float min_p) {
  return {greatest, temperature, fminf(__fdiv_rn(1.0f, temperature), 1e30f), min_p};
}

// The temperature of a row that draws by the cells' weights (all ids, or top_p alone); else 0.
DEVICE float plain_heat(const float* f, int top_k) {
  const bool all = (top_k <= 0 || top_k >= VOCAB) && f[2] <= 0.0f;
  return all && f[0] > 0.0f ? f[0] : 0.0f;
}
