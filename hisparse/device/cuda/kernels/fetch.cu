// Fetching on its own: a follower's bytes of its leader's plan, and the floor of the benchmark.
#include "rows.cuh"

// A follower's part: the same plan, its own layer's bytes.
extern "C" __global__ void __launch_bounds__(THREADS, 1) hisparse_replay(
    const Miss* misses, const Word* count, Word* ticket, int n,
    const int* step, int call, const uint4* host_rows, uint4* pool_rows) {
  __shared__ Ends ends;
  fetch_plan({misses, count, ticket, nullptr, nullptr, 1}, n, (uint32_t)*step * CALLS + (uint32_t)call, ends, blockIdx.x,
             gridDim.x, host_rows, pool_rows);
}

// A member's ticket as the resolve of `call` opened it: for a follower that fetches after later calls.
extern "C" __global__ void hisparse_reopen(Word* ticket, const int* step, int call, int blocks) {
  open_ticket(ticket, (uint32_t)*step * CALLS + (uint32_t)call, blocks);
}

// Misses that are known beforehand: the floor that the benchmark compares with.
extern "C" __global__ void __launch_bounds__(THREADS, 1) hisparse_raw(
    const Miss* misses, int count, const uint4* host_rows, uint4* pool_rows) {
  const int warp = (threadIdx.x >> 5) * gridDim.x + blockIdx.x;
  for (int at = warp; at < count; at += gridDim.x * WARPS) {
    const Miss miss = misses[at];
    Row row;
    load_row(row, host_rows, (uint32_t)miss.source);
    store_row(row, pool_rows, (uint32_t)miss.target);
  }
}
