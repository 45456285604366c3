// causal_conv: depthwise convolution over the first `channels` columns of x, then SiLU.
//
// Grid (channels / 512, tiles, segments): a thread owns four neighbouring channels of SEGMENT
// tokens of a tile and slides over them (causal_conv.cuh, with its macros). A prefill's is part of
// gdn_prefill where that is fused (prefill/delta_prefill_columns.cuh).
// More macros: TILE, SEGMENT, BLOCKS, if given (of a multiprocessor).
// 8192 tokens of 10240 channels, H200: 157 us, floor 78. Measured variants:
// benchmarks/log/delta_rule/causal_conv_fma.md.
#include "delta_rule/causal_conv.cuh"

#ifndef BLOCKS
#define BLOCKS (TILE == 1 ? 10 : 1)
#endif

extern "C" __global__ void __launch_bounds__(128, BLOCKS)
    causal_conv(const act* x, int x_width, int channels, const float* weight, const act* state_in,
                act* state_out, const int* slots, const int* starts, const int* counts,
                const int* sources, const int* saves, act* __restrict__ c, int rows) {
  const int row = blockIdx.y, channel = (blockIdx.x * 128 + threadIdx.x) * 4;
  wait_then_launch_dependents();
  if (channel >= channels) return;
  act* const to = c + (i64)row * TILE * channels + channel;
  convolve<SEGMENT, SEGMENT>(
      {x, x_width, channels, weight, state_in, state_out, slots, starts, counts, sources, saves,
       rows},
      row, channel, blockIdx.z * SEGMENT, [] {},
      [&](int t, const Quad& y) { *(Quad*)(to + (i64)t * channels) = y; });
}
