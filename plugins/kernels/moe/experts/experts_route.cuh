// Which tokens an expert has, for experts_grouped_mma.cu: every block counts the pairs
// (token, expert) itself (few ids, in L2), which saves a launch. BLOCK_M: tokens of a block.
#pragma once
#include "moe/experts/experts_common.cuh"

struct Shared {
  int* first;  // [EXPERTS + 1] blocks before each expert
  int* list;   // [BLOCK_M] pairs of this block's tokens, -1 where there is none
  int* found;  // [WARPS]
  u16* ids;    // [pairs]
};

DEVICE void count_blocks(const Shared& s, const int* ids, int pairs) {
  for (int i = threadIdx.x; i <= EXPERTS; i += THREADS) s.first[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < pairs; i += THREADS) {
    const int id = ids[i];
    s.ids[i] = (u16)id;
    atomicAdd(s.first + id + 1, 1);
  }
  __syncthreads();
  constexpr int EACH = (EXPERTS + THREADS - 1) / THREADS;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  int own[EACH], sum = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int expert = threadIdx.x * EACH + i;
    own[i] = expert < EXPERTS ? (s.first[expert + 1] + BLOCK_M - 1) / BLOCK_M : 0;
    sum += own[i];
  }
  int before = sum;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, before, d);
    if (lane >= d) before += other;
  }
  if (lane == 31) s.found[warp] = before;
  __syncthreads();
  before -= sum;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) before += w < warp ? s.found[w] : 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int expert = threadIdx.x * EACH + i;
    before += own[i];
    if (expert < EXPERTS) s.first[expert + 1] = before;
  }
  __syncthreads();
}

// The pairs of `expert` from its `rank`-th on, in order, into s.list.
DEVICE void find_pairs(const Shared& s, int pairs, int expert, int rank) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int chunk = (pairs + THREADS - 1) / THREADS * 32;
  const int begin = warp * chunk, end = min(begin + chunk, pairs);
  __syncthreads();
  if (threadIdx.x < BLOCK_M) s.list[threadIdx.x] = -1;
  int count = 0;
  for (int i = begin + lane; i - lane < end; i += 32)
    count += __popc(__ballot_sync(~0u, i < end && s.ids[i] == expert));
  if (lane == 0) s.found[warp] = count;
  __syncthreads();
  int at = -rank;
  for (int w = 0; w < warp; ++w) at += s.found[w];
  for (int i = begin + lane; i - lane < end; i += 32) {
    const bool mine = i < end && s.ids[i] == expert;
    const u32 all = __ballot_sync(~0u, mine);
    const int place = at + __popc(all & ((1u << lane) - 1));
    if (mine && place >= 0 && place < BLOCK_M) s.list[place] = i;
    at += __popc(all);
  }
  __syncthreads();
}

// The expert of a block of work, not before `expert`; the whole warp searches.
DEVICE int expert_of(const Shared& s, int block, int expert) {
  constexpr int STRIDE = (EXPERTS + 31) / 32;
  if (expert == 0) {  // coarsely first
    const int last = min(((int)lane_id() + 1) * STRIDE, EXPERTS);
    expert = (__ffs(__ballot_sync(~0u, s.first[last] > block)) - 1) * STRIDE;
  }
  while (true) {
    const u32 beyond =
        __ballot_sync(~0u, s.first[min(expert + 1 + (int)lane_id(), EXPERTS)] > block);
    if (beyond) return expert + __ffs(beyond) - 1;
    expert += 32;
  }
}

// Where a block is on the line of work, in m16 tiles. A piece is a block's part of one step.
template <bool UP>
struct Piece {
  int place, end, step, block, from, to;  // m16 tiles from … to - 1 of the step

  DEVICE void start(int begin, int stop) {
    const int line = begin / 4;
    place = begin, end = stop, step = line % Side<UP>::STEPS, block = line / Side<UP>::STEPS;
    from = begin % 4, to = min(4, from + stop - begin);
  }
  DEVICE bool over() const { return place >= end; }
  DEVICE bool next() {  // to another block of work?
    place += to - from, from = 0, to = min(4, end - place);
    const bool leaves = ++step == Side<UP>::STEPS;
    if (leaves) step = 0, ++block;
    return leaves;
  }
};
