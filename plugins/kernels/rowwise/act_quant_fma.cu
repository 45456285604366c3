// Element-wise activation, then bf16 and quantised copies: silu_mul, sigmoid_gate, act_quant, and
// (ACT 0) the stand-alone quantisers.
//
// x [rows, X] bf16; thread (chunk, row) computes eight neighbouring columns of y [rows, K]:
//   ACT 0: y = x            ACT 1: y = silu(x[:K]) · x[K:2K]
//   ACT 2: y = x · sigmoid(gate), gates in qkv [rows, QKV] at 2·HEAD_DIM·head + HEAD_DIM
// Bound by bandwidth: a 16-byte load per operand and a store, no shared memory. Of fp8_token a
// block has a row, VECS times eight columns a thread, kept as bf16 so that BLOCKS share a
// multiprocessor; of few long rows a cluster of PARTS blocks.
// 1 / 32 / 128 / 1024 rows of 2 x 17408, H200: fp8 1.1 / 2.2 / 2.8 / 21.7 us, nvfp4 1.2 / 3.5 / 4.6
// / 31.2 (variants: benchmarks/log/rowwise/act_quant_fma.md).
#include "common/early.cuh"
#include "common/row_quant.cuh"

// What eight columns of y are made of: x, and up or the gate.
struct Eights {
  uint4 x, other;
};
DEVICE Eights load(const u16* x, const u16* qkv, i64 row, int column, bool live) {
  Eights v = {};
  v.x = load_if16(live, x + row * (ACT == 1 ? 2 * K : K) + column);
#if ACT == 1
  v.other = load_if16(live, x + row * 2 * K + K + column);
#elif ACT == 2
  v.other = load_if16(live, qkv + row * QKV + column + (column / HEAD_DIM + 1) * HEAD_DIM);
#endif
  return v;
}
DEVICE uint4 activated(const Eights& v) {
#if ACT == 0
  return v.x;
#else
  float y[8], other[8];
  unpack8(v.x, y);
  unpack8(v.other, other);
#pragma unroll
  for (int i = 0; i < 8; i++)
    y[i] = ACT == 1 ? fast_silu(y[i]) * other[i] : y[i] * fast_sigmoid(other[i]);
  return pack8(y);
#endif
}

#if QUANT == 4
constexpr int GROUPS = (VECS + 3) / 4;
constexpr int TOGETHER = (VECS + GROUPS - 1) / GROUPS;  // that are loaded at once
DYNAMIC_SHARED(act_quant, THREADS / 32 * 4 + 4);
#endif
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    act_quant(const u16* x, const u16* qkv, const float* scales, QUANT_OUTPUTS) {
  const i64 row = blockIdx.y;
#if QUANT == 4
  extern __shared__ __align__(16) u8 memory[];  // a word a warp, and one
  uint4 y[VECS];
  const int first = ((PARTS > 1 ? blockIdx.x : 0) * THREADS + threadIdx.x) * 8;
  constexpr int STEP = PARTS * THREADS * 8;  // columns from a thread's eight to its next
  const auto live = [&](int v) { return (v + 1) * STEP <= K || first + v * STEP < K; };
  wait_and_let_next_begin();
#pragma unroll
  for (int from = 0; from < VECS; from += TOGETHER) {
    Eights v[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; i++)
      if (from + i < VECS) v[i] = load(x, qkv, row, first + (from + i) * STEP, live(from + i));
#pragma unroll
    for (int i = 0; i < TOGETHER; i++)
      if (from + i < VECS) y[from + i] = activated(v[i]);
  }
  const float token = token_scale<THREADS>(y, (u32*)memory);
#pragma unroll
  for (int v = 0; v < VECS; v++) emit(y[v], row, first + v * STEP, live(v), &token, QUANT_ARGS);
#if PARTS > 1
  cluster_meet();  // the others have read this block's largest
#endif
#else
  const int column = (blockIdx.x * THREADS + threadIdx.x) * 8;
  const bool live = column < K;
  wait_and_let_next_begin();
  emit(activated(load(x, qkv, row, column, live)), row, column, live, scales, QUANT_ARGS);
#endif
}
