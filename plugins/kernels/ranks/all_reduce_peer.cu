// The sum of the bf16 rows of all ranks, by one of three ways (WAY). Sums are taken in f32 in the
// order of ranks and rounded once, so all ways and all ranks have the same bits, in a batch of any
// size. Alone (RANKS 1) there is nobody to ask.
//
// ONE_SHOT: each block shows its vectors, meets the same block of the other ranks, reads theirs.
// TWO_SHOT: of what a block shows each rank sums its share, shows the sums, and reads the others'
// after a second meeting: 2 (RANKS - 1) / RANKS parts cross to a rank instead of RANKS - 1.
// PUSH: vectors are written to the other ranks, numbered (pushed.cuh): no meeting, twice the bytes.
// What was tried: benchmarks/log/collectives.md.
#include "ranks/peers.cuh"
#include "ranks/pushed.cuh"

extern "C" __global__ void all_reduce(const uint4* x, uint4* y, i64 count, const u64* peers,
                                      int rank) {
#if RANKS > 1 && WAY == PUSH
  const Pushes<RANKS> pushes(peers, rank);
#endif
  wait_for_previous();
  launch_dependents();
#if RANKS == 1
  for (i64 i = FIRST; i < count; i += STEP) y[i] = x[i];
#elif WAY == ONE_SHOT
  const u32 launch = show_all<RANKS>(x, count, peers, rank);
  for (i64 i = FIRST; i < count; i += STEP) {
    float sum[8];
    add_shown<RANKS>(peers, i, launch, sum);
    y[i] = pack8(sum);
  }
  done(peers[rank], launch);
#elif WAY == TWO_SHOT
  // A turn of the block: RANKS stretches of THREADS vectors, of which rank r sums the r-th. Its own
  // are read by nobody else, so that the sums lie in their place.
  const u32 launch = launches_so_far(peers, rank);
  const i64 first = blockIdx.x * (i64)(THREADS * RANKS) + threadIdx.x, step = STEP * RANKS;
  for (i64 i = first; i < count; i += step)
#pragma unroll
    for (int s = 0; s < RANKS; s++) {
      const i64 at = i + s * THREADS;
      if (at < count) *shown(peers[rank], at, launch) = x[at];
    }
  meet<RANKS>(peers, rank, launch);
  for (i64 i = first + rank * THREADS; i < count; i += step) {
    float sum[8];
    add_shown<RANKS>(peers, i, launch, sum);
    *shown(peers[rank], i, launch) = pack8(sum);
  }
  meet<RANKS>(peers, rank, launch, SECOND_FLAGS + blockIdx.x);
  for (i64 i = first; i < count; i += step) {
    uint4 sums[RANKS];
#pragma unroll
    for (int s = 0; s < RANKS; s++)
      if (i + s * THREADS < count) sums[s] = load_shown(shown(peers[s], i + s * THREADS, launch));
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
