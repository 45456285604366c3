// Router of a mixture of up to 256 experts: a cluster of eight blocks for 8 · COLUMNS tokens.
//
// A block has up to two m16 tiles of experts (the A of mma.sync); eight warps split k, in an order
// that does not depend on the tokens. Block t of the cluster chooses for token t of eight: logits
// reach it through distributed shared memory, so that nothing but x passes through L2. The shared
// expert's gate is a sum of eight eighths of k, one a block. Lanes read runs of eight k of weights
// and activations as stored: both sides permute k alike.
// 256 experts, top 8, a gate, H 2048, weights cold, H200: 3.5 / 3.8 / 3.9 / 4.9 / 6.2 us at 1 / 8 /
// 32 / 64 / 128 tokens (variants: benchmarks/log/moe/router.md).
// Macros: HIDDEN, EXPERTS, TOP_K, GATE (1: the shared expert's gate), BLOCK_TILES (m16 tiles a
// block), COLUMNS (n8 tiles of tokens).
#include "moe/router/router_choose.cuh"

constexpr int CLUSTER = 8;
constexpr int THREADS = BLOCK_TILES * 256;
constexpr int SLABS = HIDDEN / 64;
constexpr int EACH = (SLABS + 7) / 8;
constexpr int HELD = EACH < 4 ? EACH : 4;  // k-slabs of a warp in registers at once
static_assert(EACH == HELD || COLUMNS == 1, "weights are replaced where more do not fit");
static_assert(HIDDEN % 64 == 0 && EXPERTS % 16 == 0, "what the tactic refuses");

struct Shared {
  float4 parts[COLUMNS][BLOCK_TILES][8][32];
  float gates[COLUMNS][8];  // of this block's k, by token
  // From all blocks, of the tokens that this block chooses for:
  float logits[COLUMNS][LANES * 32];
  float gate_parts[COLUMNS][CLUSTER];
};

DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// To the same place in the shared memory of another block of the cluster.
DEVICE void store_in_block(float* place, u32 block, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address_in_block(place, block)), "f"(value)
               : "memory");
}

DEVICE float gate_logit(const float* parts) {
  float dot = parts[0];
#pragma unroll
  for (int i = 1; i < CLUSTER; ++i) dot += parts[i];
  return dot;
}

// This block's part of a gate, by one warp: eight k a lane in `run`, others as they come.
DEVICE void add_gate(float* sum, const u8* x, const uint4& run, bool there, int k, const u8* gate) {
  float a[8] = {}, b[8] = {}, dot = 0.0f;
  if (there) unpack8(run, a), unpack8(__ldcg((const uint4*)(x + 2 * k)), b);
#pragma unroll
  for (int i = 0; i < 8; ++i) dot = fmaf(a[i], b[i], dot);
#pragma unroll
  for (int more = 256; more < HIDDEN / 8; more += 256) {
    if (lane_id() * 8 + more >= HIDDEN / 8) break;
    unpack8(load_once(gate + 2 * (k + more)), a);
    unpack8(__ldcg((const uint4*)(x + 2 * (k + more))), b);
#pragma unroll
    for (int i = 0; i < 8; ++i) dot = fmaf(a[i], b[i], dot);
  }
  dot = warp_sum(dot);
  if (lane_id() == 0) *sum = dot;
}

