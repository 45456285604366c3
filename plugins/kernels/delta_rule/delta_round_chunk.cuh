// A round of drafts in chunk form: of 16 value rows of the state S, which fold together, a warp
// computes S k and S q of all tokens at once by mma.sync, adds the records' deltas times the
// products of keys, and then goes token by token over its own deltas alone:
//   delta_j = beta_j (v_j - d S k_j - sum over n before j of d_nj (k_n k_j) delta_n),
//   o_j = d S q_j + sum over n up to j of d_nj (k_n q_j) delta_n,
// where d, d_nj are the decays from the state, and from n, to j. S folds once, before it is stored.
//
// Operands: f32 as two parts of tf32, three products (two over states of 16 bits, which are tf32):
// 2e-7 of a sum's terms. Left: 16 rows x 8 elements; lane (g, t) has EPL elements from EPL t on of
// rows g and g + 8. Right: keys and queries of tokens in turn, in the same order of elements.
#pragma once
#include "delta_rule/delta_round.cuh"

constexpr int OLD_STEPS = (MAX_LAG + DRAFTS + 7) / 8;  // of eight records before the round
static_assert(LANES >= 4 && OLD_STEPS * 8 <= KEY_TILES * 16, "the plan must refuse");

// a · b with b in parts. Sums of the parts are separate: products wait for those before them.
// EXACT: a is tf32 as it is. Of eight tokens two sums, which take fewer registers.
struct Sums {
  static constexpr int LAST = PARTS_OF_TOKENS > 1 ? 1 : 2;
  float c[LAST + 1][4];
  DEVICE float sum(int i) const { return c[0][i] + (LAST > 1 ? c[1][i] + c[LAST][i] : c[1][i]); }
};
template <bool EXACT>
DEVICE void multiply(Sums& x, const float (&a)[4], const float (&high)[2], const float (&low)[2]) {
  u32 first[4], second[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float part = EXACT ? a[i] : tf32_part(a[i]);
    first[i] = __float_as_uint(part), second[i] = __float_as_uint(a[i] - part);
  }
  const u32 b[4] = {__float_as_uint(high[0]), __float_as_uint(high[1]), __float_as_uint(low[0]),
                    __float_as_uint(low[1])};
  mma_tf32(x.c[0], first, b[0], b[1]);
  mma_tf32(x.c[1], first, b[2], b[3]);
  if (!EXACT) mma_tf32(x.c[Sums::LAST], second, b[0], b[1]);
}

// Rows times the keys and queries of all tokens. `row(i)`: the lane's elements at its i-th place.
template <bool EXACT, class Row>
DEVICE void multiply_tokens(float (&c)[PARTS_OF_TOKENS][4], const Round& s, int lane,
                            const Row& row) {
  Sums sums[PARTS_OF_TOKENS] = {};
#pragma unroll
  for (int n = 0; n < LANES / 4; n++) {
    float x[2][EPL];
    row(x[0], 2 * n), row(x[1], 2 * n + 1);
#pragma unroll
    for (int e = 0; e < EPL; e += 4) {
#pragma unroll
      for (int u = 0; u < PARTS_OF_TOKENS; u++) {
        const float4 high = s.operands[n][e / 4][u][0][lane],
                     low = s.operands[n][e / 4][u][1][lane];
        multiply<EXACT>(sums[u], {x[0][e], x[1][e], x[0][e + 1], x[1][e + 1]}, {high.x, high.y},
                        {low.x, low.y});
        multiply<EXACT>(sums[u], {x[0][e + 2], x[1][e + 2], x[0][e + 3], x[1][e + 3]},
                        {high.z, high.w}, {low.z, low.w});
      }
    }
  }
#pragma unroll
  for (int u = 0; u < PARTS_OF_TOKENS; u++)
#pragma unroll
    for (int i = 0; i < 4; i++) c[u][i] = sums[u].sum(i);
}

// The sum of the logarithms of the decays of entries first … last.
DEVICE float decays(const Round& s, int mine, int first, int last) {
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < WINDOW; n++) {
    const float g = s.g[mine][n];
    if (n >= first && n <= last) sum += g;
  }
  return sum;
}
// Of 16 entries of the window and a head: their products with the tokens, and the decays since.
DEVICE void weigh_entries(Round& s, const Place& p, int first, int mine, int lane) {
  const int g = lane / 4, t = lane % 4;
  float c[PARTS_OF_TOKENS][4];
  multiply_tokens<false>(c, s, lane, [&](float (&x)[EPL], int i) {
    const int n = min(first + g + i % 2 * 8, WINDOW - 1);
    take(x, &s.keys[n][(i / 2 * 4 + t) * EPL]);
  });
#pragma unroll
  for (int u = 0; u < PARTS_OF_TOKENS; u++) {
    const int j = 4 * u + t, here = p.entry(p.start + j);
    if (j >= p.tokens) continue;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int n = first + g + 8 * h;
      const float sum = decays(s, mine, n + 1, here), decay = expf(sum);
      const bool live = n <= here && n - MAX_LAG + p.done >= p.base;
      s.products[mine][n][j] =
          live ? float2{decay * c[u][2 * h], decay * c[u][2 * h + 1]} : float2{};
      if (n <= here) s.decay[mine][j][n] = expf(sum + s.g[mine][n]);
    }
  }
}
DEVICE void prepare_products(Round& s, const Place& p, int head, int warp, int lane) {
  for (int j = warp; j < p.tokens; j += WARPS) make_units(s, p, j, head, lane);
  __syncthreads();
  for (int i = warp; i < KEY_TILES * G; i += WARPS) weigh_entries(s, p, i / G * 16, i % G, lane);
}

