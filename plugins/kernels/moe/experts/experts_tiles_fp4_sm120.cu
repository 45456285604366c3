// Grouped GEMM of experts with NVFP4 activations (W4A4), many tokens, by the FP4 instruction:
// native on sm_121a, emulated on sm_90a (fp4_mma_sm120.cuh: correct, not fast).
//
// Launches: moe_count, moe_sort, quantise_rows, tile_up, tile_down, moe_combine. The weights are
// packed to be dequantised (expert_layout.py); here a word's bits become eight codes again, in an
// order that activations are written in, and two lanes exchange halves, so that a block of 16 is
// what the instruction takes it to be. Block scales go back to e4m3 and are turned among four
// lanes. `h` is quantised where it is made: a warp's 32 rows of `up` are one block of 16 inner
// columns.
// A row of codes, by runs of SPAN k-slabs: lane t's words of each slab, 8 SPAN bytes; a row of
// scales: four bytes a slab, in the instruction's order. benchmarks/log/moe/experts_tiles_mma.md.
// Macros: experts_tiles.cuh's.
#include "common/fp4_mma_sm120.cuh"
#include "moe/experts/experts_quantise.cuh"

constexpr int SPAN = Side<true>::SLABS % 2 || Side<false>::SLABS % 2 ? 1 : 2;  // k-slabs a stage
constexpr int STAGE = SPAN * (BLOCK_M * 36 + 16 * (M16_BYTES + M16_SCALES)) + BLOCK_M * 4;
constexpr int DEPTH = (SHARED_LIMIT - 1024) / STAGE < 6 ? (SHARED_LIMIT - 1024) / STAGE : 6;
#include "moe/experts/experts_tiles.cuh"

// Where a row has half a block of 16 k, and the block's scale.
DEVICE int code_place(int block, int half) {
  const int slab = block >> 2, p = block & 3;
  return slab / SPAN * SPAN * 32 + ((p >> 1) * 2 + half) * 8 * SPAN + slab % SPAN * 8 + (p & 1) * 4;
}
DEVICE int scale_place(int block) { return (block >> 2) * 4 + (block & 1) * 2 + (block >> 1 & 1); }
// The place in a word of the code of k, of eight.
DEVICE int nibble(int k) { return 0x51374062 >> 4 * k & 7; }

// The instruction; its emulation is a call, so that a tile does not contain it 64 times.
#if defined(__CUDA_ARCH_SPECIFIC__) && __CUDA_ARCH_SPECIFIC__ / 100 == 12
DEVICE void multiply_codes(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 scale_a,
                           u32 scale_b) {
  mma_nvfp4(d, a, b0, b1, scale_a, scale_b);
}
#else
__device__ __noinline__ float4 emulated(float4 d, uint4 a, u32 b0, u32 b1, u32 scale_a,
                                        u32 scale_b) {
  float v[4] = {d.x, d.y, d.z, d.w};
  const u32 codes[4] = {a.x, a.y, a.z, a.w};
  mma_nvfp4(v, codes, b0, b1, scale_a, scale_b);
  return make_float4(v[0], v[1], v[2], v[3]);
}
DEVICE void multiply_codes(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 scale_a,
                           u32 scale_b) {
  const float4 v = emulated(make_float4(d[0], d[1], d[2], d[3]), make_uint4(a[0], a[1], a[2], a[3]),
                            b0, b1, scale_a, scale_b);
  d[0] = v.x, d[1] = v.y, d[2] = v.z, d[3] = v.w;
}
#endif

// Eight codes of a word as expert_layout.py packs it, as nibbles in the order of `nibble`.
DEVICE u32 nibbles(u32 w) {
  u32 codes = w & 0x70077007;
  codes |= w << 2 & 0x07400740;
  codes |= turn<10>(w) & 0x00300030;
  codes |= turn<26>(w) & 0x80088008;
  codes |= w >> 4 & 0x08000800;
  return codes | (w << 4 & 0x00800080);
}

