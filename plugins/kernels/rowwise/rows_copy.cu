// Copies and sums of whole rows: embed, last_rows, and the standard Add.
//
// bf16 rows of H columns (H % 8 = 0), 16 bytes a thread. Grid: x chunks of THREADS vectors, y rows.
// 1 / 32 / 128 rows of 5120, H200: 0.8 to 0.9 / 0.9 to 1.0 / 1.5 us (log/rowwise/rows_copy.md).
#include "common/numeric.cuh"

#define VECTOR (blockIdx.x * THREADS + threadIdx.x)  // this thread's 16 bytes of a row

#ifdef TILE
#ifdef VOCAB
// x[t] = weight[id]: the host's id, or the slot's last token if that is negative; clamped, so that
// padding rows stay in range. Slot −1 is the last of SLOTS rows. The IMAGES ids from VOCAB on are
// rows of `images`.
extern "C" __global__ void embed(const int* tokens, const int* last, const int* slots,
                                 const uint4* weight, const uint4* images, uint4* x) {
  wait_then_launch_dependents();
  if (VECTOR >= H / 8) return;
  int id = tokens[blockIdx.y];
  if (id < 0) {
    const int slot = slots[blockIdx.y / TILE];
    id = last[slot < 0 ? SLOTS - 1 : slot];
  }
  const bool image = IMAGES > 0 && id >= VOCAB && id - VOCAB < IMAGES;
  const uint4* from = image ? images : weight;
  id = image ? id - VOCAB : min(max(id, 0), VOCAB - 1);
  x[(i64)blockIdx.y * (H / 8) + VECTOR] = from[(i64)id * (H / 8) + VECTOR];
}
#else
// y[r] = x[r·TILE + counts[r] − 1], or the first token if the row has none.
extern "C" __global__ void last_rows(const uint4* x, const int* counts, uint4* y) {
  wait_then_launch_dependents();
  if (VECTOR >= H / 8) return;
  const i64 row = blockIdx.y * TILE + min(max(counts[blockIdx.y], 1), TILE) - 1;
  y[(i64)blockIdx.y * (H / 8) + VECTOR] = x[row * (H / 8) + VECTOR];
}
#endif
#else
extern "C" __global__ void add(const uint4* a, const uint4* b, uint4* y) {
  const i64 at = (i64)blockIdx.y * (H / 8) + VECTOR;
  wait_then_launch_dependents();
  if (VECTOR >= H / 8) return;
  float left[8], right[8];
  unpack8(a[at], left);
  unpack8(b[at], right);
#pragma unroll
  for (int i = 0; i < 8; i++) left[i] += right[i];
  y[at] = pack8(left);
}
#endif
