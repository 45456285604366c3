// One token of the gated delta net for every row of a launch: gdn_decode (FUSED: convolution,
// delta rule, gated norm, quantisation) and gated_delta_step (the delta rule alone).
//
// A block owns G value heads of a row (G divides R, the value heads of a key head). Each block of a
// key head convolves q and k; the last to have read that part of the convolution's state shifts it.
// State: [slot][Hv][Dv][Dk], Dk contiguous, f32 or bf16; 16 bytes a lane, so LANES lanes hold one
// value row and a warp 32 / LANES rows; U accesses make a chunk of CROWS rows (4 KB at U = 8).
// One pass over S: a = S k, b = S q; d = beta (v - g a); o = g b + d (q k); S' = g S + d k^T.
// WHOLE: all of the block's state is on its way to shared memory, by bulk copies, before the launch
// before this one is over; a chunk is updated in place and copied back. Else chunks go through
// registers, one ahead.
// A replay ring (k, d, cumulative log decay of tokens not yet folded in) may follow a slot's state.
//
// Ladder, H200, microseconds, 27B heads (16 key, 48 value), f32 state; floor at 4.3 TB/s 1.5 us for
// a row, 46.8 for 32, 187.3 for 128; reading and writing the same bytes and nothing else 197-204:
//   a block a key head, warps with rings of 4 KB copies   10.1 / 58.6 / 218.5; cluster of 4: 6.3
//   of it, no update of the state at all                         58.2 / 217.6
//   no evict-first hint on its loads                             58.2 / 213.2
//   8 KB copies, two deep 258; 4 warps, six deep 232; 16 warps in one block 243
//   a block a value head, all its state fetched at once      5.5 / 59.2 / 215.0
//   that (WHOLE, G = 1), the readers' counter without a fence, a channel's weights in one load
//                                                         4.9 / 57.9 / 212.6
//   through registers, 8 warps                            5.3 / 56.7 / 220.1; 4: 7.1 / 57.4 / 216.7
//   G = R, registers, 4 warps                            14.5 / 57.8 / 220.3
//     but best for a bf16 state, 128 rows: 117.6 (WHOLE 132.9, registers 135.2, 4 warps 122.7)
//   shared memory addressed as such, not by generic pointers, WHOLE    4.5 / 56.6 / 210.2
//   no longer here: clusters of 2 and 4 (5.9 for a row at best), G = R in shared memory (258.7)
//   the delta rule alone (gated_delta_step), 128 rows: WHOLE 204.0, registers 205.9.
// At 128 rows the convolution's states and the projections add 20 MB, 5 us, to the floor.
#include "gdn.cuh"
#include "quad_quant.cuh"

#define HV (HK * R)
#define LANES (KD * STATE_BYTES / 16)
#define EPL (16 / STATE_BYTES)   // state elements a lane holds of a row
#define PASS (32 / LANES)        // rows of one 16-byte access of a warp
#define U (LANES < 16 ? LANES / 2 : STATE_BYTES == 4 ? 8 : 4)
#define CROWS (U * PASS)
#define CHUNK (U * 512)          // bytes
#define PER_HEAD (VD / CROWS)
#define CHUNKS (G * PER_HEAD)
#define THREADS (WARPS * 32)
#define CHANNELS (2 * HK * KD + HV * VD)
#define LOCAL (2 * KD + G * VD)  // channels of this block: q, k, then its value rows by head
#define SHARERS (R / G)          // blocks that read the same q and k

static_assert(VD % CROWS == 0 && VD % 4 == 0 && KD % 4 == 0 && R % G == 0 && G <= WARPS,
              "sizes the plan must refuse");

struct Shared {
#if WHOLE
  alignas(128) char state[CHUNKS][CHUNK];
  u64 full[CHUNKS];
#endif
  alignas(16) float c[LOCAL];
  float o[G * VD];
#if FUSED
  float gate[G * VD];  // norm weight * silu(z)
#endif
  float decay[G], beta[G];
  int last;              // whether this block shifts q's and k's part of the convolution's state
};

