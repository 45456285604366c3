// mbarriers as the PTX manual says: a phase ends when all arrivals came, and the next one begins.
// In the eight bytes: arrivals that are left, arrivals of a phase, the phase's parity. Included by
// the ptx.cuh of this folder.
#pragma once

struct Arrivals {
  u16 left, all;
  u32 parity;
};
static_assert(sizeof(Arrivals) == 8);

inline void barrier_init(u64* bar, u32 arrivals) {
  *bar = bits_of<u64>(Arrivals{(u16)arrivals, (u16)arrivals, 0});
}
inline void barrier_init_fence() {}
inline void fence_async() {}
inline void barrier_arrive(u64* bar) {
  Arrivals a = bits_of<Arrivals>(*bar);
  check(a.left > 0 && a.left <= a.all, "an arrival that no phase has");
  if (--a.left == 0) a.left = a.all, a.parity ^= 1;
  *bar = bits_of<u64>(a);
}
inline void barrier_wait(u64* bar, u32 parity) {
  while (bits_of<Arrivals>(*bar).parity == parity) swapcontext(&self().place, &scheduler);
}
