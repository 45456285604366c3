// gdn_decode: one decode token of the gated delta net for every row of a launch. FUSED: causal
// convolution, delta rule, gated norm, quantisation; else gated_delta_step, the delta rule alone.
//
// Grid (Hv / G, rows): a block owns G of the R value heads that share a key head. Every block of a
// key head convolves its q and k; the last that has read their convolution state shifts it.
// One pass over S: a = S k, b = S q; d = beta (v - g a); o = g b + d (q k); S' = g S + d k^T.
// STAGES: chunks that each warp keeps in flight to shared memory by TMA bulk copies, the first
// issued before griddepcontrol.wait (PDL); 0: chunks come through registers, one ahead.
// RING: S lags behind (replay_ring.py): a and b add the records' part, a chunk is written only when
// its rows fold.
// Winner: the builder times the variants by rows. 128 rows of the 27B, f32 state, H200: 209.5 us
// (floor 187), ring of 8: 122.1 (floor 110.6). Variants: log/delta_rule/delta_decode_fma.md.
#include "common/early.cuh"
#include "delta_rule/delta_decode_replay.cuh"
#include "common/quad_quant.cuh"

// What the delta rule makes of a chunk.
struct Update {
  float delta;  // of the row with the number that the lane's bits spell
  float decay;  // of the state
  int lag;      // tokens that the stored rows lag behind
  bool folds;
};
// The delta rule on a chunk; `first`: its first value row in this block.
DEVICE Update delta_rule(Shared& s, const uint4 (&raw)[ACCESSES], int first, int head,
                         const RingPosition& p, const float (&k)[EPL], const float (&q)[EPL],
                         float dot, int lane) {
  float v[2 * ACCESSES];
#pragma unroll
  for (int u = 0; u < ACCESSES; u++) {
    float x[EPL], a = 0.f, b = 0.f;
    unpack(x, raw[u]);
#pragma unroll
    for (int e = 0; e < EPL; e++) a = fmaf(x[e], k[e], a), b = fmaf(x[e], q[e], b);
    v[u] = a, v[ACCESSES + u] = b;
  }
  float mine = transposed_sum(v, lane);
  // Lanes with a value number below ACCESSES hold a of row u; the lowest bits may be copies.
  const int sub = lane / LANES, in = lane % LANES;
  const int u = (in * 2 * ACCESSES / LANES) % ACCESSES, row = first + u * ACCESS_ROWS + sub;
  const bool writes = in < LANES / 2 && in % (LANES / (2 * ACCESSES)) == 0;
  const float beta = s.beta[first / VD];
#if RING
  const int phase = phase_of(p, head, first), n = min(p.lag, phase);
  const float decay = s.decay[first / VD][n];
  const float* key_dots = s.key_dots[first / VD][in / (LANES / 2)];
  mine *= decay;
#pragma unroll
  for (int j = 0; j < MAX_LAG; j++) mine = fmaf(key_dots[j], s.deltas[j][row], mine);
  float other = __shfl_xor_sync(~0u, mine, LANES / 2);  // b where this lane has a
  float delta = beta * (s.c[2 * KD + row] - mine);
  if (writes) s.o[row] = other + delta * dot, p.record[head * VD + row] = delta;
  return {delta, decay, n, p.fresh || phase == MAX_LAG};
#else
  const float decay = s.decay[first / VD][0];
  float other = __shfl_xor_sync(~0u, mine, LANES / 2);  // b where this lane has a
  float delta = beta * (s.c[2 * KD + row] - decay * mine);
  if (writes) s.o[row] = decay * other + delta * dot;
  return {delta, decay, 0, true};
#endif
}
// The new state of a chunk.
DEVICE void fold(const Shared& s, uint4 (&raw)[ACCESSES], int first, const Update& c,
                 const float (&k)[EPL], int lane) {
  const int sub = lane / LANES;
  float x[ACCESSES][EPL];
#pragma unroll
  for (int r = 0; r < ACCESSES; r++) {
    unpack(x[r], raw[r]);
#pragma unroll
    for (int e = 0; e < EPL; e++) x[r][e] *= c.decay;
  }
#if RING
  replay(s, x, c.lag, first / VD, first + sub, lane);
#endif
#pragma unroll
  for (int r = 0; r < ACCESSES; r++) {
    float d = __shfl_sync(~0u, c.delta, sub * LANES + r * (LANES / (2 * ACCESSES)));
#pragma unroll
    for (int e = 0; e < EPL; e++) x[r][e] = fmaf(d, k[e], x[r][e]);
    raw[r] = packed(x[r]);
  }
}

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
  const int head = blockIdx.x * G, token = blockIdx.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int slot = slots[token], start = starts[token];
  const bool owns = slot >= 0, fresh = start == 0, live = owns && counts[token] > 0;
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
  uint4 raw[ACCESSES], ahead[ACCESSES];
  if (live && !fresh && warp < CHUNKS) load_chunk(raw, state_in + warp * CHUNK, lane);
