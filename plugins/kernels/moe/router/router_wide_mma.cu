// Router of a mixture for many tokens (prefill): a block has TOKENS tokens and every expert.
//
// Logits are one matrix product: tokens are the m16 tiles (A of mma.sync), experts with the shared
// gate behind them the n8 tiles (B). Eight warps, 2 of tokens times 4 of experts; slabs of 64 k
// come by cp.async into a ring of STAGES, 128 bytes a row, 16-byte columns swizzled by the row. A
// token's sums run over k in order, whatever is next to it. Then logits replace the ring in
// shared memory, of all tokens or of half of them after the other, and a warp chooses for a token
// at a time (router_choose.cuh).
// 8,192 tokens, 256 experts, top 8, a gate, H 2048, H200: 62 us (floor 11; log/moe/router.md).
// Macros: HIDDEN, EXPERTS, TOP_K, GATE, TOKENS (32, 64 or 96), SHARED_LIMIT (bytes of shared memory
// of a block).
#include "moe/router/router_choose.cuh"

constexpr int WIDTH = ((EXPERTS + GATE + 7) / 8 + 3) / 4;  // n8 tiles of a warp
constexpr int ROWS = 4 * WIDTH * 8;                        // of weights in a stage, padded
constexpr int HEIGHT = TOKENS / 32;                        // m16 tiles of a warp
constexpr int SLABS = (HIDDEN + 63) / 64;
constexpr int STAGE = (ROWS + TOKENS) * 128;  // bytes: weights, then tokens
constexpr int STAGES = SHARED_LIMIT / STAGE < 4 ? SHARED_LIMIT / STAGE : 4;
constexpr int PITCH = ROWS + 4;  // floats of a token's logits
constexpr int TURNS = TOKENS * PITCH * 4 <= STAGES * STAGE ? 1 : 2, TURN = TOKENS / TURNS;
static_assert(TURN * PITCH * 4 <= STAGES * STAGE, "logits fit where the ring was");

// Copies rows of one slab; a row that is not there, and k beyond HIDDEN, become zeros.
template <class From>
DEVICE void fetch(u32 to, int rows, int slab, From from) {
  for (int i = threadIdx.x; i < rows * 8; i += 256) {
    const int r = i / 8, c = i % 8, k = slab * 64 + c * 8;
    const u8* row = from(r);
    const bool there = row && (HIDDEN % 64 == 0 || k < HIDDEN);
    copy_async(to + r * 128 + ((c ^ (r & 7)) << 4), there ? row + 2 * k : from(0), there ? 16 : 0);
  }
}

DEVICE u32 place(u32 tile, int row, int column) {
  return tile + row * 128 + ((column ^ (row & 7)) << 4);
}

// One slab of 64 k.
DEVICE void multiply(float (&d)[HEIGHT][WIDTH][4], u32 weights, u32 tokens, int lane) {
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    u32 a[HEIGHT][4];
#pragma unroll
    for (int m = 0; m < HEIGHT; ++m)
      load_matrix(a[m], place(tokens, m * 16 + (lane & 15), 2 * s + (lane >> 4)));
#pragma unroll
    for (int n = 0; n < WIDTH; n += 2) {  // a last odd one reads rows that it does not use
      u32 b[4];
      load_matrix(b, place(weights, n * 8 + (lane & 7) + (lane >> 4) * 8, 2 * s + (lane >> 3 & 1)));
#pragma unroll
      for (int m = 0; m < HEIGHT; ++m) {
        mma_bf16(d[m][n], a[m], b[0], b[1]);
        if (n + 1 < WIDTH) mma_bf16(d[m][n + 1 < WIDTH ? n + 1 : n], a[m], b[2], b[3]);
      }
    }
  }
}

DYNAMIC_SHARED(moe_router_wide, (STAGES * STAGE));
extern "C" __global__ void __launch_bounds__(256, 1)
    moe_router_wide(const u8* x, const u8* w, const u8* gate, int* ids, float* weights,
                    int tokens) {
  extern __shared__ __align__(1024) u8 memory[];
  const u32 ring = shared_address(memory);
  const int warp = threadIdx.x >> 5, lane = lane_id(), token0 = blockIdx.x * TOKENS;
  const int tokens_at = warp / 4 * HEIGHT * 16, experts_at = warp % 4 * WIDTH * 8;
  const auto expert = [&](int r) {
    return r < EXPERTS ? w + (u64)r * HIDDEN * 2 : GATE && r == EXPERTS ? gate : nullptr;
  };
  const auto token = [&](int r) {
    return token0 + r < tokens ? x + (u64)(token0 + r) * HIDDEN * 2 : nullptr;
  };
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i)  // weights do not depend on the previous launch
    if (i < SLABS) fetch(ring + i * STAGE, ROWS, i, expert);
  wait_then_launch_dependents();
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    if (i < SLABS) fetch(ring + i * STAGE + ROWS * 128, TOKENS, i, token);
    commit_copies();
  }
  float d[HEIGHT][WIDTH][4] = {};
#pragma unroll 1
  for (int i = 0; i < SLABS; ++i) {
    wait_copies<STAGES - 2>();
    __syncthreads();
    const int next = i + STAGES - 1;
    if (next < SLABS) {
      const u32 to = ring + next % STAGES * STAGE;
      fetch(to, ROWS, next, expert), fetch(to + ROWS * 128, TOKENS, next, token);
    }
    commit_copies();
    const u32 at = ring + i % STAGES * STAGE;
    multiply(d, at + experts_at * 128, at + (ROWS + tokens_at) * 128, lane);
  }
  wait_copies<0>();
  float* logits = (float*)memory;
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    __syncthreads();
    const int before = turn * TURN;
    if (TURNS == 1 || warp / 4 == turn)
#pragma unroll
      for (int m = 0; m < HEIGHT; ++m)
#pragma unroll
        for (int n = 0; n < WIDTH; ++n) {
          float* to = logits + (tokens_at - before + m * 16 + (lane >> 2)) * PITCH;
          to += experts_at + n * 8 + (lane & 3) * 2;
          *(float2*)to = {d[m][n][0], d[m][n][1]};
          *(float2*)(to + 8 * PITCH) = {d[m][n][2], d[m][n][3]};
        }
    __syncthreads();
    for (int r = warp; r < TURN && token0 + before + r < tokens; r += 8) {
      const float* own = logits + r * PITCH;
      const u64 to = (u64)(token0 + before + r) * OUT;
      choose(own, [&] { return own[EXPERTS]; }, ids + to, weights + to);
    }
  }
}
