// Matrix instructions of common/ptx.cuh as the PTX manual says, in double precision; and the loads,
// stores and transposes of their operands. Included by the ptx.cuh of this folder.
#pragma once

// A lane's part of four matrices, or of their transposes; eight lanes point to the rows of each.
template <class Address>
void load_matrices(u32 (&r)[4], Address row, bool transposed) {
  const auto all = gathered({shared_address(row)});
  const int first = lane_id() / 4, pair = lane_id() % 4 * 2;
  for (int matrix = 0; matrix < 4; ++matrix) {
    r[matrix] = 0;
    for (int i = 0; i < 2; ++i) {
      const int line = transposed ? pair + i : first, column = transposed ? first : pair + i;
      u16 value;
      memcpy(&value, shared(all[matrix * 8 + line][0], 16) + column * 2, 2);
      r[matrix] |= (u32)value << 16 * i;
    }
  }
  __syncwarp();
}
template <class Address>
void load_matrix(u32 (&r)[4], Address row) {
  load_matrices(r, row, false);
}
template <class Address>
void load_matrix_transposed(u32 (&r)[4], Address row) {
  load_matrices(r, row, true);
}
template <bool STAYS = false>
u32 transpose_matrix(u32 pair) {
  const auto all = gathered({pair});
  const int row = lane_id() / 4, column = lane_id() % 4 * 2;
  u32 found = 0;
  for (int i = 0; i < 2; ++i)
    found |= (all[(column + i) * 4 + row / 2][0] >> row % 2 * 16 & 0xffff) << 16 * i;
  __syncwarp();
  return found;
}
template <class Address>
void store_matrix_transposed(Address row, const u32 (&r)[4]) {
  const auto all = gathered({r[0], r[1], r[2], r[3], shared_address(row)});
  for (int matrix = 0; lane_id() == 0 && matrix < 4; ++matrix)
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 2; ++i) {
        const u16 value = all[lane][matrix] >> 16 * i;
        u8* const to = shared(all[matrix * 8 + lane % 4 * 2 + i][4], 16);
        memcpy(to + lane / 4 * 2, &value, 2);
      }
  __syncwarp();
}
// d += Σ a(row, k) b(column, k) of an m16n8 instruction.
template <int DEPTH, class A, class B>
void add_products(float (&d)[4], const A& a, const B& b) {
  double rows[2][DEPTH], columns[2][DEPTH];
  for (int i = 0; i < 2; ++i)
    for (int k = 0; k < DEPTH; ++k) {
      rows[i][k] = a(lane_id() / 4 + 8 * i, k);
      columns[i][k] = b(lane_id() % 4 * 2 + i, k);
    }
  for (int i = 0; i < 4; ++i) {
    double sum = d[i];
    for (int k = 0; k < DEPTH; ++k) sum += rows[i / 2][k] * columns[i % 2][k];
    d[i] = (float)sum;
  }
  __syncwarp();
}
template <class Value>
void mma_halves(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const Value& value) {
  const auto all = gathered({a[0], a[1], a[2], a[3], b0, b1});
  const auto of_a = [&](int row, int k) -> double {
    return value(all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2] >> k % 2 * 16 & 0xffff);
  };
  const auto of_b = [&](int column, int k) -> double {
    return value(all[column * 4 + k % 8 / 2][4 + k / 8] >> k % 2 * 16 & 0xffff);
  };
  add_products<16>(d, of_a, of_b);
}
inline void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma_halves(d, a, b0, b1, value_of_bf16);
}
inline void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma_halves(d, a, b0, b1, from_f16);
}
inline void mma_e4m3(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const auto all = gathered({a[0], a[1], a[2], a[3], b0, b1});
  const auto of_a = [&](int row, int k) -> double {
    return value_of_e4m3(all[row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2] >> k % 4 * 8);
  };
  const auto of_b = [&](int column, int k) -> double {
    return value_of_e4m3(all[column * 4 + k % 16 / 4][4 + k / 16] >> k % 4 * 8);
  };
  add_products<32>(d, of_a, of_b);
}
inline void mma_nvfp4(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 scale_a, u32 scale_b) {
  const auto all = gathered({a[0], a[1], a[2], a[3], b0, b1, scale_a, scale_b});
  const auto of_a = [&](int row, int k) {
    const u32 x = all[row % 8 * 4 + k % 32 / 8][row / 8 + k / 32 * 2] >> k % 8 * 4 & 15;
    const u32 by = all[row % 8 * 4 + row / 8][6] >> k / 16 * 8 & 0xff;
    return (double)value_of_e2m1(x) * value_of_e4m3(by);  // exact
  };
  const auto of_b = [&](int column, int k) {
    const u32 x = all[column * 4 + k % 32 / 8][4 + k / 32] >> k % 8 * 4 & 15;
    const u32 by = all[column * 4][7] >> k / 16 * 8 & 0xff;
    return (double)value_of_e2m1(x) * value_of_e4m3(by);
  };
  add_products<64>(d, of_a, of_b);
}