#endif
  RingPosition position = {};
#if RING
  Records records;
  ring_in += (i64)slot * RECORDS * RECORD, ring_out += (i64)slot * RECORDS * RECORD;
  position = {ring_in, ring_out + start % RECORDS * RECORD, start, 0, fresh};
  if (live) {
    if (!fresh) position.lag = start - (int)ring_in[RECORD - 1];
    fetch_records(s, records, position, head, warp, lane);
  }
#endif
#if FUSED
  const act* old = conv_in + (i64)slot * (TAPS - 1) * CHANNELS;
  act* next = conv_out + (i64)slot * (TAPS - 1) * CHANNELS;
  Quad quads[QUADS];
#pragma unroll
  for (int t = 0; t < QUADS; t++) {
    const int i = (t * THREADS + threadIdx.x) * 4;
    quads[t].channel = channel_of(i, head);
    if (live && i < LOCAL) load_taps(quads[t], old, fresh), load_weights(quads[t], conv_weight);
  }
#endif
  wait_and_let_next_begin();  // the states above were written a whole step ago
  x += (i64)token * x_width;
  if (live) {
#if FUSED
#pragma unroll
    for (int t = 0; t < QUADS; t++)
      if ((t * THREADS + threadIdx.x) * 4 < LOCAL)
        quads[t].taps[TAPS - 1] = *(const act4*)(x + quads[t].channel);
    // From the last thread down: the first are those that convolve.
    for (int i = THREADS - 1 - threadIdx.x; i < G * VD; i += THREADS) {
      float z = widen(x[offset + head * VD + i]);
      s.gate[i] = norm_weight[i % VD] * silu(z);
    }
#pragma unroll
    for (int t = 0; t < QUADS; t++) {
      const int i = (t * THREADS + threadIdx.x) * 4;
      if (i >= LOCAL) continue;
      convolve(s.c + i, quads[t]);
      if (KEY_BLOCKS == 1 || i >= 2 * KD) shift(quads[t], next);
    }
#else
    for (int i = threadIdx.x; i < LOCAL; i += THREADS) s.c[i] = widen(x[channel_of(i, head)]);
#endif
    const int mine = head_of_rates(warp), h = head + mine;
    if (mine < G && lane < RECORDS) {
      float b = widen(ba[(i64)token * 2 * HV + h]);
      float a = widen(ba[(i64)token * 2 * HV + HV + h]);
      float g = -expf(a_log[h]) * softplus(a + dt_bias[h]);
#if RING
      s.decay[mine][lane] = expf(g + records.since);
      if (lane == 0) position.record[DECAYS_AT + h] = g;
#else
      s.decay[mine][0] = expf(g);
#endif
      if (lane == 0) s.beta[mine] = sigmoid(b);
    }
#if RING
    wait_copies<0>();
#endif
  }
  __syncthreads();
  int before = 0;
  if (live) {
    // No fence: this block's reads have returned, and no later write can change what they saw.
    if (KEY_BLOCKS > 1 && FUSED && threadIdx.x == THREADS - 1)
      before = atomicAdd(readers + token * HK + head / R, 1);
    float k[EPL], q[EPL], kk = 0.f, qq = 0.f, dot = 0.f;
#pragma unroll
    for (int e = 0; e < EPL; e++) {
      q[e] = s.c[lane % LANES * EPL + e], k[e] = s.c[KD + lane % LANES * EPL + e];
      kk = fmaf(k[e], k[e], kk), qq = fmaf(q[e], q[e], qq);
    }
    kk = 1.f / sqrtf(lane_sum<LANES>(kk) + 1e-6f);
    qq = 1.f / sqrtf(lane_sum<LANES>(qq) + 1e-6f) * (1.f / sqrtf((float)KD));
#pragma unroll
    for (int e = 0; e < EPL; e++) k[e] *= kk, q[e] *= qq, dot = fmaf(k[e], q[e], dot);
    dot = lane_sum<LANES>(dot);
#if RING
    dot_keys(s, records, k, q, warp, lane);
    append_record(position, k, head, warp, lane);
    __syncthreads();
#endif
#if STAGES
    int stage = 0, parity = 0;
#endif
#pragma unroll 1
    for (int chunk = warp; chunk < CHUNKS; chunk += WARPS) {
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
      if (fresh)
#pragma unroll
        for (int i = 0; i < ACCESSES; i++) raw[i] = uint4{};
#endif
      const Update update = delta_rule(s, raw, chunk * CHUNK_ROWS, head, position, k, q, dot, lane);
      if (update.folds) {
        fold(s, raw, chunk * CHUNK_ROWS, update, k, lane);
        store_chunk(state_out + chunk * CHUNK, raw, lane);
      }
#if !STAGES
#pragma unroll
      for (int i = 0; i < ACCESSES; i++) raw[i] = ahead[i];
#endif
    }
  } else if (owns && fresh) {  // a fresh sequence without a token: its state is zero
    for (int chunk = warp; chunk < CHUNKS; chunk += WARPS)
      for (int i = lane; i < CHUNK / 16; i += 32)
        ((uint4*)(state_out + chunk * CHUNK))[i] = uint4{};
#if FUSED
    for (int i = threadIdx.x; i < (TAPS - 1) * LOCAL; i += THREADS)
      next[i / LOCAL * CHANNELS + channel_of(i % LOCAL, head)] = act{};
#endif
  }
  if (KEY_BLOCKS > 1 && FUSED && live && threadIdx.x == THREADS - 1) {
    s.last = before == KEY_BLOCKS - 1;
    if (s.last) readers[token * HK + head / R] = 0;
  }
  __syncthreads();
