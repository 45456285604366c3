// ranks/peer_ptx.cuh on the host, where a rank is a thread with a separate copy of the library.
// A thread that reads another rank's memory lets the other threads of its block run first, and
// the first one of a warp lets other ranks run.
#pragma once
#include <time.h>
#include <unistd.h>

#include "common/ptx.cuh"

inline void look_away() {
  if (lane_id() == 0) usleep(20);
  let_others();
}
// Between what it shows and what it reads a rank is slow now and then, so that others get ahead.
inline bool showed;
inline void dawdle() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  if (showed) usleep(now.tv_nsec / 1000 % 8 * 5000);  // one of eight: seldom all ranks alike
  showed = false;
}
template <class T>
T load_atomic(u64 at, int order) {
  check(at % sizeof(T) == 0, "an address is misaligned");
  return __atomic_load_n((T*)at, order);
}
inline u32 load_acquire(const u32* at) {
  look_away();
  return load_atomic<u32>((u64)at, __ATOMIC_ACQUIRE);
}
inline void store_release(u32* at, u32 value) {
  showed = true;
  __atomic_store_n(at, value, __ATOMIC_RELEASE);
}
inline uint4 load_published(const uint4* at) {
  check((u64)at % 16 == 0, "a vector is misaligned");
  dawdle();
  return *at;
}
struct Halves {
  u64 low, high;
};
inline void store_pushed(u64 at, u32 low, u32 high, u32 number) {
  check(at % 16 == 0, "a vector is misaligned");
  showed = true;
  look_away();  // the halves of a vector arrive one after the other
  __atomic_store_n((u64*)(at + 8), (u64)number << 32 | high, __ATOMIC_RELAXED);
  look_away();
  __atomic_store_n((u64*)at, (u64)number << 32 | low, __ATOMIC_RELAXED);
}
inline Halves load_pushed(u64 at) {
  look_away();
  dawdle();
  const u64 low = load_atomic<u64>(at, __ATOMIC_RELAXED);
  return {low, load_atomic<u64>(at + 8, __ATOMIC_RELAXED)};
}
inline u64 nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ull + now.tv_nsec;
}
inline void __trap() { check(false, "a rank does not come"); }
