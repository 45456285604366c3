// Counts the launch's tokens into token_counts i32 [SLOTS, VOCAB], in place: bit 0 for a prompt
// token, +2 for a generated one. A sequence that starts at position 0 clears its slot's row first.
//
// One launch: block (part, tile) of a sequence's first tile owns one of PARTS pieces of the slot's
// row; blocks of other tiles return at once. The block clears the piece of a fresh sequence, then
// counts the tokens in it of all tiles of the sequence, so no block waits for another. Integer
// atomics commute (adding 2 leaves bit 0): the result does not depend on the order of tokens.
// Decode, 1 / 32 / 128 rows, H200: 1.4 / 1.6 / 1.9 us (log/sampling/mark_tokens_atomic.md).
#include "common/ptx.cuh"

constexpr int PIECE = ((VOCAB + PARTS - 1) / PARTS + 3) / 4 * 4;

extern "C" __global__ void __launch_bounds__(THREADS)
    mark(int* token_counts, const int* tokens, const int* last, const int* slots, const int* starts,
         const int* counts, const int* prompt_lens, int tiles) {
  wait_then_launch_dependents();
  const int first = blockIdx.y, slot = slots[first];
  if (slot < 0 || (first > 0 && slots[first - 1] == slot)) return;
  const int begin = blockIdx.x * PIECE, end = min(begin + PIECE, VOCAB);
  int* row = token_counts + (i64)slot * VOCAB;
  if (starts[first] == 0) {
    if (VOCAB % 4 == 0)
      for (int i = begin + threadIdx.x * 4; i < end; i += THREADS * 4)
        *(int4*)(row + i) = make_int4(0, 0, 0, 0);
    else
      for (int i = begin + threadIdx.x; i < end; i += THREADS) row[i] = 0;
    __syncthreads();
  }
  const int prompt = prompt_lens[slot];
  for (int tile = first; tile < tiles && slots[tile] == slot; ++tile)
    for (int t = threadIdx.x; t < min(counts[tile], TILE); t += THREADS) {
      int token = tokens[tile * TILE + t];
      if (token < 0) token = last[slot];
      if (token < begin || token >= end) continue;
      if (starts[tile] + t < prompt) atomicOr(row + token, 1);
      else atomicAdd(row + token, 2);
    }
}
