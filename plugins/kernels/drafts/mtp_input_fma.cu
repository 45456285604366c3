// y[t] = [rms_norm(weight[id]) | rms_norm(hidden[t])]: the input of a draft head.
//
// Block (half, token), the row in registers: VECS vectors of eight columns a thread, at a stride of
// THREADS. The norm's weight, which no launch writes, is read before the wait for the previous
// launch (PDL). bf16 rows of H columns (H % 8 = 0); an id outside the vocabulary reads row 0, but
// the IMAGES ids from VOCAB on read rows of `images`.
// Figures: benchmarks/log/sampling/draft_rounds.md.
// Macros: H, VOCAB, EPS, THREADS, VECS, IMAGES (0: no rows of images).
#include "common/numeric.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    mtp_input(const int* ids, const u16* hidden, const u16* weight, const float* norm_e,
              const float* norm_h, const u16* images, u16* y) {
  __shared__ float warp_sums[THREADS / 32];
  const int token = blockIdx.y;
  const bool embeds = blockIdx.x == 0;
  const float* norm = embeds ? norm_e : norm_h;
  float x[VECS][8] = {}, w[VECS][8] = {};
#pragma unroll
  for (int v = 0; v < VECS; v++) {
    const int column = (v * THREADS + threadIdx.x) * 8;
    if (column < H) load8(norm + column, w[v]);
  }
  wait_then_launch_dependents();
  const u16* from = hidden + (i64)token * H;
  if (embeds) {
    const int id = ids[token];
    from = weight + (i64)((u32)id < VOCAB ? id : 0) * H;
    if (IMAGES > 0 && id >= VOCAB && id - VOCAB < IMAGES) from = images + (i64)(id - VOCAB) * H;
  }
  float squares = 0.0f;
#pragma unroll
  for (int v = 0; v < VECS; v++) {
    const int column = (v * THREADS + threadIdx.x) * 8;
    if (column >= H) continue;
    unpack8(*(const uint4*)(from + column), x[v]);
#pragma unroll
    for (int i = 0; i < 8; i++) squares += x[v][i] * x[v][i];
  }
  const float root = rsqrtf(block_sum<THREADS>(squares, warp_sums) / H + (float)(EPS));
  u16* to = y + (i64)token * 2 * H + (embeds ? 0 : H);
#pragma unroll
  for (int v = 0; v < VECS; v++) {
    const int column = (v * THREADS + threadIdx.x) * 8;
    if (column >= H) continue;
#pragma unroll
    for (int i = 0; i < 8; i++) x[v][i] *= root * w[v][i];
    *(uint4*)(to + column) = pack8(x[v]);
  }
}
