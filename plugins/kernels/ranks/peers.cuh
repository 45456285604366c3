// Symmetric memory: a region with the same layout on every rank, which the other ranks read. A
// block publishes its part to the same block of every other rank.
//
// A region has two counters (launches so far, finished blocks of this launch), a flag for each
// block and rank, the buffer for pushed vectors (pushed.cuh), and the data. Data is double-buffered
// in phases of 256 bytes: launches alternate between the two. A launch does not overwrite data that
// a rank still reads: it has received data of the previous launch from every rank, so the launch
// before that has ended on all ranks. All ranks make the same launches in the same order, each on
// one stream. Multicast is not used.
// Macros: THREADS of a block, for FIRST, STEP and publish_all.
#pragma once
#include "common/numeric.cuh"
#include "ranks/peer_ptx.cuh"

#define MOST_RANKS 8
#define FLAGS 256             // bytes before the flags
#define SECOND_FLAGS 252      // index of the flags of a block's second synchronisation
#define PUSHED 16384          // offset of pushed vectors, in bytes: after the flags of 504 blocks
#define PUSHED_BYTES 8388608  // size of the buffer for pushed vectors
#define DATA (PUSHED + PUSHED_BYTES)
#define LIMIT_NS 60000000000ull  // a rank that does not arrive in this time is lost
// Another rank is in this launch or the next, so its flag is at most this far ahead. The flag of a
// block that recent launches did not have is outside this range; launch numbers wrap at 2^32.
#define MOST_AHEAD 65536u

// Values of the macro ALGORITHM.
#define ONE_SHOT 0
#define TWO_SHOT 1
#define PUSH 2

#define FIRST (blockIdx.x * (i64)THREADS + threadIdx.x)
#define STEP (gridDim.x * (i64)THREADS)

DEVICE u32 launches_so_far(u64 region) { return *(volatile u32*)region; }
DEVICE u32 launches_so_far(const u64* peers, int rank) { return launches_so_far(peers[rank]); }
// The address of a rank's published vector `i` of 16 bytes, in launch number `launch`.
DEVICE uint4* published(u64 region, i64 i, u32 launch) {
  return (uint4*)(region + DATA) + ((i >> 4) * 2 + (launch & 1)) * 16 + (i & 15);
}

// Publishes the block's writes to the same block of every rank, and waits for theirs. `place`: the
// index of the flags, different for each synchronisation of a launch. `own`, `theirs`: the regions
// of this rank and of rank threadIdx.x.
template <int N_RANKS>
DEVICE void sync_ranks(u64 own, u64 theirs, int rank, u32 launch, u32 place = blockIdx.x) {
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
DEVICE void sync_ranks(const u64* peers, int rank, u32 launch, u32 place = blockIdx.x) {
  const u64 theirs = threadIdx.x < N_RANKS ? peers[threadIdx.x] : 0;
  sync_ranks<N_RANKS>(peers[rank], theirs, rank, launch, place);
}

#ifdef THREADS
// Publishes x [count] and waits for the other ranks; a thread has vectors FIRST, FIRST + STEP, …
// Returns the launch's number.
template <int N_RANKS>
DEVICE u32 publish_all(const uint4* x, i64 count, const u64* peers, int rank) {
  const u32 launch = launches_so_far(peers, rank);
  for (i64 i = FIRST; i < count; i += STEP) *published(peers[rank], i, launch) = x[i];
  sync_ranks<N_RANKS>(peers, rank, launch);
  return launch;
}
#endif

// sum = part or sum += part, in f32; called in the order of ranks.
DEVICE void add_part(const uint4& part, bool first, float (&sum)[8]) {
  float values[8];
  unpack8(part, values);
#pragma unroll
  for (int e = 0; e < 8; e++) sum[e] = first ? values[e] : sum[e] + values[e];
}
// Adds the published vector `i` of all ranks.
template <int N_RANKS>
DEVICE void add_published(const u64* peers, i64 i, u32 launch, float (&sum)[8]) {
  uint4 parts[N_RANKS];
#pragma unroll
  for (int r = 0; r < N_RANKS; r++) parts[r] = load_published(published(peers[r], i, launch));
#pragma unroll
  for (int r = 0; r < N_RANKS; r++) add_part(parts[r], r == 0, sum);
}

// The last block to arrive counts the launch. A barrier before `arrive` ensures that all threads of
// the block have read the launch's number. Only `count` uses the result of `arrive`, and later, so
// the atomic's latency is hidden. No launch of this rank reads the number before this one ends.
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
