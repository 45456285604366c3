// causal_conv: depthwise convolution over the first `channels` columns of x, then SiLU.
//
// Grid (channels / 512, tiles, segments): a thread owns four neighbouring channels of SEGMENT
// tokens of a tile and slides over them; what is before a tile comes from the tile before it in
// x, or from the state's row `sources` (prefill). The state may be updated in place: only the first
// tile of a sequence reads it, and that tile's thread writes the new one, from the sequence's last
// tile in x; a tile that saves writes its own. DRAFTS: the state is a ring by position, of which a
// round writes its own columns only.
// Macros: TILE, TAPS, DRAFTS, SEGMENT, ALIGNED (rows of x start at a multiple of four columns),
// WORDS (bf16 is widened once and rounded by pairs; the same bits, a seventh less time), BLOCKS, if
// given (of a multiprocessor).
// 8192 tokens of 10240 channels, H200: 149 to 190 us, floor 78. Measured variants:
// benchmarks/log/delta_rule/causal_conv_fma.md.
#include "delta_rule/delta_rule.cuh"

#ifndef BLOCKS
#define BLOCKS (TILE == 1 ? 10 : 1)
#endif

// Four neighbouring columns of x; its rows start anywhere unless ALIGNED.
DEVICE act4 columns(const act* p) {
#if ALIGNED
  return *(const act4*)p;
#else
  return {p[0], p[1], p[2], p[3]};
#endif
}

#if WORDS
static_assert(!ACT_F32 && ALIGNED, "what the tactic refuses");
DEVICE void widen4(const uint2& pairs, float (&to)[4]) {
  to[0] = low_bf16(pairs.x), to[1] = high_bf16(pairs.x);
  to[2] = low_bf16(pairs.y), to[3] = high_bf16(pairs.y);
}

// Tokens first … of the tile, those from `count` on zeros; `window`: what is before them.
DEVICE void convolve_words(act* to, const act* tokens, int x_width, int channels,
                           const act4 (&window)[TAPS], const float (&w)[4][TAPS], int first,
                           int count) {
  uint2 fetched[SEGMENT];
#pragma unroll
  for (int i = 0; i < SEGMENT; i++)
    if (first + i < count) fetched[i] = *(const uint2*)(tokens + (i64)(first + i) * x_width);
  float wide[TAPS][4];
#pragma unroll
  for (int j = 1; j < TAPS; j++) widen4(*(const uint2*)&window[j], wide[j]);
#pragma unroll
  for (int i = 0; i < SEGMENT; i++) {
    float y[4] = {};
#pragma unroll
    for (int j = 0; j < TAPS; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (j < TAPS - 1) wide[j][e] = wide[j + 1][e];
        else if (e == 0) widen4(fetched[i], wide[j]);
        y[e] = fmaf(w[e][j], wide[j][e], y[e]);
      }
#pragma unroll
    for (int e = 0; e < 4; e++) y[e] = __fdividef(y[e], 1.f + __expf(-y[e]));
    const bool there = first + i < count;
    *(uint2*)(to + (i64)(first + i) * channels) = {there ? pack_bf16(y[0], y[1]) : 0,
                                                   there ? pack_bf16(y[2], y[3]) : 0};
  }
}
#endif

constexpr bool PREFILL = TILE > 8;
constexpr int KEPT = DRAFTS ? TAPS + DRAFTS : TAPS - 1;  // columns of a slot's state

// The j-th of the TAPS - 1 columns before position `start` > 0.
DEVICE act4 column_before(const act* state, int start, int j, int channels) {
#if DRAFTS
  const int position = start - TAPS + 1 + j;
  return position < 0 ? act4{} : *(const act4*)(state + (u32)position % KEPT * channels);
#else
  return *(const act4*)(state + (i64)j * channels);
#endif
}
// The last columns of `count` tokens from position `start` on, each at its place.
DEVICE void keep_last(act* state, const act* tokens, int x_width, int start, int count,
                      int channels) {
  for (int t = max(0, count - KEPT); t < count; t++)
    *(act4*)(state + (u32)(start + t) % KEPT * channels) = columns(tokens + (i64)t * x_width);
}

