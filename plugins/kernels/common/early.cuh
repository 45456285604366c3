// The wait of a short kernel that lets the next launch prefetch its weights early.
//
// EARLY (a macro of the build, default 0): the next launch reads nothing recent before its own wait
// (`Early` of spark_engine/kernel.py), so it may begin before this kernel's wait.
#pragma once
#include "common/ptx.cuh"

#ifndef EARLY
#define EARLY 0
#endif

// A word, or zero; bypasses L1. For data that the launch before the previous one wrote, in a kernel
// that has not waited yet.
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