// Rows `row` and `row` + 8 of a part's k-slabs from `first` on, as many as registers hold.
DEVICE void load_weights(uint4 (&a)[HELD][2][2], const u8* w, int row, int k0, int first,
                         int part) {
  const bool busy = row < EXPERTS;
#pragma unroll
  for (int u = 0; u < HELD; ++u)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        a[u][h][i] = make_uint4(0, 0, 0, 0);
        const u64 at = (u64)(row + 8 * i) * HIDDEN + k0 + (first + u) * 64 + h * 32;
        if (busy && first + u < EACH && part * EACH + first + u < SLABS)
          a[u][h][i] = load_once(w + 2 * at);
      }
}
// The k-slabs that are loaded once registers are free: into L2 meanwhile.
DEVICE void prefetch_rest(const u8* w, int row, int k0, int part) {
#pragma unroll
  for (int u = HELD; u < EACH; ++u)
    for (int i = 0; i < 2; ++i)
      if (row < EXPERTS && part * EACH + u < SLABS)
        prefetch(w + 2 * ((u64)(row + 8 * i) * HIDDEN + k0 + u * 64));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe_router_cluster(const u8* x, const u8* w, const u8* gate, int* ids, float* weights,
                       int tokens) {
  __shared__ Shared s;
  const int rank = blockIdx.x % CLUSTER, token0 = blockIdx.x / CLUSTER * 8 * COLUMNS;
  const int warp = threadIdx.x >> 5, part = warp % 8, lane = lane_id(), g = lane >> 2, t = lane & 3;
  const int row = (rank * BLOCK_TILES + warp / 8) * 16 + g, k0 = part * EACH * 64 + t * 8;
  uint4 a[HELD][2][2];
  load_weights(a, w, row, k0, 0, part);  // they do not depend on the previous launch
  prefetch_rest(w, row, k0, part);
  const int gate_k = rank * (HIDDEN / 8) + lane * 8;
  const bool gated = GATE && warp < 8 && lane * 8 < HIDDEN / 8;
  uint4 gate_run = make_uint4(0, 0, 0, 0);
  if (gated) gate_run = load_once(gate + 2 * gate_k);
  cluster_meet();  // all blocks are there to be written to
  wait_then_launch_dependents();
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    const u8* from = x + (u64)min(token0 + c * 8 + g, tokens - 1) * HIDDEN * 2;
    float d[4] = {};
#pragma unroll
    for (int first = 0; first < EACH; first += HELD) {
      uint4 b[HELD][2];
      if (first > 0) load_weights(a, w, row, k0, first, part);
#pragma unroll
      for (int u = first; u < min(first + HELD, EACH); ++u)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          b[u - first][h] = make_uint4(0, 0, 0, 0);
          if (part * EACH + u < SLABS)
            b[u - first][h] = __ldcg((const uint4*)(from + 2 * (k0 + u * 64 + h * 32)));
        }
      if (GATE && warp < 8 && first == 0)
        add_gate(&s.gates[c][warp], x + (u64)min(token0 + c * 8 + warp, tokens - 1) * HIDDEN * 2,
                 gate_run, gated, gate_k, gate);
#pragma unroll
      for (int u = first; u < min(first + HELD, EACH); ++u)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint4(&rows)[2] = a[u - first][h];
          const u32 even[4] = {rows[0].x, rows[1].x, rows[0].y, rows[1].y};
          const u32 odd[4] = {rows[0].z, rows[1].z, rows[0].w, rows[1].w};
          mma_bf16(d, even, b[u - first][h].x, b[u - first][h].y);
          mma_bf16(d, odd, b[u - first][h].z, b[u - first][h].w);
        }
    }
    s.parts[c][warp / 8][part][lane] = make_float4(d[0], d[1], d[2], d[3]);
  }
  __syncthreads();
#pragma unroll
  for (int c = 0; c < COLUMNS; ++c) {
    if (threadIdx.x <
        BLOCK_TILES * 128) {  // a logit a thread: lane i / 4 of the fragment, element i % 4
      const int m16 = threadIdx.x / 128, i = threadIdx.x % 128, element = i % 4;
      const float* const own = (const float*)s.parts[c][m16][0] + i;
      float v = own[0];
#pragma unroll
      for (int p = 1; p < 8; ++p) v += own[p * 128];
      const int expert = (rank * BLOCK_TILES + m16) * 16 + (i >> 4) + (element >> 1) * 8;
      if (expert < EXPERTS)
        store_in_block(s.logits[c] + expert, (i / 4 & 3) * 2 + (element & 1), v);
    } else if (GATE && threadIdx.x < BLOCK_TILES * 128 + 8) {
      const int token = threadIdx.x - BLOCK_TILES * 128;
      store_in_block(s.gate_parts[c] + rank, token, s.gates[c][token]);
    }
  }
  cluster_meet();
  const int mine = token0 + warp * 8 + rank;
  if (warp < COLUMNS && mine < tokens)
    choose(
        s.logits[warp], [&] { return gate_logit(s.gate_parts[warp]); }, ids + (u64)mine * OUT,
        weights + (u64)mine * OUT);
}
