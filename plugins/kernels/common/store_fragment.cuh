// The store of a GEMM with A and B swapped: a D fragment of mma.sync has weights as its 16 rows and
// tokens as its 8 columns; y [m, n] has tokens as rows.
//
// Macros: OUT_BF16, RAGGED (n % 16; if 0, bf16 is stored in pairs, transposed in registers),
// BY_TOKEN, if given (`p` has token_scales too, f32 [m], which a fragment is multiplied by).
#pragma once
#include "common/numeric.cuh"

// The scales of a lane's two of eight tokens.
template <class Problem>
DEVICE float2 token_scales(const Problem& p, int m0) {
#ifdef BY_TOKEN
  const int token = m0 + 2 * (lane_id() & 3);
  return make_float2(token < p.m ? p.token_scales[token] : 0.0f,
                     token + 1 < p.m ? p.token_scales[token + 1] : 0.0f);
#else
  return make_float2(1.0f, 1.0f);
#endif
}

// s: the fragment of weight rows n0 … n0 + 15 and tokens m0 … m0 + 7, factors applied; `p` has m
// and n. CHECKED: n is compared too. `tokens`: `token_scales`.
template <bool CHECKED = RAGGED, class Problem>
DEVICE void store_fragment(const Problem& p, void* y, int n0, int m0, const float (&sums)[4],
                           const float2& tokens) {
  const int g = lane_id() >> 2, t = lane_id() & 3;
#ifdef BY_TOKEN
  const float s[4] = {sums[0] * tokens.x, sums[1] * tokens.y, sums[2] * tokens.x,
                      sums[3] * tokens.y};
#else
  const float (&s)[4] = sums;
#endif
  if constexpr (CHECKED) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = m0 + 2 * t + (i & 1), n = n0 + g + (i & 2) * 4;
      if (row >= p.m || n >= p.n) continue;
#if OUT_BF16
      ((u16*)y)[(u64)row * p.n + n] = to_bf16(s[i]);
#else
      ((float*)y)[(u64)row * p.n + n] = s[i];
#endif
    }
  } else {
#if OUT_BF16
    const u32 low = transpose_matrix<true>(pack_bf16(s[0], s[1]));   // token g, weights 2t, 2t + 1
    const u32 high = transpose_matrix<true>(pack_bf16(s[2], s[3]));  // … 8 further
    if (m0 + g < p.m) {
      u32* to = (u32*)y + ((u64)(m0 + g) * p.n + n0) / 2 + t;
      to[0] = low;
      to[4] = high;
    }
#else
    float* to = (float*)y + (u64)(m0 + 2 * t) * p.n + n0 + g;
    if (m0 + 2 * t < p.m) to[0] = s[0], to[8] = s[2];
    if (m0 + 2 * t + 1 < p.m) to[p.n] = s[1], to[p.n + 8] = s[3];
#endif
  }
}
