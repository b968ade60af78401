// The hot region's replacement order, in shared memory: numbering misses, choosing victims, moving what
// was used to the tail.
//
// Hot state of a request, kept from step to step:
//
//   map        int16 [MAP_STRIDE] position -> slot, -1: not hot; from REACH on always -1
//   positions  int32 [STRIDE]     slot -> position, -1: free
//   order      uint16 [STRIDE]    slots, next victim first: free ones by slot, then by (last-used step,
//                                 hit above miss, slot)
//   group      uint8 [STRIDE]     what `group_step` used: 1 missed, 2 hit; the tail of `order`
//
// Using slots moves them to the tail, misses before hits, each by slot, and leaves the rest in its
// order: that *is* the total order, so no slot needs a stamp and no victim a sort.
//
// Compile-time size beside those of rows.cuh: REACH (positions in `map`, and entries * PAGE of both
// page tables).
#pragma once
#include "rows.cuh"

constexpr int ENTRIES = 2 * ((TOPK + 2 * THREADS - 1) / (2 * THREADS));  // of top-k, a thread
constexpr int SLOTS = 4 * ((HOT + 4 * THREADS - 1) / (4 * THREADS));     // of the hot region
constexpr int STRIDE = (HOT + 3) / 4 * 4;
constexpr int MAP_STRIDE = REACH + 8;
constexpr int next_power(int n) { int p = 4; while (p < n) p *= 2; return p; }
constexpr int HASH = next_power(2 * TOPK);
constexpr int PAGES = REACH / PAGE;
constexpr bool STAGED = PAGES <= 4 * THREADS;  // page tables are looked up in shared memory
constexpr int MISSED = 1, HIT = 2, USED = 3, HELD = 4;  // HELD: used by this call
constexpr unsigned NONE = 0xffff;
static_assert(TOPK <= HOT, "a row's selection fits");
static_assert(HOT_BLOCKS <= THREADS && SLOTS <= 16, "a thread a hot block, its slots in registers");

struct Shared {
  unsigned hash_position[HASH];  // HASH words of each, cleared as one
  unsigned hash_entry[HASH];
  unsigned group[SLOTS / 4 * THREADS];      // a byte a slot
  unsigned order[SLOTS / 2 * THREADS];      // two slots a word
  int resident[STAGED ? PAGES + 1 : 1], host[STAGED ? PAGES + 1 : 1];
  unsigned short hash_index[HASH];  // in the line's list
  unsigned short victims[TOPK];
  int hot[HOT_BLOCKS];
  unsigned sums[2][WARPS];
  unsigned hits[WARPS];
  int listed;
};

__device__ __forceinline__ unsigned char* group_of(Shared& s) { return (unsigned char*)s.group; }
__device__ __forceinline__ unsigned short* order_of(Shared& s) { return (unsigned short*)s.order; }

// The slot at place `j` of a thread's words of the order.
__device__ __forceinline__ unsigned held_in(const uint2* order, int j) {
  const unsigned word = j & 2 ? order[j / 4].y : order[j / 4].x;
  return thread() * SLOTS + j < HOT ? (j & 1 ? word >> 16 : word & 0xffffu) : NONE;
}

__device__ __forceinline__ int pool_row(const Shared& s, unsigned slot) {
  return s.hot[slot / PAGE] * BLOCK_ROWS + slot % PAGE;
}

__device__ __forceinline__ void clear_hash(Shared& s) {
  uint4* words = reinterpret_cast<uint4*>(s.hash_position);
#pragma unroll
  for (int i = 0; i < HASH / 2; i += THREADS)
    if (i + thread() < HASH / 2) words[i + thread()] = make_uint4(~0u, ~0u, ~0u, ~0u);
}

