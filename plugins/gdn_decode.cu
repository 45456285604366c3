// One token of the gated delta net for every row of a launch: gdn_decode (FUSED: convolution,
// delta rule, gated norm, quantisation) and gated_delta_step (the delta rule alone).
//
// A block owns (row, key head): its R value heads share q, k and their norms. With SPLIT > 1 a
// cluster of SPLIT blocks shares that work by value rows and exchanges sums for the norm.
// State: [slot][Hv][Dv][Dk], Dk contiguous, f32 or bf16; 16 bytes a lane, so LANES lanes hold one
// value row and a warp 32 / LANES rows; U accesses make a chunk of CROWS rows (4 KB at U = 8).
// One pass over S: a = S k, b = S q; d = beta (v - g a); o = g b + d (q k); S' = g S + d k^T.
// RING: each warp runs its own ring of bulk copies, global -> shared -> (in place) -> global, so
// that no barrier among warps stands in the loop; else chunks go through registers, one ahead.
// A replay ring (k, d, cumulative log decay of tokens not yet folded in) may follow a slot's state.
// Ladder, H200, microseconds, 27B heads (16 key, 48 value) unless said; floor 4.3 TB/s:
//   f32 state, rows           1     2     8    32    128   35B 128   bf16 128   bf16 32
//   floor                   1.5   2.9  11.7  46.8  187.3     124.9       93.6      23.4
//   ring, 8 warps, 96 KB   10.1  10.6  18.8  58.5  218.2     146.8      128.5      34.1
//   the same, convolution's operands loaded before the previous launch is over:
//   ring, 8 warps x 3       9.1   9.6  17.6  58.6  218.7     148.2      132.3      33.8
//   ring, 4 warps x 3      11.9  12.4  19.3  59.7  219.7     147.9      119.1      33.0
//   registers, 8 warps     10.1  10.7  17.6  57.9  220.6     147.8      124.8      33.3
//   registers, 4 warps     14.8  15.6  21.1  58.3  222.1     148.2      122.2      32.0
//   ring, cluster of 2      7.3   7.5  16.3  63.8  261.9     203.9
//   ring, cluster of 4      6.3   8.7  28.4  94.4  369.2     304.2
//   registers, cluster 4    6.6   8.1  26.6  81.4  321.7     273.9
//   the delta rule alone (gated_delta_step), 128 rows: ring 212.1, registers 209.2.
#include "gdn.cuh"
#include "gdn_quant.cuh"

#define LANES (KD * STATE_BYTES / 16)
#define EPL (16 / STATE_BYTES)   // state elements a lane holds of a row
#define PASS (32 / LANES)        // rows of one 16-byte access of a warp
#define U (LANES < 16 ? LANES / 2 : RING || STATE_BYTES == 4 ? 8 : 4)
#define CROWS (U * PASS)
#define CHUNK (U * 512)          // bytes
#define ROWS (VD / SPLIT)        // value rows of a head in this block
#define PER_HEAD (ROWS / CROWS)
#define CHUNKS (R * PER_HEAD)
#define THREADS (WARPS * 32)
#define CHANNELS (2 * HK * KD + HV * VD)
#define LOCAL (2 * KD + R * ROWS)  // channels of this block: q, k, then its value rows by head

static_assert(ROWS % CROWS == 0 && ROWS % 4 == 0 && KD % 4 == 0, "sizes the plan must refuse");

struct Shared {
#if RING
  alignas(128) char ring[WARPS][STAGES][CHUNK];
  u64 full[WARPS][STAGES];
#endif
  alignas(16) float c[LOCAL];
  float o[R * ROWS];
#if FUSED
  float gate[R * ROWS];  // norm weight * silu(z)
  float part[2 * R];     // this block's sum of squares and largest |o * gate| by head
#endif
  float decay[R], beta[R];
};

#define QUADS ((LOCAL + 4 * THREADS - 1) / (4 * THREADS))

// Channel of the model for a channel of this block.
DEVICE int channel_of(int i, int head, int split) {
  if (i < KD) return head * KD + i;
  if (i < 2 * KD) return HK * KD + head * KD + i - KD;
  int v = i - 2 * KD;
  return 2 * HK * KD + (head * R + v / ROWS) * VD + split * ROWS + v % ROWS;
}

