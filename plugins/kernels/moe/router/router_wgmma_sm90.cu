// Router of a mixture for many tokens (prefill), by wgmma: a cluster of two blocks has 128 tokens
// and every expert, each block half of k. sm_90a only.
//
// Tokens are wgmma's M (A in registers, 64 a warpgroup), experts its N, the shared gate an N of 8
// behind them. Slabs of 64 k come by cp.async into a ring of STAGES, swizzled by 128 bytes; half of
// k a block, since a slab of weights then serves twice as many tokens of what a multiprocessor
// reads through L2. Half of the sums go to the other block (distributed shared memory), which adds
// its own: two sums in the order of k, whatever is next to a token. A block then chooses for 64
// tokens, a warp a token (router_choose.cuh).
// 8,192 tokens, 256 experts, top 8, a gate, H 2048, H200: 31 us (floor 11;
// benchmarks/log/moe/router.md).
// Macros: HIDDEN, EXPERTS, TOP_K, GATE, STAGES.
#include "common/wgmma_sm90.cuh"
#include "moe/router/router_choose.cuh"

constexpr int TOKENS = 128, THREADS = 256;  // of a cluster, of a block
constexpr int SLABS = (HIDDEN + 63) / 64, HALF = (SLABS + 1) / 2;
constexpr int ROWS = EXPERTS + 8 * GATE;          // of weights in a stage
constexpr int STAGE = (ROWS + TOKENS) * 128;      // bytes: weights, then tokens
constexpr int PITCH = (ROWS + 23) / 32 * 32 + 8;  // floats of a token's logits, by banks
constexpr int PARTS = ROWS / 8 * 128 * 16;        // bytes of sums from the other block
static_assert(PARTS + 64 * PITCH * 4 <= STAGES * STAGE, "sums and logits fit where the ring was");

// What a thread copies of every slab: its 16-byte column of every 32nd row.
struct Copies {
  const u8 *w, *gate, *x;
  u32 token[TOKENS / 32];  // bytes from x; x is below 4 GiB
  u32 to;                  // in a tile

  DEVICE Copies(const u8* weights, const u8* gate_row, const u8* tokens_at, int token0,
                int tokens) {
    const int row = threadIdx.x / 8, column = threadIdx.x % 8;
    w = weights + (row * HIDDEN + column * 8) * 2, gate = gate_row + column * 16;
    x = tokens_at;
#pragma unroll
    for (int i = 0; i < TOKENS / 32; ++i)  // rows that are not there are the last one
      token[i] = (u32)(min(token0 + row + 32 * i, tokens - 1) * HIDDEN + column * 8) * 2;
    to = row * 128 + ((column ^ (row & 7)) << 4);
  }
  // k beyond HIDDEN become zeros.
  DEVICE void one(u32 place, const u8* from, int slab, bool there = true) const {
    const bool inside = HIDDEN % 64 == 0 || slab * 64 + (int)threadIdx.x % 8 * 8 < HIDDEN;
    copy_async(place, inside && there ? from + slab * 128 : from, inside && there ? 16 : 0);
  }
  DEVICE void weights(u32 stage, int slab) const {
#pragma unroll
    for (int i = 0; i < (EXPERTS + 31) / 32; ++i)
      if (EXPERTS % 32 == 0 || i * 32 + threadIdx.x / 8 < EXPERTS)
        one(stage + to + i * 4096, w + i * 32 * HIDDEN * 2, slab);
    if (GATE && threadIdx.x < 64) one(stage + EXPERTS * 128 + to, gate, slab, threadIdx.x < 8);
  }
  DEVICE void rows(u32 stage, int slab) const {
#pragma unroll
    for (int i = 0; i < TOKENS / 32; ++i)
      one(stage + ROWS * 128 + to + i * 4096, x + token[i], slab);
  }
};

// A lane's sums of its warpgroup's 64 tokens: all experts, and the gate with seven rows of zeros.
struct Sums {
  float experts[EXPERTS / 8][4] = {}, gate[1][4] = {};

