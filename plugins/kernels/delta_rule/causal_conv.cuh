// causal_conv of four neighbouring channels and TOKENS tokens of a tile, by one thread: for the op
// itself (causal_conv_fma.cu) and the delta rule's prefill (prefill/delta_prefill_columns.cuh).
//
// What is before a tile comes from the tile before it in x, or from the state's row `sources`
// (prefill). The state may be updated in place: only the first tile of a sequence reads it, and
// that tile's thread writes the new one, from the sequence's last tile in x; a tile that saves
// writes its own. DRAFTS: the state is a ring by position, of which a round writes its own columns
// only. A value is widened once, and rounded in pairs.
// TILE; macros: TAPS, DRAFTS, ALIGNED (rows of x start at a multiple of four columns).
#pragma once
#include "delta_rule/delta_rule.cuh"

constexpr bool PREFILL = TILE > 8;
constexpr int COLUMNS = DRAFTS ? TAPS + DRAFTS : TAPS - 1;  // of a slot's state

struct Convolution {  // what causal_conv is given, and its state's result
  const act* x;
  int x_width, channels;
  const float* weight;
  const act* state_in;
  act* state_out;
  const int *slots, *starts, *counts, *sources, *saves;
  int rows;
};

// Four neighbouring columns.
#if ACT_F32
using Quad = float4;
DEVICE Quad join(const act* p) { return {p[0], p[1], p[2], p[3]}; }
DEVICE void widen4(Quad x, float (&to)[4]) { to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w; }
DEVICE Quad narrow4(const float (&y)[4]) { return {y[0], y[1], y[2], y[3]}; }
#else
using Quad = uint2;
DEVICE Quad join(const act* p) { return {p[0] | (u32)p[1] << 16, p[2] | (u32)p[3] << 16}; }
DEVICE void widen4(Quad x, float (&to)[4]) {
  to[0] = low_bf16(x.x), to[1] = high_bf16(x.x), to[2] = low_bf16(x.y), to[3] = high_bf16(x.y);
}
DEVICE Quad narrow4(const float (&y)[4]) { return {pack_bf16(y[0], y[1]), pack_bf16(y[2], y[3])}; }
#endif
// Of x; its rows start anywhere unless ALIGNED.
DEVICE Quad columns(const act* p) { return ALIGNED ? *(const Quad*)p : join(p); }

// The j-th of the TAPS - 1 columns before position `start` > 0.
DEVICE Quad column_before(const act* state, int start, int j, int channels) {
#if DRAFTS
  const int position = start - TAPS + 1 + j;
  return position < 0 ? Quad{} : *(const Quad*)(state + (u32)position % COLUMNS * channels);
#else
  return *(const Quad*)(state + (i64)j * channels);
#endif
}
// The last columns of `count` tokens from position `start` on, each at its place.
DEVICE void keep_last(act* state, const act* tokens, int x_width, int start, int count,
                      int channels) {
  for (int t = max(0, count - COLUMNS); t < count; t++)
    *(Quad*)(state + (u32)(start + t) % COLUMNS * channels) = columns(tokens + (i64)t * x_width);
}

// Where a tile begins: its tokens in x, and the state that has the columns before them if no tile
// before it does.
struct Begin {
  const act *tokens, *state;
  int x_width, channels, start;
  bool continues;
};
// The state behind `end` of the tokens from the tile's first on. It may be `b.state`: a column is
// read before its place is written.
DEVICE void leave(act* kept, const Begin& b, int end) {
#pragma unroll 1
  for (int t = end - COLUMNS; t < end; t++) {
    const int place = DRAFTS ? (u32)(b.start + t + COLUMNS) % COLUMNS : t + COLUMNS;
    Quad column{};
    if (b.continues || t >= 0) column = columns(b.tokens + (i64)t * b.x_width);
    else if (b.start > 0) column = *(const Quad*)(b.state + (i64)place * b.channels);
    *(Quad*)(kept + (i64)(DRAFTS ? place : place - end) * b.channels) = column;
  }
}

// Tokens first … of tile `row`: `store(t, columns)` has zeros behind the last token; `ready` is
// called when what the first AHEAD need is asked for.
template <int TOKENS, int AHEAD, class Ready, class Store>
DEVICE void convolve(const Convolution& m, int row, int channel, int first, Ready ready,
                     Store store) {
  const int x_width = m.x_width, channels = m.channels;
  const int slot = m.slots[row], count = slot < 0 ? 0 : m.counts[row];
  const bool continues = TILE > 1 && row > 0 && slot >= 0 && m.slots[row - 1] == slot;
  const int start = m.starts[row];
  const bool fresh = slot < 0 || start == 0;
  const act* tokens = m.x + (i64)row * TILE * x_width + channel;
  const int source = PREFILL && !continues && !fresh ? m.sources[row] : slot;
  auto at = [&](int state) { return (i64)state * COLUMNS * channels + channel; };

  Begin begin{tokens, m.state_in + at(source), x_width, channels, start, continues};
  float wide[TAPS][4];
#pragma unroll
  for (int j = 0; j < TAPS - 1; j++) {
    Quad before{};
    if (first > 0 ? first < count : continues)
      before = columns(tokens + (i64)(first + j - TAPS + 1) * x_width);
    else if (first == 0 && !fresh) before = column_before(begin.state, start, j, channels);
    widen4(before, wide[j + 1]);
  }
  float w[4][TAPS];
#pragma unroll
  for (int j = 0; j < TAPS; j++) {  // 16 bytes at a time: a warp's words are 64 bytes apart
    const float4 four = __ldg((const float4*)(m.weight + channel * TAPS) + j);
    float* const to = w[0] + 4 * j;
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
  }
  Quad fetched[AHEAD];
  auto ask = [&](int i) {
    if (first + i < count) fetched[i % AHEAD] = columns(tokens + (i64)(first + i) * x_width);
  };
#pragma unroll
  for (int i = 0; i < AHEAD; i++) ask(i);
  ready();
#pragma unroll
  for (int i = 0; i < TOKENS; i++) {
    float y[4] = {};
#pragma unroll
    for (int j = 0; j < TAPS; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (j < TAPS - 1) wide[j][e] = wide[j + 1][e];
        else if (e == 0) widen4(fetched[i % AHEAD], wide[j]);
        y[e] = fmaf(w[e][j], wide[j][e], y[e]);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; e++) y[e] = __fdividef(y[e], 1.f + __expf(-y[e]));
    store(first + i, first + i < count ? narrow4(y) : Quad{});
    if (i + AHEAD < TOKENS) ask(i + AHEAD);
  }

  if (first > 0 || slot < 0) return;
  if (PREFILL && m.saves[row] >= 0) leave(m.state_out + at(m.saves[row]), begin, count);
  if (continues) return;
  int last = row;
  while (TILE > 1 && last + 1 < m.rows && m.slots[last + 1] == slot) last++;
  const int end = (last - row) * TILE + m.counts[last];  // tokens of the sequence in this launch
  if (DRAFTS && !PREFILL) keep_last(m.state_out + at(slot), tokens, x_width, start, end, channels);
  else leave(m.state_out + at(slot), begin, end);
}
