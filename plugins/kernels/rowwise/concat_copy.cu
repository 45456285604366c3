// The standard Concat of columns: y[r] = [a[r], b[r], … h[r]].
//
// Macros: BYTES (of an access: 16, 8, 4 or 2), W0 … W7 (columns of each part in accesses; 0: no
// part), THREADS. Grid: x chunks of THREADS elements of y, y rows. Unfused graphs have the op, and
// a block drafter's taps once a launch, so the kernel is not tuned (log/rowwise/rows_copy.md).
#include "common/numeric.cuh"

#if BYTES == 16
typedef uint4 Element;
#elif BYTES == 8
typedef uint2 Element;
#elif BYTES == 4
typedef u32 Element;
#else
typedef u16 Element;
#endif

constexpr int PARTS = 8, WIDTHS[PARTS] = {W0, W1, W2, W3, W4, W5, W6, W7};
constexpr int WIDTH = W0 + W1 + W2 + W3 + W4 + W5 + W6 + W7;

extern "C" __global__ void concat(const Element* a, const Element* b, const Element* c,
                                  const Element* d, const Element* e, const Element* f,
                                  const Element* g, const Element* h, Element* y) {
  wait_then_launch_dependents();
  const int column = blockIdx.x * THREADS + threadIdx.x;
  const i64 row = blockIdx.y;
  if (column >= WIDTH) return;
  const Element* const parts[PARTS] = {a, b, c, d, e, f, g, h};
  const Element* from = a;
  int at = column;  // in each part; negative behind the one that has it
#pragma unroll
  for (int i = 0; i < PARTS; ++i) {
    if (at >= 0 && at < WIDTHS[i]) from = parts[i] + row * WIDTHS[i] + at;
    at -= WIDTHS[i];
  }
  y[row * WIDTH + column] = *from;
}
