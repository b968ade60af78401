// The fused resolve of one index group: resident row, then hot row, then victim + host row.
//
// One launch. The first few blocks fetch the missed rows of the leader's layer, request after request,
// as they are found; the others plan, one request each. A fetching block waits only for planning
// blocks, and leaves room for them on the device (checked at launch).
//
// A miss's source is handed over where the miss is found, and its target when it has a victim: the row
// is on its way from the host while the planning block numbers misses, takes victims and reorders.
//
// Where a step uses what the last one used, in the same way, the order (order.cuh) stays as it is, and a
// hit costs its look-up alone.
//
// Rows of one request in one call (speculation) are taken in order; a victim is never a slot that
// this call used: HOT >= rows of a request in a call * TOPK. A later row whose request row is -1 is
// padding, whatever it selects.
//
// Planning is two trips to memory, the look-ups in the map and the instructions of 32 warps: hence
// loads that stand where they begin, tables in shared memory, and one scan that numbers the misses and
// ranks the victims together.
#include "plan.cuh"

// All rows of a request that has no hot region: what is not resident is nowhere.
__device__ __forceinline__ void plan_resident(const Resolve& p, unsigned first_line,
                                              const Table& resident, int* position) {
  for (int row = 0; row < p.span; ++row) {
    int where[ENTRIES];
    unsigned lost = 0;
    if (row > 0) load_later(p.rows, p.top_k, first_line + row, position);
#pragma unroll
    for (int i = 0; i < ENTRIES; ++i) {
      where[i] = place_in(resident[position[i]], position[i]);
      lost += position[i] >= 0 && where[i] < 0;
    }
    store_out(p.out + (size_t)(first_line + row) * TOPK, where);
    if (lost) atomicAdd(p.counters + 1, (unsigned long long)lost);
  }
}

// The planning block of the first request opens the tickets of all layers.
__device__ __forceinline__ void open_tickets(const Resolve& p, unsigned b, uint32_t epoch) {
  const unsigned t = thread();
  if (b == 0 && (int)t < p.layers) open_ticket(p.tickets + t, epoch, gridDim.x - p.requests);
}

__device__ __forceinline__ void plan_padding(const Resolve& p, unsigned first_line, uint32_t epoch) {
  const unsigned t = thread();
  for (int j = 0; j < p.span; ++j) {
    for (unsigned e = t; e < TOPK; e += THREADS) p.out[(size_t)(first_line + j) * TOPK + e] = -1;
    if (t == 0) store_word(p.count + first_line + j, epoch, 0);
  }
}

// Where each entry is: on the GPU, hot, or else a miss, whose place in the hash is `at`, or nowhere.
// Returns how many are nowhere.
__device__ __forceinline__ unsigned place_entries(Shared& s, const Table& resident, const Table& host,
                                                  Entries& e) {
  unsigned lost = 0;
#pragma unroll
  for (int i = 0; i < ENTRIES; ++i) {  // branches that few warps take are real ones
    const int block = resident[e.position[i]];
    const bool on_gpu = block > 0, hit = !on_gpu && e.slot[i] >= 0;
    const int within = on_gpu ? e.position[i] : e.slot[i];
    const int place = hit ? s.hot[(unsigned)e.slot[i] / PAGE] : block;
    e.where[i] = on_gpu || hit ? place * BLOCK_ROWS + int((unsigned)within % PAGE) : -1;
    if (hit) group_of(s)[e.slot[i]] = HIT | HELD;
    e.any_hit |= hit;
    e.at[i] = -1;
    e.is_new[i] = false;
    if (on_gpu || hit || e.position[i] < 0) continue;
    e.page[i] = host[e.position[i]];
    if (e.page[i] > 0)
      e.at[i] = note_miss(s, e.position[i], thread() * ENTRIES + i, &e.is_new[i]);
    else
      ++lost;
  }
  return lost;
}