// Where a tile begins: its tokens in x, the columns before them, and the state that has them if no
// tile before it does.
struct Begin {
  const act *tokens, *state;
  int x_width, channels, start;
  bool continues;
  act4 old[TAPS - 1];
};
// The state behind `end` of the tokens from the tile's first on.
DEVICE void leave(act* kept, const Begin& b, int end) {
#if DRAFTS
#pragma unroll 1
  for (int t = end - KEPT; t < end; t++) {
    const int place = (u32)(b.start + t + KEPT) % KEPT;
    act4 column{};
    if (b.continues || t >= 0) column = columns(b.tokens + (i64)t * b.x_width);
    else if (b.start > 0) column = *(const act4*)(b.state + (i64)place * b.channels);
    *(act4*)(kept + (i64)place * b.channels) = column;
  }
#else
#pragma unroll
  for (int j = 0; j < TAPS - 1; j++) {
    const int t = end - (TAPS - 1) + j;
    act4 column{};
    if (t >= 0) column = columns(b.tokens + (i64)t * b.x_width);
#pragma unroll
    for (int i = 0; i < TAPS - 1; i++)
      if (t == i - (TAPS - 1)) column = b.old[i];
    *(act4*)(kept + (i64)j * b.channels) = column;
  }
#endif
}

extern "C" __global__ void __launch_bounds__(128, BLOCKS)
    causal_conv(const act* x, int x_width, int channels, const float* weight, const act* state_in,
                act* state_out, const int* slots, const int* starts, const int* counts,
                const int* sources, const int* saves, act* __restrict__ c, int rows) {
  const int row = blockIdx.y, first = blockIdx.z * SEGMENT;
  const int channel = (blockIdx.x * 128 + threadIdx.x) * 4;
  wait_for_previous();
  launch_dependents();
  if (channel >= channels) return;
  const int slot = slots[row], count = slot < 0 ? 0 : counts[row];
  const bool continues = TILE > 1 && row > 0 && slot >= 0 && slots[row - 1] == slot;
  const bool fresh = slot < 0 || starts[row] == 0;
  const act* tokens = x + (i64)row * TILE * x_width + channel;
  const int source = PREFILL && !continues && !fresh ? sources[row] : slot;
  auto at = [&](int state) { return (i64)state * KEPT * channels + channel; };

  Begin begin{tokens, state_in + at(source), x_width, channels, starts[row], continues};
  act4(&old)[TAPS - 1] = begin.old;
#pragma unroll
  for (int j = 0; j < TAPS - 1; j++) {
    if (continues) old[j] = columns(tokens + (i64)(j - TAPS + 1) * x_width);
    else old[j] = fresh ? act4{} : column_before(begin.state, starts[row], j, channels);
  }
  act4 window[TAPS];
#pragma unroll
  for (int j = 0; j < TAPS - 1; j++)
    window[j + 1] = first == 0      ? old[j]
                    : first < count ? columns(tokens + (i64)(first + j - TAPS + 1) * x_width)
                                    : act4{};
  float w[4][TAPS];
#pragma unroll
  for (int j = 0; j < TAPS; j++) {  // 16 bytes at a time: a warp's words are 64 bytes apart
    const float4 four = __ldg((const float4*)(weight + channel * TAPS) + j);
    float* const to = w[0] + 4 * j;
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
  }

  act* to = c + (i64)row * TILE * channels + channel;
#if WORDS
  convolve_words(to, tokens, x_width, channels, window, w, first, count);
#else
  act4 fetched[SEGMENT];
#pragma unroll
  for (int i = 0; i < SEGMENT; i++)
    if (first + i < count) fetched[i] = columns(tokens + (i64)(first + i) * x_width);
#pragma unroll
  for (int i = 0; i < SEGMENT; i++) {
    const int t = first + i;
    act4 result{};
#pragma unroll
    for (int j = 0; j < TAPS - 1; j++) window[j] = window[j + 1];
    if (t < count) {
      window[TAPS - 1] = fetched[i];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float y = 0.f;
#pragma unroll
        for (int j = 0; j < TAPS; j++) y = fmaf(w[e][j], widen(window[j].v[e]), y);
        result.v[e] = narrow(__fdividef(y, 1.f + __expf(-y)));
      }
    }
    *(act4*)(to + (i64)t * channels) = result;
  }
#endif

  if (first > 0 || slot < 0) return;
  if (PREFILL && saves[row] >= 0) leave(state_out + at(saves[row]), begin, count);
  if (continues) return;
  int last = row;
  while (TILE > 1 && last + 1 < rows && slots[last + 1] == slot) last++;
  const int end = (last - row) * TILE + counts[last];  // tokens of the sequence in this launch
  if (DRAFTS && !PREFILL)
    keep_last(state_out + at(slot), tokens, x_width, starts[row], end, channels);
  else leave(state_out + at(slot), begin, end);
}
