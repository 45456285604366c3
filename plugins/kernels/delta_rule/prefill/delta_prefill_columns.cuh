// The columns q|k|v of a prefill's tile: those of gated_delta_chunk's c, or with CONV (gdn_prefill)
// what causal_conv makes of the projection, with its bits and its state.
#pragma once
#include "delta_rule/prefill/delta_prefill_operands.cuh"
#include "delta_rule/replay_ring.cuh"
#define ALIGNED 1
#if !CONV
#define TAPS 2  // of no use
#endif
#include "delta_rule/causal_conv.cuh"

constexpr int WIDTH = 2 * HK * KD + HV * VD;
constexpr int VALUES_AT = 2 * HK * KD;    // first column of v
constexpr int HEAD_KEYS = 2 * TILE * KD;  // numbers of q and k, of a tile and key head

// Four columns of TOKENS tokens from `first` on of tile `row`; the others as of `convolve`.
template <int TOKENS, int AHEAD, class Ready, class Store>
DEVICE void make_columns(const Convolution& m, int row, int column, int first, Ready ready,
                         Store store) {
#if CONV
  convolve<TOKENS, AHEAD>(m, row, column, first, ready, store);
#else
  const int count = m.slots[row] < 0 ? 0 : m.counts[row];
  ready();
#pragma unroll
  for (int i = 0; i < TOKENS; i++)
    store(first + i, first + i < count
                         ? columns(m.x + ((i64)row * TILE + first + i) * m.x_width + column)
                         : Quad{});
#endif
}
