// delta_decode_fma.cu in chunk form: all tokens of a round at once. Of 16 rows of the state S,
// which fold together, a warp computes S k and S q of each token by mma.sync, adds the records
// before the round, and then goes token by token over the round's own deltas:
//   delta_j = beta_j (v_j - d S k_j - sum over n before j of d_nj (k_n k_j) delta_n),
//   o_j = d S q_j + sum over n up to j of d_nj (k_n q_j) delta_n,
// where d, d_nj are the decays from the state, and from n, to j. S folds once, before it is stored.
//
// f32 is two parts of tf32, of which three products are added: 2e-7 of a sum's terms. Left operand:
// 16 rows x 8 elements; lane (g, t) has four elements from 4 t on of rows g and g + 8. Right: keys
// and queries of tokens in turn. H200, 4 tokens: benchmarks/log/delta_rule/delta_round_chunk.md.
#pragma once
#include "delta_rule/delta_decode_parts.cuh"

static_assert(STATE_BYTES == 4 && LANES >= 4 && TILE <= 4 && WINDOW <= 32 && !STAGES,
              "the plan must refuse");

// S k and S q of token t, of row g, then of row g + 8.
DEVICE void multiply_state(float (&c)[4], const Shared& s, const uint4 (&raw)[ACCESSES], int lane) {
  float sums[3][4] = {};  // apart: a product waits for the one before it
#pragma unroll
  for (int n = 0; n < LANES / 4; n++) {
    float x[2][EPL], high[EPL], low[EPL];
    unpack(x[0], raw[2 * n]), unpack(x[1], raw[2 * n + 1]);
    take(high, s.operands[n][0][lane]), take(low, s.operands[n][1][lane]);
#pragma unroll
    for (int e = 0; e < EPL; e += 2) {
      float first[4], second[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        first[i] = tf32_part(x[i % 2][e + i / 2]);
        second[i] = x[i % 2][e + i / 2] - first[i];
      }
      mma_tf32(sums[0], first, high[e], high[e + 1]);
      mma_tf32(sums[1], first, low[e], low[e + 1]);
      mma_tf32(sums[2], second, high[e], high[e + 1]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) c[i] = sums[0][i] + (sums[1][i] + sums[2][i]);
}
// The chunk after entry `last`; it holds all entries before `since`.
DEVICE void fold(const Shared& s, uint4 (&raw)[ACCESSES], int first, int since, int last,
                 int lane) {
  const float* decay = s.decay[last - MAX_LAG][first / VD];
  float x[ACCESSES][EPL];
#pragma unroll
  for (int i = 0; i < ACCESSES; i++) {
    unpack(x[i], raw[i]);
#pragma unroll
    for (int e = 0; e < EPL; e++) x[i][e] *= decay[last - since];
  }
#pragma unroll 1
  for (int n = since; n <= last; n++) {
    const float grown = n < last ? decay[last - n - 1] : 1.f;
    const float* of = &s.deltas[n][first + lane / 4];
    const float delta[2] = {grown * of[0], grown * of[8]};
#pragma unroll
    for (int i = 0; i < ACCESSES; i++) {
      float key[EPL];
      take(key, &s.keys[n][(i / 2 * 4 + lane % 4) * EPL]);
#pragma unroll
      for (int e = 0; e < EPL; e++) x[i][e] = fmaf(delta[i % 2], key[e], x[i][e]);
    }
  }
#pragma unroll
  for (int i = 0; i < ACCESSES; i++) raw[i] = packed(x[i]);
}
// The round over a chunk, which goes to `to` if it has to be stored; then the next chunk.
DEVICE void go_over(Shared& s, uint4 (&raw)[ACCESSES], int first, int head, const Place& p,
                    char* to, const char* next, int lane) {
  const int t = lane % 4, j = min(t, TILE - 1), row = first + lane / 4, mine = first / VD;
  const int since = p.entry(since_of(p, head, first)), start = p.entry(p.start);
  const int behind = p.behind(), phase = phase_of(p, head, first) + behind;
  // The position from `done` after which it folds; below 0: it does not.
  const int last = p.done == 0 ? 0 : behind - (phase + 1) % RECORDS;
  const auto load_next = [&] {
#pragma unroll
    for (int i = 0; i < ACCESSES; i++) raw[i] = uint4{};
    if (next) load_chunk(raw, next, lane);
  };
  float c[4];
  multiply_state(c, s, raw, lane);
  if (last < 0) load_next();
#pragma unroll
  for (int i = 0; i < 4; i++) c[i] *= s.decay[behind + j][mine][start + j - since];
  const Products* by = s.products[j][mine];
  const auto add = [&](float upper, float lower, float key, float query) {
    c[0] = fmaf(upper, key, c[0]), c[1] = fmaf(upper, query, c[1]);
    c[2] = fmaf(lower, key, c[2]), c[3] = fmaf(lower, query, c[3]);
  };
  for (int n = since; n < start; n++) {
    const int age = start + j - n;
    add(s.deltas[n][row], s.deltas[n][row + 8], by[0].by_age[age - 1], by[1].by_age[age - 1]);
  }
  float* value = &s.c[j][2 * KD + row];
  const float upper = value[0], lower = value[8], beta = by->beta;
#pragma unroll
  for (int i = 0; i < TILE; i++) {
    if (i >= p.tokens) break;
    const int from = lane / 4 * 4 + i, age = max(t - i, 1);
    const float x = __shfl_sync(~0u, beta * (upper - c[0]), from);
    const float y = __shfl_sync(~0u, beta * (lower - c[2]), from);
    if (t == i) s.deltas[start + i][row] = x, s.deltas[start + i][row + 8] = y;
    if (t >= i) add(x, y, by[0].by_age[age - 1], t == i ? by->dot : by[1].by_age[age - 1]);
  }
  __syncwarp();  // with three tokens, two lanes have read a value
  if (t < p.tokens) value[0] = c[1], value[8] = c[3];
  __syncwarp();
  if (last < 0) return;
  fold(s, raw, first, since, MAX_LAG + last, lane);
  store_chunk(to, raw, lane);
  load_next();
}
