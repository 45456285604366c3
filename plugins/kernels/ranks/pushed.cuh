// Pushed vectors: a rank writes them to the memory of the other ranks, each word with the number of
// its launch.
//
// Eight bytes arrive at once, so a word with the current number is valid: no flag, fence or reply
// is needed, for twice the bytes. The memory is double-buffered as published data is (peers.cuh)
// and holds nothing else, so an old word has an old number; numbers wrap after 2^32 launches. Of 32
// vectors the first halves are stored first, then the second halves.
#pragma once
#include "ranks/peers.cuh"

// Constructed before the wait for the previous launch, since the table of regions never changes.
template <int N_RANKS>
struct Pushes {
  static constexpr i64 EACH = PUSHED_BYTES / (2 * N_RANKS) / 1024 * 1024;  // bytes of one rank
  u64 region[N_RANKS], mine;
  int rank;

  DEVICE Pushes(const u64* peers, int rank) : mine(peers[rank]), rank(rank) {
#pragma unroll
    for (int r = 0; r < N_RANKS; r++) region[r] = peers[r];
  }
  // The address of vector `i` of rank `from` in a region.
  DEVICE static u64 place(u64 region, int from, i64 i, u32 launch) {
    return region + PUSHED + ((launch & 1) * N_RANKS + from) * EACH + (i >> 5) * 1024 +
           (i & 31) * 16;
  }
  // Writes v to all other ranks.
  DEVICE void push(uint4 v, i64 i, u32 launch) const {
#pragma unroll
    for (int r = 0; r < N_RANKS; r++) {
      if (r == rank) continue;
      const u64 at = place(region[r], rank, i, launch);
      store_pushed(at, v.x, v.y, launch + 1);
      store_pushed(at + 512, v.z, v.w, launch + 1);
    }
  }
  // The sum of vector `i` of all ranks, in the order of ranks; `own` is this rank's. Loads of
  // several ranks are in flight, as many as registers allow.
  DEVICE void add(uint4 own, i64 i, u32 launch, float (&sum)[8]) const {
    constexpr int AT_ONCE = N_RANKS < 4 ? N_RANKS : 4;
#pragma unroll
    for (int first = 0; first < N_RANKS; first += AT_ONCE) {
      uint4 parts[AT_ONCE];
      take<AT_ONCE>(parts, first, own, i, launch);
#pragma unroll
      for (int r = 0; r < AT_ONCE; r++)
        if (first + r < N_RANKS) add_part(parts[r], first + r == 0, sum);
    }
  }
  // Waits for vector `i` of COUNT ranks from `first` on.
  template <int COUNT>
  DEVICE void take(uint4 (&parts)[COUNT], int first, uint4 own, i64 i, u32 launch) const {
    const u32 number = launch + 1;
    u64 start = 0;
    for (u32 tries = 1;; tries++) {
      bool there = true;
#pragma unroll
      for (int j = 0; j < COUNT; j++) {
        parts[j] = own;
        if (first + j == rank || first + j >= N_RANKS) continue;
        const u64 at = place(mine, first + j, i, launch);
        const Halves a = load_pushed(at), b = load_pushed(at + 512);
        there &= a.low >> 32 == number && a.high >> 32 == number && b.low >> 32 == number &&
                 b.high >> 32 == number;
        parts[j] = make_uint4((u32)a.low, (u32)a.high, (u32)b.low, (u32)b.high);
      }
      if (there) break;
      if (tries % 1024) continue;
      if (start == 0) start = nanoseconds();
      if (nanoseconds() - start > LIMIT_NS) __trap();
    }
  }
};
