// Launches: a kernel's threads are made and scheduled, cluster by cluster. Compiled once for all
// kernels.
#pragma once
#include <cstdlib>
#include <memory>

#include "common/ptx.cuh"

constexpr int STACK = (1 << 18) + 1088;  // tops in other sets of the caches
constexpr int MOST_ARGUMENTS = 32, MOST_BLOCKS = 8;
template <class F, class... Given>
static void call_with(F* kernel, const u64* g, Given... given) {
  if constexpr (sizeof...(Given) == MOST_ARGUMENTS) ((void (*)(Given...))kernel)(given...);
  else call_with(kernel, g + 1, given..., *g);
}
typedef void (*Kernel)();
static Kernel kernel;
static u64 given[MOST_ARGUMENTS];
static void enter() {
  call_with(kernel, given);
  self().done = true;
  let_others();
}
// A cluster of one block or more; its first is `first` along x.
static void run_cluster(int size, int count, Dim first, u8* stacks) {
  alignas(1024) static u8 memory[MOST_BLOCKS][SHARED_OF_BLOCK];
  check(size <= MOST_BLOCKS && gridDim.x % size == 0, "a cluster of another kind");
  blocks.assign(size, {}), cluster = Assembly{size * count};
  std::vector<int> order;
  for (int b = 0; b < size; ++b) {
    BlockOnHost& block = blocks[b];
    block.index = {first.x + b, first.y, first.z}, block.dynamic = memory[b];
    memset(block.dynamic, 0xFF, SHARED_OF_BLOCK);
    block.all = Assembly{count}, block.warps.assign(count / 32, Assembly{32});
    block.threads.assign(count, {}), block.exchanges.resize(count / 32);
    for (int i = 0; i < count; ++i) {
      begin_at(block.threads[i].place, stacks + (size_t)STACK * (b * count + i), STACK, enter);
      if (i % 32 == 0) order.push_back(b * count + i);
    }
  }
  std::vector<int> asleep(size * count / 32);  // turns that a warp waits: it falls behind others
  for (int left = size * count; left;) {
    for (int i = (int)order.size() - 1; i > 0; --i) std::swap(order[i], order[rand() % (i + 1)]);
    for (int& turns : asleep) turns = turns ? turns - 1 : rand() % 64 ? 0 : rand() % 256;
    for (int i = 0; i < size * count; ++i) {
      const int thread = order[i / 32] + i % 32;
      if (asleep[thread / 32]) continue;
      here = &blocks[thread / count], dynamic = here->dynamic, blockIdx = here->index;
      threadIdx.x = thread % count;
      if (self().done || (self().turn && *self().turn == self().seen)) continue;
      switch_to(scheduler, self().place);
      left -= self().done, here->all.gone += self().done;
    }
  }
}
extern "C" void launch(Kernel which, int grid, int count, int args, const u64* values, int delayed,
                       int seed, int high, int deep, int size) {
  check(args <= MOST_ARGUMENTS && count % 32 == 0, "a launch of another kind");
  const std::unique_ptr<u8[]> stacks(new u8[(size_t)STACK * count * size]);  // few pages are used
  kernel = which, late = delayed, srand(seed);
  std::copy(values, values + args, given);
  gridDim = {grid, high, deep}, blockDim = {count, 1, 1};
  for (int i = 0; i < grid * high * deep; i += size)
    run_cluster(size, count, {i % grid, i / grid % high, i / grid / high}, stacks.get());
}
