// Rows in and out of the packed pool, for a model that does not read the pool itself.
//
// A warp moves a row, in pieces as wide as both addresses and the row's length allow: latent rows are
// whole pieces of 16 bytes, indexer rows may be 20 or 132 bytes. `owner` names a layer, or, below 0, an
// index group (-1 - group), in a fault. Offsets are 64-bit, ids and entries 32-bit.
//
// With checks, `sums`, where not null, is [requests, positions] of one layer (of stride `stride`): the
// checksum of the row that was last written there, 0 where none was. Rows are looked at wherever they are
// selected: where they are copied out, and behind a resolve alone.
#include "faults.cuh"

typedef unsigned char Byte;
typedef unsigned long long Wide;

struct View {  // of one layer or group in a pool
  Byte* base;
  Wide block_stride;  // bytes
  int rows_per_block, row_bytes;
};

struct TableOf {
  const int* entry;  // [requests, stride]
  int stride, entries;
};

struct Checks {
  unsigned* sums;
  Wide stride;
  int poison;  // a byte of what is freed; below 0: no checks
};

template <typename Piece>
__device__ __forceinline__ void move(Byte* to, const Byte* from, int bytes) {
  const int pieces = bytes / (int)sizeof(Piece);
  for (int i = threadIdx.x & 31; i < pieces; i += 32)
    reinterpret_cast<Piece*>(to)[i] = reinterpret_cast<const Piece*>(from)[i];
}

// A warp copies a row; from null: zeros.
__device__ __forceinline__ void move_row(Byte* to, const Byte* from, int bytes) {
  const Wide odd = (Wide)to | (Wide)from | (Wide)bytes;
  if (from == nullptr) {
    for (int i = threadIdx.x & 31; i < bytes; i += 32) to[i] = 0;
  } else if (odd % 16 == 0) {
    move<uint4>(to, from, bytes);
  } else if (odd % 4 == 0) {
    move<unsigned>(to, from, bytes);
  } else {
    move<Byte>(to, from, bytes);
  }
}

// Of a row, by a warp; never 0. A byte that moves to another place changes it.
__device__ __forceinline__ unsigned checksum(const Byte* row, int bytes) {
  unsigned sum = 0;
  for (int i = threadIdx.x & 31; i < bytes; i += 32) sum += (row[i] + 1u) * (2654435761u * (2 * i + 1));
#pragma unroll
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  return sum ? sum : 1;
}

// Note what is wrong with a row, for a warp.
__device__ __forceinline__ void check_row(const Byte* at, int bytes, const Checks& checks, int row,
                                          int position, int owner, Faults* faults) {
  const unsigned want = checks.sums != nullptr ? checks.sums[row * checks.stride + position] : 0;
  if (want && want == checksum(at, bytes)) return;
  bool poisoned = true;
  for (int i = threadIdx.x & 31; i < bytes; i += 32) poisoned &= at[i] == checks.poison;
  poisoned = __all_sync(0xffffffffu, poisoned);
  if ((want || poisoned) && (threadIdx.x & 31) == 0)
    note_fault(faults, poisoned ? POISONED : OTHER_BYTES, row, owner, position);
}

// The row of `position`, or null: no such entry, or none there.
__device__ __forceinline__ Byte* find_row(const View& view, const TableOf& table, int row,
                                          long long position, bool* beyond) {
  const long long entry = position / view.rows_per_block;
  *beyond = position < 0 || entry >= table.entries;
  const int block = *beyond ? 0 : table.entry[(Wide)row * table.stride + entry];
  if (block <= 0) return nullptr;
  return view.base + block * view.block_stride +
         (Wide)(position - entry * view.rows_per_block) * view.row_bytes;
}

__device__ __forceinline__ int warps() { return gridDim.x * (blockDim.x / 32); }
__device__ __forceinline__ int warp_id() { return (blockIdx.x * blockDim.x + threadIdx.x) / 32; }
__device__ __forceinline__ bool first_lane() { return (threadIdx.x & 31) == 0; }

