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
// Compile-time sizes beside those of rows.cuh: HOT (slots), REACH (positions in `map`, and entries *
// PAGE of both page tables).
#pragma once
#include "rows.cuh"

constexpr int ENTRIES = 2 * ((TOPK + 2 * THREADS - 1) / (2 * THREADS));  // of top-k, a thread
constexpr int SLOTS = 4 * ((HOT + 4 * THREADS - 1) / (4 * THREADS));     // of the hot region
constexpr int STRIDE = (HOT + 3) / 4 * 4;
constexpr int MAP_STRIDE = REACH + 8;
constexpr int HOT_BLOCKS = (HOT + PAGE - 1) / PAGE;
constexpr int next_power(int n) { int p = 4; while (p < n) p *= 2; return p; }
constexpr int HASH = next_power(2 * TOPK);
constexpr int MISSED = 1, HIT = 2, USED = 3, HELD = 4;  // HELD: used by this call
static_assert(HOT <= 32768 && TOPK <= HOT, "slots are int16, and a row's selection fits");
static_assert(HOT_BLOCKS <= THREADS && SLOTS <= 16, "a thread a hot block; counts of a warp are bytes");

struct Shared {
  unsigned hash_position[HASH];  // HASH words of each, cleared as one
  unsigned hash_entry[HASH];
  unsigned group[SLOTS / 4 * THREADS];      // a byte a slot
  unsigned order[SLOTS / 2 * THREADS];      // two slots a word
  unsigned short victims[TOPK];
  int hot[HOT_BLOCKS];
  unsigned sums[2][WARPS];
  unsigned hits[WARPS];
  int any_miss, any_hit;
};

__device__ __forceinline__ unsigned char* group_of(Shared& s) { return (unsigned char*)s.group; }
__device__ __forceinline__ unsigned short* order_of(Shared& s) { return (unsigned short*)s.order; }

__device__ __forceinline__ int pool_row(const Shared& s, unsigned slot) {
  return s.hot[slot / PAGE] * BLOCK_ROWS + slot % PAGE;
}

__device__ __forceinline__ void clear_hash(Shared& s) {
  uint4* words = reinterpret_cast<uint4*>(s.hash_position);
#pragma unroll
  for (int i = threadIdx.x; i < HASH / 2; i += THREADS) words[i] = make_uint4(~0u, ~0u, ~0u, ~0u);
}

// The place of `position` in the hash; entry numbers meet there in their least.
__device__ __forceinline__ int note_miss(Shared& s, unsigned position, unsigned entry) {
  unsigned h = position * 2654435761u >> 7 & (HASH - 1);
  while (true) {
    const unsigned held = atomicCAS(&s.hash_position[h], ~0u, position);
    if (held == ~0u || held == position) break;
    h = (h + 1) & (HASH - 1);
  }
  atomicMin(&s.hash_entry[h], entry);
  return (int)h;
}

// Exclusive sum over the block of counts whose sums stay below the width they are packed in.
__device__ __forceinline__ unsigned scan(unsigned mine, unsigned* sums, unsigned* total) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  unsigned upto = mine;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const unsigned left = __shfl_up_sync(ALL, upto, d);
    if (lane >= d) upto += left;
  }
  if (lane == 31) sums[warp] = upto;
  __syncthreads();
  const unsigned w = lane < WARPS ? sums[lane] : 0;
  *total = __reduce_add_sync(ALL, w);
  return __reduce_add_sync(ALL, lane < warp ? w : 0) + upto - mine;
}

// Number the misses by first appearance and give each the next slot of the order that this call does
// not hold; returns how many there are. `at` are places in the hash; `slot` is set where `first`.
__device__ __forceinline__ int take_victims(Shared& s, unsigned long long* count, uint32_t epoch,
                                            const int* at, const bool* miss, bool* first, int* slot,
                                            int* number) {
  const unsigned t = threadIdx.x;
  unsigned idle[SLOTS];
  unsigned free_ones = 0, firsts = 0;
#pragma unroll
  for (int i = 0; i < ENTRIES; ++i) {
    first[i] = miss[i] && s.hash_entry[at[i]] == t * ENTRIES + i;
    firsts += first[i];
  }
#pragma unroll
  for (int j = 0; j < SLOTS; ++j) {
    idle[j] = t * SLOTS + j < HOT ? order_of(s)[t * SLOTS + j] : 0xffffu;
    if (idle[j] != 0xffffu && group_of(s)[idle[j]] & HELD) idle[j] = 0xffffu;
    free_ones += idle[j] != 0xffffu;
  }
  unsigned total;
  const unsigned before = scan(firsts << 16 | free_ones, s.sums[0], &total);
  const int misses = total >> 16;
  if (t == 0) store_count(count, epoch, misses);
  int rank = before & 0xffff, next = before >> 16;
  if (rank < misses) {
#pragma unroll
    for (int j = 0; j < SLOTS; ++j) {
      if (idle[j] == 0xffffu) continue;
      if (rank < misses) {
        s.victims[rank] = (unsigned short)idle[j];
        group_of(s)[idle[j]] = MISSED | HELD;
      }
      ++rank;
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ENTRIES; ++i) {
    if (!first[i]) continue;
    slot[i] = s.victims[next];
    number[i] = next++;
  }
  return misses;
}

// Move what the step used to the tail: misses before hits, each by slot.
__device__ __forceinline__ void reorder(Shared& s) {
  const unsigned t = threadIdx.x;
  unsigned idle[SLOTS], use[SLOTS];
  unsigned rest = 0, hits = 0;  // rest: idle ones, and missed ones above them
#pragma unroll
  for (int j = 0; j < SLOTS; ++j) {
    const bool real = t * SLOTS + j < HOT;
    idle[j] = real ? order_of(s)[t * SLOTS + j] : 0xffffu;
    if (idle[j] != 0xffffu && group_of(s)[idle[j]] & USED) idle[j] = 0xffffu;
    use[j] = real ? group_of(s)[t * SLOTS + j] & USED : 0;
    rest += (idle[j] != 0xffffu) + (use[j] == MISSED ? 1u << 16 : 0);
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
  const unsigned before = scan(rest, s.sums[1], &total);  // its barrier ends all reads of the order
  const unsigned hits_before =
      __reduce_add_sync(ALL, lane < warp ? s.hits[lane] : 0) + hits_upto - hits;
  unsigned idle_at = before & 0xffff, missed_at = (total & 0xffff) + (before >> 16);
  unsigned hit_at = (total & 0xffff) + (total >> 16) + hits_before;
#pragma unroll
  for (int j = 0; j < SLOTS; ++j) {
    if (idle[j] != 0xffffu) order_of(s)[idle_at++] = (unsigned short)idle[j];
    if (use[j]) order_of(s)[use[j] == MISSED ? missed_at++ : hit_at++] = (unsigned short)(t * SLOTS + j);
  }
}
