// The TOP largest logits of each token of a block, the lower id first of equal ones.
//
// Block (part, token) keeps its part of the logits in registers, LOADS times four a thread, and
// takes the greatest (logit, ~place) TOP times; only the thread that had it looks again. The last
// block of a token does the same with the keys of all parts and resets the counter. A place is as
// good as an id: ids ascend. The first token of a row's block and rows without a token read
// nothing. Not timed yet (benchmarks/log/sampling/block_drafter.md).
// Macros: LOGITS (of a token, a multiple of 4), VOCAB, SHORTLIST (1: with one), TILE, TOP, LOADS,
// PARTS (blocks of a token), THREADS.
#include "common/numeric.cuh"

constexpr int WARPS = THREADS / 32, KEYS = (PARTS * TOP + THREADS - 1) / THREADS;
typedef unsigned long long Word;

DEVICE u64 greater(u64 a, u64 b) { return a > b ? a : b; }

// The greatest of a thread's keys that is below `bound`; 0 for none.
template <int N>
DEVICE u64 next_of(const u64 (&keys)[N], u64 bound) {
  u64 best = 0;
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (keys[i] < bound) best = greater(best, keys[i]);
  return best;
}

// The TOP greatest keys of the block, in their order, into `chosen`; 0 in place of missing ones.
template <class Next>
DEVICE void select(Next next, u64* maxima, u64* chosen) {
  u64 mine = next(~0ull);
#pragma unroll 1
  for (int r = 0; r < TOP; ++r) {
    u64 best = mine;
#pragma unroll
    for (int d = 16; d; d >>= 1) best = greater(best, __shfl_xor_sync(~0u, best, d));
    if (lane_id() == 0) maxima[(r & 1) * WARPS + threadIdx.x / 32] = best;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) best = greater(best, maxima[(r & 1) * WARPS + w]);
    if (threadIdx.x == 0) chosen[r] = best;
    if (best && mine == best) mine = next(best);
  }
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS)
    top_ids(const float* logits, const int* shortlist, const int* counts, int* ids, float* values,
            u64* found, int* arrived) {
  __shared__ u64 maxima[2 * WARPS + TOP];
  u64* chosen = maxima + 2 * WARPS;
  __shared__ int last;
  const int token = blockIdx.y, first = (blockIdx.x * LOADS * THREADS + threadIdx.x) * 4;
  wait_then_launch_dependents();
  if (token % TILE == 0 || counts[token / TILE] <= 0) {
    if (blockIdx.x == 0 && threadIdx.x < TOP)
      ids[token * TOP + threadIdx.x] = 0, values[token * TOP + threadIdx.x] = minus_infinity();
    return;
  }
  u32 keys[LOADS * 4];  // of a logit that may be drafted above 0
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    const int at = first + i * THREADS * 4;
    const bool there = at < LOGITS;
    const float4 x = there ? __ldcg((const float4*)(logits + (i64)token * LOGITS + at))
                           : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float four[4] = {x.x, x.y, x.z, x.w};
#if SHORTLIST
    const int4 id = there ? *(const int4*)(shortlist + at) : make_int4(VOCAB, VOCAB, VOCAB, VOCAB);
    const int of[4] = {id.x, id.y, id.z, id.w};
#else
    const int of[4] = {at, at + 1, at + 2, at + 3};
#endif
#pragma unroll
    for (int e = 0; e < 4; ++e)
      keys[4 * i + e] =
          there && four[e] == four[e] && (u32)of[e] < VOCAB ? ordered_key(four[e]) : 0;
  }
  select(
      [&](u64 bound) {
        u64 best = 0;
#pragma unroll
        for (int i = 0; i < LOADS * 4; ++i) {
          const int at = first + i / 4 * THREADS * 4 + i % 4;
          const u64 key = keys[i] ? (u64)keys[i] << 32 | (u32)~at : 0;
          if (key < bound) best = greater(best, key);
        }
        return best;
      },
      maxima, chosen);
  if (PARTS > 1) {
    if (threadIdx.x < TOP) {
      found[((i64)token * PARTS + blockIdx.x) * TOP + threadIdx.x] = chosen[threadIdx.x];
      __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0) last = count_up(arrived + token) == PARTS - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();
    if (threadIdx.x == 0) arrived[token] = 0;
    u64 parts[KEYS];
#pragma unroll
    for (int i = 0; i < KEYS; ++i) {
      const int at = i * THREADS + threadIdx.x;
      parts[i] = at < PARTS * TOP ? __ldcg((const Word*)found + (i64)token * PARTS * TOP + at) : 0;
    }
    select([&](u64 bound) { return next_of(parts, bound); }, maxima, chosen);
  }
  if (threadIdx.x >= TOP) return;
  const u64 key = chosen[threadIdx.x];
  const float value = key ? key_value((u32)(key >> 32)) : minus_infinity();
  int id = value == minus_infinity() ? 0 : (int)~(u32)key;
#if SHORTLIST
  id = value == minus_infinity() ? 0 : shortlist[id];
#endif
  ids[token * TOP + threadIdx.x] = id, values[token * TOP + threadIdx.x] = value;
}
