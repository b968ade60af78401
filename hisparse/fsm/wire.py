"""What crosses scheduler <-> worker: commands down, acknowledgements up.

Both sides import this and nothing of each other. A `SparseKVOffloadCommand` is the projection of
the scheduler's events in ``(from_seq, to_seq]``; an `Acknowledgements` message is a slice of one
rank's acknowledgement stream. All are msgspec structs that survive msgpack unchanged.

A command carries transfer, block and host ids with their epochs, physical coordinates, and the
*row index* of a request for table updates. It carries no request id, token, hash or logical page:
the worker cannot know them, so it cannot act on them (a schema test forbids the names).

    table      entry e of row r                      names
    RESIDENT   page e of the request in row r        GPU block, 0 = read it from the host tier
    HOST       page e of the request in row r        host page, 0 = none
    INDEX      pages [e*P, (e+1)*P) of the request   GPU block holding P pages of indexer rows
    HOT        hot rows [e*B, (e+1)*B)               GPU block of B = page_size hot rows
"""

from __future__ import annotations

import enum

import msgspec


class Table(enum.IntEnum):
    """The four tables that the worker keeps, each int32 ``[rows, entries]``."""

    RESIDENT = 0
    HOST = 1
    INDEX = 2
    HOT = 3


class TransferKind(enum.IntEnum):
    """Why a page is copied. SPILL and WRITE_BACK read the GPU block, RESTORE writes it."""

    SPILL = 0
    WRITE_BACK = 1
    RESTORE = 2


class SparseKVPageTransfer(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One page to copy: its transfer id and physical coordinates, nothing else."""

    transfer: int
    epoch: int
    kind: TransferKind
    block: int
    block_epoch: int
    host: int
    host_epoch: int


class TableUpdate(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Replace ``table[row, entry : entry + len(ids)]`` by `ids`."""

    table: Table
    row: int
    entry: int
    ids: tuple[int, ...]


class IndexCopy(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Copy `pages` indexer pages from slot `source_slot` of a block to slot `slot` of another."""

    source: int
    source_slot: int
    block: int
    slot: int
    pages: int


class IndexTransfer(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Copy one indexer page, of all groups, between slot `slot` of an index block and page `suffix`
    of the CPU tier: into the block (`load`), or out of it."""

    transfer: int
    epoch: int
    load: bool
    block: int
    block_epoch: int
    slot: int
    suffix: int
    suffix_epoch: int


AnyTransfer = SparseKVPageTransfer | IndexTransfer


class SparseKVOffloadCommand(msgspec.Struct, frozen=True, array_like=True):
    """Opaque scheduler -> worker work of one step, in the order in which it must be applied.

    1. `resets`: rows handed to another request: tables cleared, hot rows forgotten.
    2. `tables`: table replacements, in order.
    3. `fences`: transfers whose source block may be rewritten, and whose host page may be read,
       from this step on: compute waits for their copies first.
    4. `poison_blocks`, `poison_hosts`: freed since the last command (only with checks on).
    5. `index_copies`: GPU -> GPU copies of shared indexer pages.
    6. `transfers`, `index_transfers`: page copies to queue. `poison_suffixes`, with checks on, are
       pages of the CPU tier that were evicted since the last command.

    `memory`, before all of these: 1, the GPU pool gives its memory up; 2, the host tiers too; 0,
    they have it again. While there is none, nothing but tables is touched; `index_copies` that were
    decided before it went are left out.

    `epochs`, where ranks differ in it, is the worker epoch of each rank; `worker_epoch` is that of
    rank 0 then.

    `acked` says, as (rank, seq) pairs, up to where the scheduler has taken each rank's
    acknowledgements in: they need not be kept or sent again.
    """

    step: int
    worker_epoch: int
    from_seq: int
    to_seq: int
    resets: tuple[int, ...] = ()
    tables: tuple[TableUpdate, ...] = ()
    fences: tuple[int, ...] = ()
    poison_blocks: tuple[int, ...] = ()
    poison_hosts: tuple[int, ...] = ()
    index_copies: tuple[IndexCopy, ...] = ()
    transfers: tuple[SparseKVPageTransfer, ...] = ()
    acked: tuple[tuple[int, int], ...] = ()
    index_transfers: tuple[IndexTransfer, ...] = ()
    poison_suffixes: tuple[int, ...] = ()
    memory: tuple[int, ...] = ()
    epochs: tuple[int, ...] = ()

    def epoch_of(self, rank: int) -> int:
        """The worker epoch of `rank` that this is for."""
        return self.epochs[rank] if self.epochs else self.worker_epoch


class AckKind(enum.IntEnum):
    """What a rank can say about a transfer or a step."""

    ENQUEUED = 0  # the copy is in its stream, behind the last writer of its source
    COMPLETED = 1  # the event behind the copy has been seen
    FAILED = 2  # the copy did not happen; its destination is not valid
    RETIRED = 3  # every read and write of step `ident` has happened on the device


class Ack(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One acknowledgement: `ident` is a transfer id (with its epoch) or, for RETIRED, a step."""

    kind: AckKind
    ident: int
    epoch: int = 0


class Acknowledgements(msgspec.Struct, frozen=True, array_like=True):
    """A slice of one rank's acknowledgement stream; ``acks[i]`` has seq ``first_seq + i``."""

    rank: int
    worker_epoch: int
    first_seq: int
    acks: tuple[Ack, ...]

    @property
    def last_seq(self) -> int:
        return self.first_seq + len(self.acks) - 1
