// Grouped GEMM of experts by mma.sync, many tokens: y = Σ_e weight_e · w2_e(silu(gate_e(x)) ·
// up_e(x)), where there is no wgmma. Activations are bf16, or codes as the bf16 they mean.
//
// Launches: moe_count, moe_sort, [quantise_x], tile_up, tile_down, moe_combine. A stage is a
// k-slab: 128 bytes of each token's row, 16-byte chunks swizzled by the row, and the block's
// weights as stored; a lane's 16 k of a token are consecutive there (expert_layout.py), so x is
// read as it is. With BLOCK_M 64 the order of every sum is experts_grouped_mma.cu's; with 128 all
// of k is one sum and parts are bf16. Figures: log/moe/experts_tiles_mma.md.
// Macros: experts_tiles.cuh's.
#include "moe/experts/experts_quantise.cuh"

// A stage is the tokens' rows and weights. With one more slot of rows and a barrier warps are half
// a stage apart, where three stages fit too.
constexpr int SLOT = BLOCK_M * 132 + 16, STAGE = SLOT - 16 + 16 * (M16_BYTES + M16_SCALES);
constexpr int SLACK = (SHARED_LIMIT - 1024 - SLOT) / STAGE > 2;
constexpr int FITTING = (SHARED_LIMIT - 1024 - SLACK * SLOT) / STAGE,
              DEPTH = FITTING < 6 ? FITTING : 6;
#include "moe/experts/experts_tiles.cuh"

struct Slab {
  static constexpr float REST = ::REST;
  static constexpr int OWN_BYTES = 2 * M16_BYTES;  // a warp's weights of a stage
  static constexpr int LIST_AT = BLOCK_M * 128, ROW_STAGE = LIST_AT + BLOCK_M * 4;
  static constexpr int SCALES_AT = WARPS * OWN_BYTES;
  static constexpr int OWN_STAGE = SCALES_AT + WARPS * 2 * M16_SCALES;
  static constexpr int ROW_SLOTS = DEPTH + SLACK;
  static constexpr int TURNS = 4, INNER_TURNS = 2;    // of `staging`, before the lanes wait
  static constexpr int ROUNDS = BLOCK_M / 32;         // rows that a thread copies
  static constexpr int RAW = WEIGHTS == 0 ? 2 : 1;    // words of an m16 tile held at once, by four
  static constexpr int GROUP = WEIGHTS == 0 ? 2 : 4;  // eights of tokens in registers at once
  static constexpr bool EARLY = DEPTH > 2;            // weights are dequantised half a slab ahead
  static constexpr int LEFT = DEPTH > 2 ? DEPTH - 3 : 0;  // groups that may be in flight
  // Of bf16 weights two stages fit, and registers do not do for code without branches.
  static constexpr bool WIDTHS = WEIGHTS != 0;
  static constexpr int FEWEST_EIGHTS = WIDTHS ? 1 : COLUMNS;
  template <bool UP>
  DEVICE static constexpr int runs() {
    return Side<UP>::SLABS;
  }

  // What a thread copies of a tile: rows tid / 8 + 32 i, chunk tid % 8; of its warp's weights what
  // it reads itself, so that no other thread waits for it.
  template <bool UP>
  struct Source {
    using S = Side<UP>;
    u32 from[ROUNDS];             // bytes; x is below 4 GiB
    const u8 *rows, *w, *scales;  // of the next slab
    int place, count;
    bool there;

    DEVICE void open(const Operands& o, const int4& tile, int item) {
      const int row0 = threadIdx.x >> 3;
      place = tile.y, count = tile.z, there = Item<UP>::there(item);
#pragma unroll
      for (int i = 0; i < ROUNDS; ++i) {
        const int row = min(row0 + 32 * i, count - 1);
        int source = tile.y + row;
        if (UP) source = __ldcg(o.order + source), source = BY_PAIR ? source : source / K1;
        from[i] = (u32)source * (S::K * 2) + (threadIdx.x & 7) * 16;
      }
      const u64 at = ((u64)tile.x * S::PANELS + Item<UP>::panel(item)) * S::SLABS * 4 +
                     (Item<UP>::warp() & 1) * 2;
      rows = o.rows;
      w = o.w + at * M16_BYTES + lane_id() * 16;
      scales = o.scales + at * M16_SCALES + lane_id() * 4;
    }
    DEVICE void close() { count = 0, there = false; }
    DEVICE void copy(const Place<Slab>& stage, int slab) {
      const int row0 = threadIdx.x >> 3, chunk = threadIdx.x & 7;
      const bool inside = S::K % 64 == 0 || slab * 64 + chunk * 8 < S::K;
      const u32 to = stage.rows + row0 * 128 + ((chunk ^ (row0 & 7)) << 4);
#pragma unroll
      for (int i = 0; i < ROUNDS; ++i)
        if (row0 + 32 * i < count) copy_async(to + i * 4096, rows + from[i], inside ? 16 : 0);
      if (there) {
        const u32 own = stage.own + Item<UP>::warp() * OWN_BYTES + lane_id() * 16;
#pragma unroll
        for (int i = 0; i < OWN_BYTES; i += 512) copy_async(own + i, w + i);
        if (M16_SCALES) copy_async_few<4>(stage.own + SCALES_AT + threadIdx.x * 4, scales);
      }
      rows += 128, w += 4 * M16_BYTES, scales += 4 * M16_SCALES;
    }
    DEVICE void copy_list(const Operands& o, const Place<Slab>& stage) const {
      if (!UP && (int)threadIdx.x < count)
        copy_async_few<4>(stage.rows + LIST_AT + threadIdx.x * 4, o.order + place + threadIdx.x);
    }
  };

