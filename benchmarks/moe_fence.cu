// Two helpers of benchmarks/moe_fence.py: shared memory filled with 0xFF, and a count of words that
// differ.

// Every byte of a block's shared memory becomes 0xFF; a block that takes all of it has a
// multiprocessor of its own.
extern "C" __global__ void poison_shared(int words) {
  extern __shared__ volatile unsigned memory[];
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int i = threadIdx.x; i < words; i += blockDim.x) memory[i] = 0xFFFFFFFFu;
  __syncthreads();
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// found[0] += words of `got` that are not those of `want`; `got` becomes 0xFF.
extern "C" __global__ void count_differences(unsigned* got, const unsigned* want, int words,
                                             unsigned long long* found) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  unsigned differ = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) {
    differ += got[i] != want[i];
    got[i] = 0xFFFFFFFFu;
  }
  if (differ) atomicAdd(found, (unsigned long long)differ);
}