// Four block scales, 5 bits of exponent and 3 of mantissa, as e4m3: pack_scales' inverse.
DEVICE u32 e4m3_scales(u32 wide) {
  if ((wide & 0x80808080) == 0x80808080) return (wide & 0x7f7f7f7f) + 0x08080808;
  u32 codes = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 byte = wide >> 8 * i & 0xff;
    codes |= (byte >= 128 ? byte - 120 : (8 + (byte & 7)) >> (16 - (byte >> 3))) << 8 * i;
  }
  return codes;
}

// A warp's 32 weight rows of a k-slab as operands of the instruction.
struct Weights {
  u32 a[2][4], scale[2];

  DEVICE void load(u32 codes, u32 scales) {
    const int t = lane_id() & 3;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 w = load_shared16(codes + i * M16_BYTES + lane_id() * 16);
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const u32 first = nibbles(row ? w.y : w.x), second = nibbles(row ? w.w : w.z);
        const u32 other = __shfl_xor_sync(~0u, t & 1 ? first : second, 1);
        a[i][row] = t & 1 ? other : first, a[i][2 + row] = t & 1 ? second : other;
      }
    }
    const u32 own = e4m3_scales(load_shared4(scales + lane_id() * 4));
    const u32 far = __shfl_xor_sync(~0u, own, 2);
    const u32 two = t < 2 ? __byte_perm(own, far, 0x5410) : __byte_perm(far, own, 0x7632);
    const u32 near = __shfl_xor_sync(~0u, two, 1);
    scale[0] = t & 1 ? __byte_perm(near, two, 0x7531) : __byte_perm(two, near, 0x6420);
    scale[1] = __shfl_xor_sync(~0u, scale[0], 2);
  }
};

struct Codes {
  static constexpr float REST = 1.0f;
  static constexpr int ROW = SPAN * 32, CHUNKS = ROW / 16;  // of a token in a stage
  static constexpr int OWN_BYTES = SPAN * 2 * M16_BYTES;
  static constexpr int X_SCALES_AT = BLOCK_M * ROW;
  static constexpr int LIST_AT = X_SCALES_AT + BLOCK_M * SPAN * 4;
  static constexpr int ROW_STAGE = LIST_AT + BLOCK_M * 4;
  static constexpr int SCALES_AT = WARPS * OWN_BYTES;
  static constexpr int OWN_STAGE = SCALES_AT + WARPS * SPAN * 2 * M16_SCALES;
  static constexpr int ROW_SLOTS = DEPTH, TURNS = SPAN * 2;
  static constexpr int FEWEST_EIGHTS = COLUMNS;
  template <bool UP>
  DEVICE static constexpr int runs() {
    return Side<UP>::SLABS / SPAN;
  }

  template <bool UP>
  struct Source {
    using S = Side<UP>;
    const u8 *codes, *row_scales, *w, *scales;
    const int* pairs;
    int count;
    bool there;

    DEVICE void open(const Operands& o, const int4& tile, int item) {
      count = tile.z, pairs = o.order + tile.y, there = Item<UP>::there(item);
      codes = o.rows + (u64)tile.y * (S::SLABS * 32);
      row_scales = o.row_scales + (u64)tile.y * (S::SLABS * 4);
      const u64 at = ((u64)tile.x * S::PANELS + Item<UP>::panel(item)) * S::SLABS * 4 +
                     (Item<UP>::warp() & 1) * 2;
      w = o.w + at * M16_BYTES + lane_id() * 16;
      scales = o.scales + at * M16_SCALES + lane_id() * 16;
    }
    DEVICE void close() { count = 0, there = false; }
    DEVICE void copy(const Place<Codes>& stage, int run) const {
      const int thread = threadIdx.x;
#pragma unroll
      for (int i = 0; i < BLOCK_M * CHUNKS / THREADS; ++i) {
        const int at = i * THREADS + thread, row = at / CHUNKS, chunk = at % CHUNKS * 16;
        if (row < count)
          copy_async(stage.rows + row * ROW + chunk,
                     codes + row * (S::SLABS * 32) + run * ROW + chunk);
      }
      if (thread < count)
        copy_async_few<SPAN * 4>(stage.rows + X_SCALES_AT + thread * SPAN * 4,
                                 row_scales + thread * (S::SLABS * 4) + run * SPAN * 4);
      if (!there) return;
      const u32 own = stage.own + Item<UP>::warp() * OWN_BYTES + lane_id() * 16;
#pragma unroll
      for (int s = 0; s < SPAN; ++s) {
        const u64 slab = (u64)(run * SPAN + s) * 4;
#pragma unroll
        for (int i = 0; i < 2; ++i)
          copy_async(own + (s * 2 + i) * M16_BYTES, w + (slab + i) * M16_BYTES);
        if (lane_id() < 2 * M16_SCALES / 16)
          copy_async(stage.own + SCALES_AT + (Item<UP>::warp() * SPAN + s) * 2 * M16_SCALES +
                         lane_id() * 16,
                     scales + slab * M16_SCALES);
      }
    }
    DEVICE void copy_list(const Operands&, const Place<Codes>& stage) const {
      if (!UP && (int)threadIdx.x < count)
        copy_async_few<4>(stage.rows + LIST_AT + threadIdx.x * 4, pairs + threadIdx.x);
    }
  };