extern "C" __global__ void hisparse_write_rows(View view, TableOf table, const int* rows,
                                               const long long* positions, int n, const Byte* data,
                                               int owner, Faults* faults, Checks checks) {
  for (int i = warp_id(); i < n; i += warps()) {
    const int row = rows[i];
    if (row < 0) continue;
    bool beyond;
    Byte* to = find_row(view, table, row, positions[i], &beyond);
    const Byte* from = data + (Wide)i * view.row_bytes;
    if (to == nullptr) {
      if (first_lane()) note_fault(faults, beyond ? BEYOND : NO_BLOCK, row, owner, (int)positions[i]);
      continue;
    }
    move_row(to, from, view.row_bytes);
    if (checks.sums != nullptr) {
      const unsigned sum = checksum(from, view.row_bytes);
      if (first_lane()) checks.sums[row * checks.stride + positions[i]] = sum;
    }
  }
}

// Positions [0, limit) of each of n rows: out [n, limit, row_bytes]. Zeros from the row's own length on,
// which is `length` or, where that is negative, its position + 1.
extern "C" __global__ void hisparse_read_prefixes(View view, TableOf table, const int* rows,
                                                  const long long* positions, int n, long long length,
                                                  long long limit, Byte* out, int owner,
                                                  Faults* faults) {
  for (long long at = warp_id(); at < n * limit; at += warps()) {
    const int i = (int)(at / limit), row = rows[i];
    const long long position = at - i * limit;
    const long long end = row < 0 ? 0 : length >= 0 ? length : positions[i] + 1;
    const Byte* from = nullptr;
    if (position < end) {
      bool beyond;
      from = find_row(view, table, row, position, &beyond);
      if (from == nullptr && first_lane()) note_fault(faults, NO_PREFIX, row, owner, (int)position);
    }
    move_row(out + (Wide)at * view.row_bytes, from, view.row_bytes);
  }
}

// Where the selections of tokens are that need no hot region: out [n, k] rows of the pool, -1 for
// padding, and for what is not resident, a fault. `tokens`: those meant, or null for the first `count`.
extern "C" __global__ void hisparse_locate(TableOf table, const int* rows, const int* top_k,
                                           const int* tokens, int count, int k, int page_size,
                                           int block_rows, int* out, int owner, Faults* faults) {
  const Wide total = (Wide)count * k;
  for (Wide at = blockIdx.x * blockDim.x + threadIdx.x; at < total; at += gridDim.x * blockDim.x) {
    const int i = (int)(at / k), token = tokens ? tokens[i] : i, row = rows[token];
    const Wide place = (Wide)token * k + (at - (Wide)i * k);
    const int position = top_k[place], entry = position / page_size;
    int block = 0;
    if (row >= 0 && position >= 0 && entry < table.entries)
      block = table.entry[(Wide)row * table.stride + entry];
    out[place] = block > 0 ? block * block_rows + position % page_size : -1;
    if (row >= 0 && position >= 0 && block <= 0) note_fault(faults, NO_COPY, row, owner, position);
  }
}

// A wave's selections as its resolve reads them: lines [lines, width], -1 where a line has no token.
extern "C" __global__ void hisparse_pack(const int* top_k, const int* tokens, int lines, int k, int width,
                                         int* out) {
  const Wide total = (Wide)lines * width;
  for (Wide at = blockIdx.x * blockDim.x + threadIdx.x; at < total; at += gridDim.x * blockDim.x) {
    const int line = (int)(at / width), j = (int)(at - (Wide)line * width), token = tokens[line];
    out[at] = token >= 0 && j < k ? top_k[(Wide)token * k + j] : -1;
  }
}

// A wave's answers, where its tokens have them: out [n, k].
extern "C" __global__ void hisparse_unpack(const int* places, const int* tokens, int lines, int k,
                                           int width, int* out) {
  const Wide total = (Wide)lines * k;
  for (Wide at = blockIdx.x * blockDim.x + threadIdx.x; at < total; at += gridDim.x * blockDim.x) {
    const int line = (int)(at / k), j = (int)(at - (Wide)line * k), token = tokens[line];
    if (token >= 0) out[(Wide)token * k + j] = places[(Wide)line * width + j];
  }
}