#define QUADS ((LOCAL + 4 * THREADS - 1) / (4 * THREADS))

// Channel of the model for a channel of this block, whose first value head is `head`.
DEVICE int channel_of(int i, int head) {
  if (i < 2 * KD) return (i < KD ? 0 : HK * KD) + head / R * KD + i % KD;
  return 2 * HK * KD + head * VD + i - 2 * KD;
}

#if FUSED
// Four neighbouring channels of a thread: what the convolution needs, loaded before the launch
// before this one is over, and the token itself after.
struct Quad {
  act4 taps[TAPS];
  float w[4][TAPS];
  int channel;
};
DEVICE void load_taps(Quad& q, const act* old, bool fresh) {
#pragma unroll
  for (int j = 0; j < TAPS - 1; j++)
    q.taps[j] = fresh ? act4{} : *(const act4*)(old + j * CHANNELS + q.channel);
}
DEVICE void load_weights(Quad& q, const float* weight) {
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const float* w = weight + (q.channel + e) * TAPS;
    if constexpr (TAPS == 4) {
      float4 all = __ldg((const float4*)w);
      q.w[e][0] = all.x, q.w[e][1] = all.y, q.w[e][2] = all.z, q.w[e][3] = all.w;
    } else {
#pragma unroll
      for (int j = 0; j < TAPS; j++) q.w[e][j] = __ldg(w + j);
    }
  }
}
DEVICE void convolve(float* c, const Quad& q) {
#pragma unroll
  for (int e = 0; e < 4; e++) {
    float y = 0.f;
#pragma unroll
    for (int j = 0; j < TAPS; j++) y = fmaf(q.w[e][j], widen(q.taps[j].v[e]), y);
    c[e] = rounded(silu(y));
  }
}
DEVICE void shift(const Quad& q, act* next) {
#pragma unroll
  for (int j = 0; j < TAPS - 1; j++) *(act4*)(next + j * CHANNELS + q.channel) = q.taps[j + 1];
}
#endif

// 2U sums over LANES lanes at once: afterwards v[0] is the sum of value number (lane's bits,
// high to low); halves are exchanged, so each step halves the values.
DEVICE float transposed_sum(float (&v)[2 * U], int lane) {
  int n = 2 * U;
#pragma unroll
  for (int off = LANES / 2; off; off /= 2) {
    if (n > 1) {
      n /= 2;
      bool upper = lane & off;
#pragma unroll
      for (int i = 0; i < U; i++)
        if (i < n) {
          float send = upper ? v[i] : v[i + n], keep = upper ? v[i + n] : v[i];
          v[i] = keep + __shfl_xor_sync(~0u, send, off);
        }
    } else {
      v[0] += __shfl_xor_sync(~0u, v[0], off);
    }
  }
  return v[0];
}

DEVICE void unpack(float (&s)[EPL], uint4 raw) {
#if STATE_BYTES == 4
  s[0] = __uint_as_float(raw.x), s[1] = __uint_as_float(raw.y);
  s[2] = __uint_as_float(raw.z), s[3] = __uint_as_float(raw.w);
#else
  u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; i++) s[2 * i] = low_bf16(words[i]), s[2 * i + 1] = high_bf16(words[i]);
#endif
}
DEVICE uint4 packed(const float (&s)[EPL]) {
#if STATE_BYTES == 4
  return {__float_as_uint(s[0]), __float_as_uint(s[1]), __float_as_uint(s[2]),
          __float_as_uint(s[3])};
#else
  return {pack_bf16(s[0], s[1]), pack_bf16(s[2], s[3]), pack_bf16(s[4], s[5]),
          pack_bf16(s[6], s[7])};
#endif
}