// The chunk after entry `last`, where it has folded all before entry `since`.
DEVICE void fold(const Round& s, uint4 (&raw)[ACCESSES], int first, int head, const Place& p,
                 int last, int lane) {
  const int mine = first / VD, since = p.entry(since_of(p, head, first));
  float x[ACCESSES][EPL], after = 0.f;
  const float all = expf(decays(s, mine, since, last));
#pragma unroll
  for (int i = 0; i < ACCESSES; i++) {
    unpack(x[i], raw[i]);
#pragma unroll
    for (int e = 0; e < EPL; e++) x[i][e] *= all;
  }
#pragma unroll 1
  for (int n = last; n >= since; n--) {
    const float grown = expf(after);
    const float* from = &s.deltas[n][first + lane / 4];
    const float delta[2] = {grown * from[0], grown * from[8]};
    after += s.g[mine][n];
#pragma unroll
    for (int i = 0; i < ACCESSES; i += 2) {
      float key[EPL];
      take(key, &s.keys[n][(i / 2 * 4 + lane % 4) * EPL]);
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int e = 0; e < EPL; e++) x[i + h][e] = fmaf(delta[h], key[e], x[i + h][e]);
    }
  }
#pragma unroll
  for (int i = 0; i < ACCESSES; i++) raw[i] = packed(x[i]);
}

// Adds the records before the round, from entry `since` on, to what the state gave.
DEVICE void add_records(float (&c)[PARTS_OF_TOKENS][4], const Round& s, const Place& p, int first,
                        int mine, int since, int lane) {
  const int g = lane / 4, t = lane % 4, end = p.entry(p.start);
  Sums sums[PARTS_OF_TOKENS] = {};
#pragma unroll
  for (int step = 0; step < OLD_STEPS; step++) {
    float a[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int n = 8 * step + t + i / 2 * 4;
      a[i] = n >= since && n < end ? s.deltas[n][first + g + i % 2 * 8] : 0.f;
    }
#pragma unroll
    for (int u = 0; u < PARTS_OF_TOKENS; u++) {
      float high[2], low[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 by = s.products[mine][8 * step + t + 4 * i][4 * u + g / 2];
        const float x = g % 2 ? by.y : by.x;
        high[i] = tf32_part(x), low[i] = x - high[i];
      }
      multiply<false>(sums[u], a, high, low);
    }
  }
#pragma unroll
  for (int u = 0; u < PARTS_OF_TOKENS; u++)
#pragma unroll
    for (int i = 0; i < 4; i++) c[u][i] += sums[u].sum(i);
}

// S k and S q of token 4 u + t in c[u], by row g, then by row g + 8.
DEVICE void multiply_state(float (&c)[PARTS_OF_TOKENS][4], const Round& s,
                           const uint4 (&raw)[ACCESSES], int lane) {
  multiply_tokens<STATE_BYTES == 2>(c, s, lane, [&](float (&x)[EPL], int i) { unpack(x, raw[i]); });
}
// The entry after which the chunk folds, the last up to the round's first token; -1 if none is.
DEVICE int fold_entry(const Place& p, int head, int first) {
  const int phase = phase_of(p, head, first), behind = p.behind();
  const int last = behind - (phase + behind + 1) % RECORDS;
  if (p.done == 0) return MAX_LAG;  // everything folds at position 0
  return last < 0 ? -1 : MAX_LAG + last;
}
// The round's deltas and results of a chunk's rows, from the state's products.
DEVICE void go_over(Round& s, float (&c)[PARTS_OF_TOKENS][4], int first, int head, const Place& p,
                    int lane) {
  const int g = lane / 4, t = lane % 4, mine = first / VD;
  const int since = p.entry(since_of(p, head, first));
  float v[PARTS_OF_TOKENS][2], beta[PARTS_OF_TOKENS];
#pragma unroll
  for (int u = 0; u < PARTS_OF_TOKENS; u++) {
    const int j = min(4 * u + t, TILE - 1);
    const float decay = s.decay[mine][j][since];
#pragma unroll
    for (int i = 0; i < 4; i++) c[u][i] *= decay;
    v[u][0] = s.c[j][2 * KD + first + g], v[u][1] = s.c[j][2 * KD + first + g + 8];
    beta[u] = s.beta_of(j, mine);
  }
  add_records(c, s, p, first, mine, since, lane);
#pragma unroll
  for (int j = 0; j < TILE; j++) {
    if (j >= p.tokens) break;
    const int u = j / 4, entry = p.entry(p.start + j);
    float delta[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      delta[h] = beta[u] * (v[u][h] - c[u][2 * h]);
      delta[h] = __shfl_sync(~0u, delta[h], lane / 4 * 4 + j % 4);
      if (t == j % 4) s.deltas[entry][first + g + 8 * h] = delta[h];
    }
#pragma unroll
    for (int w = u; w < PARTS_OF_TOKENS; w++) {
      const float2 by = s.products[mine][entry][4 * w + t];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        c[w][2 * h] = fmaf(delta[h], by.x, c[w][2 * h]);
        c[w][2 * h + 1] = fmaf(delta[h], by.y, c[w][2 * h + 1]);
      }
    }
  }
#pragma unroll
  for (int u = 0; u < PARTS_OF_TOKENS; u++) {
    const int j = 4 * u + t;
    if (j >= p.tokens) continue;
    s.c[j][2 * KD + first + g] = c[u][1], s.c[j][2 * KD + first + g + 8] = c[u][3];
  }
  __syncwarp();
}
