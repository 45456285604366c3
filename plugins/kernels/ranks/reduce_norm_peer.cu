// A sum over ranks and what stands behind it in one launch: the parts of all ranks added, the
// residual added, RMSNorm -> bf16 and quantised copies. In the place of all_reduce and norm_quant.
//
// A block has a row at a time, in registers as norm_quant has it (VECS vectors of eight columns a
// thread, at a stride of THREADS) and summed in its order; parts are added as all_reduce adds them:
// so the bits are those of the two launches. x, residual, y, sum bf16 [rows, K]; weight f32. No
// launch writes the norm's weight, so it is read before the wait for the previous launch (PDL).
// What fusing gains: benchmarks/log/collectives.md.
// Macros besides those of row_quant.cuh: THREADS, VECS, EPS, RANKS, WAY (ONE_SHOT or PUSH: see
// all_reduce_peer.cu).
#include "common/early.cuh"
#include "common/row_quant.cuh"
#include "ranks/peers.cuh"
#include "ranks/pushed.cuh"

DEVICE void load_weight(const float* weight, int column, float (&w)[8]) {
  float4 a = *(const float4*)(weight + column), b = *(const float4*)(weight + column + 4);
  w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w, w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
}

#define COLUMN(v) ((v * THREADS + threadIdx.x) * 8)

// The sum and the residual, each rounded to bf16, and what its squares add; returns its bits.
DEVICE uint4 add_residual(float (&y)[8], uint4 residual, float& squares) {
  unpack8(pack8(y), y);
  float before[8];
  unpack8(residual, before);
#pragma unroll
  for (int e = 0; e < 8; e++) y[e] += before[e];
  const uint4 bits = pack8(y);
  unpack8(bits, y);
#pragma unroll
  for (int e = 0; e < 8; e++) squares += y[e] * y[e];
  return bits;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_norm(const uint4* x, const float* weight, const uint4* residual, const float* scales,
                uint4* __restrict__ sum, QUANT_OUTPUTS, int rows, const u64* peers, int rank) {
  __shared__ float room[THREADS / 32];
  const i64 row_vectors = K / 8;
  float w[VECS][8] = {};
#pragma unroll
  for (int v = 0; v < VECS; v++)
    if (COLUMN(v) < K) load_weight(weight, COLUMN(v), w[v]);
  float known[COPIES] = {};  // the scales: behind the sum they would be waited for
#if QUANT == 1 || QUANT == 3
#pragma unroll
  for (int i = 0; i < COPIES; i++) known[i] = scales[i];
#endif
#if RANKS > 1
  // The table of regions, before the wait too.
  const u64 own = peers[rank], theirs = threadIdx.x < RANKS ? peers[threadIdx.x] : 0;
  u64 regions[RANKS];
#pragma unroll
  for (int r = 0; r < RANKS; r++) regions[r] = peers[r];
#if WAY == PUSH
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
#if WAY == PUSH
      pushes.push(x[i], i, launch);
#else
      *shown(own, i, launch) = x[i];
#endif
    }
#if WAY == ONE_SHOT
  meet<RANKS>(own, theirs, rank, launch);
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
#elif WAY == PUSH
      pushes.add(x[i], i, launch, y[v]);
#else
      add_shown<RANKS>(regions, i, launch, y[v]);
#endif
      sum[i] = add_residual(y[v], other, squares);
    }
    const float root = rsqrtf(block_sum<THREADS>(squares, room) / K + (float)(EPS));
#pragma unroll
    for (int v = 0; v < VECS; v++) {
#pragma unroll
      for (int e = 0; e < 8; e++) y[v][e] *= root * w[v][e];
      emit(y[v], row, COLUMN(v), COLUMN(v) < K, known, QUANT_ARGS);
    }
    __syncthreads();  // before the room holds the next row's sums
  }
#if RANKS > 1
  count(own, launch, arrived);
#endif
}
