// The sum of the bf16 rows of all ranks, by one of three algorithms. Sums are f32 in the order of
// ranks and rounded once, so all algorithms and all ranks give the same bits in a batch of any
// size. A single rank (RANKS 1) copies.
//
// ONE_SHOT: a block publishes its vectors, waits for the same block of the other ranks, reads
// theirs. TWO_SHOT: each rank sums its share of a block's vectors and publishes the sums; after a
// second synchronisation it reads the others': 2 (RANKS - 1) / RANKS parts are received instead of
// RANKS - 1. PUSH: a rank writes numbered vectors to the others (pushed.cuh), without
// synchronisation, for twice the bytes.
// What was tried: benchmarks/log/collectives.md.
#include "ranks/peers.cuh"
#include "ranks/pushed.cuh"

extern "C" __global__ void all_reduce(const uint4* x, uint4* y, i64 count, const u64* peers,
                                      int rank) {
#if RANKS > 1 && ALGORITHM == PUSH
  const Pushes<RANKS> pushes(peers, rank);
#endif
  wait_then_launch_dependents();
#if RANKS == 1
  for (i64 i = FIRST; i < count; i += STEP) y[i] = x[i];
#elif ALGORITHM == ONE_SHOT
  const u32 launch = publish_all<RANKS>(x, count, peers, rank);
  for (i64 i = FIRST; i < count; i += STEP) {
    float sum[8];
    add_published<RANKS>(peers, i, launch, sum);
    y[i] = pack8(sum);
  }
  done(peers[rank], launch);
#elif ALGORITHM == TWO_SHOT
  // An iteration of the block has RANKS pieces of THREADS vectors; rank r sums piece r. No other
  // rank reads piece r of rank r, so the sums overwrite it.
  const u32 launch = launches_so_far(peers, rank);
  const i64 first = blockIdx.x * (i64)(THREADS * RANKS) + threadIdx.x, step = STEP * RANKS;
  for (i64 i = first; i < count; i += step)
#pragma unroll
    for (int s = 0; s < RANKS; s++) {
      const i64 at = i + s * THREADS;
      if (at < count) *published(peers[rank], at, launch) = x[at];
    }
  sync_ranks<RANKS>(peers, rank, launch);
  for (i64 i = first + rank * THREADS; i < count; i += step) {
    float sum[8];
    add_published<RANKS>(peers, i, launch, sum);
    *published(peers[rank], i, launch) = pack8(sum);
  }
  sync_ranks<RANKS>(peers, rank, launch, SECOND_FLAGS + blockIdx.x);
  for (i64 i = first; i < count; i += step) {
    uint4 sums[RANKS];
#pragma unroll
    for (int s = 0; s < RANKS; s++)
      if (i + s * THREADS < count)
        sums[s] = load_published(published(peers[s], i + s * THREADS, launch));
#pragma unroll
    for (int s = 0; s < RANKS; s++)
      if (i + s * THREADS < count) y[i + s * THREADS] = sums[s];
  }
  done(peers[rank], launch);
#else
  const u32 launch = launches_so_far(peers, rank);
  for (i64 i = FIRST; i < count; i += STEP) pushes.push(x[i], i, launch);
  for (i64 i = FIRST; i < count; i += STEP) {
    float sum[8];
    pushes.add(x[i], i, launch, sum);
    y[i] = pack8(sum);
  }
  done(peers[rank], launch);
#endif
}
