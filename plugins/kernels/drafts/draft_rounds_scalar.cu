// The ops that begin and end a round: round_rows, shift_ids, store_ids and block_rows, a thread a
// token; accept_drafts, a thread a row. All loads of a thread but those of states are in flight
// together. The time is that of a launch and two memory latencies, so one form serves all sizes
// (benchmarks/log/sampling/draft_rounds.md).
// Macros: TILE (tokens of a row), THREADS, DRAFTS (of a slot; round_rows), VOCAB (accept_drafts);
// PAGE (tokens of one), PAGES (of a slot), IDS (vocabulary; store_ids); MASK (an id; block_rows).
#include "common/ptx.cuh"

#define INDEX (blockIdx.x * THREADS + threadIdx.x)

#ifdef DRAFTS
// The host's ids and starts if not negative, else those of the slot's states.
extern "C" __global__ void round_rows(const int* tokens, const int* last, const int* drafts,
                                      const int* positions, const int* slots, const int* starts,
                                      const int* counts, int* ids, int* row_starts, int* certain,
                                      int n) {
  wait_then_launch_dependents();
  const int at = INDEX, row = at / TILE, j = at % TILE;
  if (at >= n) return;
  const int slot = slots[row], count = counts[row];
  int id = tokens[at], start = starts[row];
  if (slot < 0 || j >= count) {
    id = 0;
  } else if (id < 0) {
    id = j ? drafts[(i64)slot * DRAFTS + j - 1] : last[slot];
  }
  ids[at] = id;
  if (j > 0) return;
  if (slot < 0) start = 0;
  else if (start < 0) start = positions[slot];
  row_starts[row] = start;
  certain[row] = slot < 0 ? 0 : min(count, 1);
}
#elif defined(VOCAB)
// Accepts drafts while each equals the token sampled before it; advances the slot's states past
// them. A slot has one row, so only one thread writes its states.
extern "C" __global__ void accept_drafts(const int* sampled, const int* ids, int*, int*, int*,
                                         const int* slots, const int* starts, const int* counts,
                                         int* accepted, int* draft_starts, int* token_counts,
                                         int* last, int* positions, int rows) {
  wait_then_launch_dependents();
  const int row = INDEX;
  if (row >= rows) return;
  const int slot = slots[row], start = starts[row], count = counts[row];
  int token[TILE], id[TILE];
#pragma unroll
  for (int j = 0; j < TILE; ++j) token[j] = sampled[row * TILE + j], id[j] = ids[row * TILE + j];
  if (slot < 0 || count <= 0) {
    accepted[row] = draft_starts[row] = 0;
    return;
  }
  int held = 1, next = token[0];
#pragma unroll
  for (int j = 1; j < TILE; ++j)
    if (held == j && j < count && id[j] == next) {
      held = j + 1, next = token[j];
      atomicAdd(token_counts + (i64)slot * VOCAB + id[j], 2);
    }
  accepted[row] = held, draft_starts[row] = start + held - 1;
  last[slot] = next, positions[slot] = start + held;
}
#elif defined(PAGE)
// The ids of tokens by position, -1 for those of images.
extern "C" __global__ void store_ids(const int* ids, const int* table, const int* slots,
                                     const int* starts, const int* counts, int* pages, int n) {
  wait_then_launch_dependents();
  const int at = INDEX, row = at / TILE, j = at % TILE;
  if (at >= n) return;
  const int slot = slots[row], position = starts[row] + j, id = ids[at];
  if (slot < 0 || j >= counts[row]) return;
  const i64 page = table[(i64)slot * PAGES + position / PAGE];
  pages[page * PAGE + position % PAGE] = (u32)id < IDS ? id : -1;
}
#elif defined(MASK)
// The slot's last token and masks behind it, from the slot's position on.
extern "C" __global__ void block_rows(const int* last, const int* positions, const int* slots,
                                      const int* counts, int* ids, int* block_starts,
                                      int* block_counts, int n) {
  wait_then_launch_dependents();
  const int at = INDEX, row = at / TILE;
  if (at >= n) return;
  const int slot = slots[row];
  const bool live = slot >= 0 && counts[row] > 0;
  ids[at] = !live ? 0 : at % TILE ? MASK : last[slot];
  if (at % TILE) return;
  block_starts[row] = live ? positions[slot] : 0;
  block_counts[row] = live ? TILE : 0;
}
#else
// The id after each token; after a row's last token the host's, or the token sampled there.
extern "C" __global__ void shift_ids(const int* tokens, const int* next_ids, const int* sampled,
                                     const int* counts, int* ids, int n) {
  wait_then_launch_dependents();
  const int at = INDEX, row = at / TILE, left = counts[min(at, n - 1) / TILE] - 1 - at % TILE;
  if (at >= n) return;
  int id = 0;
  if (left > 0) id = tokens[at + 1];
  if (left == 0) id = next_ids[row] < 0 ? sampled[row] : next_ids[row];
  ids[at] = id;
}
#endif
