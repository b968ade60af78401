// What planning blocks share: the call's parameters, and what becomes of a row once its entries are looked
// up: misses listed, victims taken, the order moved.
//
// Compile-time sizes beside those of order.cuh: CALLS (most calls of a group in a step).
#pragma once
#include "entries.cuh"

struct Resolve {
  const int* rows;      // [n] request row, -1: graph padding
  const int* top_k;     // [n, TOPK] positions, -1: padding
  const int* resident;  // [R, PAGES + 1] block; the last entry stays 0
  const int* host;      // [R, PAGES + 1] host page; likewise
  const int* hot;       // [R, HOT_BLOCKS] block
  short* map;
  int* positions;
  unsigned short* order;
  unsigned char* group;
  int* group_step;
  const int* step;      // the step under way
  int call;             // which call of this group in the step, below CALLS
  int requests;         // planning blocks
  int span;             // rows a request
  int layers;           // of the group
  int* out;             // [n, TOPK] pool row, -1: padding, or nothing to read
  Miss* misses;         // [n, TOPK], a line's first `count` are there
  Word* count;          // [n]
  Word* tickets;        // [layers of the group]
  unsigned long long* counters;  // misses, entries with no copy
  const uint4* host_rows;        // the leader's layer
  uint4* pool_rows;
};

__device__ __forceinline__ uint32_t epoch_of(int step, int call) {
  return (uint32_t)step * CALLS + (uint32_t)call;
}

// Put the sources of a line's new misses on its list, for whole warps.
__device__ __forceinline__ void list_sources(Shared& s, Miss* list, uint32_t epoch, const Entries& e) {
  const int lane = thread() & 31;
  unsigned who[ENTRIES], many = 0;
#pragma unroll
  for (int i = 0; i < ENTRIES; ++i) {
    who[i] = __ballot_sync(ALL, e.is_new[i]);
    many += __popc(who[i]);
  }
  if (!many) return;
  int next = lane == 0 ? atomicAdd(&s.listed, many) : 0;
  next = __shfl_sync(ALL, next, 0);
#pragma unroll
  for (int i = 0; i < ENTRIES; ++i) {
    const int index = next + __popc(who[i] & ((1u << lane) - 1));
    if (e.is_new[i]) {
      const uint32_t source = (uint32_t)e.page[i] * PAGE + (unsigned)e.position[i] % PAGE;
      store_word(&list[index].source, epoch, source);
      s.hash_index[e.at[i]] = (unsigned short)index;
    }
    next += __popc(who[i]);
  }
}

// Whether the step uses other slots than the last one did, or in another way.
__device__ __forceinline__ bool used_otherwise(const Shared& s, const HotWords& now) {
  bool differs = false;
#pragma unroll
  for (int j = 0; j < SLOTS / 4; ++j)
    differs |= (s.group[thread() * (SLOTS / 4) + j] & USED4) != (now.group[j] & USED4);
  return __syncthreads_or(differs);
}

// What this step has used before this call, into shared memory.
__device__ __forceinline__ void stage_group(Shared& s, const HotWords& now, bool same_step) {
#pragma unroll
  for (int j = 0; j < SLOTS / 4; ++j)
    s.group[thread() * (SLOTS / 4) + j] = same_step ? now.group[j] : 0;
}

// Give the misses of a row their slots: targets for who fetches, the map for the steps after.
__device__ __forceinline__ void replace(Shared& s, const HotWords& now, Miss* list, uint32_t epoch,
                                        short* map, int* positions, Entries& e) {
  bool first[ENTRIES];
  take_victims(s, now.order, e.at, first, e.slot);
  int gone[ENTRIES];  // what the victims held: asked for before the order moves, so that nobody waits for it
#pragma unroll
  for (int i = 0; i < ENTRIES; ++i) gone[i] = first[i] ? positions[e.slot[i]] : -1;
#pragma unroll
  for (int i = 0; i < ENTRIES; ++i) {
    if (!first[i]) continue;
    e.where[i] = pool_row(s, e.slot[i]);
    store_word(&list[s.hash_index[e.at[i]]].target, epoch, e.where[i]);
    s.hash_entry[e.at[i]] = (unsigned)e.where[i];  // for its duplicates
  }
  reorder(s, now.order);  // its barrier comes before the duplicates look
#pragma unroll
  for (int i = 0; i < ENTRIES; ++i) {
    if (e.at[i] < 0) continue;
    if (!first[i]) {
      e.where[i] = (int)s.hash_entry[e.at[i]];
      continue;
    }
    positions[e.slot[i]] = e.position[i];
    map[e.position[i]] = (short)e.slot[i];
    if (gone[i] >= 0) map[gone[i]] = -1;
  }
}

