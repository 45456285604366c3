// The standard Concat of columns: y[r] = [a[r], b[r], c[r], d[r]].
//
// Macros: BYTES (of an access: 16, 8, 4 or 2), W0 … W3 (columns of each part in accesses; 0: no
// part), THREADS. Grid: x chunks of THREADS elements of y, y rows. Only unfused graphs have the op,
// so the kernel is not tuned (log/rowwise/rows_copy.md).
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

extern "C" __global__ void concat(const Element* a, const Element* b, const Element* c,
                                  const Element* d, Element* y) {
  wait_for_previous();
  launch_dependents();
  const int column = blockIdx.x * THREADS + threadIdx.x;
  const i64 row = blockIdx.y;
  if (column >= W0 + W1 + W2 + W3) return;
  const Element* from = a + row * W0 + column;
  if (column >= W0 + W1 + W2) from = d + row * W3 + (column - W0 - W1 - W2);
  else if (column >= W0 + W1) from = c + row * W2 + (column - W0 - W1);
  else if (column >= W0) from = b + row * W1 + (column - W0);
  y[row * (W0 + W1 + W2 + W3) + column] = *from;
}
