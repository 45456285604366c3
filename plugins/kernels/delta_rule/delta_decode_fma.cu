// gdn_decode: the gated delta net of decode rows: one token each, or with drafts a round of up to
// TILE. FUSED: causal convolution, delta rule, gated norm, quantisation; else gated_delta_step, the
// delta rule alone. One kernel, with a replay ring (replay_ring.py) or without (RING, DRAFTS 0): a
// token's sums have one order, whatever engine it is in. Which folds are stored: docs/graph.md.
//
// Grid (Hv / G, rows): a block owns G of the R value heads that share a key head. A chunk of the
// state is read once and stays in registers for the round's positions: first the accepted tokens
// of earlier rounds, which only fold, then this one's. A token: a = g S k, b = g S q, both with the
// records' part; d = beta (v - a), o = b + d (q k). A fold: S' = g S + d k^T, with the records. A
// chunk is written if something up to the first token made it fold. STAGES: chunks of a warp in
// flight by TMA bulk copies, the first before griddepcontrol.wait (PDL); 0: one, in registers.
// CHUNKED: all tokens at once, which has other bits: delta_round_chunk.cuh. The builder times the
// shapes by rows; what was tried, with figures: benchmarks/log/delta_rule/delta_decode_fma.md.
#include "common/early.cuh"
#include "delta_rule/delta_decode_parts.cuh"
#include "common/quad_quant.cuh"
#if CHUNKED
#include "delta_rule/delta_round_chunk.cuh"
#else

