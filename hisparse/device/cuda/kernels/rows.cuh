// Rows of one layer between the pinned host tier and the packed GPU pool, and the hand-over from the
// blocks that plan misses to the blocks that fetch them.
//
// A miss names its rows physically: host row `source` (host page * PAGE + offset) and pool row
// `target` (block * BLOCK_ROWS + offset). Ids are 32-bit, byte offsets always 64-bit.
//
// Hand-over: a line's `count`, a miss's `source` and its `target` are words of epoch << 32 | value,
// each there when its epoch is the call's. Words are read and written whole, so no fence stands
// between planning and fetching. The source comes first: its bytes are on their way while the planning
// block still looks for a victim. The order of a line's list is no contract.
//
// Compile-time sizes: PAGE tokens a page, ROW_BYTES (a multiple of 16), BLOCK_ROWS rows from one
// block of the packed pool to the next, TOPK, HOT (slots of a hot region), THREADS a block.
#pragma once
#ifdef __CUDACC_RTC__
typedef unsigned int uint32_t;
#else
#include <cstdint>
#endif

typedef unsigned long long Word;  // epoch << 32 | value

constexpr int WARPS = THREADS / 32;
constexpr unsigned ALL = 0xffffffffu;
constexpr int CHUNKS = ROW_BYTES / 16;
constexpr int LINE = 8;  // chunks in a line of 128 bytes
constexpr int LOADS = (CHUNKS + (CHUNKS % LINE ? LINE - 1 : 0) + 31) / 32;
constexpr int HOT_BLOCKS = (HOT + PAGE - 1) / PAGE;
constexpr int WINDOW = 64;  // lines whose misses are dealt out together
constexpr int WATCHERS = WINDOW / 32;  // warps that wait for their counts
constexpr int EARLY_LINES = 8;  // whose first misses have a warp each
static_assert(ROW_BYTES % 16 == 0, "rows are moved in 16-byte pieces");
static_assert(THREADS % 32 == 0 && THREADS >= WINDOW, "a thread a line of a window");

// The number of a thread in its block, with what the compiler could know of it.
__device__ __forceinline__ unsigned thread() {
  const unsigned t = threadIdx.x;
  __builtin_assume(t < THREADS);
  return t;
}

struct __align__(16) Miss {
  Word source, target;
};

__device__ __forceinline__ Word load_word(const Word* at) {
  Word value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(at));
  return value;
}

__device__ __forceinline__ void store_word(Word* at, uint32_t epoch, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"((Word)epoch << 32 | value));
}

// Loads that begin where they stand, of what no launch changes while it runs: the compiler puts plain ones
// behind the wait for another. They go through the L1 cache, since all warps of the device ask for the same few
// words at first.
__device__ __forceinline__ int load_now(const int* at) {
  int value;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(at));
  return value;
}

