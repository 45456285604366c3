// Matrix instructions of common/ptx.cuh, and the loads, stores and transposes of their operands.
// Included by the ptx.cuh of this folder.
#pragma once

// A lane's part of four matrices, or of their transposes; eight lanes point to the rows of each.
void load_matrices(u32 (&r)[4], u32 row, bool transposed);
template <class Address>
void load_matrix(u32 (&r)[4], Address row) {
  load_matrices(r, shared_address(row), false);
}
template <class Address>
void load_matrix_transposed(u32 (&r)[4], Address row) {
  load_matrices(r, shared_address(row), true);
}
u32 transpose_pair(u32 pair);
template <bool STAYS = false>
u32 transpose_matrix(u32 pair) {
  return transpose_pair(pair);
}
void store_matrices_transposed(u32 row, const u32 (&r)[4]);
template <class Address>
void store_matrix_transposed(Address row, const u32 (&r)[4]) {
  store_matrices_transposed(shared_address(row), r);
}
void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);
void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);
void mma_tf32(float (&d)[4], const float (&a)[4], float b0, float b1);
void mma_e4m3(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1);
void mma_nvfp4(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, u32 scale_a, u32 scale_b);
