// all_reduce and norm_quant in one launch: the sum over ranks, the residual added, RMSNorm -> bf16
// and quantised copies.
//
// A block has a row at a time in registers (VECS vectors of eight columns a thread, at a stride of
// THREADS). Parts are added in the order of all_reduce and squares in that of norm_quant, so the
// bits are those of the two launches. x, residual, y, sum bf16 [rows, K]; weight f32. No launch
// writes the norm's weight, so it is read before the wait for the previous launch (PDL).
// Gain of the fusion: benchmarks/log/collectives.md.
// Macros: those of row_quant.cuh; THREADS, VECS, EPS, RANKS, ALGORITHM (ONE_SHOT or PUSH of
// all_reduce_peer.cu).
#include "common/early.cuh"
#include "common/row_quant.cuh"
#include "ranks/peers.cuh"
#include "ranks/pushed.cuh"

#define COLUMN(v) ((v * THREADS + threadIdx.x) * 8)

extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_norm(const uint4* x, const float* weight, const uint4* residual, const float* scales,
                uint4* __restrict__ sum, QUANT_OUTPUTS, int rows, const u64* peers, int rank) {
  __shared__ float partial[THREADS / 32];
  const i64 row_vectors = K / 8;
  float w[VECS][8] = {};
#pragma unroll
  for (int v = 0; v < VECS; v++)
    if (COLUMN(v) < K) load8(weight + COLUMN(v), w[v]);
  float known[COPIES] = {};  // the scales, loaded before the sum to hide their latency
#if QUANT == 1 || QUANT == 3
#pragma unroll
  for (int i = 0; i < COPIES; i++) known[i] = scales[i];
#endif
#if RANKS > 1
  // No launch writes the table of regions: it is loaded before the wait.
  const u64 own = peers[rank], theirs = threadIdx.x < RANKS ? peers[threadIdx.x] : 0;
  u64 regions[RANKS];
#pragma unroll
  for (int r = 0; r < RANKS; r++) regions[r] = peers[r];
#if ALGORITHM == PUSH
  const Pushes<RANKS> pushes(peers, rank);
#endif
#endif
  wait_and_let_next_begin();
#if RANKS > 1
  const u32 launch = launches_so_far(own);
  for (int row = blockIdx.x; row < rows; row += gridDim.x)
#pragma unroll
    for (int v = 0; v < VECS; v++) {
      const i64 i = row * row_vectors + COLUMN(v) / 8;
      if (COLUMN(v) >= K) continue;
#if ALGORITHM == PUSH
      pushes.push(x[i], i, launch);
#else
      *published(own, i, launch) = x[i];
#endif
    }
#if ALGORITHM == ONE_SHOT
  sync_ranks<RANKS>(own, theirs, rank, launch);
#else
  __syncthreads();
#endif
  const u32 arrived = arrive(own);
#endif
  for (int row = blockIdx.x; row < rows; row += gridDim.x) {
    float y[VECS][8] = {}, squares = 0.0f;
#pragma unroll
    for (int v = 0; v < VECS; v++) {
      const i64 i = row * row_vectors + COLUMN(v) / 8;
      if (COLUMN(v) >= K) continue;
      const uint4 other = residual[i];
#if RANKS == 1
      unpack8(x[i], y[v]);
#elif ALGORITHM == PUSH
      pushes.add(x[i], i, launch, y[v]);
#else
      add_published<RANKS>(regions, i, launch, y[v]);
#endif
      unpack8(pack8(y[v]), y[v]);
      sum[i] = add_bf16(y[v], other);
#pragma unroll
      for (int e = 0; e < 8; e++) squares += y[v][e] * y[v][e];
    }
    const float root = rsqrtf(block_sum<THREADS>(squares, partial) / K + (float)(EPS));
    emit_normed<THREADS>(y, root, w, row, known, QUANT_ARGS);
    __syncthreads();  // before the next row's sums overwrite `partial`
  }
#if RANKS > 1
  count(own, launch, arrived);
#endif
}
