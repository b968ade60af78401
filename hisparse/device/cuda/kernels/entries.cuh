// A row's entries in a planning block: positions in, places out, and what they are looked up in.
//
// A thread has ENTRIES adjacent entries and SLOTS adjacent slots, which move as vectors. Look-ups in
// global memory are scattered: each occupies the cache for a cycle, 2048 of them for a microsecond.
// So only the map, which is too large for it, is looked up there.
#pragma once
#include "order.cuh"

constexpr int STAGES = STAGED ? (PAGES + THREADS - 1) / THREADS : 1;
constexpr unsigned USED4 = 0x03030303;  // of four slots

// A thread's entries of the row under way.
struct Entries {
  int position[ENTRIES];
  int slot[ENTRIES];    // of a hit, or of a miss when it has one
  int page[ENTRIES];    // host page of a miss
  int at[ENTRIES];      // place of a miss in the hash, -1: no miss
  int where[ENTRIES];   // pool row, -1: nowhere
  bool is_new[ENTRIES];  // the one entry of its position that lists the miss
  bool any_hit;
};

// A thread's entries of a top-k row.
__device__ __forceinline__ void load_positions(const int* row, int* position) {
  const unsigned e = thread() * ENTRIES;
#pragma unroll
  for (int i = 0; i < ENTRIES; i += 2) {
    if (TOPK % 2 == 0) {
      const int2 pair = e + i < TOPK ? load_now(reinterpret_cast<const int2*>(row + e + i)) : make_int2(-1, -1);
      position[i] = pair.x;
      position[i + 1] = pair.y;
    } else {
      position[i] = e + i < TOPK ? load_now(row + e + i) : -1;
      position[i + 1] = e + i + 1 < TOPK ? load_now(row + e + i + 1) : -1;
    }
  }
}

// The same of a later row of a request, which is all padding where its request row is.
__device__ __forceinline__ void load_later(const int* rows, const int* top_k, unsigned line,
                                           int* position) {
  const bool real = load_now(rows + line) >= 0;
  load_positions(top_k + (size_t)line * TOPK, position);
#pragma unroll
  for (int i = 0; i < ENTRIES; ++i)
    if (!real) position[i] = -1;
}

__device__ __forceinline__ void store_out(int* row, const int* where) {
  const unsigned e = thread() * ENTRIES;
#pragma unroll
  for (int i = 0; i < ENTRIES; i += 2) {
    if (TOPK % 2 == 0) {
      if (e + i < TOPK) *reinterpret_cast<int2*>(row + e + i) = make_int2(where[i], where[i + 1]);
    } else {
      if (e + i < TOPK) row[e + i] = where[i];
      if (e + i + 1 < TOPK) row[e + i + 1] = where[i + 1];
    }
  }
}

// A request's part of an array. Its address is computed once: the compiler would do it for each use.
template <typename T>
__device__ __forceinline__ T* part_of(T* all, int request, unsigned stride) {
  T* part = all + (size_t)(unsigned)request * stride;
  asm volatile("" : "+l"(part));
  __builtin_assume(__isGlobal(part));
  return part;
}

// Where a position is looked up. What is none reads the entry after the last, which says nowhere.
__device__ __forceinline__ unsigned clamp(int position) {
  return min((unsigned)position, (unsigned)REACH);
}

// Slots of positions, -1 where they have none. The loads begin here and are not waited for.
template <int N = ENTRIES>
__device__ __forceinline__ void look_up(const int* position, const short* map, int* slot) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    asm volatile("ld.global.s16 %0, [%1];" : "=r"(slot[i]) : "l"(map + clamp(position[i])) : "memory");
}

// A page table of a request: a copy in shared memory, where a warp's look-ups are not as many lines.
struct Table {
  const int* all;
  int* staged;
  int held[STAGES];

  __device__ __forceinline__ void load() {
    if constexpr (STAGED) {
#pragma unroll
      for (int i = 0; i < STAGES; ++i)
        held[i] = thread() + i * THREADS < PAGES ? all[thread() + i * THREADS] : 0;
    }
  }
  __device__ __forceinline__ void stage() const {
    if constexpr (STAGED) {
#pragma unroll
      for (int i = 0; i < STAGES; ++i)
        if (thread() + i * THREADS < PAGES) staged[thread() + i * THREADS] = held[i];
      if (thread() == 0) staged[PAGES] = 0;
    }
  }
  __device__ __forceinline__ int operator[](int position) const {
    return STAGED ? staged[clamp(position) / PAGE] : all[clamp(position) / PAGE];
  }
};

__device__ __forceinline__ int place_in(int block, int position) {
  return block > 0 ? block * BLOCK_ROWS + int((unsigned)position % PAGE) : -1;
}

// The block's part of the hot state, between global memory (a word four slots) and shared memory.
struct HotWords {
  unsigned group[SLOTS / 4];
  uint2 order[SLOTS / 4];
};

__device__ __forceinline__ void load_group(const unsigned char* group, HotWords& w) {
#pragma unroll
  for (int j = 0; j < SLOTS / 4; ++j) {
    const unsigned slot = thread() * SLOTS + 4 * j;
    w.group[j] = slot < HOT ? *reinterpret_cast<const unsigned*>(group + slot) : 0;
  }
}

__device__ __forceinline__ void load_order(const unsigned short* order, HotWords& w) {
#pragma unroll
  for (int j = 0; j < SLOTS / 4; ++j) {
    const unsigned slot = thread() * SLOTS + 4 * j;
    w.order[j] = slot < HOT ? *reinterpret_cast<const uint2*>(order + slot) : make_uint2(0, 0);
  }
}

__device__ __forceinline__ void store_hot(unsigned char* group, unsigned short* order, const Shared& s) {
#pragma unroll
  for (int j = 0; j < SLOTS / 4; ++j) {
    const unsigned word = thread() * (SLOTS / 4) + j, slot = 4 * word;
    if (slot >= HOT) continue;
    *reinterpret_cast<unsigned*>(group + slot) = s.group[word] & USED4;
    *reinterpret_cast<uint2*>(order + slot) = *reinterpret_cast<const uint2*>(&s.order[2 * word]);
  }
}
