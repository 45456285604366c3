// Counts the launch's tokens into seen i32 [SLOTS, VOCAB], in place: bit 0 for a prompt token,
// +2 for a generated one. A tile at position 0 clears its slot's row first.
//
// Two launches, so that a sequence's later tiles count into a row that is already cleared: `clear`
// (grid: chunks of a row, tiles) ends at once for a tile that starts elsewhere. Integer atomics
// commute (adding 2 leaves bit 0), so the order of the tokens does not show.
#include "ptx.cuh"

extern "C" __global__ void clear(int* __restrict__ seen, const int* __restrict__ slots,
                                 const int* __restrict__ starts) {
  let_next_start();
  wait_for_previous();
  const int slot = slots[blockIdx.y];
  if (slot < 0 || starts[blockIdx.y] != 0) return;
  int* row = seen + (i64)slot * VOCAB;
  for (int i = blockIdx.x * THREADS + threadIdx.x; i < VOCAB; i += gridDim.x * THREADS) row[i] = 0;
}

extern "C" __global__ void mark(int* __restrict__ seen, const int* __restrict__ tokens,
                                const int* __restrict__ last, const int* __restrict__ slots,
                                const int* __restrict__ starts, const int* __restrict__ counts,
                                const int* __restrict__ prompt_lens) {
  let_next_start();
  wait_for_previous();
  const int tile = blockIdx.x, t = threadIdx.x, slot = slots[tile];
  if (slot < 0 || t >= counts[tile] || t >= TILE) return;
  int token = tokens[tile * TILE + t];
  if (token < 0) token = last[slot];
  if ((u32)token >= VOCAB) return;
  int* at = seen + (i64)slot * VOCAB + token;
  if (starts[tile] + t < prompt_lens[slot]) atomicOr(at, 1);
  else atomicAdd(at, 2);
}