// Copy selected rows out: out [n, k, row_bytes], zeros where `places` [., width] says -1. `tokens` says
// whose line it is, -1 for nobody's; null: line i is token i's. `places` is by line, or by token.
// `counts` (null: not counted) gets the resident and the host-backed entries.
extern "C" __global__ void hisparse_gather(View view, TableOf resident, const int* rows, const int* top_k,
                                           const int* places, const int* tokens, int lines, int k,
                                           int width, int by_token, int page_size, Byte* out,
                                           int owner, Faults* faults, Checks checks, Wide* counts) {
  unsigned seen[2] = {0, 0};
  const Wide total = (Wide)lines * k;
  for (Wide at = warp_id(); at < total; at += warps()) {
    const int line = (int)(at / k), j = (int)(at - (Wide)line * k), token = tokens ? tokens[line] : line;
    if (token < 0) continue;
    const int place = places[(Wide)(by_token ? token : line) * width + j], row = rows[token];
    const int position = row < 0 ? -1 : top_k[(Wide)token * k + j];
    const Byte* from = nullptr;
    if (place >= 0 && position >= 0) {
      from = view.base + (Wide)place * view.row_bytes;
      const int entry = position / page_size;
      if (counts) ++seen[resident.entry[(Wide)row * resident.stride + entry] == 0];
      if (checks.poison >= 0) check_row(from, view.row_bytes, checks, row, position, owner, faults);
    } else if (position >= 0 && first_lane()) {
      note_fault(faults, NO_COPY, row, owner, position);
    }
    move_row(out + ((Wide)token * k + j) * view.row_bytes, from, view.row_bytes);
  }
  if (counts && first_lane()) {
    if (seen[0]) atomicAdd(counts, (Wide)seen[0]);
    if (seen[1]) atomicAdd(counts + 1, (Wide)seen[1]);
  }
}

// Checks, behind a resolve whose rows nobody copies out: `places` [n, k] are where the selections lie.
extern "C" __global__ void hisparse_check_rows(View view, const int* rows, const int* top_k,
                                               const int* places, int n, int k, int owner, Faults* faults,
                                               Checks checks) {
  const Wide total = (Wide)n * k;
  for (Wide at = warp_id(); at < total; at += warps()) {
    const int row = rows[at / k], position = row < 0 ? -1 : top_k[at];
    if (position < 0) continue;
    const int place = places[at];
    if (place >= 0)
      check_row(view.base + (Wide)place * view.row_bytes, view.row_bytes, checks, row, position, owner,
                faults);
    else if (first_lane())
      note_fault(faults, NO_COPY, row, owner, position);
  }
}

// Misses of a call's lines (the low word of `count`), added up by request row.
extern "C" __global__ void hisparse_add_misses(const int* rows, const Wide* count, int lines, int span,
                                               int* misses) {
  for (int line = blockIdx.x * blockDim.x + threadIdx.x; line < lines; line += gridDim.x * blockDim.x) {
    const int row = rows[line - line % span], missed = (int)(unsigned)count[line];
    if (row >= 0 && missed > 0) atomicAdd(misses + row, missed);
  }
}

// Checks: a token selects itself and what lies before it.
extern "C" __global__ void hisparse_check_selection(const int* rows, const long long* positions,
                                                    const int* top_k, int n, int k, int reach, int owner,
                                                    Faults* faults) {
  const Wide total = (Wide)n * k;
  for (Wide at = blockIdx.x * blockDim.x + threadIdx.x; at < total; at += gridDim.x * blockDim.x) {
    const int token = (int)(at / k), row = rows[token], position = top_k[at];
    if (row < 0 || position < 0) continue;
    if (position > positions[token] || position >= reach)
      note_fault(faults, UNWRITTEN, row, owner, position);
  }
}

// Whole blocks of a view get one byte: poison.
extern "C" __global__ void hisparse_fill(Byte* base, Wide block_stride, Wide length, const int* blocks,
                                         int count, int value) {
  for (int i = blockIdx.x; i < count; i += gridDim.x)
    for (Wide at = threadIdx.x; at < length; at += blockDim.x)
      base[blocks[i] * block_stride + at] = (Byte)value;
}
