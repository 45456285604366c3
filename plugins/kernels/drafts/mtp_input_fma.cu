// y[t] = [rms_norm(weight[id]) | rms_norm(hidden[t])]: the input of a draft head.
//
// Block (half, token), the row in registers: VECS vectors of eight columns a thread, at a stride of
// THREADS. The norm's weight, which no launch writes, is read before the wait for the previous
// launch (PDL). bf16 rows of H columns (H % 8 = 0); an id outside the vocabulary reads row 0, but
// with IMAGES the ids from VOCAB on read so many rows of `images`.
// Figures: benchmarks/log/sampling/draft_rounds.md.
// Macros: H, VOCAB, EPS, THREADS, VECS; IMAGES, if given.
#include "common/numeric.cuh"

#ifndef IMAGES
#define IMAGES 0
#endif

DEVICE void load_weight(const float* weight, int column, float (&w)[8]) {
  const float4 a = *(const float4*)(weight + column), b = *(const float4*)(weight + column + 4);
  w[0] = a.x, w[1] = a.y, w[2] = a.z, w[3] = a.w, w[4] = b.x, w[5] = b.y, w[6] = b.z, w[7] = b.w;
}

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
    if (column < H) load_weight(norm, column, w[v]);
  }
  wait_for_previous();
  launch_dependents();
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