  DEVICE float4 four(int n) const {
    const float (&d)[4] = n < EXPERTS / 8 ? experts[n] : gate[0];
    return {d[0], d[1], d[2], d[3]};
  }
};

// One slab of 64 k; a: the tokens' fragments, which stay as they are until the products are done.
DEVICE void multiply(Sums& d, u32 (&a)[4][4], u32 stage) {
  const int lane = lane_id(), row = threadIdx.x / 32 * 16 + (lane & 15);
#pragma unroll
  for (int s = 0; s < 4; ++s)
    load_matrix(a[s], stage + (ROWS + row) * 128 + (((2 * s + (lane >> 4)) ^ (row & 7)) << 4));
  wgmma_fence();
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    Wgmma<false, EXPERTS>::run(d.experts, a[s], wgmma_tile(stage) + 2 * s);
    if (GATE) Wgmma<false, 8>::run(d.gate, a[s], wgmma_tile(stage + EXPERTS * 128) + 2 * s);
  }
  wgmma_commit();
}

DYNAMIC_SHARED(moe_router_wgmma, (STAGES * STAGE));
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe_router_wgmma(const u8* x, const u8* w, const u8* gate, int* ids, float* weights,
                     int tokens) {
  extern __shared__ __align__(1024) u8 memory[];
  const u32 ring = uniform(shared_address(memory));
  const int part = blockIdx.x % 2, token0 = blockIdx.x / 2 * TOKENS;
  const int first = part * HALF, count = min(HALF, SLABS - first);
  const Copies copies(w, gate, x, token0, tokens);
#pragma unroll
  for (int i = 0; i < STAGES - 2; ++i)  // weights do not depend on the previous launch
    if (i < count) copies.weights(ring + i * STAGE, first + i);
  wait_then_launch_dependents();
#pragma unroll
  for (int i = 0; i < STAGES - 2; ++i) {
    if (i < count) copies.rows(ring + i * STAGE, first + i);
    commit_copies();
  }
  Sums d;
  u32 even[4][4], odd[4][4];
  const auto step = [&](u32(&a)[4][4], int i) {
    wait_copies<STAGES - 3>();
    fence_async();    // wgmma reads what this thread copied
    wgmma_wait<1>();  // of all but the slab before: the one before that is free, and `a`
    __syncthreads();
    multiply(d, a, ring + i % STAGES * STAGE);
    const int next = i + STAGES - 2;
    if (next < count) {
      const u32 to = ring + next % STAGES * STAGE;
      copies.weights(to, first + next), copies.rows(to, first + next);
    }
    commit_copies();
  };
#pragma unroll 1
  for (int i = 0; i < count; i += 2) {
    step(even, i);
    if (i + 1 < count) step(odd, i + 1);
  }
  wgmma_wait<0>();
  keep_order(d.experts), keep_order(d.gate);
  wait_copies<0>();
  cluster_meet();                       // neither block's ring is in use
  const int group = threadIdx.x / 128;  // block `group` chooses for this warpgroup's tokens
  float4* const sums = (float4*)memory + threadIdx.x % 128;
  float* const logits = (float*)(memory + PARTS);
  if (group != part)
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n) store_in_block(sums + n * 128, group, d.four(n));
  cluster_meet();
  const int warp = threadIdx.x / 32, lane = lane_id();
  if (group == part) {
    float* to = logits + (warp % 4 * 16 + lane / 4) * PITCH + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n, to += 8) {
      const float4 own = d.four(n), other = sums[n * 128];
      *(float2*)to = {own.x + other.x, own.y + other.y};
      *(float2*)(to + 8 * PITCH) = {own.z + other.z, own.w + other.w};
    }
  }
  __syncthreads();
#pragma unroll 1
  for (int r = warp; r < 64 && token0 + part * 64 + r < tokens; r += 8) {
    const float* own = logits + r * PITCH;
    const u64 to = (u64)(token0 + part * 64 + r) * OUT;
    choose(own, [&] { return own[EXPERTS]; }, ids + to, weights + to);
  }
}