  // Weights of half a k-slab: dequantised one half before they are multiplied, with its products.
  struct Held {
    u32 a[2][2][4];       // by m16 tile and step
    uint4 words[2][RAW];  // as stored; of 4-bit codes both halves
    [[maybe_unused]] u32 scales;

    template <int HALF>
    DEVICE void load(const Place<Slab>& stage) {
      if (FOUR_BITS && HALF == 1) return;
      const u32 own = stage.own + (threadIdx.x >> 5) * OWN_BYTES + lane_id() * 16;
#pragma unroll
      for (int i = 0; i < 2 * RAW; ++i)
        words[i / RAW][i % RAW] =
            load_shared16(own + i / RAW * M16_BYTES + (HALF * RAW + i % RAW) * 512);
      if (M16_SCALES) scales = load_shared4(stage.own + SCALES_AT + threadIdx.x * 4);
    }
    template <int HALF>
    DEVICE void unpack(u32 (&to)[2][2][4]) const {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 v = words[i][0];
        u32(&a)[2][4] = to[i];
#if WEIGHTS == 0
        const uint4 u = words[i][1];
        a[0][0] = v.x, a[0][1] = v.y, a[0][2] = v.z, a[0][3] = v.w;
        a[1][0] = u.x, a[1][1] = u.y, a[1][2] = u.z, a[1][3] = u.w;
#elif FOUR_BITS
        const RowScales s = row_scales(scales, i);
        code_pairs(HALF ? v.z : v.x, s.near, a[0][0], a[0][2], a[1][0], a[1][2]);
        code_pairs(HALF ? v.w : v.y, s.far, a[0][1], a[0][3], a[1][1], a[1][3]);
#else
        fp8_pairs(v.x, a[0][0], a[0][2]);
        fp8_pairs(v.y, a[1][0], a[1][2]);
        fp8_pairs(v.z, a[0][1], a[0][3]);
        fp8_pairs(v.w, a[1][1], a[1][3]);
#endif
      }
    }
    // The first half of a slab, once this thread's copies of it are there.
    DEVICE void open(const Place<Slab>& stage) {
      wait_copies<DEPTH - 2>();
      load<0>(stage), unpack<0>(a);
    }
  };
  DEVICE static void arrive() {}
  DEVICE static void depart(Held& held, const Place<Slab>& next) {
    if (!EARLY) held.open(next);
  }

  // A k-slab of 32 weight rows times EIGHTS eights of tokens: by halves, GROUP eights at a time,
  // the next in flight. In the second half what this thread copied of the next slab must be there;
  // of two stages it cannot be before the end.
  template <bool UP, int EIGHTS>
  DEVICE static void multiply(Products<Slab, UP>& all, int count, int, Sums& sums) {
    constexpr int GROUPS = (EIGHTS + GROUP - 1) / GROUP;
    const int g = lane_id() >> 2, t = lane_id() & 3;
    const u32 row = all.last.rows + g * 128;
    const u32 chunk[2] = {row + ((2 * t ^ g) << 4), row + (((2 * t + 1) ^ g) << 4)};
    uint4 x[2][GROUP];
    const auto load = [&](int n) {
#pragma unroll
      for (int i = 0; i < GROUP; ++i)
        if (n % GROUPS * GROUP + i < EIGHTS)
          x[n % 2][i] = load_shared16(chunk[n / GROUPS] + (n % GROUPS * GROUP + i) * 1024);
    };
    load(0);
    all.feeder.copy();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 later[2][2][4];
#pragma unroll
      for (int part = 0; part < GROUPS; ++part) {
        const int n = half * GROUPS + part;
        if (!WIDTHS && part * GROUP * 8 >= count) break;
        if (!WIDTHS && n == GROUPS) load(n);
        if (n + 1 < 2 * GROUPS) load(n + 1);
        if (n == 0) all.held.template load<1>(all.last), all.held.template unpack<1>(later);
        if (n == GROUPS && EARLY) {
          wait_copies<LEFT>();
          if (SLACK) all.announce(all.met);
          all.held.template load<0>(all.stage), all.held.template unpack<0>(later);
        }
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
          for (int i = 0; i < 2 * GROUP; ++i) {
            const uint4& v = x[n % 2][i / 2];
            if (part * GROUP + i / 2 < EIGHTS)
              mma_bf16(sums[i % 2][part * GROUP + i / 2], all.held.a[i % 2][step], step ? v.z : v.x,
                       step ? v.w : v.y);
          }
      }
      if (!EARLY && half == 1) continue;
#pragma unroll
      for (int i = 0; i < 16; ++i)
        all.held.a[i / 8][i / 4 % 2][i % 4] = later[i / 8][i / 4 % 2][i % 4];
    }
  }

  // A warp's weights of the stage that was multiplied; of the next one too where they are held.
  DEVICE static Staging staging(u32 last, u32 next) {
    const u32 own = Item<true>::warp() * OWN_BYTES;
    return {{last + own, FOUR_BITS ? next + own : last + own + 1024}};
  }

  // `h`, bf16 [places, INNER]: sixteen columns of sixteen tokens at a time, INNER_TURNS times
  // before the lanes wait for each other.
  DEVICE static void write_inner(const Operands& o, const int4& tile, int item, const Factors& f,
                                 const Sums& sums, const Staging& staging) {
    const int lane = lane_id(), row = Item<true>::row(item);
    const int token = (lane >> 4) * 8 + (lane & 7);  // a lane gives the address of this
    const u32 mine = token * 32 + (((lane >> 3) & 1) ^ (lane >> 2 & 1)) * 16;
    const u32 whole = (lane >> 1) * 32 + ((lane & 1) ^ (lane >> 3 & 1)) * 16;
#pragma unroll
    for (int p = 0; p < COLUMNS / 2; p += INNER_TURNS) {
      if (p * 16 >= tile.z) break;
#pragma unroll
      for (int turn = 0; turn < INNER_TURNS; ++turn) {
        float v[4][2];
#pragma unroll
        for (int i = 0; i < 8; ++i)
          v[i / 2][i % 2] = inner_of(sums[i / 2 % 2][2 * (p + turn) + i / 4], i % 2, f, i / 2 % 2);
#if QUANT == 1
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i / 2][i % 2] = e4m3_of(v[i / 2][i % 2], f.next);
#elif QUANT == 3
        const float gain = 1.0f / f.next;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float &first = v[i / 2 * 2][i % 2], &second = v[i / 2 * 2 + 1][i % 2];
          const float scale = from_e4m3(scale_code(most_of_block(first, second), gain));
          first = from_e2m1(value_code(first, gain, scale)) * scale;
          second = from_e2m1(value_code(second, gain, scale)) * scale;
        }
#endif
        u32 turned[4];
#pragma unroll
        for (int q = 0; q < 4; ++q) turned[q] = pack_bf16(v[q][0], v[q][1]);
        store_matrix_transposed(staging.at<INNER_TURNS>(turn) + mine, turned);
      }
      __syncwarp();
#pragma unroll
      for (int turn = 0; turn < INNER_TURNS; ++turn) {
        const uint4 values = load_shared16(staging.at<INNER_TURNS>(turn) + whole);
        const int column = (p + turn) * 16 + (lane >> 1);
        if (column < tile.z && row < INNER)
          *(uint4*)((u16*)o.to + (u64)(tile.y + column) * INNER + row + (lane & 1) * 8) = values;
      }
      __syncwarp();
    }
  }
};

DYNAMIC_SHARED(tile_up, RING<Slab>);
DYNAMIC_SHARED(tile_down, RING<Slab>);

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    tile_up(const u8* x, const int* order, const int4* tiles, const u8* w13, const u8* scale,
            const float* scale2, const float* x_scale, const float* h_scale, void* h) {
  multiply_tiles<Slab, true>(
      {x, nullptr, order, tiles, w13, scale, scale2, x_scale, h_scale, h, nullptr});
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    tile_down(const u8* h, const int* order, const int4* tiles, const u8* w2, const u8* scale,
              const float* scale2, const float* h_scale, void* parts) {
  multiply_tiles<Slab, false>(
      {h, nullptr, order, tiles, w2, scale, scale2, h_scale, nullptr, parts, nullptr});
}
