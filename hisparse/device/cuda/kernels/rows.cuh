// Rows of one layer between the pinned host tier and the packed GPU pool, and the hand-over from the
// blocks that plan misses to the blocks that fetch them.
//
// A miss names its rows physically: host row `source` (host page * PAGE + offset) and pool row
// `target` (block * BLOCK_ROWS + offset). Ids are 32-bit, byte offsets always 64-bit.
//
// Hand-over: a line's `count` is there when its epoch is the call's, and so is each miss. Both are
// single words that are read and written whole, so no fence stands between planning and fetching.
//
// Compile-time sizes: PAGE tokens a page, ROW_BYTES (a multiple of 16), BLOCK_ROWS rows from one
// block of the packed pool to the next, TOPK, THREADS a block.
#pragma once
#ifdef __CUDACC_RTC__
typedef unsigned int uint32_t;
#else
#include <cstdint>
#endif

constexpr int WARPS = THREADS / 32;
constexpr unsigned ALL = 0xffffffffu;
constexpr int CHUNKS = ROW_BYTES / 16;
constexpr int LOADS = (CHUNKS + 31) / 32;
constexpr int WATCHED = 64;
static_assert(ROW_BYTES % 16 == 0, "rows are moved in 16-byte pieces");
static_assert(THREADS % 32 == 0 && THREADS >= 64, "a warp watches, the others fetch");

struct __align__(16) Miss {
  uint32_t source, target, epoch, unused;
};

struct Plan {
  const Miss* misses;               // [n, TOPK]
  const unsigned long long* count;  // [n] epoch << 32 | misses
  unsigned long long* ticket;       // epoch << 32 | misses that were given to a warp
};

__device__ __forceinline__ unsigned long long load_count(const unsigned long long* at) {
  unsigned long long value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(at));
  return value;
}

__device__ __forceinline__ void store_count(unsigned long long* at, uint32_t epoch, int misses) {
  const unsigned long long value = (unsigned long long)epoch << 32 | (uint32_t)misses;
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(value));
}

__device__ __forceinline__ Miss load_miss(const Miss* at) {
  Miss m;
  asm volatile(
      "{\n .reg .b128 v; .reg .b64 a, b;\n ld.relaxed.gpu.global.b128 v, [%4];\n"
      " mov.b128 {a, b}, v;\n mov.b64 {%0, %1}, a;\n mov.b64 {%2, %3}, b;\n}"
      : "=r"(m.source), "=r"(m.target), "=r"(m.epoch), "=r"(m.unused) : "l"(at));
  return m;
}

__device__ __forceinline__ void store_miss(Miss* at, uint32_t source, uint32_t target, uint32_t epoch) {
  asm volatile(
      "{\n .reg .b128 v; .reg .b64 a, b;\n mov.b64 a, {%1, %2};\n mov.b64 b, {%3, %4};\n"
      " mov.b128 v, {a, b};\n st.relaxed.gpu.global.b128 [%0], v;\n}"
      ::"l"(at), "r"(source), "r"(target), "r"(epoch), "r"(0));
}

__device__ __forceinline__ uint4 load_host(const uint4* at) {
  uint4 v;  // read once, kept in no cache
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}

// A row on its way through a warp's registers.
struct Row {
  uint4 piece[LOADS];
};

__device__ __forceinline__ void load_row(Row& row, const uint4* host, uint32_t source) {
  const unsigned lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < LOADS; ++i)
    if (lane + 32 * i < CHUNKS) row.piece[i] = load_host(host + (size_t)source * CHUNKS + lane + 32 * i);
}

__device__ __forceinline__ void store_row(const Row& row, uint4* pool, uint32_t target) {
  const unsigned lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < LOADS; ++i)
    if (lane + 32 * i < CHUNKS) pool[(size_t)target * CHUNKS + lane + 32 * i] = row.piece[i];
}

// What the watching warp of a fetching block tells the others, word by word: an entry is written
// before `lines` counts it. Both sides use atomics, which take place in program order.
struct Watch {
  int lines;                          // entries so far; negative, less one: these are all
  unsigned long long entry[WATCHED];  // lines with misses, in order: line << 32 | misses
};

// One lane reads for its warp.
template <typename T>
__device__ __forceinline__ T peek(T& at) {
  T value = 0;
  if ((threadIdx.x & 31) == 0) value = atomicAdd(&at, (T)0);
  return __shfl_sync(ALL, value, 0);
}

