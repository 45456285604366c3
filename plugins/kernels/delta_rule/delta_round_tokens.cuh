// A round of drafts token by token: every token's sums are those of a round of one token, in their
// order. Its lag is the same, since a chunk of the state folds on the chip when it would have been
// stored; the accepted tokens of earlier rounds only fold. A chunk is written if something up to
// the round's first token made it fold.
#pragma once
#include "delta_rule/delta_round.cuh"

// Of the i-th position from `done`: the decay over it and the n before it, n below RECORDS.
DEVICE void sum_decays(Round& s, int i, int mine, int lane) {
  float since = lane >= 1 && lane <= MAX_LAG ? s.g[mine][MAX_LAG + i - lane] : 0.f;
#pragma unroll
  for (int off = 1; off < RECORDS; off *= 2) {
    float before = __shfl_up_sync(~0u, since, off);
    if (lane >= off) since += before;
  }
  if (lane < RECORDS) s.decay[i][mine][lane] = expf(__fadd_rn(s.g[mine][MAX_LAG + i], since));
}
// The products of a token's key and query with the keys before it, LANES lanes a token; ages come
// ACCESSES at a time, so that they are summed as rows of a chunk are.
DEVICE void dot_keys(Round& s, const Place& p, int warp, int lane) {
  const int in = lane % LANES;
#pragma unroll 1
  for (int t = warp * ACCESS_ROWS; t < p.tokens; t += WARPS * ACCESS_ROWS) {
    const int j = min(t + lane / LANES, p.tokens - 1), here = p.entry(p.start + j);
    float k[EPL], q[EPL];
    take(k, &s.c[j][KD + in * EPL]), take(q, &s.c[j][in * EPL]);
#pragma unroll
    for (int first = 1; first <= MAX_LAG; first += ACCESSES) {
      float v[2 * ACCESSES];
#pragma unroll
      for (int u = 0; u < ACCESSES; u++) {
        float key[EPL], kk = 0.f, qk = 0.f;
        if (first + u <= MAX_LAG) {
          take(key, &s.keys[here - first - u][in * EPL]);
#pragma unroll
          for (int e = 0; e < EPL; e++) kk = fmaf(k[e], key[e], kk), qk = fmaf(q[e], key[e], qk);
        }
        v[u] = kk, v[ACCESSES + u] = qk;
      }
      const float sum = transposed_sum(v, lane);
      constexpr int COPIES_OF = LANES / (2 * ACCESSES);  // neighbours that hold the same sum
      const int value = in / COPIES_OF, age = first + value % ACCESSES;
      if (age <= MAX_LAG)
        for (int mine = in % COPIES_OF; mine < G; mine += COPIES_OF)
          s.products[j][mine][value / ACCESSES].by_age[age - 1] =
              s.decay[p.behind() + j][mine][age - 1] * sum;
    }
  }
}

