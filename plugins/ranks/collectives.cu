// What ranks make together: the sum of their bf16 rows, and their logits side by side.
//
// One shot: each block shows its vectors in its own region (peers.cuh), meets the same block of the
// other ranks, and reads theirs. Sums are taken in f32 in the order of ranks and rounded once, so
// all ranks have the same bits, in a batch of any size. Alone (RANKS 1) there is nobody to ask.
// What was tried: benchmarks/log/collectives.md.
#include "ranks/peers.cuh"

#define FIRST (blockIdx.x * (i64)THREADS + threadIdx.x)
#define STEP (gridDim.x * (i64)THREADS)

#ifndef COLUMNS
extern "C" __global__ void all_reduce(const uint4* x, uint4* y, i64 count, const u64* peers,
                                      int rank) {
  wait_for_previous();
  launch_dependents();
#if RANKS == 1
  for (i64 i = FIRST; i < count; i += STEP) y[i] = x[i];
#else
  const u32 launch = launches_so_far(peers, rank);
  for (i64 i = FIRST; i < count; i += STEP) *shown(peers[rank], i, launch) = x[i];
  meet<RANKS>(peers, rank, launch);
  for (i64 i = FIRST; i < count; i += STEP) {
    uint4 parts[RANKS];
#pragma unroll
    for (int r = 0; r < RANKS; r++) parts[r] = load_shown(shown(peers[r], i, launch));
    float sum[8], part[8];
    unpack8(parts[0], sum);
#pragma unroll
    for (int r = 1; r < RANKS; r++) {
      unpack8(parts[r], part);
#pragma unroll
      for (int e = 0; e < 8; e++) sum[e] += part[e];
    }
    y[i] = pack8(sum);
  }
  done(peers[rank], launch);
#endif
}
#else
// y[row] = x[row] of rank 0, of rank 1 …; COLUMNS vectors of four logits each.
extern "C" __global__ void gather_logits(const uint4* x, uint4* y, i64 count, const u64* peers,
                                         int rank) {
  wait_for_previous();
  launch_dependents();
#if RANKS == 1
  for (i64 i = FIRST; i < count; i += STEP) y[i] = x[i];
#else
  const u32 launch = launches_so_far(peers, rank);
  for (i64 i = FIRST; i < count; i += STEP) *shown(peers[rank], i, launch) = x[i];
  meet<RANKS>(peers, rank, launch);
  for (i64 i = FIRST; i < count; i += STEP) {
    const i64 row = i / COLUMNS, column = i % COLUMNS;
    uint4 parts[RANKS];
#pragma unroll
    for (int r = 0; r < RANKS; r++) parts[r] = load_shown(shown(peers[r], i, launch));
#pragma unroll
    for (int r = 0; r < RANKS; r++) y[(row * RANKS + r) * COLUMNS + column] = parts[r];
  }
  done(peers[rank], launch);
#endif
}
#endif
