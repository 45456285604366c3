// The logits of all ranks side by side: y[row] = x[row] of rank 0, of rank 1 …; COLUMNS vectors of
// four logits each. A block publishes its vectors, waits for the same block of the other ranks, and
// reads theirs (peers.cuh). A single rank (RANKS 1) copies.
// What was tried: benchmarks/log/collectives.md.
#include "ranks/peers.cuh"

extern "C" __global__ void gather_logits(const uint4* x, uint4* y, i64 count, const u64* peers,
                                         int rank) {
  wait_then_launch_dependents();
#if RANKS == 1
  for (i64 i = FIRST; i < count; i += STEP) y[i] = x[i];
#else
  const u32 launch = publish_all<RANKS>(x, count, peers, rank);
  for (i64 i = FIRST; i < count; i += STEP) {
    const i64 row = i / COLUMNS, column = i % COLUMNS;
    uint4 parts[RANKS];
#pragma unroll
    for (int r = 0; r < RANKS; r++) parts[r] = load_published(published(peers[r], i, launch));
#pragma unroll
    for (int r = 0; r < RANKS; r++) y[(row * RANKS + r) * COLUMNS + column] = parts[r];
  }
  done(peers[rank], launch);
#endif
}
