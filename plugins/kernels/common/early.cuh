// The wait of a short kernel whose successor may prefetch its weights meanwhile.
//
// EARLY (a macro that the build gives, 0 where it does not): what the launch behind this one reads
// before its own wait is old enough (`Early` of spark_engine/kernel.py), so that it may begin ahead
// of this kernel's wait.
#pragma once
#include "common/ptx.cuh"

#ifndef EARLY
#define EARLY 0
#endif

// A word, or zero, past this multiprocessor's own cache: of what was written a launch ago, where
// this kernel has not waited yet.
DEVICE u32 load_late_if(bool there, const u32* p) {
  u32 v;
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %2, 0; mov.u32 %0, 0; @p ld.global.cg.u32 %0, [%1]; }"
      : "=r"(v)
      : "l"(p), "r"((u32)there));
  return v;
}

DEVICE void wait_and_let_next_begin() {
  if (EARLY) launch_dependents();
  wait_for_previous();
  if (!EARLY) launch_dependents();
}
