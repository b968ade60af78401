// The fused resolve of one index group for a call of one row: a cluster of eight blocks shares its look-ups.
// Compute capability 9.0. Its answers, plan and state are those of resolve.cu.
//
// The first block plans. Each of the others looks a part of the row up, stores where those entries are, and
// tells the planner their slots and all the others how many it could not place: into their shared memory,
// not through words in the L2 cache. So look-ups, of which a multiprocessor makes one a cycle, take a seventh
// of the time, and where nothing is missing the others leave at once. Where something is, they fetch what the
// planner lists, as in resolve.cu.
//
// ALL_WARPS_WAIT has every warp wait for the cluster, which is slower: compute-sanitizer's racecheck does not
// come to an end where only some warps of a block do (`pytest --racecheck` sets it).
#include "cluster.cuh"

#ifndef ALL_WARPS_WAIT
#define ALL_WARPS_WAIT 0
#endif

constexpr int CLUSTER = 8;                 // and the blocks of a follower's fetch
constexpr int LOOKERS = CLUSTER - 1;       // who look up, and fetch
constexpr unsigned PLANNER = 0;            // rank in the cluster
constexpr int SENDERS = 128;               // threads, the last ones, which have no entry as a rule
constexpr int PLACED = -1, UNPLACED = -2;  // instead of a slot
constexpr int PART = (TOPK + 4 * LOOKERS - 1) / (4 * LOOKERS) * 4;  // entries of a looker, whole words
constexpr int MINE = (PART + THREADS - 1) / THREADS;                // of a thread

struct Exchange {
  Word arrived;
  unsigned unplaced[CLUSTER];  // entries of each looker
  Word part[PART / 4];         // the looker's slots, four in a word
  Word slots[LOOKERS * PART / 4 + 1];  // the planner's: of all entries
};

// Tell the others, once `part` is there. For the last warps: a wait for the cluster empties the L1 cache, so
// those that look something up have none.
__device__ __forceinline__ void send_part(Exchange& x, unsigned looker, unsigned unplaced) {
  const unsigned sender = thread() - (THREADS - SENDERS);
  if (sender < CLUSTER) send(place_at(&x.unplaced[looker], sender), place_at(&x.arrived, sender), unplaced);
  for (unsigned i = sender; i < PART / 4; i += SENDERS)
    send(place_at(&x.slots[looker * (PART / 4) + i], PLANNER), place_at(&x.arrived, PLANNER), x.part[i]);
}

__device__ __forceinline__ unsigned sum_unplaced(const Exchange& x) {
  unsigned sum = 0;
#pragma unroll
  for (int i = 0; i < LOOKERS; ++i) sum += x.unplaced[i];
  return sum;
}

// Look a part up. Returns whether the row has anything that is on neither the GPU nor hot.
__device__ __forceinline__ bool look_up_part(const Resolve& p, Shared& s, Exchange& x, unsigned looker,
                                             int request) {
  const unsigned t = thread();
  const bool sends = t >= THREADS - SENDERS;
  unsigned entry[MINE];
  int position[MINE], block[MINE], slot[MINE];
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    const unsigned at = i * THREADS + t;
    entry[i] = at < PART ? min(looker * PART + at, (unsigned)TOPK) : TOPK;
    position[i] = entry[i] < TOPK ? load_now(p.top_k + entry[i]) : -1;
  }
  if (sends || ALL_WARPS_WAIT) cluster_wait();
  if (request < 0) {
#pragma unroll
    for (int i = 0; i < MINE; ++i)
      if (entry[i] < TOPK) p.out[entry[i]] = -1;
    return false;
  }
  const int* hot = part_of(p.hot, request, HOT_BLOCKS);
  const int* resident = part_of(p.resident, request, PAGES + 1);
  const short* map = part_of(p.map, request, MAP_STRIDE);
  const bool has_hot = load_now(hot) != 0;
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    block[i] = slot[i] = -1;
    if (i * THREADS + t / 32 * 32 >= PART) continue;  // the warp has none
    block[i] = load_now(resident + clamp(position[i]) / PAGE);
    look_up<1>(position + i, map, slot + i);
  }
  if (t < HOT_BLOCKS) s.hot[t] = load_now(hot + t);
  unsigned unplaced = 0;
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    const unsigned at = i * THREADS + t;
    if (block[i] > 0 || position[i] < 0 || !has_hot)
      slot[i] = PLACED;
    else if (slot[i] < 0)
      slot[i] = UNPLACED;
    if (at < PART) reinterpret_cast<short*>(x.part)[at] = (short)slot[i];
    unplaced += __syncthreads_count(slot[i] == UNPLACED);
  }
  if (has_hot) {
    if (sends) send_part(x, looker, unplaced);
    if (t == 0) expect(&x.arrived, LOOKERS * sizeof(unsigned));
  }
  unsigned lost = 0;
