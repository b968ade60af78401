// Forgetting hot rows: the requests, slots or positions that a command took away.
#include "order.cuh"

// Slots lost their bytes, or positions their host page: one block a request, its spans in order.
// `spans` is [n] of {first, last}; `by_slot` says which of the two they count. What is forgotten is
// free, and the free come first, by slot.
extern "C" __global__ void __launch_bounds__(THREADS, 1) hisparse_forget(
    const int* requests, const int* starts, const int2* spans, int by_slot, short* maps,
    int* all_positions, unsigned short* orders, unsigned char* groups) {
  extern __shared__ __align__(16) unsigned char raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const unsigned t = threadIdx.x;
  const int request = requests[blockIdx.x];
  short* map = maps + (size_t)request * MAP_STRIDE;
  int* positions = all_positions + (size_t)request * STRIDE;
  unsigned short* order = orders + (size_t)request * STRIDE;
  unsigned char* group = groups + (size_t)request * STRIDE;
  for (int i = starts[blockIdx.x]; i < starts[blockIdx.x + 1]; ++i)
    for (int at = spans[i].x + (int)t; at < spans[i].y; at += THREADS) {
      const int slot = by_slot ? at : map[at];
      if (slot < 0 || positions[slot] < 0) continue;
      map[positions[slot]] = -1;
      positions[slot] = -1;
      group[slot] = 0;
    }
  __syncthreads();
  unsigned held[SLOTS];
  unsigned counts = 0;  // held ones by order, and free ones by slot above them
  bool is_free[SLOTS];
#pragma unroll
  for (int j = 0; j < SLOTS; ++j) {
    const unsigned at = t * SLOTS + j;
    held[j] = at < HOT ? order[at] : 0xffffu;
    if (held[j] != 0xffffu && positions[held[j]] < 0) held[j] = 0xffffu;
    is_free[j] = at < HOT && positions[at] < 0;
    counts += (held[j] != 0xffffu) + (is_free[j] ? 1u << 16 : 0);
  }
  unsigned total;
  const unsigned before = scan(counts, s.sums[0], &total);
  unsigned held_at = (total >> 16) + (before & 0xffff), free_at = before >> 16;
#pragma unroll
  for (int j = 0; j < SLOTS; ++j) {
    if (held[j] != 0xffffu) order[held_at++] = (unsigned short)held[j];
    if (is_free[j]) order[free_at++] = (unsigned short)(t * SLOTS + j);
  }
}
