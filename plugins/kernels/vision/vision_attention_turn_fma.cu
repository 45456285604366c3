// Queries, keys and values of the vision tower's attention as tiles (vision_attention_tiles.cuh):
// q and k turned by the patch's row and column, q also times log2(e) / sqrt(D).
//
// A block has eight patches; 16 neighbouring threads write 256 bytes. Rows of the last live tile
// of keys beyond `live` become zeros; later rows are not written. Figures:
// log/vision/vision_attention.md.
// Macros: those of vision_attention_tiles.cuh.
#include "vision/vision_attention_tiles.cuh"

constexpr int PATCHES = 8, THREADS = 256, HALF = D / 2;
constexpr int ITEMS = 3 * HEADS * PANELS * PATCHES * 2;  // chunks of 16 bytes

// Byte offset of a patch's chunk among the tiles of a head.
template <int ROWS>
DEVICE i64 tiled(int patch, int chunk) {
  return (i64)(patch / ROWS) * (ROWS * ROW) + place<ROWS>(patch % ROWS, chunk);
}

DEVICE void load4(float (&x)[4], const u16* from) {
  const uint2 v = *reinterpret_cast<const uint2*>(from);
  x[0] = low_bf16(v.x), x[1] = high_bf16(v.x), x[2] = low_bf16(v.y), x[3] = high_bf16(v.y);
}

// Dimensions d … d + 7 of a head, turned, times `scale`. The partner is half a head away.
DEVICE uint4 turned(const u16* head, int d, const float2* turns, float scale) {
  float y[8];
#pragma unroll
  for (int k = 0; k < 8; k += 4) {
    const bool lower = d + k < HALF;
    const int at = lower ? d + k : d + k - HALF;
    float x[4], other[4];
    load4(x, head + d + k), load4(other, head + at + (lower ? HALF : 0));
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float2 turn = turns[at + e];
      y[k + e] = fmaf(x[e], turn.x, other[e] * (lower ? -turn.y : turn.y)) * scale;
    }
  }
  return pack8(y);
}

// Grid: `rows` / 8. queries, keys, values: [HEADS, rows / rows of a tile] tiles.
extern "C" __global__ void __launch_bounds__(THREADS)
    vision_turn(const u16* qkv, const int* coords, const float* inv_freq, const int* live,
                u8* queries, u8* keys, u8* values, int rows) {
  __shared__ float2 turns[PATCHES][HALF];
  wait_for_previous();
  const int first = blockIdx.x * PATCHES, count = live[0];
  if (first >= (count + KEYS - 1) / KEYS * KEYS) return;
  for (int i = threadIdx.x; i < PATCHES * HALF; i += THREADS) {
    const int row = i / HALF, at = i % HALF, column = at >= HALF / 2;
    if (first + row >= count) break;
    const float where = (float)coords[2 * (first + row) + column];
    const float angle = reduced_angle(__fmul_rn(where, inv_freq[at - column * (HALF / 2)]));
    turns[row][at].x = __cosf(angle), turns[row][at].y = __sinf(angle);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < ITEMS; i += THREADS) {
    const int row = i / 2 % PATCHES, panel = i / 16 % PANELS, chunk = 2 * panel + (i & 1);
    const int head = i / (16 * PANELS) % HEADS, part = i / (16 * PANELS * HEADS);
    const int patch = first + row;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (patch < count && 8 * chunk < D) {
      const u16* from = qkv + (((i64)patch * 3 + part) * HEADS + head) * D;
      const float scale = part == 0 ? 1.44269504f * rsqrtf((float)D) : 1.0f;
      if (part == 2) v = *reinterpret_cast<const uint4*>(from + 8 * chunk);
      else v = turned(from, 8 * chunk, turns[row], scale);
    }
    const i64 place = part == 0 ? tiled<QUERIES>(patch, chunk) : tiled<KEYS>(patch, chunk);
    u8* to = part == 0 ? queries : part == 1 ? keys : values;
    *reinterpret_cast<uint4*>(to + (i64)head * rows * ROW + place) = v;
  }
}
