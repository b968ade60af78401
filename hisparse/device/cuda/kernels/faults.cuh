// What the device found wrong: the first fault, for the host to tell, and how many of each kind.
//
// Nothing on the device waits for the host and nothing is thrown: who finds a fault notes it and goes on
// with zeros, never with stale bytes. The host copies the record out after each step, and wipes what it has
// told, but for the counts (faults.py). Whoever notes is on the compute stream, as are copy and wipe: so who
// reads `kind` finds the rest of the fault too.
#pragma once

enum Fault {
  NO_COPY = 1,     // a selected position with neither a resident nor a readable host row
  NO_BLOCK = 2,    // a write where the table has no block
  NO_PREFIX = 3,   // a read of indexer rows where the table has no block
  BEYOND = 4,      // a position beyond the tables
  UNWRITTEN = 5,   // a selected position behind the token that selects (checks)
  OTHER_BYTES = 6,  // a row whose checksum is not that of the row that was written (checks)
  POISONED = 7      // likewise, or one of which no checksum is known: all bytes are poison (checks)
};

struct Faults {
  int claimed, kind, row, owner, position;
  unsigned counts[11];  // by kind
};

__device__ __forceinline__ void note_fault(Faults* faults, int kind, int row, int owner, int position) {
  atomicAdd(faults->counts + kind, 1u);
  if (atomicCAS(&faults->claimed, 0, 1) != 0) return;
  faults->row = row;
  faults->owner = owner;
  faults->position = position;
  faults->kind = kind;
}
