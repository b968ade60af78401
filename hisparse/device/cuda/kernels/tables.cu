// A step's beginning: its number, the rows handed to other requests, the entries of the four tables that
// name other ids, and the hot rows that go with them. One launch a step, outside of any graph.
//
// Grid: (request rows that change, leaders), or (1, 1) where none does. Each block forgets its leader's hot
// rows, by the entries as they still are; the last of a request row's blocks then writes its entries.
// So no block sees a table half changed, and nothing waits.
//
// A hot entry that named another block gives up its slots; a host entry that named another page gives up
// its positions; a reset gives up everything. What is forgotten is free, and free slots come first in
// the replacement order, by slot. The state is that of order.cuh; its sizes come as arguments.

typedef unsigned long long Wide;
enum Table { RESIDENT, HOST, INDEX, HOT_BLOCK };

struct Change {    // of one entry, all of a command together
  int table;       // and, above 255: it named another id in between
  int entry, first, last;  // the first and the last id that the command gives it
};

struct Leader {
  short* map;
  int* positions;
  unsigned short* order;
  unsigned char* group;
};

struct Begin {
  const int* rows;        // [n] request rows
  const int* starts;      // [n + 1] into `changes`
  const int* resets;      // [n] whether the row is handed on
  const Change* changes;
  int* tables[4];         // [requests, strides]
  int strides[4], entries[4];
  const Leader* leaders;
  int* arrived;           // [requests] zeros
  int* step;
  int rows_count, leaders_count, number;
  int page_size, hot_rows, stride, map_stride, reach;
  unsigned* sums;         // [requests, sums_stride], or null
  Wide sums_stride;
};

__device__ __forceinline__ bool forget(const Leader& state, int slot) {
  const int position = state.positions[slot];
  if (position < 0) return false;
  state.map[position] = -1;
  state.positions[slot] = -1;
  state.group[slot] = 0;
  return true;
}

// Exclusive rank of the threads that hold something, and how many do.
__device__ __forceinline__ int rank_of(bool holds, int* sums, int* total) {
  const unsigned mine = __ballot_sync(0xffffffffu, holds);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  __syncthreads();
  if (lane == 0) sums[warp] = __popc(mine);
  __syncthreads();
  int before = 0, all = 0;
  for (int i = 0; i < warps; ++i) {
    before += i < warp ? sums[i] : 0;
    all += sums[i];
  }
  *total = all;
  return before + __popc(mine & ((1u << lane) - 1));
}

// Free slots first, by slot; the others behind them in the order that they had.
__device__ __forceinline__ void sort_free_first(const Leader& state, const Begin& p,
                                                unsigned short* next, int* sums) {
  int done = 0;
  for (int pass = 0; pass < 2; ++pass)
    for (int base = 0; base < p.hot_rows; base += blockDim.x) {
      const int at = base + threadIdx.x;
      const int slot = at >= p.hot_rows ? -1 : pass ? state.order[at] : at;
      const bool takes = slot >= 0 && (state.positions[slot] < 0) == (pass == 0);
      int total;
      const int rank = rank_of(takes, sums, &total);
      if (takes) next[done + rank] = (unsigned short)slot;
      done += total;
    }
  __syncthreads();
  for (int at = threadIdx.x; at < p.hot_rows; at += blockDim.x) state.order[at] = next[at];
}

__device__ __forceinline__ bool forget_row(const Leader& state, const Begin& p, int line, int row) {
  bool any = false;
  if (p.resets[line])
    for (int slot = threadIdx.x; slot < p.hot_rows; slot += blockDim.x) any |= forget(state, slot);
  for (int i = p.starts[line] + threadIdx.x; i < p.starts[line + 1]; i += blockDim.x) {
    const Change change = p.changes[i];
    const int table = change.table & 255;
    if (p.resets[line] || (table != HOST && table != HOT_BLOCK)) continue;
    const int old = p.tables[table][(Wide)row * p.strides[table] + change.entry];
    if (change.table < 256 && (old == 0 || old == change.first)) continue;
    const int first = change.entry * p.page_size, end = first + p.page_size;
    if (table == HOT_BLOCK)
      for (int slot = first; slot < min(end, p.hot_rows); ++slot) any |= forget(state, slot);
    else
      for (int position = first; position < min(end, p.reach); ++position) {
        const int slot = state.map[position];
        if (slot >= 0) any |= forget(state, slot);
      }
  }
  return any;
}

__device__ __forceinline__ void write_entries(const Begin& p, int line, int row) {
  if (p.resets[line]) {
    for (int table = 0; table < 4; ++table)
      for (int i = threadIdx.x; i < p.entries[table]; i += blockDim.x)
        p.tables[table][(Wide)row * p.strides[table] + i] = 0;
    if (p.sums != nullptr)
      for (Wide i = threadIdx.x; i < p.sums_stride; i += blockDim.x) p.sums[row * p.sums_stride + i] = 0;
    __syncthreads();
  }
  for (int i = p.starts[line] + threadIdx.x; i < p.starts[line + 1]; i += blockDim.x) {
    const Change change = p.changes[i];
    const int table = change.table & 255;
    p.tables[table][(Wide)row * p.strides[table] + change.entry] = change.last;
  }
}

extern "C" __global__ void __launch_bounds__(1024, 1) hisparse_begin(
    const __grid_constant__ Begin p) {
  extern __shared__ unsigned short next[];
  __shared__ int sums[32];
  __shared__ int last;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *p.step = p.number;
  if ((int)blockIdx.x >= p.rows_count) return;
  const int line = blockIdx.x, row = p.rows[line];
  if ((int)blockIdx.y < p.leaders_count) {
    Leader state = p.leaders[blockIdx.y];
    state.map += (Wide)row * p.map_stride;
    state.positions += (Wide)row * p.stride;
    state.order += (Wide)row * p.stride;
    state.group += (Wide)row * p.stride;
    const bool any = forget_row(state, p, line, row);
    if (__syncthreads_or(any)) sort_free_first(state, p, next, sums);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(p.arrived + row, 1) + 1 == (int)gridDim.y;
  __syncthreads();
  if (!last) return;
  write_entries(p, line, row);
  if (threadIdx.x == 0) p.arrived[row] = 0;
}
