// image_rows[first + r] = x[r] of the first live / GROUP rows r; none beyond the state's ROWS.
//
// bf16 rows of H columns (H % 8 = 0), 16 bytes a thread. Grid: x chunks of THREADS vectors, y rows.
// Not measured (log/vision/rowwise.md).
// Macros: H, GROUP, ROWS (without the scratch one), THREADS.
#include "common/numeric.cuh"

extern "C" __global__ void store_rows(const uint4* x, const int* live, const int* first,
                                      uint4* image_rows) {
  const int vector = blockIdx.x * THREADS + threadIdx.x, row = blockIdx.y;
  wait_then_launch_dependents();
  const i64 to = (i64)first[0] + row;
  if (vector >= H / 8 || row >= live[0] / GROUP || to < 0 || to >= ROWS) return;
  image_rows[to * (H / 8) + vector] = x[(i64)row * (H / 8) + vector];
}
