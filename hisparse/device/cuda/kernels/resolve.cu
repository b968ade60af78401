// The fused resolve of one index group: resident row, then hot row, then victim + host row.
//
// One launch. The first few blocks fetch the missed rows of the leader's layer, request after request,
// as their plans become ready; the others plan, one request each. A fetching block waits only for
// planning blocks, and leaves room for them on the device (checked at launch).
//
// Where a step uses what the last one used, in the same way, the order (order.cuh) stays as it is, and a
// hit costs its look-up alone.
//
// Rows of one request in one call (speculation) are taken in order; a victim is never a slot that
// this call used: HOT >= rows of a request in a call * TOPK.
//
// A planning block is bound by the instructions that its warps issue, not by bytes: hence one
// thread's slots and entries are adjacent and move as vectors, and one scan numbers the misses and
// ranks the victims together.
//
// Compile-time sizes beside those of order.cuh: CALLS (most calls of a group in a step).
#include "order.cuh"

constexpr int PAGES = REACH / PAGE;
constexpr unsigned USED4 = 0x03030303;  // of four slots

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
  unsigned long long* count;     // [n]
  unsigned long long* tickets;   // [layers of the group]
  unsigned long long* counters;  // misses, entries with no copy
  const uint4* host_rows;        // the leader's layer
  uint4* pool_rows;
};

// A thread's entries of a top-k row.
__device__ __forceinline__ void load_positions(const int* row, int* position) {
  const unsigned e = threadIdx.x * ENTRIES;
#pragma unroll
  for (int i = 0; i < ENTRIES; i += 2) {
    if (TOPK % 2 == 0) {
      const int2 pair = e + i < TOPK ? *reinterpret_cast<const int2*>(row + e + i) : make_int2(-1, -1);
      position[i] = pair.x;
      position[i + 1] = pair.y;
    } else {
      position[i] = e + i < TOPK ? row[e + i] : -1;
      position[i + 1] = e + i + 1 < TOPK ? row[e + i + 1] : -1;
    }
  }
}