#if !FUSED
  for (int i = threadIdx.x; i < G * VD; i += THREADS)
    y_out[(i64)token * HV * VD + head * VD + i] = narrow(live ? s.o[i] : 0.f);
#else
  // A warp has a head's rows, four neighbours a lane.
  constexpr int STEPS = (VD + 127) / 128;
  float o[STEPS][4], sum = 0.f, top = 0.f;
  if (warp < G) {
#pragma unroll
    for (int t = 0; t < STEPS; t++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        int row = t * 128 + lane * 4 + e;
        float value = live && row < VD ? rounded(s.o[warp * VD + row]) : 0.f;
        sum = fmaf(value, value, sum);
        o[t][e] = live && row < VD ? value * s.gate[warp * VD + row] : 0.f;
        top = fmaxf(top, fabsf(o[t][e]));
      }
    sum = lane_sum<32>(sum), top = warp_max(top);
  }
  if (warp < G) {
    float root = 1.f / sqrtf(sum * (1.f / VD) + (float)EPS), amax = rounded(top * root);
    u8* q[2] = {q0, q1};
    u8* q_scale[2] = {s0, s1};
#pragma unroll
    for (int t = 0; t < STEPS; t++) {
      int row = t * 128 + lane * 4, column = (head + warp) * VD + row;
      float y[4];
      act4 out;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        out.v[e] = narrow(o[t][e] * root);
        y[e] = widen(out.v[e]);
      }
      if (KEEP && row < VD) *(act4*)(y_out + (i64)token * HV * VD + column) = out;
      quantise<HV * VD>(y, token, column, amax, scales, q, q_scale, row < VD);
    }
  }
  if (KEY_BLOCKS > 1 && live && s.last)
    for (int i = threadIdx.x * 4; i < 2 * KD; i += THREADS * 4) {
      Quad quad;
      quad.channel = channel_of(i, head);
      load_taps(quad, old, fresh);
      quad.taps[TAPS - 1] = *(const act4*)(x + quad.channel);
      shift(quad, next);
    }
#endif
}