// What a lane reads of shared memory for a chunk, position after position.
struct Cursor {
  const float *mine, *other;  // its part of a token's key and query; of the query and key in the
                              // upper half of a row's lanes
  const Products* products;   // of the key; of the query in the upper half
  float* value;               // the value of its row, then the result
  float* delta;               // of its row
  const float* decay;
};
DEVICE Cursor cursor(Shared& s, const Place& p, int first, int lane) {
  const int in = lane % LANES, upper = in / (LANES / 2), head = first / VD;
  // Of its sums a lane gets that of row u, by the key or, in the upper half, by the query.
  const int u = in * 2 * ACCESSES / LANES % ACCESSES;
  const int row = first + u * ACCESS_ROWS + lane / LANES;
  const float* q = &s.c[0][in * EPL];
  return {upper ? q : q + KD,
          upper ? q + KD : q,
          &s.products[0][head][upper],
          &s.c[0][2 * KD + row],
          s.deltas[p.entry(p.done)] + row,
          &s.decay[0][head][0]};
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
  for (int n = 0; n < MAX_LAG; n++) add_if(lag, n, by_age[n], at.delta[-(n + 1) * ROWS], sum);
  const float other = __shfl_xor_sync(~0u, sum, LANES / 2);
  const int in = lane % LANES;
  if (in < LANES / 2 && in % (LANES / (2 * ACCESSES)) == 0) {
    const float delta = at.products->beta * (*at.value - sum);
    *at.value = fmaf(delta, at.products->dot, other), *at.delta = delta;
  }
  __syncwarp();
}
// The chunk after the i-th position from `done`.
DEVICE void fold(const Shared& s, uint4 (&raw)[ACCESSES], const float* decay, int first, int head,
                 const Place& p, int i, int lag, int lane) {
  float x[ACCESSES][EPL];
#pragma unroll
  for (int r = 0; r < ACCESSES; r++) {
    unpack(x[r], raw[r]);
#pragma unroll
    for (int e = 0; e < EPL; e++) x[r][e] *= decay[lag];
  }
#pragma unroll 1
  for (int n = 0; n <= lag; n++) {  // the records by age, then the position's own
    const int position = p.done + i - (n < lag ? n + 1 : 0), entry = p.entry(position);
    const float* keys = s.keys[entry];
    const float* deltas = s.deltas[entry] + first;
    if (TILE == 1 && DRAFTS && entry < 0) {
      const float* record = p.ring + record_at(position);
      keys = record + KEYS_AT + head / R * KD, deltas = record + head * VD + first;
    }
    const float grown = n < lag ? decay[n] : 1.f;
    float key[EPL], delta[ACCESSES];
    take(key, keys + lane % LANES * EPL);
    if constexpr (ACCESS_ROWS == 1 && ACCESSES % 4 == 0) take(delta, deltas);
    else
#pragma unroll
      for (int r = 0; r < ACCESSES; r++) delta[r] = deltas[r * ACCESS_ROWS + lane / LANES];
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
DEVICE void go_over(Shared& s, uint4 (&raw)[ACCESSES], int first, int head, const Place& p,
                    char* to, int lane) {
  const int behind = p.behind(), positions = AHEAD > 1 ? behind + p.tokens : 1;
  int phase = phase_of(p, head, first), lag = p.done - since_of(p, head, first);
  bool folded = false;
  Cursor at = cursor(s, p, first, lane);
#pragma unroll 1
  for (int i = 0; i < positions; i++) {
    if (i >= behind) {
      delta_rule(at, raw, lag, lane);
      at.mine += LOCAL, at.other += LOCAL, at.value += LOCAL, at.products += 2 * G;
    }
    lag++;
    if (phase == MAX_LAG || p.done + i == 0) {
      fold(s, raw, at.decay, first, head, p, i, lag - 1, lane);
      lag = 0, folded = true;
    }
    at.delta += ROWS, at.decay += G * RECORDS;
    phase = phase == MAX_LAG ? 0 : phase + 1;
    if (i == behind && folded) store_chunk(to, raw, lane);
  }
}
#endif

DYNAMIC_SHARED(gdn_decode, sizeof(Shared));
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    gdn_decode(const act* x, int x_width, const act* ba, const float* conv_weight,
               const act* conv_in, act* conv_out, const float* a_log, const float* dt_bias,
               const char* state_in, char* state_out, const float* ring_in, float* ring_out,
               const float* norm_weight, const int* slots, const int* starts, const int* counts,
               const float* scales, act* y_out, u8* q0, u8* s0, u8* q1, u8* s1, int* readers,
               int offset) {
  extern __shared__ __align__(128) char memory[];
  Shared& s = *(Shared*)memory;
  const int head = blockIdx.x * G, token = blockIdx.y * TILE;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int slot = slots[blockIdx.y], start = starts[blockIdx.y];
  const int tokens = slot < 0 ? 0 : min(counts[blockIdx.y], TILE);
  const bool fresh = start == 0, live = tokens > 0;
  const i64 heads = ((i64)slot * HV + head) * VD * KD * STATE_BYTES;
  state_in += heads, state_out += heads;
#if STAGES
  auto fetch = [&](int chunk, int stage) {
    barrier_expect(&s.full[warp][stage], CHUNK);
    bulk_load(s.state[warp][stage], state_in + chunk * CHUNK, CHUNK, &s.full[warp][stage]);
  };
  if (lane == 0 && live && !fresh) {
    for (int i = 0; i < STAGES; i++) barrier_init(&s.full[warp][i], 1);
    barrier_init_fence();
    for (int i = 0; i < STAGES; i++)
      if (warp + i * WARPS < CHUNKS) fetch(warp + i * WARPS, i);
  }
  __syncwarp();
#else
  uint4 raw[ACCESSES] = {}, ahead[ACCESSES] = {};  // zeros where the state is fresh
  // The convolution needs registers.
  constexpr int BEFORE = !CHUNKED ? ACCESSES : QUADS > 1 ? 0 : ACCESSES / 2;
  if (live && !fresh && warp < CHUNKS) load_chunk<0, BEFORE>(raw, state_in + warp * CHUNK, lane);
#endif
  Place p = {};
  if (live) {
    const i64 ring = (i64)slot * SLOT_RING;
    p = place_of(ring_in + ring, ring_out + ring, start, tokens, head);
    fetch_records(s, p, head);
  }
#if FUSED
  const i64 columns = (i64)slot * COLUMNS * CHANNELS;
  const int from = PARTS > 1 ? threadIdx.x / SHARE * PART : 0;  // this thread's first token
  Quad quads[QUADS];
#pragma unroll
  for (int t = 0; t < QUADS; t++) {
    quads[t].channel = channel_of(channel_at(t), head);
    if (!live || !convolves(t)) continue;
#pragma unroll
    for (int j = 0; j < TAPS - 1; j++) {
      const int back = from - TAPS + 1 + j, position = start + back;
      quads[t].taps[j] = act4{};
      if (back < 0 && (DRAFTS ? position >= 0 : !fresh))
        quads[t].taps[j] = *(const act4*)(conv_in + columns + quads[t].channel +
                                          (DRAFTS ? (u32)position % COLUMNS : j) * CHANNELS);
    }
    load_weights(quads[t], conv_weight);
  }
#endif
  wait_and_let_next_begin();  // the states above were written a whole round ago
  x += (i64)token * x_width;
  if (live) {
#if FUSED
    act4 given[QUADS][PART];
#pragma unroll
    for (int t = 0; t < QUADS; t++) {
      const act* column = x + quads[t].channel;
      if (!convolves(t)) continue;
#pragma unroll
      for (int j = 0; j < PART; j++)
        if (from + j < tokens) given[t][j] = *(const act4*)(column + (i64)(from + j) * x_width);
#pragma unroll
      for (int j = 0; j < TAPS - 1; j++)
        if (const int at = from - TAPS + 1 + j; PARTS > 1 && at >= 0 && from < tokens)
          quads[t].taps[j] = *(const act4*)(column + (i64)at * x_width);
    }
    for (int i = THREADS - 1 - threadIdx.x; i < tokens * (ROWS / 4); i += THREADS) {
      const int j = i / (ROWS / 4), row = i % (ROWS / 4) * 4;
      const act4 z = *(const act4*)(x + (i64)j * x_width + offset + head * VD + row);
      const float4 w = *(const float4*)(norm_weight + row % VD);
      *(float4*)&s.gate[j][row] = {w.x * silu(widen(z.v[0])), w.y * silu(widen(z.v[1])),
                                   w.z * silu(widen(z.v[2])), w.w * silu(widen(z.v[3]))};
    }
#pragma unroll
    for (int t = 0; t < QUADS; t++) {
      if (!convolves(t)) continue;
      const int i = channel_at(t);
      Quad& quad = quads[t];
      u32 place = (u32)(start + from) % COLUMNS;
#pragma unroll 1
      for (int j = from; j < min(tokens, from + PART); j++) {
        quad.taps[TAPS - 1] = given[t][0];
        convolve(s.c[j] + i, quad);
        if (DRAFTS && (head % R == 0 || i >= 2 * KD))
          *(act4*)(conv_out + columns + place * CHANNELS + quad.channel) = quad.taps[TAPS - 1];
        place = place + 1 == COLUMNS ? 0 : place + 1;
#pragma unroll
        for (int u = 0; u < TAPS - 1; u++) quad.taps[u] = quad.taps[u + 1];
#pragma unroll
        for (int u = 0; u < PART - 1; u++) given[t][u] = given[t][u + 1];
      }
      if (!DRAFTS && (KEY_BLOCKS == 1 || i >= 2 * KD)) leave(quad, conv_out + columns);
    }
#else
    for (int i = threadIdx.x; i < tokens * LOCAL; i += THREADS)
      s.c[i / LOCAL][i % LOCAL] =
          widen(x[(i64)(i / LOCAL) * x_width + channel_of(i % LOCAL, head)]);
#endif
#if CHUNKED
    if (!fresh && warp < CHUNKS) load_chunk<BEFORE, ACCESSES>(raw, state_in + warp * CHUNK, lane);
#endif
    make_rates(s, p, ba + (i64)token * 2 * HV, a_log, dt_bias, head);
    wait_copies<0>();
  }
  __syncthreads();
  int before = 0;
  if (live) {
    // No fence: this block's reads have returned, and no later write can change what they saw.
    if (SHIFTS && threadIdx.x == THREADS - 1)
      before = atomicAdd(readers + blockIdx.y * HK + head / R, 1);
    for (int t = warp; t < tokens + (p.behind() + tokens) * G; t += WARPS) {
      if (t < tokens) make_units(s, p, t, head, lane);
      else sum_decays(s, (t - tokens) / G, (t - tokens) % G, lane);
    }
    __syncthreads();
    if (MOST_AGE) {
      dot_keys(s, p, warp, lane);
      __syncthreads();
    }
#if STAGES
    int stage = 0, parity = 0;
#endif
#pragma unroll 1
    for (int chunk = warp; chunk < CHUNKS; chunk += WARPS) {
#if CHUNKED
      const bool more = !fresh && chunk + WARPS < CHUNKS;
      go_over(s, raw, chunk * CHUNK_ROWS, head, p, state_out + chunk * CHUNK,
              more ? state_in + (chunk + WARPS) * CHUNK : nullptr, lane);
#else
#if STAGES
      uint4 raw[ACCESSES];
      const uint4* at = (const uint4*)s.state[warp][stage] + lane;
      if (!fresh) barrier_wait(&s.full[warp][stage], parity);
#pragma unroll
      for (int i = 0; i < ACCESSES; i++) raw[i] = fresh ? uint4{} : at[32 * i];
      __syncwarp();
      if (lane == 0 && !fresh && chunk + STAGES * WARPS < CHUNKS)
        fetch(chunk + STAGES * WARPS, stage);
      if (++stage == STAGES) stage = 0, parity ^= 1;
#else
      if (!fresh && chunk + WARPS < CHUNKS) {
        const uint4* from = (const uint4*)(state_in + (chunk + WARPS) * CHUNK) + lane;
#pragma unroll
        for (int i = 0; i < ACCESSES; i++) ahead[i] = __ldcs(from + 32 * i);
      }
#endif
      go_over(s, raw, chunk * CHUNK_ROWS, head, p, state_out + chunk * CHUNK, lane);
#if !STAGES
#pragma unroll
      for (int i = 0; i < ACCESSES; i++) raw[i] = ahead[i];
#endif
#endif
    }
  } else if (!DRAFTS && slot >= 0 && fresh) {  // a fresh sequence without a token: all is zero
    for (int i = threadIdx.x; i < ROWS * LANES; i += THREADS) ((uint4*)state_out)[i] = uint4{};
#if FUSED
    for (int i = threadIdx.x; i < COLUMNS * LOCAL; i += THREADS)
      conv_out[columns + i / LOCAL * CHANNELS + channel_of(i % LOCAL, head)] = act{};
#endif
  }
  if (SHIFTS && live && threadIdx.x == THREADS - 1) {
    s.last = before == KEY_BLOCKS - 1;
    if (s.last) readers[blockIdx.y * HK + head / R] = 0;
  }
  __syncthreads();
  if (live && RING) {
    for (int i = threadIdx.x; i < tokens * (ROWS / 4); i += THREADS) {
      const int position = start + i / (ROWS / 4), row = i % (ROWS / 4) * 4;
      *(float4*)(p.ring_out + record_at(position) + head * VD + row) =
          *(const float4*)&s.deltas[p.entry(position)][row];
    }
#if DRAFTS
    float* header = p.ring_out + KEPT * RECORD + head;
    if (threadIdx.x < G) header[threadIdx.x] = (float)(start + 1);
    if (threadIdx.x < G && fresh) header[HV + threadIdx.x] = 1.f;
#else
    if (head == 0 && fresh && threadIdx.x == 0) p.ring_out[RECORD - 1] = 1.f;
#endif
  }
#if !FUSED
  for (int i = threadIdx.x; i < TILE * ROWS; i += THREADS)
    y_out[(i64)(token + i / ROWS) * HV * VD + head * VD + i % ROWS] =
        narrow(i / ROWS < tokens ? s.c[i / ROWS][2 * KD + i % ROWS] : 0.f);
#else
  // A warp has a head's rows of a token, four neighbours a lane.
  constexpr int STEPS = (VD + 127) / 128;
  u8* q[2] = {q0, q1};
  u8* q_scale[2] = {s0, s1};
#pragma unroll 1
  for (int t = warp; t < TILE * G; t += WARPS) {
    const int j = t / G, mine = t % G;
    float o[STEPS][4], sum = 0.f, top = 0.f;
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int row = i * 128 + lane * 4 + e, at = mine * VD + row;
        const float value = j < tokens && row < VD ? rounded(s.c[j][2 * KD + at]) : 0.f;
        sum = fmaf(value, value, sum);
        o[i][e] = j < tokens && row < VD ? value * s.gate[j][at] : 0.f;
        top = fmaxf(top, fabsf(o[i][e]));
      }
    sum = lane_sum<32>(sum), top = warp_max(top);
    const float root = 1.f / sqrtf(sum * (1.f / VD) + (float)EPS), amax = rounded(top * root);
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
      const int row = i * 128 + lane * 4, column = (head + mine) * VD + row;
      float y[4];
      act4 out;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        out.v[e] = narrow(o[i][e] * root);
        y[e] = widen(out.v[e]);
      }
      if (KEEP && row < VD) *(act4*)(y_out + (i64)(token + j) * HV * VD + column) = out;
      quantise<HV * VD>(y, token + j, column, amax, scales, q, q_scale, row < VD);
    }
  }
  if (SHIFTS && live && s.last)
    for (int i = threadIdx.x * 4; i < 2 * KD; i += THREADS * 4) {
      Quad quad;
      quad.channel = channel_of(i, head);
#pragma unroll
      for (int j = 0; j < TAPS - 1; j++) {
        const act* from = j < TAPS - 2 ? conv_in + columns + (j + 1) * CHANNELS : x;
        quad.taps[j] = j < TAPS - 2 && fresh ? act4{} : *(const act4*)(from + quad.channel);
      }
      leave(quad, conv_out + columns);
    }
#endif
}