// Plan all rows of planning block `b`.
__device__ __forceinline__ void plan_request(const Resolve& p, Shared& s, unsigned b) {
  const unsigned t = thread();
  const unsigned first_line = b * p.span;
  Entries e;
  const int request = load_now(p.rows + first_line);
  const int step = load_now(p.step);
  load_positions(p.top_k + (size_t)first_line * TOPK, e.position);
  const uint32_t epoch = epoch_of(step, p.call);
  clear_hash(s);
  if (t == 0) s.listed = 0;
  if (request < 0) {
    open_tickets(p, b, epoch);
    plan_padding(p, first_line, epoch);
    return;
  }
  Table resident = {part_of(p.resident, request, PAGES + 1), s.resident};
  Table host = {part_of(p.host, request, PAGES + 1), s.host};
  const int* hot = part_of(p.hot, request, HOT_BLOCKS);
  short* map = part_of(p.map, request, MAP_STRIDE);
  int* positions = part_of(p.positions, request, STRIDE);
  unsigned char* group = part_of(p.group, request, STRIDE);
  unsigned short* order = part_of(p.order, request, STRIDE);
  // All that is needed is asked for before any of it is waited for, but for the scattered look-ups, which
  // occupy the cache for a microsecond: who has no hot region is not behind those.
  const bool has_hot = load_now(hot) != 0;
  resident.load();
  host.load();
  const int hot_block = t < HOT_BLOCKS ? hot[t] : 0;
  const int old_step = p.group_step[request];
  HotWords now;
  load_group(group, now);
  open_tickets(p, b, epoch);
  if (!has_hot) {
    if ((int)t < p.span) store_word(p.count + first_line + t, epoch, 0);
    resident.stage();
    __syncthreads();
    plan_resident(p, first_line, resident, e.position);
    return;
  }
  look_up(e.position, map, e.slot);
  load_order(order, now);
  resident.stage();
  host.stage();
  if (t < HOT_BLOCKS) s.hot[t] = hot_block;
  stage_group(s, now, old_step == step);
  __syncthreads();
  bool moved = false, touched = false;
  for (int row = 0; row < p.span; ++row) {
    const unsigned line = first_line + row;
    Miss* list = p.misses + (size_t)line * TOPK;
    e.any_hit = false;
    const unsigned lost = place_entries(s, resident, host, e);
    list_sources(s, list, epoch, e);
    if (lost) atomicAdd(p.counters + 1, (unsigned long long)lost);
    const bool hits = __syncthreads_or(e.any_hit);
    const int misses = s.listed;
    if (t == 0) store_word(p.count + line, epoch, misses);
    bool reordered = misses > 0;
    if (!misses) {
      store_out(p.out + (size_t)line * TOPK, e.where);
      if (hits) {
        touched = true;
        reordered = used_otherwise(s, now);
        if (reordered) reorder(s, now.order);
      }
    } else {
      touched = true;
      replace(s, now, list, epoch, map, positions, e);
      store_out(p.out + (size_t)line * TOPK, e.where);
      if (t == 0) atomicAdd(p.counters, (unsigned long long)misses);
    }
    moved |= reordered;
    if (row + 1 == p.span) break;
    load_later(p.rows, p.top_k, line + 1, e.position);
    __syncthreads();  // nobody reads this row's shared state any more; its map entries are written
    look_up(e.position, map, e.slot);
    if (misses) clear_hash(s);
    if (t == 0) s.listed = 0;
#pragma unroll
    for (int j = 0; j < SLOTS / 4; ++j) {
      const unsigned word = t * (SLOTS / 4) + j;
      now.group[j] = s.group[word];
      if (reordered) now.order[j] = *reinterpret_cast<const uint2*>(&s.order[2 * word]);
    }
    __syncthreads();
  }
  if (moved) {
    __syncthreads();
    store_hot(group, order, s);
  }
  if (touched && t == 0) p.group_step[request] = step;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) hisparse_resolve(
    const __grid_constant__ Resolve p) {
  extern __shared__ __align__(16) unsigned char raw[];
  const int fetching = gridDim.x - p.requests;
  if ((int)blockIdx.x >= fetching)
    plan_request(p, *reinterpret_cast<Shared*>(raw), blockIdx.x - fetching);
  else
    fetch_plan({p.misses, p.count, p.tickets, p.rows, p.hot, p.span}, p.requests * p.span,
               epoch_of(load_now(p.step), p.call), *reinterpret_cast<Ends*>(raw), blockIdx.x, fetching,
               p.host_rows, p.pool_rows);
}
