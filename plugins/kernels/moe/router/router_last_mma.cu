// Router of a mixture: logits of all experts, the k greatest, their softmax, the shared gate.
//
// One launch. A block has an m16 tile of experts (the A of mma.sync) and 8 tokens (B); eight warps
// split k, in an order that does not depend on the tokens. Logits go to scratch memory in f32; the
// last block to arrive at its 8 tokens chooses for them, a warp a token, and resets the counter.
// Lanes read runs of eight k of weights and activations as stored: both sides permute k alike.
// 256 experts, H200: 5.4 / 6.1 / 6.3 / 8.6 / 9.9 us at 1 / 8 / 32 / 64 / 128 tokens; where clusters
// of eight exist router_cluster_sm90.cu is faster (benchmarks/log/moe/router.md).
// Macros: HIDDEN, EXPERTS, TOP_K, GATE (1: one more row, the shared expert's gate).
#include "common/numeric.cuh"

constexpr int ROWS = EXPERTS + GATE;
constexpr int LOGITS = (ROWS + 15) / 16 * 16;
constexpr int OUT = TOP_K + GATE;
constexpr int SLABS = (HIDDEN + 63) / 64;
constexpr int EACH = (SLABS + 7) / 8;
constexpr int LANES = (EXPERTS + 31) / 32;  // logits a lane

DEVICE uint4 run_of_eight(const u8* from, int k, bool there) {
  uint4 v = make_uint4(0, 0, 0, 0);
  if (there && (HIDDEN % 64 == 0 || k < HIDDEN)) v = __ldg((const uint4*)(from + 2 * k));
  return v;
}
// Greater logit first, then lower index; a NaN comes last but is an expert like any other.
DEVICE u64 rank_of(float x, int id) { return (u64)ordered_key_nan_last(x) << 32 | (u32)~id; }

DEVICE void choose(const float* logits, int* ids, float* weights) {
  const int lane = lane_id();
  float own[LANES];
#pragma unroll
  for (int i = 0; i < LANES; ++i) {
    const int id = i * 32 + lane;
    own[i] = id < EXPERTS ? __ldcg(logits + id) : 0.0f;
  }
  float mine = 0.0f, most = 0.0f;
  u64 below = ~0ull;
#pragma unroll 1
  for (int k = 0; k < TOP_K; ++k) {
    u64 best = 0;
    float value = 0.0f;
#pragma unroll
    for (int i = 0; i < LANES; ++i) {
      const int id = i * 32 + lane;
      const u64 rank = rank_of(own[i], id);
      if (id < EXPERTS && rank < below && rank > best) best = rank, value = own[i];
    }
    const u32 high = __reduce_max_sync(~0u, (u32)(best >> 32));
    const u32 low = __reduce_max_sync(~0u, (u32)(best >> 32) == high ? (u32)best : 0u);
    below = (u64)high << 32 | low;
    const u32 holder = __ballot_sync(~0u, best == below);
    value = __shfl_sync(~0u, value, __ffs(holder) - 1);
    if (k == 0) most = value;
    if (lane == k % 32) {
      ids[k] = (int)~low;
      mine = value;
    }
    if (k % 32 == 31 || k == TOP_K - 1) {
      const int slot = k - k % 32 + lane;
      if (slot <= k) weights[slot] = expf(mine - most);
    }
  }
  __syncwarp();
  float sum = 0.0f;
  for (int k = lane; k < TOP_K; k += 32) sum += weights[k];
  sum = warp_sum(sum);
  for (int k = lane; k < TOP_K; k += 32) weights[k] = __fdiv_rn(weights[k], sum);
  if (GATE && lane == 0) {
    ids[TOP_K] = EXPERTS;
    weights[TOP_K] = sigmoid(__ldcg(logits + EXPERTS));
  }
}

extern "C" __global__ void __launch_bounds__(256)
    moe_router(const u8* x, const u8* w, const u8* gate, int* ids, float* weights, float* logits,
               u32* arrived, int tokens) {
  __shared__ float4 parts[8][32];
  __shared__ u32 others;
  const int warp = threadIdx.x >> 5, lane = lane_id(), g = lane >> 2, t = lane & 3;
  const int row = blockIdx.x * 16 + g, token = blockIdx.y * 8 + g;
  const u8* rows[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int e = row + 8 * i;
    rows[i] = GATE && e == EXPERTS ? gate : w + (u64)min(e, EXPERTS - 1) * HIDDEN * 2;
  }
  uint4 a[EACH][2][2];
#pragma unroll
  for (int u = 0; u < EACH; ++u)  // weights do not depend on the previous launch
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        a[u][h][i] = run_of_eight(rows[i], (warp * EACH + u) * 64 + h * 32 + t * 8,
                                  row + 8 * i < ROWS && warp * EACH + u < SLABS);
  wait_then_launch_dependents();
  float d[4] = {};
  const u8* from = x + (u64)min(token, tokens - 1) * HIDDEN * 2;
#pragma unroll
  for (int u = 0; u < EACH; ++u)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int k = (warp * EACH + u) * 64 + h * 32 + t * 8;
      uint4 b = make_uint4(0, 0, 0, 0);
      if (token < tokens && warp * EACH + u < SLABS && (HIDDEN % 64 == 0 || k < HIDDEN))
        b = __ldcg((const uint4*)(from + 2 * k));
      const u32 even[4] = {a[u][h][0].x, a[u][h][1].x, a[u][h][0].y, a[u][h][1].y};
      const u32 odd[4] = {a[u][h][0].z, a[u][h][1].z, a[u][h][0].w, a[u][h][1].w};
      mma_bf16(d, even, b.x, b.y);
      mma_bf16(d, odd, b.z, b.w);
    }
  parts[warp][lane] = make_float4(d[0], d[1], d[2], d[3]);
  __syncthreads();
  if (warp == 0) {
    float4 v = parts[0][lane];
#pragma unroll
    for (int i = 1; i < 8; ++i) {
      const float4 p = parts[i][lane];
      v.x += p.x, v.y += p.y, v.z += p.z, v.w += p.w;
    }
    float* out = logits + (u64)(blockIdx.y * 8 + 2 * t) * LOGITS + row;
    __stcg(out, v.x), __stcg(out + 8, v.z);
    __stcg(out + LOGITS, v.y), __stcg(out + LOGITS + 8, v.w);
    __threadfence();
    __syncwarp();
    if (lane == 0) others = atomicAdd(arrived + blockIdx.y, 1);
  }
  __syncthreads();
  if (others != gridDim.x - 1) return;
  __threadfence();
  if (threadIdx.x == 0) arrived[blockIdx.y] = 0;
  const int mine = blockIdx.y * 8 + warp;
  if (mine < tokens)
    choose(logits + (u64)mine * LOGITS, ids + (u64)mine * OUT, weights + (u64)mine * OUT);
}