// What a lane reads of shared memory for a chunk, position after position.
struct Cursor {
  const float *mine, *other;  // its part of a token's key and query; of the query and key in the
                              // upper half of a row's lanes
  const Products* products;   // of the key; of the query in the upper half
  float* value;               // the value of its row, then the result
  float* delta;               // of its row
  const float* decay;
};
DEVICE Cursor cursor(Round& s, int first, int lane) {
  const int in = lane % LANES, upper = in / (LANES / 2), head = first / VD;
  // Of its sums a lane gets that of row u, by the key or, in the upper half, by the query.
  const int u = in * 2 * ACCESSES / LANES % ACCESSES;
  const int row = first + u * ACCESS_ROWS + lane / LANES;
  const float* q = &s.c[0][in * EPL];
  return {upper ? q : q + KD,    upper ? q + KD : q,      &s.products[0][head][upper],
          &s.c[0][2 * KD + row], &s.deltas[MAX_LAG][row], &s.decay[0][head][0]};
}
// sum += x y if lag > n: ptxas would make a product and a move of what C++ says.
DEVICE void add_if(int lag, int n, float x, float y, float& sum) {
  asm("{.reg .pred p; setp.gt.s32 p, %3, %4; @p fma.rn.f32 %0, %1, %2, %0;}"
      : "+f"(sum)
      : "f"(x), "f"(y), "r"(lag), "r"(n));
}
// The delta rule of a token on a chunk; its rows lag `lag` tokens.
DEVICE void delta_rule(const Cursor& at, const uint4 (&raw)[ACCESSES], int lag, int lane) {
  float one[EPL], two[EPL], a[ACCESSES], b[ACCESSES];
  take(one, at.mine), take(two, at.other);
#pragma unroll
  for (int u = 0; u < ACCESSES; u++) {
    float x[EPL];
    a[u] = b[u] = 0.f;
    unpack(x, raw[u]);
#pragma unroll
    for (int e = 0; e < EPL; e++) a[u] = fmaf(x[e], one[e], a[u]), b[u] = fmaf(x[e], two[e], b[u]);
  }
#pragma unroll
  for (int u = 0; u < ACCESSES; u++) a[u] += __shfl_xor_sync(~0u, b[u], LANES / 2);
  float sum = transposed_sum<ACCESSES, LANES / 4>(a, lane) * at.decay[lag];
  float by_age[AGES];
  take(by_age, at.products->by_age);
#pragma unroll
  for (int n = 0; n < MAX_LAG; n++) add_if(lag, n, by_age[n], at.delta[-(n + 1) * STRIDE], sum);
  const float other = __shfl_xor_sync(~0u, sum, LANES / 2);
  const int in = lane % LANES;
  if (in < LANES / 2 && in % (LANES / (2 * ACCESSES)) == 0) {
    const float delta = at.products->beta * (*at.value - sum);
    *at.value = fmaf(delta, at.products->dot, other), *at.delta = delta;
  }
  __syncwarp();
}
// The chunk after the i-th position from `done`.
DEVICE void fold(const Round& s, uint4 (&raw)[ACCESSES], const float* decay, int first, int i,
                 int lag, int lane) {
  const float* keys = &s.keys[MAX_LAG + i][lane % LANES * EPL];
  const float* deltas = &s.deltas[MAX_LAG + i][first + lane / LANES];
  float x[ACCESSES][EPL];
#pragma unroll
  for (int r = 0; r < ACCESSES; r++) {
    unpack(x[r], raw[r]);
#pragma unroll
    for (int e = 0; e < EPL; e++) x[r][e] *= decay[lag];
  }
#pragma unroll 1
  for (int n = 0; n <= lag; n++) {  // the records by age, then the position's own
    const int back = n < lag ? n + 1 : 0;
    const float grown = n < lag ? decay[n] : 1.f;
    float key[EPL], delta[ACCESSES];
    take(key, keys - back * KD);
    if constexpr (ACCESS_ROWS == 1 && ACCESSES % 4 == 0) take(delta, deltas - back * STRIDE);
    else
#pragma unroll
      for (int r = 0; r < ACCESSES; r++) delta[r] = deltas[r * ACCESS_ROWS - back * STRIDE];
#pragma unroll
    for (int r = 0; r < ACCESSES; r++) {
      const float d = grown * delta[r];
#pragma unroll
      for (int e = 0; e < EPL; e++) x[r][e] = fmaf(d, key[e], x[r][e]);
    }
  }
#pragma unroll
  for (int r = 0; r < ACCESSES; r++) raw[r] = packed(x[r]);
}
// The round over a chunk, which goes to `to` if it has to be stored.
DEVICE void go_over(Round& s, uint4 (&raw)[ACCESSES], int first, int head, const Place& p, char* to,
                    int lane) {
  const int behind = p.behind();
  int phase = phase_of(p, head, first), lag = p.done - since_of(p, head, first);
  bool folded = false;
  Cursor at = cursor(s, first, lane);
#pragma unroll 1
  for (int i = 0; i < behind + p.tokens; i++) {
    if (i >= behind) {
      delta_rule(at, raw, lag, lane);
      at.mine += LOCAL, at.other += LOCAL, at.value += LOCAL, at.products += 2 * G;
    }
    lag++;
    if (phase == MAX_LAG || p.done + i == 0) {
      fold(s, raw, at.decay, first, i, lag - 1, lane);
      lag = 0, folded = true;
    }
    at.delta += STRIDE, at.decay += G * RECORDS;
    phase = phase == MAX_LAG ? 0 : phase + 1;
    if (i == behind && folded) {
      store_chunk(to, raw, lane);
    }
  }
}

DEVICE void prepare_products(Round& s, const Place& p, int head, int warp, int lane) {
  for (int t = warp; t < p.tokens + (p.behind() + p.tokens) * G; t += WARPS) {
    if (t < p.tokens) make_units(s, p, t, head, lane);
    else sum_decays(s, (t - p.tokens) / G, (t - p.tokens) % G, lane);
  }
  __syncthreads();
  dot_keys(s, p, warp, lane);
}