  // A token's words and scales of a run, of lane (g, t).
  struct Input {
    u32 words[2 * SPAN], scales[SPAN];
    DEVICE void load(u32 codes, u32 scale) {
      if constexpr (SPAN == 2) {
        const uint4 v = load_shared16(codes);
        const uint2 s = load_shared8(scale);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        scales[0] = s.x, scales[1] = s.y;
      } else {
        const uint2 v = load_shared8(codes);
        words[0] = v.x, words[1] = v.y;
        scales[0] = load_shared4(scale);
      }
    }
  };

  // Nothing is held from a stage to the next, and any number of tokens takes this one code.
  struct Held {
    DEVICE void open(const Place<Codes>&) {}
  };
  DEVICE static void arrive() { wait_copies<DEPTH - 2>(); }
  DEVICE static void depart(Held&, const Place<Codes>&) {}

  template <bool UP, int EIGHTS>
  DEVICE static void multiply(Products<Codes, UP>& all, int count, int run, Sums& sums) {
    all.feeder.copy();
    const Place<Codes>& stage = all.last;
    using S = Side<UP>;
    constexpr u32 PART = S::K % 64 == 16 ? 0xff : S::K % 64 == 32 ? 0xff00ff : 0xffffff;
    const int warp = threadIdx.x >> 5, g = lane_id() >> 2, t = lane_id() & 3;
    Weights weights[SPAN];
#pragma unroll
    for (int s = 0; s < SPAN; ++s)
      weights[s].load(stage.own + warp * OWN_BYTES + s * 2 * M16_BYTES,
                      stage.own + SCALES_AT + (warp * SPAN + s) * 2 * M16_SCALES);
    const u32 codes = stage.rows + g * ROW + t * 8 * SPAN;
    const u32 scale = stage.rows + X_SCALES_AT + g * SPAN * 4;
    Input ahead[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) ahead[n].load(codes + n * 8 * ROW, scale + n * 32 * SPAN);
#pragma unroll
    for (int p = 0; p < COLUMNS / 2; ++p) {
      if (p * 16 >= count) break;
      Input x[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        x[n] = ahead[n];
        if (p + 1 < COLUMNS / 2)
          ahead[n].load(codes + (2 * p + 2 + n) * 8 * ROW, scale + (2 * p + 2 + n) * 32 * SPAN);
      }
#pragma unroll
      for (int s = 0; s < SPAN; ++s)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          u32 scales = x[i / 2].scales[s];  // behind the row's end is what was there before
          if (S::K % 64 && run * SPAN + s == S::SLABS - 1) scales &= PART;
          multiply_codes(sums[i % 2][2 * p + i / 2], weights[s].a[i % 2], x[i / 2].words[2 * s],
                         x[i / 2].words[2 * s + 1], weights[s].scale[i % 2], scales);
        }
    }
  }

  DEVICE static Staging staging(u32 last, u32) {
    const u32 own = last + Item<true>::warp() * OWN_BYTES;
    return {{own, own + OWN_BYTES / 2}};
  }

  // A block of `h` of each token. Lanes of one t have two tokens' 16 values; the words are gathered
  // by halves, so that lane g ends with the word of token g / 4, half g / 2 % 2.
  DEVICE static void write_inner(const Operands& o, const int4& tile, int item, const Factors& f,
                                 const Sums& sums, const Staging&) {
    constexpr int SLABS = Side<false>::SLABS;
    const int g = lane_id() >> 2, t = lane_id() & 3, block = Item<true>::row(item) / 16;
    const float gain = 1.0f / f.next;
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      if (j * 8 >= tile.z) break;
      u32 words[2][2];
      u8 code[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float v[2] = {inner_of(sums[0][j], c, f, 0), inner_of(sums[1][j], c, f, 1)};
        code[c] = scale_code(most_of_block(v[0], v[1]), gain);
#pragma unroll
        for (int i = 0; i < 2; ++i)
          words[c][i] = value_code(v[i], gain, from_e4m3(code[c])) << 4 * nibble(g);
      }
      const bool late = g & 4, second = g & 2;
      u32 mine[2];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        mine[i] = (late ? words[1][i] : words[0][i]) |
                  __shfl_xor_sync(~0u, late ? words[0][i] : words[1][i], 16);
      u32 word = (second ? mine[1] : mine[0]) | __shfl_xor_sync(~0u, second ? mine[0] : mine[1], 8);
      word |= __shfl_xor_sync(~0u, word, 4);
      const int column = j * 8 + 2 * t + late;
      if (column < tile.z && block * 16 < INNER && !(g & 1)) {
        const u64 place = tile.y + column;
        *(u32*)((u8*)o.to + place * (SLABS * 32) + code_place(block, second)) = word;
        if (!second)
          o.to_scales[place * (SLABS * 4) + scale_place(block)] = late ? code[1] : code[0];
      }
    }
  }
};

