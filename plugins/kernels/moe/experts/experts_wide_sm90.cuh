// What the two grouped GEMMs of many tokens share: the blocks' division into four consumer
// warpgroups and a producer warpgroup, the ring between them, and bf16 parts. sm_90a.
//
// Defines: STATIC, CONSUMERS, PRODUCERS, ROUNDS. A kernel defines the bytes of a stage and how many
// stages the ring has, and writes produce and consume.
#pragma once
#include "moe/experts/experts_sort.cuh"
#include "common/wgmma_sm90.cuh"

constexpr int STATIC = 5120;  // bytes of shared memory without the ring
constexpr int CONSUMERS = 4 * 128, PRODUCERS = 128;
constexpr int ROUNDS = BLOCK_M / 16;  // rows that a thread copies

struct Ring {
  u8* memory;
  u64 *full, *empty;

  // A stage is full when it was announced so many times, and empty when it was read so many.
  template <int DEPTH>
  DEVICE void open(int announced, int read) const {
    if (threadIdx.x) return;
    for (int i = 0; i < DEPTH; ++i) {
      barrier_init(full + i, announced);
      barrier_init(empty + i, read);
    }
    barrier_init_fence();
  }
};

// A place in a ring of so many stages: which stage, and the parity of its barriers.
template <int DEPTH>
struct RingPlace {
  int slot = 0, phase = 0;
  DEVICE void next() {
    if (++slot == DEPTH) slot = 0, phase ^= 1;
  }
};

// wgmma reads through the async proxy, cp.async writes through the generic one: the thread that
// copied fences once its copies are done, and only then announces the stage. LEFT later stages stay
// in flight meanwhile.
template <int LEFT>
DEVICE void announce(const Ring& r, int slot) {
  wait_copies<LEFT>();
  fence_async();
  barrier_arrive(r.full + slot);
}