#if FUSED
// Four neighbouring channels of a thread: what the convolution needs, loaded before the launch
// before this one is over, and the token itself after.
struct Quad {
  act4 taps[TAPS];
  float w[4][TAPS];
  int channel;
};
DEVICE void load_old(Quad& q, const act* old, const float* weight, bool fresh) {
#pragma unroll
  for (int j = 0; j < TAPS - 1; j++)
    q.taps[j] = fresh ? act4{} : *(const act4*)(old + j * CHANNELS + q.channel);
#pragma unroll
  for (int e = 0; e < 4; e++)
#pragma unroll
    for (int j = 0; j < TAPS; j++) q.w[e][j] = __ldg(weight + (q.channel + e) * TAPS + j);
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

// The delta rule on one chunk in registers; `first` is its first value row in this block's order.
DEVICE void update(Shared& s, uint4 (&raw)[U], int first, const float (&k)[EPL],
                   const float (&q)[EPL], float dot, int lane) {
  const int head = first / ROWS;
  const float decay = s.decay[head], beta = s.beta[head];
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

// Where a chunk of this block lies in the state, in bytes.
DEVICE long long place(int chunk, int slot, int head, int split) {
  long long row = ((long long)slot * HV + head * R + chunk / PER_HEAD) * VD;
  return (row + split * ROWS + chunk % PER_HEAD * CROWS) * (KD * STATE_BYTES);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
gdn_decode(const act* x, int x_width, const act* ba, const float* conv_weight,
           const act* conv_in, act* conv_out, const float* a_log, const float* dt_bias,
           const char* state_in, char* state_out, const float* norm_weight, const int* slots,
           const int* starts, const int* counts, const float* scales, act* y_out, u8* q0, u8* s0,
           u8* q1, u8* s1, float eps, int offset) {
  extern __shared__ char memory[];
  Shared& s = *(Shared*)(((u64)memory + 127) & ~127ull);
  const int split = blockIdx.x, head = blockIdx.y, token = blockIdx.z;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int slot = slots[token], start = starts[token];
  const bool owns = slot >= 0, fresh = start == 0, live = owns && counts[token] > 0;
  const u64 policy = evict_first_policy();
#if RING
  if (lane == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(&s.full[warp][i], 1);
    barrier_init_fence();
    if (live && !fresh)
#pragma unroll 1
      for (int i = 0; i < STAGES && warp + i * WARPS < CHUNKS; i++) {
        u64* full = &s.full[warp][i];
        barrier_expect(full, CHUNK);
        bulk_load(s.ring[warp][i],
                  state_in + place(warp + i * WARPS, slot, head, split), CHUNK, full, policy);
      }
  }
  __syncwarp();
#else
  uint4 raw[U], ahead[U];
  if (live && !fresh && warp < CHUNKS) {
    const uint4* from = (const uint4*)(state_in + place(warp, slot, head, split)) + lane;
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
    quads[t].channel = channel_of(i, head, split);
    if (live && i < LOCAL) load_old(quads[t], old, conv_weight, fresh);
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
#pragma unroll
    for (int t = 0; t < QUADS; t++) {
      const int i = (t * THREADS + threadIdx.x) * 4;
      if (i >= LOCAL) continue;
      convolve(s.c + i, quads[t]);
      if (SPLIT == 1 || i >= 2 * KD) shift(quads[t], next);
    }
    for (int i = threadIdx.x; i < R * ROWS; i += THREADS) {
      int row = split * ROWS + i % ROWS;
      float z = widen(x[offset + (head * R + i / ROWS) * VD + row]);
      s.gate[i] = norm_weight[row] * silu(z);
    }
#else
    for (int i = threadIdx.x; i < LOCAL; i += THREADS)
      s.c[i] = widen(x[channel_of(i, head, split)]);
#endif
    if (threadIdx.x < R) {
      int h = head * R + threadIdx.x;
      float b = widen(ba[(long long)token * 2 * HV + h]);
      float a = widen(ba[(long long)token * 2 * HV + HV + h]);
      s.beta[threadIdx.x] = sigmoid(b);
      s.decay[threadIdx.x] = expf(-expf(a_log[h]) * softplus(a + dt_bias[h]));
    }
  }
  __syncthreads();
  if (live) {
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
    int stage = 0;
    u32 parity = 0;
#pragma unroll 1
    for (int chunk = warp; chunk < CHUNKS; chunk += WARPS) {
      uint4 raw[U];
      char* at = s.ring[warp][stage];
      if (!fresh) barrier_wait(&s.full[warp][stage], parity);
#pragma unroll
      for (int i = 0; i < U; i++)
        raw[i] = fresh ? uint4{} : *(uint4*)(at + (32 * i + lane) * 16);
      update(s, raw, chunk * CROWS, k, q, dot, lane);
#pragma unroll
      for (int i = 0; i < U; i++) *(uint4*)(at + (32 * i + lane) * 16) = raw[i];
      fence_async();
      __syncwarp();
      if (lane == 0) {
        bulk_store(state_out + place(chunk, slot, head, split), at, CHUNK);
        bulk_commit();
        int next = chunk + (STAGES - 1) * WARPS;  // into the stage that was stored last time round
        bulk_wait_read<1>();
        if (!fresh && chunk >= WARPS && next < CHUNKS) {
          int before = stage ? stage - 1 : STAGES - 1;
          u64* full = &s.full[warp][before];
          barrier_expect(full, CHUNK);
          bulk_load(s.ring[warp][before],
                    state_in + place(next, slot, head, split), CHUNK, full, policy);
        }
      }
      __syncwarp();
      if (++stage == STAGES) stage = 0, parity ^= 1;
    }
#else
#pragma unroll 1
    for (int chunk = warp; chunk < CHUNKS; chunk += WARPS) {
      if (!fresh && chunk + WARPS < CHUNKS) {
        const uint4* from =
            (const uint4*)(state_in + place(chunk + WARPS, slot, head, split)) + lane;
#pragma unroll
        for (int i = 0; i < U; i++) ahead[i] = __ldcs(from + 32 * i);
      }
      if (fresh)
#pragma unroll
        for (int i = 0; i < U; i++) raw[i] = uint4{};
      update(s, raw, chunk * CROWS, k, q, dot, lane);
      uint4* to = (uint4*)(state_out + place(chunk, slot, head, split)) + lane;
#pragma unroll
      for (int i = 0; i < U; i++) __stcs(to + 32 * i, raw[i]);
#pragma unroll
      for (int i = 0; i < U; i++) raw[i] = ahead[i];
    }
#endif
  } else if (owns && fresh) {  // a fresh sequence without a token: its state is zero
    for (int chunk = warp; chunk < CHUNKS; chunk += WARPS)
      for (int i = lane; i < CHUNK / 16; i += 32)
        ((uint4*)(state_out + place(chunk, slot, head, split)))[i] = uint4{};
#if FUSED
    for (int i = threadIdx.x; i < (TAPS - 1) * LOCAL; i += THREADS)
      conv_out[((long long)slot * (TAPS - 1) + i / LOCAL) * CHANNELS +
               channel_of(i % LOCAL, head, split)] = act{};
#endif
  }
  __syncthreads();
#if !FUSED
  for (int i = threadIdx.x; i < R * ROWS; i += THREADS)
    y_out[(long long)token * HV * VD + (head * R + i / ROWS) * VD + split * ROWS + i % ROWS] =
        narrow(live ? s.o[i] : 0.f);
#else
  constexpr int STEPS = (ROWS + 127) / 128;
  float o[STEPS][4], sum = 0.f, top = 0.f;
  if (warp < R) {  // a warp a head: four neighbouring rows a lane
#pragma unroll
    for (int t = 0; t < STEPS; t++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        int row = t * 128 + lane * 4 + e;
        float value = live && row < ROWS ? rounded(s.o[warp * ROWS + row]) : 0.f;
        sum = fmaf(value, value, sum);
        o[t][e] = live && row < ROWS ? value * s.gate[warp * ROWS + row] : 0.f;
        top = fmaxf(top, fabsf(o[t][e]));
      }
    sum = lane_sum<32>(sum);
#pragma unroll
    for (int off = 16; off; off /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, off));
  }
#if SPLIT > 1
  if (warp < R && lane == 0) s.part[warp] = sum, s.part[R + warp] = top;
  cluster_arrive();
  cluster_wait();
  if (warp < R) {
    sum = 0.f, top = 0.f;
#pragma unroll
    for (int i = 0; i < SPLIT; i++) {
      sum += load_cluster(&s.part[warp], i);
      top = fmaxf(top, load_cluster(&s.part[R + warp], i));
    }
  }
  cluster_arrive();  // nobody leaves while its sums are read; q and k were read by all
  if (split == 0 && live)
#pragma unroll
    for (int t = 0; t < QUADS; t++)
      if ((t * THREADS + threadIdx.x) * 4 < 2 * KD) shift(quads[t], next);
#endif
  if (warp < R) {
    float root = 1.f / sqrtf(sum * (1.f / VD) + eps), amax = rounded(top * root);
    u8* q[2] = {q0, q1};
    u8* q_scale[2] = {s0, s1};
#pragma unroll
    for (int t = 0; t < STEPS; t++) {
      int row = t * 128 + lane * 4, column = (head * R + warp) * VD + split * ROWS + row;
      float y[4];
      act4 out;
#pragma unroll
      for (int e = 0; e < 4; e++) {
        out.v[e] = narrow(o[t][e] * root);
        y[e] = widen(out.v[e]);
      }
      if (KEEP && row < ROWS) *(act4*)(y_out + (long long)token * HV * VD + column) = out;
      quantise(y, token, column, amax, scales, q, q_scale, row < ROWS);
    }
  }
#if SPLIT > 1
  cluster_wait();
#endif
#endif
#if RING
  if (lane == 0) bulk_wait<0>();
#endif
}