// A block a row of x, in the order of the tiles: codes and scales by its expert's input scale.
extern "C" __global__ void __launch_bounds__(256)
    quantise_rows(const u16* x, const int* ids, const int* order, const float* given, u8* codes,
                  u8* scales) {
  constexpr int SLABS = Side<true>::SLABS;
  wait_then_launch_dependents();
  const u64 row = blockIdx.x;
  const int pair = __ldcg(order + row);
  const float gain = 1.0f / given[__ldcg(ids + pair)];
  for (int base = 0; base < HIDDEN; base += 256 * 8) {
    const int k = base + threadIdx.x * 8;
    float v[8] = {};
    if (k < HIDDEN) unpack8(__ldcg((const uint4*)(x + (u64)(pair / K1) * HIDDEN + k)), v);
    u32 most = 0, word = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = max(most, size_bits(v[i]));
    most = max(most, __shfl_xor_sync(~0u, most, 1));
    const u8 code = scale_code(most, gain);
#pragma unroll
    for (int i = 0; i < 8; ++i) word |= value_code(v[i], gain, from_e4m3(code)) << 4 * nibble(i);
    if (k >= HIDDEN) continue;
    *(u32*)(codes + row * (SLABS * 32) + code_place(k / 16, k / 8 % 2)) = word;
    if (k / 8 % 2 == 0) scales[row * (SLABS * 4) + scale_place(k / 16)] = code;
  }
}

DYNAMIC_SHARED(tile_up, RING<Codes>);
DYNAMIC_SHARED(tile_down, RING<Codes>);

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    tile_up(const u8* x, const u8* x_scales, const int* order, const int4* tiles, const u8* w13,
            const u8* scale, const float* scale2, const float* given, const float* next, void* h,
            u8* h_scales) {
  multiply_tiles<Codes, true>(
      {x, x_scales, order, tiles, w13, scale, scale2, given, next, h, h_scales});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    tile_down(const u8* h, const u8* h_scales, const int* order, const int4* tiles, const u8* w2,
              const u8* scale, const float* scale2, const float* given, void* parts) {
  multiply_tiles<Codes, false>(
      {h, h_scales, order, tiles, w2, scale, scale2, given, nullptr, parts, nullptr});
}