// The place of `position` in the hash; entry numbers meet there in their least. `is_new` is set for one
// of the entries of a position.
__device__ __forceinline__ int note_miss(Shared& s, unsigned position, unsigned entry, bool* is_new) {
  unsigned h = position * 2654435761u >> 7 & (HASH - 1);
  while (true) {
    const unsigned held = atomicCAS(&s.hash_position[h], ~0u, position);
    *is_new = held == ~0u;
    if (held == ~0u || held == position) break;
    h = (h + 1) & (HASH - 1);
  }
  atomicMin(&s.hash_entry[h], entry);
  return (int)h;
}

// Number the misses by first appearance and give each the next slot of the order that this call does
// not hold. `at` are places in the hash, -1 for what is no miss; `slot` is set where `first`.
__device__ __forceinline__ void take_victims(Shared& s, const uint2* order, const int* at,
                                             bool* first, int* slot) {
  const unsigned t = thread();
  unsigned idle[SLOTS];
  unsigned free_ones = 0, firsts = 0;
#pragma unroll
  for (int i = 0; i < ENTRIES; ++i) {
    first[i] = at[i] >= 0 && s.hash_entry[at[i]] == t * ENTRIES + i;
    firsts += first[i];
  }
#pragma unroll
  for (int j = 0; j < SLOTS; ++j) {
    idle[j] = held_in(order, j);
    if (idle[j] != NONE && group_of(s)[idle[j]] & HELD) idle[j] = NONE;
    free_ones += idle[j] != NONE;
  }
  unsigned total;
  const unsigned before = scan(firsts << 16 | free_ones, s.sums[0], &total);
  const int misses = total >> 16;
  int rank = before & 0xffff, next = before >> 16;
  if (rank < misses) {
#pragma unroll
    for (int j = 0; j < SLOTS; ++j) {
      if (idle[j] == NONE) continue;
      if (rank < misses) {
        s.victims[rank] = (unsigned short)idle[j];
        group_of(s)[idle[j]] = MISSED | HELD;
      }
      ++rank;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ENTRIES; ++i)
    if (first[i]) slot[i] = s.victims[next++];
}

// Move what the step used to the tail: misses before hits, each by slot. `order` becomes that of shared
// memory; the barrier inside comes before anything is written.
__device__ __forceinline__ void reorder(Shared& s, const uint2* order) {
  const unsigned t = thread();
  unsigned idle[SLOTS], use[SLOTS];
  unsigned rest = 0, hits = 0;  // rest: idle ones, and missed ones above them
#pragma unroll
  for (int j = 0; j < SLOTS; ++j) {
    idle[j] = held_in(order, j);
    if (idle[j] != NONE && group_of(s)[idle[j]] & USED) idle[j] = NONE;
    use[j] = t * SLOTS + j < HOT ? group_of(s)[t * SLOTS + j] & USED : 0;
    rest += (idle[j] != NONE) + (use[j] == MISSED ? 1u << 16 : 0);
    hits += use[j] >= HIT;
  }
  const int lane = t & 31, warp = t >> 5;
  unsigned hits_upto = hits;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const unsigned left = __shfl_up_sync(ALL, hits_upto, d);
    if (lane >= d) hits_upto += left;
  }
  if (lane == 31) s.hits[warp] = hits_upto;
  unsigned total;
  const unsigned before = scan(rest, s.sums[1], &total);
  const unsigned hits_before =
      __reduce_add_sync(ALL, lane < warp ? s.hits[lane] : 0) + hits_upto - hits;
  unsigned idle_at = before & 0xffff, missed_at = (total & 0xffff) + (before >> 16);
  unsigned hit_at = (total & 0xffff) + (total >> 16) + hits_before;
#pragma unroll
  for (int j = 0; j < SLOTS; ++j) {
    if (idle[j] != NONE) order_of(s)[idle_at++] = (unsigned short)idle[j];
    if (use[j]) order_of(s)[use[j] == MISSED ? missed_at++ : hit_at++] = (unsigned short)(t * SLOTS + j);
  }
}
