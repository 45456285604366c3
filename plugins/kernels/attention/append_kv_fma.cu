// Appends keys and values of tokens without queries to their pages: norm, RoPE, encode. A block has
// a token; its warps take the heads of keys and of values in turn. The arithmetic is that of
// attention_kv_pages.cuh, so the bits are those that the attention kernels append.
//
// The next launch may read pages before it waits (attention_decode_mma.cu), so this launch does not
// let it begin early. Figures: benchmarks/log/sampling/draft_rounds.md.
// Macros: those of attention_kv_pages.cuh (HEADS is 0); TOKENS (of a row), WARPS.
#include "attention/attention_kv_pages.cuh"

// Grid: tokens.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    append_kv(const u16* kv, const float* k_norm, const float* inv_freq, const int* rope_offsets,
              const float* kv_scale, u8* keys, u8* values, const int* page_table, const int* slots,
              const int* starts, const int* counts, int most_pages) {
  int row = blockIdx.x / TOKENS, t = blockIdx.x % TOKENS;
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  float weight[VEC];
  load_floats(weight, k_norm + lane * VEC);
  wait_for_previous();
  int slot = slots[row];
  if (slot < 0 || t >= counts[row]) return;
  int at = starts[row] + t, page = page_table[(i64)slot * most_pages + at / PAGE];
  Rotation rotation = rotation_at(place_of<TOKENS>(rope_offsets, row, t, at), inv_freq, lane);
  for (int item = warp; item < 2 * KV_HEADS; item += WARPS) {
    int which = item / KV_HEADS, head = item % KV_HEADS;
    Head h = load_head(kv + (i64)blockIdx.x * WIDTH + item * D, lane);
    if (which == 0) normalise(h, weight), rotate(h, rotation, lane);
    Stored s = encode(h, KV_FP8 ? kv_scale[which] : 1.0f);
    put((which ? values : keys) + page_offset(page, head, at), s, lane);
  }
  __threadfence();
}
