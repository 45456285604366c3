// Grouped GEMM of experts by mma.sync, many tokens: y = Σ_e weight_e · w2_e(silu(gate_e(x)) ·
// up_e(x)), where there is no wgmma. Activations are bf16, or codes as the bf16 they stand for.
//
// Launches: moe_sort, [quantise_x], tile_up, tile_down, moe_combine. A stage is a k-slab: 128 bytes
// of each token's row, 16-byte chunks swizzled by the row, and the block's weights as they lie; a
// lane's 16 k of a token are consecutive there (expert_layout.py), so x is read as it is. With
// BLOCK_M 64 the order of every sum is moe_grouped.cu's; with 128 all of k is one sum and parts are
// bf16, as in moe_wide.cu. benchmarks/log/moe_tiles.md.
// Macros: moe_tiles.cuh's.
#include "moe/moe_tiles.cuh"

struct Slab {
  static constexpr float REST = ::REST;
  static constexpr int OWN_BYTES = 2 * M16_BYTES;  // a warp's weights of a stage
  static constexpr int WEIGHTS_AT = BLOCK_M * 128, SCALES_AT = WEIGHTS_AT + WARPS * OWN_BYTES;
  static constexpr int LIST_AT = SCALES_AT + WARPS * 2 * M16_SCALES;
  static constexpr int STAGE = LIST_AT + BLOCK_M * 4;
  static constexpr int ROUNDS = BLOCK_M / 32;  // rows that a thread copies
  template <bool UP>
  DEVICE static constexpr int runs() {
    return Side<UP>::SLABS;
  }

  // What a thread copies of a tile: rows tid / 8 + 32 i, chunk tid % 8; a warp its own weights.
  template <bool UP>
  struct Source {
    using S = Side<UP>;
    u32 from[ROUNDS];  // bytes; x is below 4 GiB
    const u8 *w, *scales;
    const int* pairs;
    int count;
    bool there;

    DEVICE void open(const Operands& o, const int4& tile, int item) {
      const int row0 = threadIdx.x >> 3;
      count = tile.z, pairs = o.order + tile.y, there = Item<UP>::there(item);
#pragma unroll
      for (int i = 0; i < ROUNDS; ++i) {
        const int row = min(row0 + 32 * i, count - 1);
        int source = tile.y + row;
        if (UP) source = __ldcg(pairs + row), source = BY_PAIR ? source : source / K1;
        from[i] = (u32)source * (S::K * 2) + (threadIdx.x & 7) * 16;
      }
      const u64 at = ((u64)tile.x * S::PANELS + Item<UP>::panel(item)) * S::SLABS * 4 +
                     (Item<UP>::warp() & 1) * 2;
      w = o.w + at * M16_BYTES + lane_id() * 16;
      scales = o.scales + at * M16_SCALES + lane_id() * 16;
    }
    DEVICE void copy(const Operands& o, u8* stage, int slab) const {
      const int row0 = threadIdx.x >> 3, chunk = threadIdx.x & 7, warp = Item<UP>::warp();
      const bool inside = S::K % 64 == 0 || slab * 64 + chunk * 8 < S::K;
      u8* const to = stage + row0 * 128 + ((chunk ^ (row0 & 7)) << 4);
#pragma unroll
      for (int i = 0; i < ROUNDS; ++i)
        if (row0 + 32 * i < count)
          copy_async(to + i * 4096, o.rows + from[i] + slab * 128, inside ? 16 : 0);
      if (there) {
        u8* const own = stage + WEIGHTS_AT + warp * OWN_BYTES + lane_id() * 16;
#pragma unroll
        for (int i = 0; i < OWN_BYTES; i += 512)
          copy_async(own + i, w + (u64)slab * 4 * M16_BYTES + i);
        if (M16_SCALES && lane_id() < 2 * M16_SCALES / 16)
          copy_async(stage + SCALES_AT + warp * 2 * M16_SCALES + lane_id() * 16,
                     scales + (u64)slab * 4 * M16_SCALES);
      }
      if (!UP && slab == S::SLABS - 1 && (int)threadIdx.x < count)
        copy_async_few<4>(stage + LIST_AT + threadIdx.x * 4, pairs + threadIdx.x);
    }
  };

  // A k-slab of 32 weight rows times the tile's tokens, sixteen at a time, the next under way.
  template <bool UP>
  DEVICE static void multiply(const u8* stage, int count, int, Sums& sums) {
    const int warp = threadIdx.x >> 5, g = lane_id() >> 2, t = lane_id() & 3;
    const u8* const w = stage + WEIGHTS_AT + warp * OWN_BYTES;
    const u8* const scales = stage + SCALES_AT + warp * 2 * M16_SCALES;
    u32 a[2][4][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) fragments(load_raw(w + i * M16_BYTES, scales), i, a[i]);
    const u32 row = shared_address(stage) + g * 128;
    const u32 chunk[2] = {row + ((2 * t ^ g) << 4), row + (((2 * t + 1) ^ g) << 4)};
    uint4 ahead[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) ahead[i / 2][i % 2] = load_shared16(chunk[i % 2] + i / 2 * 1024);
#pragma unroll
    for (int p = 0; p < COLUMNS / 2; ++p) {
      if (p * 16 >= count) break;
      uint4 x[2][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i / 2][i % 2] = ahead[i / 2][i % 2];
        if (p + 1 < COLUMNS / 2)
          ahead[i / 2][i % 2] = load_shared16(chunk[i % 2] + (2 * p + 2 + i / 2) * 1024);
      }
#pragma unroll
      for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const uint4& v = x[i / 2][step / 2];
          mma_bf16(sums[i % 2][2 * p + i / 2], a[i % 2][step], step % 2 ? v.z : v.x,
                   step % 2 ? v.w : v.y);
        }
    }
  }

  // `h`, bf16 [places, INNER]: sixteen columns of sixteen tokens at a time, turned in `room`.
  DEVICE static void write_inner(const Operands& o, const int4& tile, int item, const Factors& f,
                                 const Sums& sums, u8* room) {
    const int lane = lane_id(), row = Item<true>::row(item);
    const int token = (lane >> 4) * 8 + (lane & 7);  // whose address a lane gives
    u8* const mine = room + token * 32 + (((lane >> 3) & 1) ^ (lane >> 2 & 1)) * 16;
    const u8* const whole = room + (lane >> 1) * 32 + ((lane & 1) ^ (lane >> 3 & 1)) * 16;
#pragma unroll
    for (int p = 0; p < COLUMNS / 2; ++p) {
      if (p * 16 >= tile.z) break;
      float v[4][2];
#pragma unroll
      for (int i = 0; i < 8; ++i)
        v[i / 2][i % 2] = inner_of(sums[i / 2 % 2][2 * p + i / 4], i % 2, f, i / 2 % 2);
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
      store_matrix_transposed(mine, turned);
      __syncwarp();
      const uint4 values = load_shared16(whole);
      const int column = p * 16 + (lane >> 1);
      if (column < tile.z && row < INNER)
        *(uint4*)((u16*)o.to + (u64)(tile.y + column) * INNER + row + (lane & 1) * 8) = values;
      __syncwarp();
    }
  }
};

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