// The delta rule on one chunk in registers; `first` is its first value row in this block.
DEVICE void update(Shared& s, uint4 (&raw)[U], int first, const float (&k)[EPL],
                   const float (&q)[EPL], float dot, int lane) {
  const float decay = s.decay[first / VD], beta = s.beta[first / VD];
  float v[2 * U];
#pragma unroll
  for (int u = 0; u < U; u++) {
    float x[EPL], a = 0.f, b = 0.f;
    unpack(x, raw[u]);
#pragma unroll
    for (int e = 0; e < EPL; e++) a = fmaf(x[e], k[e], a), b = fmaf(x[e], q[e], b);
    v[u] = a, v[U + u] = b;
  }
  float mine = transposed_sum(v, lane);
  float other = __shfl_xor_sync(~0u, mine, LANES / 2);  // b where this lane has a
  // Lanes whose value number is below U hold a of row u; the lowest bits may be copies.
  const int sub = lane / LANES, in = lane % LANES;
  const int u = (in * 2 * U / LANES) % U, row = first + u * PASS + sub;
  float delta = beta * (s.c[2 * KD + row] - decay * mine);
  if (in < LANES / 2 && in % (LANES / (2 * U)) == 0) s.o[row] = decay * other + delta * dot;
#pragma unroll
  for (int i = 0; i < U; i++) {
    float d = __shfl_sync(~0u, delta, sub * LANES + i * (LANES / (2 * U)));
    float x[EPL];
    unpack(x, raw[i]);
#pragma unroll
    for (int e = 0; e < EPL; e++) x[e] = fmaf(d, k[e], decay * x[e]);
    raw[i] = packed(x);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
gdn_decode(const act* x, int x_width, const act* ba, const float* conv_weight,
           const act* conv_in, act* conv_out, const float* a_log, const float* dt_bias,
           const char* state_in, char* state_out, const float* norm_weight, const int* slots,
           const int* starts, const int* counts, const float* scales, act* y_out, u8* q0, u8* s0,
           u8* q1, u8* s1, int* readers, float eps, int offset) {
  extern __shared__ __align__(128) char memory[];
  Shared& s = *(Shared*)memory;
  const int head = blockIdx.x * G, token = blockIdx.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int slot = slots[token], start = starts[token];
  const bool owns = slot >= 0, fresh = start == 0, live = owns && counts[token] > 0;
  const long long heads = ((long long)slot * HV + head) * VD * KD * STATE_BYTES;
  state_in += heads, state_out += heads;
#if WHOLE
  if (lane == 0 && live && !fresh) {
    for (int i = warp; i < CHUNKS; i += WARPS) barrier_init(&s.full[i], 1);
    barrier_init_fence();
    for (int i = warp; i < CHUNKS; i += WARPS) {
      barrier_expect(&s.full[i], CHUNK);
      bulk_load(s.state[i], state_in + i * CHUNK, CHUNK, &s.full[i]);
    }
  }
  __syncwarp();
#else
  uint4 raw[U], ahead[U];
  if (live && !fresh && warp < CHUNKS) {
    const uint4* from = (const uint4*)(state_in + warp * CHUNK) + lane;
#pragma unroll
    for (int i = 0; i < U; i++) raw[i] = __ldcs(from + 32 * i);
  }
#endif
#if FUSED
  const act* old = conv_in + (long long)slot * (TAPS - 1) * CHANNELS;
  act* next = conv_out + (long long)slot * (TAPS - 1) * CHANNELS;
  Quad quads[QUADS];
#pragma unroll
  for (int t = 0; t < QUADS; t++) {
    const int i = (t * THREADS + threadIdx.x) * 4;
    quads[t].channel = channel_of(i, head);
    if (live && i < LOCAL) load_taps(quads[t], old, fresh), load_weights(quads[t], conv_weight);
  }
#endif
  wait_for_previous();  // the states above were written a whole step ago
  let_next_start();
  x += (long long)token * x_width;
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
      if (SHARERS == 1 || i >= 2 * KD) shift(quads[t], next);
    }
#else
    for (int i = threadIdx.x; i < LOCAL; i += THREADS)
      s.c[i] = widen(x[channel_of(i, head)]);
#endif
    const int mine = threadIdx.x - THREADS / 2 + G, h = head + mine;  // threads that are idle
    if (mine >= 0 && mine < G) {
      float b = widen(ba[(long long)token * 2 * HV + h]);
      float a = widen(ba[(long long)token * 2 * HV + HV + h]);
      s.beta[mine] = sigmoid(b);
      s.decay[mine] = expf(-expf(a_log[h]) * softplus(a + dt_bias[h]));
    }
  }
  __syncthreads();
  int before = 0;
  if (live) {
    // No fence: this block's reads have returned, and no later write can change what they saw.
    if (SHARERS > 1 && FUSED && threadIdx.x == THREADS - 1)
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
#if WHOLE
#pragma unroll 1
    for (int chunk = warp; chunk < CHUNKS; chunk += WARPS) {
      uint4 raw[U];
      uint4* at = (uint4*)s.state[chunk] + lane;
      if (!fresh) barrier_wait(&s.full[chunk], 0);
#pragma unroll
      for (int i = 0; i < U; i++) raw[i] = fresh ? uint4{} : at[32 * i];
      update(s, raw, chunk * CROWS, k, q, dot, lane);
#pragma unroll
      for (int i = 0; i < U; i++) at[32 * i] = raw[i];
      fence_async();
      __syncwarp();
      if (lane == 0) {
        bulk_store(state_out + chunk * CHUNK, s.state[chunk], CHUNK);
        bulk_commit();
      }
    }
#else
#pragma unroll 1
    for (int chunk = warp; chunk < CHUNKS; chunk += WARPS) {
      if (!fresh && chunk + WARPS < CHUNKS) {
        const uint4* from = (const uint4*)(state_in + (chunk + WARPS) * CHUNK) + lane;
#pragma unroll
        for (int i = 0; i < U; i++) ahead[i] = __ldcs(from + 32 * i);
      }
      if (fresh)
#pragma unroll
        for (int i = 0; i < U; i++) raw[i] = uint4{};
      update(s, raw, chunk * CROWS, k, q, dot, lane);
      uint4* to = (uint4*)(state_out + chunk * CHUNK) + lane;
#pragma unroll
      for (int i = 0; i < U; i++) __stcs(to + 32 * i, raw[i]);
#pragma unroll
      for (int i = 0; i < U; i++) raw[i] = ahead[i];
    }
#endif
  } else if (owns && fresh) {  // a fresh sequence without a token: its state is zero
    for (int chunk = warp; chunk < CHUNKS; chunk += WARPS)
      for (int i = lane; i < CHUNK / 16; i += 32)
        ((uint4*)(state_out + chunk * CHUNK))[i] = uint4{};
#if FUSED
    for (int i = threadIdx.x; i < (TAPS - 1) * LOCAL; i += THREADS)
      next[i / LOCAL * CHANNELS + channel_of(i % LOCAL, head)] = act{};
#endif
  }
  if (SHARERS > 1 && FUSED && live && threadIdx.x == THREADS - 1) {
    s.last = before == SHARERS - 1;
    if (s.last) readers[token * HK + head / R] = 0;
  }
  __syncthreads();
#if !FUSED
  for (int i = threadIdx.x; i < G * VD; i += THREADS)
    y_out[(long long)token * HV * VD + head * VD + i] = narrow(live ? s.o[i] : 0.f);
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
    float root = 1.f / sqrtf(sum * (1.f / VD) + eps), amax = rounded(top * root);
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
      if (KEEP && row < VD) *(act4*)(y_out + (long long)token * HV * VD + column) = out;
      quantise<HV * VD>(y, token, column, amax, scales, q, q_scale, row < VD);
    }
  }
  if (SHARERS > 1 && live && s.last)
    for (int i = threadIdx.x * 4; i < 2 * KD; i += THREADS * 4) {
      Quad quad;
      quad.channel = channel_of(i, head);
      load_taps(quad, old, fresh);
      quad.taps[TAPS - 1] = *(const act4*)(x + quad.channel);
      shift(quad, next);
    }
#endif
#if WHOLE
  if (lane == 0) bulk_wait_read<0>();
#endif
}
