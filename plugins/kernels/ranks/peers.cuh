// Memory that every rank of an engine has at the same offsets and the others read: its layout, and
// how a block shows its part to the same block of every other rank.
//
// A region begins with two counters (launches so far, blocks of this launch that are done), then a
// flag for each block and rank, then what others push (pushed.cuh), then the data. Data is held
// twice, in turns of 256 bytes: a launch writes the turn that the launch before did not. No rank
// can still read what is written over: who has had something of the launch before from every rank
// knows that the one before that is over everywhere. All ranks make the same launches in the same
// order, each on one stream. Nothing is multicast.
// Macros: THREADS of a block, where FIRST, STEP or show_all are used.
#pragma once
#include "common/numeric.cuh"
#include "ranks/peer_ptx.cuh"

#define MOST_RANKS 8
#define FLAGS 256             // bytes before the flags
#define SECOND_FLAGS 252      // where those of a block's second meeting begin
#define PUSHED 16384          // bytes before what is pushed: flags of 504 blocks
#define PUSHED_BYTES 8388608  // of what is pushed
#define DATA (PUSHED + PUSHED_BYTES)
#define LIMIT_NS 60000000000ull  // after which a rank that does not come counts as lost
// Another rank is in this launch or the next, so that its flag is this far ahead at most. A flag
// that no launch has used for long is not, whatever the numbers since (they come again after 2^32).
#define MOST_AHEAD 65536u

// The ways of a sum: the macro WAY of who adds.
#define ONE_SHOT 0
#define TWO_SHOT 1
#define PUSH 2

#define FIRST (blockIdx.x * (i64)THREADS + threadIdx.x)
#define STEP (gridDim.x * (i64)THREADS)

DEVICE u32 launches_so_far(u64 region) { return *(volatile u32*)region; }
DEVICE u32 launches_so_far(const u64* peers, int rank) { return launches_so_far(peers[rank]); }
// Where a rank shows its vector `i` of 16 bytes in the launch of that number.
DEVICE uint4* shown(u64 region, i64 i, u32 launch) {
  return (uint4*)(region + DATA) + ((i >> 4) * 2 + (launch & 1)) * 16 + (i & 15);
}

// Shows what this block has written to the same block of every rank, and waits for theirs. `place`:
// that of its flags, another one for each meeting of a launch. `own`, `theirs`: the regions of this
// rank and of rank threadIdx.x.
template <int N_RANKS>
DEVICE void meet(u64 own, u64 theirs, int rank, u32 launch, u32 place = blockIdx.x) {
  __syncthreads();
  if (threadIdx.x < N_RANKS) {
    const int flag = place * MOST_RANKS;
    store_release((u32*)(theirs + FLAGS) + flag + rank, launch + 1);
    const u32* mine = (const u32*)(own + FLAGS) + flag + threadIdx.x;
    const u64 start = nanoseconds();
    while (load_acquire(mine) - (launch + 1) >= MOST_AHEAD)
      if (nanoseconds() - start > LIMIT_NS) __trap();
  }
  __syncthreads();
}
template <int N_RANKS>
DEVICE void meet(const u64* peers, int rank, u32 launch, u32 place = blockIdx.x) {
  const u64 theirs = threadIdx.x < N_RANKS ? peers[threadIdx.x] : 0;
  meet<N_RANKS>(peers[rank], theirs, rank, launch, place);
}

#ifdef THREADS
// Shows x [count] to all ranks, and waits for theirs; a thread's vectors are FIRST, FIRST + STEP, …
// Returns the launch's number.
template <int N_RANKS>
DEVICE u32 show_all(const uint4* x, i64 count, const u64* peers, int rank) {
  const u32 launch = launches_so_far(peers, rank);
  for (i64 i = FIRST; i < count; i += STEP) *shown(peers[rank], i, launch) = x[i];
  meet<N_RANKS>(peers, rank, launch);
  return launch;
}
#endif

// sum = or += part, in f32. Parts come in the order of ranks.
DEVICE void add_part(const uint4& part, bool first, float (&sum)[8]) {
  float values[8];
  unpack8(part, values);
#pragma unroll
  for (int e = 0; e < 8; e++) sum[e] = first ? values[e] : sum[e] + values[e];
}
// Vector `i` of all ranks, which was shown.
template <int N_RANKS>
DEVICE void add_shown(const u64* peers, i64 i, u32 launch, float (&sum)[8]) {
  uint4 parts[N_RANKS];
#pragma unroll
  for (int r = 0; r < N_RANKS; r++) parts[r] = load_shown(shown(peers[r], i, launch));
#pragma unroll
  for (int r = 0; r < N_RANKS; r++) add_part(parts[r], r == 0, sum);
}

// The last block to arrive counts the launch. `arrive` is behind a barrier, so that every thread of
// a block has read the number before; what it returns is used only by `count`, which may be much
// later, so that nobody waits for it. No launch of this rank reads the number before this one ends.
DEVICE u32 arrive(u64 region) {
  return threadIdx.x || gridDim.x == 1 ? 0 : atomicAdd((u32*)region + 1, 1);
}
DEVICE void count(u64 region, u32 launch, u32 arrived) {
  u32* counters = (u32*)region;
  if (threadIdx.x == 0 && arrived == gridDim.x - 1) counters[1] = 0, counters[0] = launch + 1;
}
DEVICE void done(u64 region, u32 launch) {
  __syncthreads();
  count(region, launch, arrive(region));
}