// Warp 0's part: look at the counts, 64 in one round trip, and list the lines that have misses, in
// order, as far as all before them are known.
__device__ __forceinline__ void watch_counts(const unsigned long long* count, int base, int lines,
                                             uint32_t epoch, Watch& shared) {
  const int lane = threadIdx.x & 31;
  const unsigned below = (1u << lane) - 1;
  int done = 0, listed = 0;
  while (done < lines) {
    unsigned long long a = (unsigned long long)epoch << 32, b = a;
    if (lane < lines) a = load_count(count + base + lane);
    if (lane + 32 < lines) b = load_count(count + base + lane + 32);
    const unsigned ra = __ballot_sync(ALL, (uint32_t)(a >> 32) == epoch);
    const unsigned rb = __ballot_sync(ALL, (uint32_t)(b >> 32) == epoch);
    const unsigned long long waiting = ~((unsigned long long)rb << 32 | ra);
    const int upto = waiting ? __ffsll(waiting) - 1 : 64;
    if (upto == done) continue;
    const bool ta = lane >= done && lane < upto && (uint32_t)a > 0;
    const bool tb = lane + 32 >= done && lane + 32 < upto && (uint32_t)b > 0;
    const unsigned ma = __ballot_sync(ALL, ta), mb = __ballot_sync(ALL, tb);
    if (ta) {
      const int at = listed + __popc(ma & below);
      atomicExch(&shared.entry[at], (unsigned long long)(base + lane) << 32 | (uint32_t)a);
    }
    if (tb) {
      const int at = listed + __popc(ma) + __popc(mb & below);
      atomicExch(&shared.entry[at], (unsigned long long)(base + lane + 32) << 32 | (uint32_t)b);
    }
    listed += __popc(ma) + __popc(mb);
    done = upto;
    __threadfence_block();
    __syncwarp();
    if (lane == 0 && (ma | mb | (done >= lines)))
      atomicExch(&shared.lines, done >= lines ? -listed - 1 : listed);
  }
}

// Where a fetching warp stands in the sequence of all misses of all lines.
struct Cursor {
  int turn;   // the next miss of this warp, in the sequence
  int dealt;  // misses of the lines before `at`
  int at;     // of the list
};

// The miss whose turn it is: 1 and its address, 0 if it is not known yet, -1 if there is none.
__device__ __forceinline__ int find_miss(Cursor& c, Watch& shared, const Miss* misses,
                                         const Miss** found) {
  const int seen = peek(shared.lines), upto = seen < 0 ? -seen - 1 : seen;
  for (; c.at < upto; ++c.at) {
    const unsigned long long entry = peek(shared.entry[c.at]);
    const int count = (int)(uint32_t)entry;
    if (c.turn < c.dealt + count) {
      *found = misses + (size_t)(entry >> 32) * TOPK + (c.turn - c.dealt);
      return 1;
    }
    c.dealt += count;
  }
  return seen < 0 ? -1 : 0;
}

// The next miss that no warp has, for the whole warp. Until the ticket is the call's the answers of the
// last call are worth nothing, and asking does no harm: opening the ticket writes it over.
__device__ __forceinline__ int take_ticket(unsigned long long* ticket, uint32_t epoch) {
  unsigned long long taken = 0;
  if ((threadIdx.x & 31) == 0)
    do taken = atomicAdd(ticket, 1ull);
    while ((uint32_t)(taken >> 32) != epoch);
  return __shfl_sync(ALL, (int)(uint32_t)taken, 0);
}

// Each fetching warp has its first miss by its number; the ticket gives out those after.
__device__ __forceinline__ void open_ticket(unsigned long long* ticket, uint32_t epoch, int blocks) {
  store_count(ticket, epoch, blocks * (WARPS - 1));
}

// Fetch every miss of `n` lines; this block is `block` of `blocks`.
//
// Lines are taken in order, and their misses form one sequence for all warps: what is on its way at
// a time is from few requests, whose host pages lie together, and address translation keeps up. A
// warp takes the next miss when it is ready for one, since some places of the device reach the host
// a third faster than others (measured: 162 and 212 us for equal shares). It does so, and looks the
// miss up, while its last row is on its way.
__device__ __forceinline__ void fetch_plan(Plan plan, int n, uint32_t epoch, Watch& watch, int block,
                                           int blocks, const uint4* host, uint4* pool) {
  const int warp = threadIdx.x >> 5;
  Cursor c = {(warp - 1) * blocks + block, 0, 0};
  for (int base = 0; base < n; base += WATCHED) {
    if (threadIdx.x == 0) watch.lines = 0;
    c.at = 0;
    __syncthreads();
    if (warp == 0) {
      watch_counts(plan.count, base, min(WATCHED, n - base), epoch, watch);
    } else {
      const Miss* at;
      int known = 0;
      Miss next = {0, 0, ~epoch, 0};
      while (true) {
        while (known == 0) known = find_miss(c, watch, plan.misses, &at);
        if (known < 0) break;
        while (next.epoch != epoch) next = load_miss(at);
        const Miss miss = next;
        Row row;
        load_row(row, host, miss.source);
        c.turn = take_ticket(plan.ticket, epoch);
        next.epoch = ~epoch;
        known = find_miss(c, watch, plan.misses, &at);
        if (known > 0) next = load_miss(at);
        store_row(row, pool, miss.target);
      }
    }
    if (base + WATCHED < n) __syncthreads();  // before the list is written over
  }
}