__device__ __forceinline__ void store_out(int* row, const int* where) {
  const unsigned e = threadIdx.x * ENTRIES;
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

// Where each position is. What is no position reads the entry after the last, which says nowhere.
__device__ __forceinline__ unsigned clamp(int position) {
  return min((unsigned)position, (unsigned)REACH);
}

__device__ __forceinline__ void load_blocks(const int* position, const int* __restrict__ resident,
                                            int* block) {
#pragma unroll
  for (int i = 0; i < ENTRIES; ++i) block[i] = resident[clamp(position[i]) / PAGE];
}

__device__ __forceinline__ void load_pages(const int* position, const int* __restrict__ host,
                                           int* page) {
#pragma unroll
  for (int i = 0; i < ENTRIES; ++i) page[i] = host[clamp(position[i]) / PAGE];
}

__device__ __forceinline__ void load_slots(const int* position, const short* map, int* slot) {
#pragma unroll
  for (int i = 0; i < ENTRIES; ++i) slot[i] = map[clamp(position[i])];
}

// All rows of a request that has no hot region: what is not resident is nowhere.
__device__ __forceinline__ void plan_resident(const Resolve& p, unsigned first_line,
                                              const int* __restrict__ resident, int* position,
                                              int* block, uint32_t epoch) {
  if ((int)threadIdx.x < p.span) store_count(p.count + first_line + threadIdx.x, epoch, 0);
  for (int row = 0; row < p.span; ++row) {
    int where[ENTRIES];
    unsigned lost = 0;
    if (row > 0) {
      load_positions(p.top_k + (size_t)(first_line + row) * TOPK, position);
      load_blocks(position, resident, block);
    }
#pragma unroll
    for (int i = 0; i < ENTRIES; ++i) {
      where[i] = block[i] > 0 ? block[i] * BLOCK_ROWS + int((unsigned)position[i] % PAGE) : -1;
      lost += position[i] >= 0 && block[i] <= 0;
    }
    store_out(p.out + (size_t)(first_line + row) * TOPK, where);
    if (lost) atomicAdd(p.counters + 1, (unsigned long long)lost);
  }
}

// The block's part of the hot state, between global memory (a word four slots) and shared memory.
struct HotWords {
  unsigned group[SLOTS / 4];
  uint2 order[SLOTS / 4];
};

__device__ __forceinline__ void load_group(const Resolve& p, unsigned request, HotWords& w) {
#pragma unroll
  for (int j = 0; j < SLOTS / 4; ++j) {
    const unsigned slot = threadIdx.x * SLOTS + 4 * j;
    const size_t at = (size_t)request * STRIDE + slot;
    w.group[j] = slot < HOT ? *reinterpret_cast<const unsigned*>(p.group + at) : 0;
  }
}

__device__ __forceinline__ void load_order(const Resolve& p, unsigned request, HotWords& w) {
#pragma unroll
  for (int j = 0; j < SLOTS / 4; ++j) {
    const unsigned slot = threadIdx.x * SLOTS + 4 * j;
    const size_t at = (size_t)request * STRIDE + slot;
    w.order[j] = slot < HOT ? *reinterpret_cast<const uint2*>(p.order + at) : make_uint2(0, 0);
  }
}

__device__ __forceinline__ void store_hot(const Resolve& p, unsigned request, const Shared& s) {
#pragma unroll
  for (int j = 0; j < SLOTS / 4; ++j) {
    const unsigned word = threadIdx.x * (SLOTS / 4) + j, slot = 4 * word;
    if (slot >= HOT) continue;
    const size_t at = (size_t)request * STRIDE + slot;
    *reinterpret_cast<unsigned*>(p.group + at) = s.group[word] & USED4;
    *reinterpret_cast<uint2*>(p.order + at) = *reinterpret_cast<const uint2*>(&s.order[2 * word]);
  }
}

// Plan all rows of planning block `b`.
__device__ __forceinline__ void plan_request(const Resolve& p, Shared& s, unsigned b, int step,
                                             uint32_t epoch) {
  const unsigned t = threadIdx.x;
  const unsigned first_line = b * p.span;
  const int request = p.rows[first_line];
  int position[ENTRIES];
  load_positions(p.top_k + (size_t)first_line * TOPK, position);
  if (request < 0) {
    for (int j = 0; j < p.span; ++j) {
      for (unsigned e = t; e < TOPK; e += THREADS) p.out[(size_t)(first_line + j) * TOPK + e] = -1;
      if (t == 0) store_count(p.count + first_line + j, epoch, 0);
    }
    return;
  }
  const int* __restrict__ resident = p.resident + (size_t)request * (PAGES + 1);
  const int* __restrict__ host = p.host + (size_t)request * (PAGES + 1);
  short* map = p.map + (size_t)request * MAP_STRIDE;
  int* positions = p.positions + (size_t)request * STRIDE;
  // What tells the two paths apart, and what both or the faster one of the second need, is asked for
  // before any of it is waited for.
  int block[ENTRIES], page[ENTRIES], slot[ENTRIES];
  HotWords old;
  const bool has_hot = p.hot[request * HOT_BLOCKS] != 0;
  load_blocks(position, resident, block);
  load_slots(position, map, slot);
  load_group(p, request, old);
  if (!has_hot) {
    plan_resident(p, first_line, resident, position, block, epoch);
    return;
  }
  const int old_step = p.group_step[request];
  const int hot_block = t < HOT_BLOCKS ? p.hot[request * HOT_BLOCKS + t] : 0;
  load_pages(position, host, page);
  load_order(p, request, old);
  clear_hash(s);
  if (t == 0) s.any_miss = s.any_hit = 0;
  if (t < HOT_BLOCKS) s.hot[t] = hot_block;
#pragma unroll
  for (int j = 0; j < SLOTS / 4; ++j) {
    s.group[t * (SLOTS / 4) + j] = old_step == step ? old.group[j] : 0;
    *reinterpret_cast<uint2*>(&s.order[2 * (t * (SLOTS / 4) + j)]) = old.order[j];
  }
  __syncthreads();
  bool moved = false, touched = false;
  for (int row = 0; row < p.span; ++row) {
    const unsigned line = first_line + row;
    int at[ENTRIES], where[ENTRIES], number[ENTRIES];
    bool miss[ENTRIES], first[ENTRIES];
    unsigned lost = 0;
    bool any_hit = false, any_miss = false;
#pragma unroll
    for (int i = 0; i < ENTRIES; ++i) {
      const bool wanted = position[i] >= 0 && block[i] == 0, hit = wanted && slot[i] >= 0;
      miss[i] = wanted && !hit && page[i] > 0;
      lost += wanted && !hit && page[i] <= 0;
      where[i] = block[i] > 0 ? block[i] * BLOCK_ROWS + int((unsigned)position[i] % PAGE) : -1;
      if (hit) {
        group_of(s)[slot[i]] |= HIT | HELD;
        where[i] = pool_row(s, slot[i]);
      }
      if (miss[i]) at[i] = note_miss(s, position[i], t * ENTRIES + i);
      any_hit |= hit;
      any_miss |= miss[i];
    }
    if (any_hit) s.any_hit = 1;
    if (any_miss) s.any_miss = 1;
    if (lost) atomicAdd(p.counters + 1, (unsigned long long)lost);
    __syncthreads();
    const bool missed = s.any_miss;
    if (!missed) {
      if (t == 0) store_count(p.count + line, epoch, 0);
      store_out(p.out + (size_t)line * TOPK, where);
      if (s.any_hit) {
        touched = true;
        bool differs = false;
#pragma unroll
        for (int j = 0; j < SLOTS / 4; ++j)
          differs |= (s.group[t * (SLOTS / 4) + j] & USED4) != (old.group[j] & USED4);
        if (__syncthreads_or(differs)) {
          reorder(s);
          moved = true;
        }
      }
    } else {
      touched = moved = true;
      const int misses = take_victims(s, p.count + line, epoch, at, miss, first, slot, number);
#pragma unroll
      for (int i = 0; i < ENTRIES; ++i) {
        if (!first[i]) continue;
        where[i] = pool_row(s, slot[i]);
        const uint32_t source = (uint32_t)page[i] * PAGE + (unsigned)position[i] % PAGE;
        store_miss(p.misses + (size_t)line * TOPK + number[i], source, (uint32_t)where[i], epoch);
        s.hash_entry[at[i]] = (unsigned)where[i];  // for its duplicates
      }
      reorder(s);  // its barrier comes before the duplicates look
#pragma unroll
      for (int i = 0; i < ENTRIES; ++i) {
        if (!miss[i]) continue;
        if (!first[i]) {
          where[i] = (int)s.hash_entry[at[i]];
          continue;
        }
        const int gone = positions[slot[i]];
        positions[slot[i]] = position[i];
        map[position[i]] = (short)slot[i];
        if (gone >= 0) map[gone] = -1;
      }
      store_out(p.out + (size_t)line * TOPK, where);
      if (t == 0) atomicAdd(p.counters, (unsigned long long)misses);
    }
    if (row + 1 == p.span) break;
    load_positions(p.top_k + (size_t)(line + 1) * TOPK, position);
    __syncthreads();  // nobody reads this row's shared state any more; its map entries are written
    load_blocks(position, resident, block);
    load_slots(position, map, slot);
    load_pages(position, host, page);
#pragma unroll
    for (int j = 0; j < SLOTS / 4; ++j) old.group[j] = s.group[t * (SLOTS / 4) + j];
    if (missed) clear_hash(s);
    if (t == 0) s.any_miss = s.any_hit = 0;
    __syncthreads();
  }
  if (moved) {
    __syncthreads();
    store_hot(p, request, s);
  }
  if (touched && t == 0) p.group_step[request] = step;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) hisparse_resolve(
    const __grid_constant__ Resolve p) {
  extern __shared__ __align__(16) unsigned char raw[];
  const int step = *p.step;
  const uint32_t epoch = (uint32_t)step * CALLS + (uint32_t)p.call;
  const int fetching = gridDim.x - p.requests;
  if ((int)blockIdx.x < fetching) {
    fetch_plan({p.misses, p.count, p.tickets}, p.requests * p.span, epoch, *reinterpret_cast<Watch*>(raw),
               blockIdx.x, fetching, p.host_rows, p.pool_rows);
  } else {
    if ((int)blockIdx.x == fetching && (int)threadIdx.x < p.layers)
      open_ticket(p.tickets + threadIdx.x, epoch, fetching);
    plan_request(p, *reinterpret_cast<Shared*>(raw), blockIdx.x - fetching, step, epoch);
  }
}
