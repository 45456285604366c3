// The next draft of each row: the id of the largest logit, the lowest of equal ones.
//
// Block (part, row) reads its part of the row once, LOADS times 16 bytes a thread, and merges its
// greatest (logit, ~id) by an atomic maximum, which does not depend on the order. The last block
// of a row writes the token and resets both words to zero for the next launch. Ids of a shortlist
// are loaded with the logits. A row without a token reads nothing.
// 248,320 logits, H200: 2 / 13 / 45 us at 1 / 32 / 128 rows (a read takes 30;
// log/sampling/draft_rounds.md).
// Macros: LOGITS (of a row), VOCAB, SHORTLIST (1: with one), DRAFTS (of a slot), INDEX (of this
// draft), LOADS, THREADS; PAIRS: a row has (logit, id, 0, 0) of each rank; BEST: the kernel is
// draft_best, which computes those.
#include "common/numeric.cuh"

DEVICE u64 greater(u64 a, u64 b) { return a > b ? a : b; }

DEVICE u64 warp_greatest(u64 x) {
#pragma unroll
  for (int d = 16; d; d >>= 1) x = greater(x, __shfl_xor_sync(~0u, x, d));
  return x;
}

// Ordered by logit, then by descending id; 0 for ids that are never drafted.
DEVICE u64 pair_of(float x, int id) {
  return x == x && (u32)id < VOCAB ? (u64)ordered_key(x) << 32 | (u32)~id : 0;
}

#ifdef BEST
extern "C" __global__ void __launch_bounds__(THREADS)
    draft_best(const float* logits, const int* first_id, const int* slots, const int* counts,
               float4* shown, u64* best, int* arrived) {
#else
extern "C" __global__ void __launch_bounds__(THREADS)
    draft_token(const float* logits, const int* shortlist, const int* slots, const int* starts,
                const int* counts, int* token, int* next_starts, int* drafts, u64* best,
                int* arrived) {
#endif
  __shared__ u64 warp_best[THREADS / 32];
  const int row = blockIdx.y, first = (blockIdx.x * LOADS * THREADS + threadIdx.x) * 4;
#if SHORTLIST
  int4 ids[LOADS];  // no launch writes them
#pragma unroll
  for (int i = 0; i < LOADS; ++i)
    if (first + i * THREADS * 4 < LOGITS)
      ids[i] = *(const int4*)(shortlist + first + i * THREADS * 4);
#endif
  wait_then_launch_dependents();
  const int slot = slots[row];
  if (slot < 0 || counts[row] <= 0) {
#ifdef BEST
    if (blockIdx.x == 0 && threadIdx.x == 0) shown[row] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#else
    if (blockIdx.x == 0 && threadIdx.x == 0) token[row] = next_starts[row] = 0;
#endif
    return;
  }
#ifdef BEST
  const int base = *first_id;
#else
  const int base = 0;
#endif
  float4 x[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; ++i)
    if (first + i * THREADS * 4 < LOGITS)
      x[i] = __ldcg((const float4*)(logits + (u64)row * LOGITS + first + i * THREADS * 4));
  u64 mine = 0;
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int at = first + i * THREADS * 4;
    if (at >= LOGITS) break;
#if SHORTLIST
    const int4 id = ids[i];
#else
    const int4 id = make_int4(base + at, base + at + 1, base + at + 2, base + at + 3);
#endif
#ifdef PAIRS
    mine = greater(mine, pair_of(x[i].x, (int)x[i].y));
#else
    mine = greater(mine, greater(greater(pair_of(x[i].x, id.x), pair_of(x[i].y, id.y)),
                                 greater(pair_of(x[i].z, id.z), pair_of(x[i].w, id.w))));
#endif
  }
  mine = warp_greatest(mine);
  if (lane_id() == 0) warp_best[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x > 0) return;
#pragma unroll
  for (int w = 1; w < THREADS / 32; ++w) mine = greater(mine, warp_best[w]);
  atomicMax((unsigned long long*)best + row, mine);
  if (count_up(arrived + row) < (int)gridDim.x - 1) return;
  mine = atomicExch((unsigned long long*)best + row, 0ull);
  arrived[row] = 0;
#ifdef BEST
  shown[row] = mine ? make_float4(key_value((u32)(mine >> 32)), (float)(int)~(u32)mine, 0.0f, 0.0f)
                    : make_float4(minus_infinity(), -1.0f, 0.0f, 0.0f);
#else
  const int id = mine ? (int)~(u32)mine : 0;
  token[row] = id, next_starts[row] = starts[row] + 1;
  drafts[(i64)slot * DRAFTS + INDEX] = id;
#endif
}
