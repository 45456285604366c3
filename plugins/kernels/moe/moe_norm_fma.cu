// The last launch of a layer of experts, with the next norm: a token's experts are added, then the
// residual, then RMSNorm -> bf16 and quantised copies. In the place of moe_combine and norm_quant.
//
// One block a token, its row in registers as norm_quant has it (VECS vectors of eight columns a
// thread, at a stride of THREADS) and summed in its order; the experts in ascending index, as
// moe_combine adds them: so the bits are those of the two launches. parts f32 [tokens, K1, K];
// residual, sum bf16 [tokens, K]; weight f32. TOGETHER experts are loaded at once. ids, weights and
// the residual are older than the previous launch: they are read before the wait (PDL).
// Figures: experts of the 35B in all, H200: 21.2 / 49.5 / 108.0 / 169.0 us at 1 / 8 / 32 / 128
// tokens, 1 to 2 us less than apart (benchmarks/log/moe/moe_norm_fma.md).
// Macros besides those of row_quant.cuh: THREADS, VECS, EPS, K1 (experts a token).
#include "common/early.cuh"
#include "common/row_quant.cuh"

constexpr int MOST = THREADS > 512 ? 3 : THREADS > 256 ? 6 : 12;  // by the registers of a thread
constexpr int TOGETHER = K1 < MOST ? K1 : MOST;

DEVICE void fetch8(const float* from, float (&v)[8]) {
  const float4 a = __ldcg((const float4*)from), b = __ldcg((const float4*)from + 1);
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

// The places 0 … K1 - 1 of a token's experts in ascending index, and their weights in that order.
DEVICE void sort_experts(const int* ids, const float* weights, int* order, float* share) {
  for (int i = threadIdx.x; i < K1; i += THREADS) {
    const int id = ids[i];
    int rank = 0;
    for (int j = 0; j < K1; j++) rank += ids[j] < id || (ids[j] == id && j < i);
    order[rank] = i, share[rank] = weights[i];
  }
}

// sum += Σ share · part over the experts in `order`; `parts`: the token's, at this thread's column.
DEVICE void add_experts(const float* parts, const int* order, const float* share, float (&sum)[8]) {
#pragma unroll
  for (int first = 0; first < K1; first += TOGETHER) {
    float part[TOGETHER][8];
#pragma unroll
    for (int j = 0; j < TOGETHER; j++)
      if (first + j < K1) fetch8(parts + (i64)order[first + j] * K, part[j]);
#pragma unroll
    for (int j = 0; j < TOGETHER; j++) {
      if (first + j >= K1) break;
      const float by = share[first + j];
#pragma unroll
      for (int i = 0; i < 8; i++) sum[i] = __fmaf_rn(by, part[j][i], sum[i]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)  // else ptxas saves registers for more
    moe_norm(const int* ids, const float* weights, const float* parts, const u16* residual,
             const float* norm_weight, const float* scales, uint4* __restrict__ sum,
             QUANT_OUTPUTS) {
  __shared__ float scratch[THREADS / 32], share[K1];
  __shared__ int order[K1];
  const i64 row = blockIdx.x;
  sort_experts(ids + row * K1, weights + row * K1, order, share);
  float w[VECS][8] = {}, y[VECS][8] = {};
  uint4 other[VECS] = {};
#pragma unroll
  for (int v = 0; v < VECS; v++) {
    const int column = (v * THREADS + threadIdx.x) * 8;
    if (column >= K) continue;
    fetch8(norm_weight + column, w[v]);
    other[v] = __ldcg((const uint4*)(residual + row * K + column));
  }
  __syncthreads();
  wait_and_let_next_begin();
  float squares = 0.0f;
#pragma unroll
  for (int v = 0; v < VECS; v++) {
    const int column = (v * THREADS + threadIdx.x) * 8;
    if (column >= K) continue;
    add_experts(parts + row * K1 * K + column, order, share, y[v]);
    unpack8(pack8(y[v]), y[v]);
    sum[(row * K + column) / 8] = add_bf16(y[v], other[v]);
#pragma unroll
    for (int i = 0; i < 8; i++) squares += y[v][i] * y[v][i];
  }
  const float root = rsqrtf(block_sum<THREADS>(squares, scratch) / K + (float)(EPS));
  emit_normed<THREADS>(y, root, w, row, scales, QUANT_ARGS);
}
