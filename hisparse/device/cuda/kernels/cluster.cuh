// What the blocks of a cluster tell each other: words that go straight into another block's shared memory
// and are counted there, in bytes, by a barrier that the receiving block waits at. Compute capability 9.0.
#pragma once
#include "plan.cuh"

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of a cluster arrive; who sends waits first: until then the other block may not have begun.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ uint32_t shared_address(const void* at) {
  return (uint32_t)__cvta_generic_to_shared(at);
}

// The place of `at` in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ uint32_t place_at(const void* at, unsigned rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(at)), "r"(rank));
  return there;
}

// One thread, before it arrives.
__device__ __forceinline__ void make_barrier(Word* arrived) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(arrived)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One thread: `arrived` opens when `bytes` were sent to this block, some of them before this perhaps.
__device__ __forceinline__ void expect(Word* arrived, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.relaxed.cta.shared::cta.b64 _, [%0], %1;" ::"r"(
                   shared_address(arrived)),
               "r"(bytes)
               : "memory");
}

// Until all of it is there. Only this block's shared memory was written: no cache has to be emptied.
__device__ __forceinline__ void await_arrived(Word* arrived) {
  uint32_t open = 0;
  while (!open)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
        : "=r"(open)
        : "r"(shared_address(arrived))
        : "memory");
}

__device__ __forceinline__ void send(uint32_t to, uint32_t arrived, uint32_t value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(to),
               "r"(value), "r"(arrived)
               : "memory");
}

__device__ __forceinline__ void send(uint32_t to, uint32_t arrived, Word value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(to),
               "l"(value), "r"(arrived)
               : "memory");
}