__device__ __forceinline__ int2 load_now(const int2* at) {
  int2 v;
  asm volatile("ld.global.v2.s32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
  return v;
}

struct Plan {
  const Miss* misses;  // [n, TOPK]
  const Word* count;   // [n] misses
  Word* ticket;        // the next turn of the sequence of misses
  // For whose lines, `span` each, where the plan is still being made; null where it stands.
  const int* rows;     // [n] request rows
  const int* hot;      // [requests, HOT_BLOCKS]
  int span;
};

// Whether it is known beforehand that nothing of a line misses: padding, and who has no hot region.
// So where all is resident nobody waits for a plan.
__device__ __forceinline__ bool never_misses(const Plan& plan, int line) {
  if (plan.rows == nullptr) return false;
  const int row = load_now(plan.rows + line - line % plan.span);
  return row < 0 || load_now(plan.hot + (size_t)row * HOT_BLOCKS) == 0;
}

__device__ __forceinline__ uint4 load_host(const uint4* at) {
  uint4 v;  // read once, kept in no cache
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}

// A row on its way through a warp's registers. Lanes start at the line that the row begins in, so that
// no line is asked of the host in two parts.
struct Row {
  uint4 piece[LOADS];
  int first;  // chunk of the lane's first piece; outside of the row: none
};

__device__ __forceinline__ void load_row(Row& row, const uint4* host, uint32_t source) {
  const uint4* at = host + (size_t)source * CHUNKS;
  const int into = CHUNKS % LINE ? int((size_t)at / sizeof(uint4) % LINE) : 0;
  row.first = int(threadIdx.x & 31) - into;
#pragma unroll
  for (int i = 0; i < LOADS; ++i)
    if (unsigned(row.first + 32 * i) < CHUNKS) row.piece[i] = load_host(at + row.first + 32 * i);
}

// A row to the pool, whose lines are the first to leave the L2 cache again: kept like others they slow
// host reads by a tenth, once anything else has used the cache (measured).
__device__ __forceinline__ void store_row(const Row& row, uint4* pool, uint32_t target) {
  uint4* at = pool + (size_t)target * CHUNKS + row.first;
#pragma unroll
  for (int i = 0; i < LOADS; ++i)
    if (unsigned(row.first + 32 * i) < CHUNKS) __stcs(at + 32 * i, row.piece[i]);
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

// The next turn that no warp has, for the whole warp. Until the ticket is the call's the answers of
// the last call are worth nothing, and asking does no harm: opening the ticket writes it over.
__device__ __forceinline__ int take_ticket(Word* ticket, uint32_t epoch) {
  Word taken = 0;
  if ((threadIdx.x & 31) == 0)
    do taken = atomicAdd(ticket, 1ull);
    while ((uint32_t)(taken >> 32) != epoch);
  return __shfl_sync(ALL, (int)(uint32_t)taken, 0);
}

// Each fetching warp has its first turn by its number; the ticket gives out those after.
__device__ __forceinline__ void open_ticket(Word* ticket, uint32_t epoch, int blocks) {
  store_word(ticket, epoch, blocks * WARPS);
}

// A miss as a warp knows it.
struct Found {
  const Miss* miss;
  uint32_t source, target;
  bool has_target;
};

// What a warp looks at, in one load: lane 0 the source of entry `index` of a line's list, lane 1 its
// target, the others the line's count.
__device__ __forceinline__ const Word* look_at(const Plan& plan, int line, int index, Found& f) {
  const int lane = threadIdx.x & 31;
  f.miss = plan.misses + (size_t)line * TOPK + index;
  return lane == 0 ? &f.miss->source : lane == 1 ? &f.miss->target : plan.count + line;
}

// Look until the source is there, beginning with what a first look gave; false if the count says that
// the line has no such entry.
__device__ __forceinline__ bool await_source(Found& f, const Word* at, Word word, int index,
                                             uint32_t epoch) {
  while (true) {
    const unsigned there = __ballot_sync(ALL, (uint32_t)(word >> 32) == epoch);
    if (there & 1) {
      f.source = __shfl_sync(ALL, (uint32_t)word, 0);
      f.target = __shfl_sync(ALL, (uint32_t)word, 1);
      f.has_target = there & 2;
      return true;
    }
    if (there & 4 && (int)__shfl_sync(ALL, (uint32_t)word, 2) <= index) return false;
    word = load_word(at);
  }
}

__device__ __forceinline__ void await_target(Found& f, uint32_t epoch) {
  while (!f.has_target) {
    const Word word = load_word(&f.miss->target);
    f.target = (uint32_t)word;
    f.has_target = (uint32_t)(word >> 32) == epoch;
  }
}

struct Ends {
  unsigned end[2][WINDOW];  // turns up to each line's last
  unsigned sums[2][WARPS];
};

// Fetch every miss of `n` lines; this block is `block` of `blocks`.
//
// The first misses of the first lines have a warp each, which waits for that one alone: where few
// rows miss, no count stands between finding a miss and fetching it. All others form one sequence of
// turns, line after line: what is on its way at a time is from few requests, whose host pages lie
// together, and address translation keeps up. A warp takes a turn when it is ready for one, since some
// places of the device reach the host a third faster than others (measured: 162 and 212 us for equal
// shares). It does so, waits for a window's counts and looks its next miss up while a row is on its way.
__device__ __forceinline__ void fetch_plan(Plan plan, int n, uint32_t epoch, Ends& s, int block,
                                           int blocks, const uint4* host, uint4* pool) {
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
  const int early = min(n, EARLY_LINES);
  const int share = early ? min(blocks * (WARPS - WATCHERS) / early, TOPK) : 0;  // of each early line
  int turn = warp * blocks + block, dealt = 0, base = -WINDOW, side = 0;
  unsigned total = 0, ends[WINDOW / 32];
  Found found;
  bool have = false, first = true;
  if (early && warp >= WATCHERS) {
    const int me = turn - WATCHERS * blocks, index = me / early, line = me % early;
    if (index < share && !never_misses(plan, line)) {
      const Word* at = look_at(plan, line, index, found);
      have = await_source(found, at, load_word(at), index, epoch);
    }
  }
  while (true) {
    Row row;
    if (have) load_row(row, host, found.source);
    if (!first) turn = take_ticket(plan.ticket, epoch);
    first = false;
    while (turn - dealt >= (int)total && base + WINDOW < n) {
      base += WINDOW;
      side ^= 1;
      dealt += total;
      unsigned rest = 0;
      if (t < WINDOW && base + t < n && !never_misses(plan, base + t)) {
        Word word;
        do word = load_word(plan.count + base + t);
        while ((uint32_t)(word >> 32) != epoch);
        rest = max(0, (int)(uint32_t)word - (base + t < early ? share : 0));
      }
      total = 0;
      if (!__syncthreads_or(rest > 0)) continue;
      const unsigned before = scan(rest, s.sums[side], &total);
      if (t < WINDOW) s.end[side][t] = before + rest;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < WINDOW / 32; ++i) ends[i] = s.end[side][lane + 32 * i];
    }
    const unsigned of = turn - dealt;
    const bool more = of < total;
    Found next;
    const Word* at;
    Word word;
    int index;
    if (more) {
      int line = 0;
#pragma unroll
      for (int i = 0; i < WINDOW / 32; ++i) line += __popc(__ballot_sync(ALL, ends[i] <= of));
      index = (int)of - (line ? (int)s.end[side][line - 1] : 0) + (base + line < early ? share : 0);
      at = look_at(plan, base + line, index, next);
      word = load_word(at);
    }
    if (have) {
      await_target(found, epoch);
      store_row(row, pool, found.target);
    }
    if (!more) break;
    have = await_source(next, at, word, index, epoch);
    found = next;
  }
}
