// Attention of an image's patches by mma.sync, after `vision_turn` (vision_attention_turn_fma.cu):
// an online softmax over tiles of keys (FlashAttention-2).
//
// A block has 128 queries of a head, 16 a warp, in registers. TMA bulk copies bring tiles of keys
// and values, two of each in shared memory; while a block waits, another one of the
// multiprocessor has products. Tiles begin at multiples of KEYS for any query.
// Figures: log/vision/vision_attention.md.
// Macros: those of vision_attention_tiles.cuh.
#include "vision/vision_attention_tiles.cuh"

constexpr int WARPS = 8, THREADS = 32 * WARPS, STAGES = 2;
constexpr int BLOCKS = PANELS > 5 ? 1 : 2;  // of a multiprocessor, by a thread's registers
DYNAMIC_SHARED(vision_attend, STAGES * 2 * TILE);

// One head's tiles.
struct Source {
  const u8 *keys, *values;
  i64 before;  // bytes of other heads
  u8* to;      // of shared memory
  u64* full;   // [STAGES]

  // By one thread.
  DEVICE void load(int tile) const {
    const int stage = tile % STAGES;
    const i64 at = before + tile * TILE;
    u8* const place = to + stage * 2 * TILE;
    barrier_expect(&full[stage], 2 * TILE);
    bulk_load(place, keys + at, TILE, &full[stage]);
    bulk_load(place + TILE, values + at, TILE, &full[stage]);
  }
};

// The warp's queries as operands. `tile`: their tile, `row`: the first there.
DEVICE void load_queries(u32 (&q)[PANELS][4], const u8* tile, int row, int lane) {
#pragma unroll
  for (int panel = 0; panel < PANELS; panel++) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 at = place<QUERIES>(row + lane / 4 + (i & 1) * 8, 2 * panel + (i >> 1));
      q[panel][i] = *reinterpret_cast<const u32*>(tile + at + lane % 4 * 4);
    }
  }
}

// One tile. `keys`, `values`: the lane's addresses of matrices.
template <bool MASKED>
DEVICE void attend(Softmax& x, const u32 (&q)[PANELS][4], u32 keys, u32 values, int left) {
#pragma unroll
  for (int n = 0; n < KEYS / 16; n++) {
#pragma unroll
    for (int i = 0; i < 4; i++) x.s[2 * n][i] = x.s[2 * n + 1][i] = 0.0f;
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
      u32 r[4];
      load_matrix(r, keys + panel * (KEYS * 32) + n * 512);
      mma_bf16(x.s[2 * n], q[panel], r[0], r[1]);
      mma_bf16(x.s[2 * n + 1], q[panel], r[2], r[3]);
    }
  }
  weigh<MASKED>(x, left);
  rescale(x);
#pragma unroll
  for (int n = 0; n < KEYS / 16; n++) {
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++) {
      u32 r[4];
      load_matrix_transposed(r, values + panel * (KEYS * 32) + n * 512);
      mma_bf16(x.o[2 * panel], x.p[n], r[0], r[1]);
      mma_bf16(x.o[2 * panel + 1], x.p[n], r[2], r[3]);
    }
  }
}

// Grid: (rows / 128, heads).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    vision_attend(const u8* queries, const u8* keys, const u8* values, const int* live, u16* y,
                  int rows) {
  extern __shared__ __align__(1024) u8 shared[];
  __shared__ u64 full[STAGES];
  const int head = blockIdx.y, warp = threadIdx.x >> 5, lane = lane_id();
  const int first = blockIdx.x * 16 * WARPS + 16 * warp;  // the warp's first query
  const i64 before = (i64)head * rows * ROW;
  const Source source{keys, values, before, shared, full};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(&full[i], 1);
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_previous();
  const int count = live[0], tiles = (count + KEYS - 1) / KEYS;
  if ((int)blockIdx.x * 16 * WARPS >= count) return;
  if (threadIdx.x == 0) {
    for (int i = 0; i < min(STAGES, tiles); i++) source.load(i);
  }
  u32 q[PANELS][4];
  load_queries(q, queries + before + (i64)(first / QUERIES) * QUERY_TILE, first % QUERIES, lane);
  const u32 base = shared_address(shared);
  const u32 key = base + place<KEYS>((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
  const u32 value = base + TILE + place<KEYS>(lane & 15, lane >> 4);
  Softmax x;
  begin(x);
  int i = 0;
#pragma unroll 1
  for (; i < tiles - 1; i++) {
    const u32 stage = i % STAGES * 2 * TILE;
    barrier_wait(&full[i % STAGES], i / STAGES & 1);
    attend<false>(x, q, key + stage, value + stage, KEYS);
    __syncthreads();
    if (threadIdx.x == 0 && i + STAGES < tiles) source.load(i + STAGES);
  }
  const u32 stage = i % STAGES * 2 * TILE;
  barrier_wait(&full[i % STAGES], i / STAGES & 1);
  const int end = live[0];  // again, and again the warp: few registers
  attend<true>(x, q, key + stage, value + stage, end - i * KEYS);
  store(y, x, blockIdx.y, (blockIdx.x * WARPS + (forget(threadIdx.x) >> 5)) * 16, end);
}
