// gated_delta_scan: the second launch of both forms (delta_prefill_warps_mma.cu, …_wgmma_sm90.cu),
// its operands, and which sequences a block scans.
//
// prepare (delta_prefill_prepare.cuh), all tiles at once: for each value head the decays' sums G,
// P = (Q K^T) . D and T = (I + A)^-1. scan, tile after tile, on transposes:
//   R = beta V - (beta e^G) K S^T;  V' = T R;  O = e^G Q S^T + P V';
//   S^T <- e^Gc S^T + K^T (tail V')
// the reference's U - W S^T with T applied last, so that only T and P are stored between the
// launches. q and k stay bf16; their norms are factors of rows.
// The first tile's state is that of row `sources`, with RING caught up (delta_prefill_state.cuh); a
// sequence's last tile leaves its own in the slot, a tile that saves in that row too, and the ring
// there says that nothing is pending.
//
// A form defines THREADS (of a block) and RESIDENT (blocks a multiprocessor) before it includes
// this, and `scan_block`, what a block does, after it.
#pragma once
#include "delta_rule/prefill/delta_prefill_prepare.cuh"

#if STATE_BYTES == 4
using state_t = float;
#else
using state_t = u16;
#endif

struct Operands {       // keys to factors, and bases, as prepare leaves them
  Convolution columns;  // of v, where it is not among `values`
  const state_t* state_in;
  state_t* state_out;
  const int *slots, *starts, *counts, *sources, *saves;
  const u16 *keys, *values, *t, *p;
  const float* factors;
  u16* o;
  const float* ring_in;
  float* ring_out;
  const float* bases;
  int rows;
};

struct Sequence {  // rows begin to end, of which the last may have no token
  int begin, end;
  int slot;  // row of the states; negative: inert
  int last;  // tokens of the last row

  DEVICE int live() const { return end - (last == 0); }  // the row behind those with tokens
  DEVICE int valid(int row) const { return row + 1 < end ? TILE : last; }  // its tokens
};

// The first row of sequence number `sequence`, or `rows` beyond the last sequence.
DEVICE int sequence_begin(const int* slots, int rows, int sequence) {
  for (int base = 0; base < rows; base += 32) {
    const int i = base + threadIdx.x % 32;
    u32 cuts = __ballot_sync(~0u, i < rows && begins(slots, i));
    const int here = __popc(cuts);
    if (sequence < here) {
      while (sequence--) cuts &= cuts - 1;
      return base + __ffs(cuts) - 1;
    }
    sequence -= here;
  }
  return rows;
}

DEVICE u32 plain(u32 value) { return value; }
// Calls `scan` with this block's sequences. SAME: `uniform` where the compiler must know that all
// lanes have the same rows.
template <u32 (*SAME)(u32) = plain, class Scan>
DEVICE void each_sequence(const Operands& m, Scan scan) {
#pragma unroll 1
  for (int sequence = blockIdx.z;; sequence += gridDim.z) {
    const int begin = SAME(sequence_begin(m.slots, m.rows, sequence));
    if (begin == m.rows) return;
    const int end = SAME(sequence_begin(m.slots, m.rows, sequence + 1));
    const int slot = m.slots[begin];
    const int last = SAME(slot < 0 ? 0 : m.counts[end - 1]);
    scan(Sequence{begin, end, slot, last});
  }
}

DEVICE void scan_block(const Operands& m);

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    gated_delta_scan(const u16* x, int x_width, const float* conv_weight, const u16* conv_in,
                     u16* conv_out, const state_t* state_in, state_t* state_out, const int* slots,
                     const int* starts, const int* counts, const int* sources, const int* saves,
                     const u16* keys, const u16* values, const u16* t, const u16* p,
                     const float* factors, u16* o, const float* ring_in, float* ring_out,
                     const float* bases, int rows) {
  scan_block({{x, x_width, WIDTH, conv_weight, conv_in, conv_out, slots, starts, counts, sources,
               saves, rows},
              state_in,
              state_out,
              slots,
              starts,
              counts,
              sources,
              saves,
              keys,
              values,
              t,
              p,
              factors,
              o,
              ring_in,
              ring_out,
              bases,
              rows});
}