#pragma unroll
  for (int i = 0; i < MINE; ++i) {
    if (entry[i] >= TOPK || slot[i] == UNPLACED) continue;
    const int where = slot[i] >= 0 ? pool_row(s, slot[i]) : place_in(block[i], position[i]);
    p.out[entry[i]] = where;
    lost += where < 0 && position[i] >= 0;
  }
  if (lost) atomicAdd(p.counters + 1, (unsigned long long)lost);
  if (!has_hot) return false;
  await_arrived(&x.arrived);
  return sum_unplaced(x) > 0;
}

// A thread's entries as the lookers found them; those without a place become misses, or are nowhere.
__device__ __forceinline__ void take_entries(const Resolve& p, Shared& s, const Exchange& x,
                                             const Table& host, bool all_placed, bool* unplaced,
                                             uint32_t epoch, Entries& e) {
  unsigned lost = 0;
  e.any_hit = false;
#pragma unroll
  for (int i = 0; i < ENTRIES; ++i) {
    const unsigned entry = thread() * ENTRIES + i;
    const int slot = entry < TOPK ? reinterpret_cast<const short*>(x.slots)[entry] : PLACED;
    unplaced[i] = slot == UNPLACED;
    if (slot < 0) continue;
    group_of(s)[slot] = HIT | HELD;
    e.any_hit = true;
  }
  if (all_placed) return;
#pragma unroll
  for (int i = 0; i < ENTRIES; ++i) {
    e.at[i] = e.where[i] = -1;
    e.is_new[i] = false;
    if (!unplaced[i]) continue;
    e.page[i] = host[e.position[i]];
    if (e.page[i] > 0)
      e.at[i] = note_miss(s, e.position[i], thread() * ENTRIES + i, &e.is_new[i]);
    else
      ++lost;
  }
  list_sources(s, p.misses, epoch, e);
  if (lost) atomicAdd(p.counters + 1, (unsigned long long)lost);
}

__device__ __forceinline__ void plan_row(const Resolve& p, Shared& s, Exchange& x, int request, int step) {
  const unsigned t = thread();
  Entries e;
  load_positions(p.top_k, e.position);
  clear_hash(s);
  if (t == 0) s.listed = 0;
  const uint32_t epoch = epoch_of(step, p.call);
  if ((int)t < p.layers) open_ticket(p.tickets + t, epoch, t == 0 ? LOOKERS : CLUSTER);
  if (t == 0 && request < 0) store_word(p.count, epoch, 0);
  if (request < 0) return;
  const int* hot = part_of(p.hot, request, HOT_BLOCKS);
  const bool has_hot = load_now(hot) != 0;
  unsigned char* group = part_of(p.group, request, STRIDE);
  unsigned short* order = part_of(p.order, request, STRIDE);
  Table host = {part_of(p.host, request, PAGES + 1), s.host};
  HotWords now;
  const int old_step = p.group_step[request];
  load_group(group, now);
  host.load();
  load_order(order, now);
  if (t == 0 && !has_hot) store_word(p.count, epoch, 0);
  if (!has_hot) return;
  if (t < HOT_BLOCKS) s.hot[t] = load_now(hot + t);
  stage_group(s, now, old_step == step);
  host.stage();
  __syncthreads();
  if (t == 0) expect(&x.arrived, LOOKERS * (sizeof(unsigned) + PART * sizeof(short)));
  await_arrived(&x.arrived);
  const bool all_placed = sum_unplaced(x) == 0;
  bool unplaced[ENTRIES];
  take_entries(p, s, x, host, all_placed, unplaced, epoch, e);
  const bool hits = __syncthreads_or(e.any_hit);
  const int misses = s.listed;
  if (t == 0) {
    store_word(p.count, epoch, misses);
    if (hits || misses) p.group_step[request] = step;
    if (misses) atomicAdd(p.counters, (unsigned long long)misses);
  }
  bool moved = misses > 0;
  if (misses) {
    replace(s, now, p.misses, epoch, part_of(p.map, request, MAP_STRIDE),
            part_of(p.positions, request, STRIDE), e);
  } else if (hits) {
    moved = used_otherwise(s, now);
    if (moved) reorder(s, now.order);
  }
  if (!all_placed) {
#pragma unroll
    for (int i = 0; i < ENTRIES; ++i)
      if (unplaced[i]) p.out[t * ENTRIES + i] = e.where[i];
  }
  if (moved) {
    __syncthreads();
    store_hot(group, order, s);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1)
    hisparse_resolve_one(const __grid_constant__ Resolve p) {
  extern __shared__ __align__(16) unsigned char raw[];
  __shared__ __align__(16) Exchange x;
  __shared__ Ends ends;
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const unsigned rank = cluster_rank();
  if (thread() == 0) make_barrier(&x.arrived);
  cluster_arrive();
  if (ALL_WARPS_WAIT && rank == PLANNER) cluster_wait();
  const int request = load_now(p.rows);
  const int step = load_now(p.step);
  if (rank == PLANNER)
    plan_row(p, s, x, request, step);
  else if (look_up_part(p, s, x, rank - 1, request))
    fetch_plan({p.misses, p.count, p.tickets, nullptr, nullptr, 1}, 1, epoch_of(step, p.call), ends, rank - 1,
               LOOKERS, p.host_rows, p.pool_rows);
}
