// PTX instructions on memory that other ranks read or write, by name (others: common/ptx.cuh).
#pragma once
#include "common/ptx.cuh"

DEVICE u32 load_acquire(const u32* at) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}
DEVICE void store_release(u32* at, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}
// Loads data that another rank wrote; bypasses L1.
DEVICE uint4 load_published(const uint4* at) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}
struct Halves {
  u64 low, high;
};
// Two words of data, each in eight bytes with the number.
DEVICE void store_pushed(u64 at, u32 low, u32 high, u32 number) {
  asm volatile(
      "{ .reg .b64 a, b; mov.b64 a, {%1, %3}; mov.b64 b, {%2, %3}; "
      "st.relaxed.sys.global.v2.b64 [%0], {a, b}; }" ::"l"(at),
      "r"(low), "r"(high), "r"(number)
      : "memory");
}
DEVICE Halves load_pushed(u64 at) {
  Halves v;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(v.low), "=l"(v.high)
               : "l"(at)
               : "memory");
  return v;
}
DEVICE u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}
