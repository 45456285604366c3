// The columns q|k|v of a prefill's tile: those of gated_delta_chunk's c, or with CONV (gdn_prefill)
// what causal_conv makes of the projection, with its bits and its state.
#pragma once
#include "delta_rule/prefill/delta_prefill_operands.cuh"
#include "delta_rule/replay_ring.cuh"
#define ALIGNED 1
#if !CONV
#define TAPS 2  // of no use
#endif
constexpr int SEGMENT = 4;  // tokens of a thread
#include "delta_rule/causal_conv.cuh"

constexpr int WIDTH = 2 * HK * KD + HV * VD;
constexpr int VALUES_AT = 2 * HK * KD;    // first column of v
constexpr int HEAD_KEYS = 2 * TILE * KD;  // numbers of q and k, of a tile and key head

// Four columns of tokens first … of tile `row`; `ready` and `store` as of `convolve`.
template <class Ready, class Store>
DEVICE void make_columns(const Convolution& m, int row, int column, int first, Ready ready,
                         Store store) {
#if CONV
  convolve(m, row, column, first, ready, store);
#else
  const int count = m.slots[row] < 0 ? 0 : m.counts[row];
  act4 fetched[SEGMENT];
#pragma unroll
  for (int i = 0; i < SEGMENT; i++)
    fetched[i] = first + i < count
                     ? columns(m.x + ((i64)row * TILE + first + i) * m.x_width + column)
                     : act4{};
  ready();
#pragma unroll
  for (int i = 0; i < SEGMENT; i++) store(first + i, fetched[i]);
#endif
}
