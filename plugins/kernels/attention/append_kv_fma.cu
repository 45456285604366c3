// Keys and values of tokens without queries into their pages: norm, RoPE, encode. A block has a
// token, its warps the token's heads of keys and of values in turn; the arithmetic is that of
// paged_kv.cuh, so the bits are those of the attention kernels' own append.
//
// What follows may fetch from pages before it waits (attention_decode_mma.cu), so this launch lets
// nothing begin before its end. Figures: benchmarks/log/sampling/draft_rounds.md.
// Macros besides paged_kv.cuh's (HEADS is 0): TOKENS (of a row), WARPS.
#include "attention/paged_kv.cuh"

// Grid: tokens.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    append_kv(const u16* kv, const float* k_norm, const float* inv_freq, const float* kv_scale,
              u8* keys, u8* values, const int* page_table, const int* slots, const int* starts,
              const int* counts, int most_pages) {
  int row = blockIdx.x / TOKENS, t = blockIdx.x % TOKENS;
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  float weight[VEC];
  load_floats(weight, k_norm + lane * VEC);
  wait_for_previous();
  int slot = slots[row];
  if (slot < 0 || t >= counts[row]) return;
  int at = starts[row] + t, page = page_table[(i64)slot * most_pages + at / PAGE];
  Turn turn = turn_of(at, inv_freq, lane);
  for (int item = warp; item < 2 * KV_HEADS; item += WARPS) {
    int which = item / KV_HEADS, head = item % KV_HEADS;
    Head h = load_head(kv + (i64)blockIdx.x * WIDTH + item * D, lane);
    if (which == 0) normalise(h, weight), rotate(h, turn, lane);
    Stored s = encode(h, KV_FP8 ? kv_scale[which] : 1.0f);
    put((which ? values : keys) + page_offset(page, head, at), s, lane);
  }
  __threadfence();
}
