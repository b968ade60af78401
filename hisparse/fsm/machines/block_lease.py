"""BlockLease: one block of the packed GPU pool, from free list to free list.

The role of a block (resident, hot, index, staging) is a field beside its state, set at `reserved`
and kept to the end of the epoch. Hot and staging blocks never become DIRTY; index blocks have no
spill arrows and turn CLEAN by `sealed`: losing one shortens a prefix, it never loses a live row.
`reopened`: its owner, alone, goes back to before the last rows in it and will write them again.
"""

from __future__ import annotations

import enum

from hisparse.fsm.machine import Machine


class BlockState(enum.IntEnum):
    FREE = 0  # names nothing; poisoned when checks are on
    RESERVED = 1  # leased, no row of this epoch written yet
    DIRTY = 2  # holds rows that exist nowhere else
    PINNED = 3  # a copy out of it is planned; nobody else may take it
    ENQUEUED = 4  # the copy is in its stream on every reading rank
    CLEAN = 5  # holds rows whose host copy is valid (index: whose rows are final)
    CACHED = 6  # nobody refers to it, still readable, counts as free
    QUARANTINED = 7  # a copy of unknown outcome may still touch it


class BlockTrigger(enum.IntEnum):
    reserved = 0
    abandoned = 1
    written = 2
    pinned = 3
    cancelled = 4
    enqueued = 5
    spilled = 6
    completed = 7
    failed = 8
    restored = 9
    sealed = 10
    cached = 11
    adopted = 12
    evicted = 13
    dropped = 14
    retired = 15
    quarantined = 16
    fenced = 17
    reopened = 18
    failed_partial = 19


class BlockRole(enum.IntEnum):
    """What a leased block holds; values equal those of `fsm.wire.Table` for the same table."""

    RESIDENT = 0
    STAGING = 1
    INDEX = 2
    HOT = 3


_S, _T = BlockState, BlockTrigger

BLOCK_LEASE = Machine(
    "BlockLease",
    BlockState,
    BlockTrigger,
    [
        (_T.reserved, _S.FREE, _S.RESERVED),
        (_T.abandoned, _S.RESERVED, _S.FREE),
        (_T.written, _S.RESERVED, _S.DIRTY),
        (_T.written, _S.DIRTY, _S.DIRTY),
        (_T.pinned, _S.DIRTY, _S.PINNED),
        (_T.cancelled, _S.PINNED, _S.DIRTY),
        (_T.enqueued, _S.PINNED, _S.ENQUEUED),
        (_T.spilled, _S.ENQUEUED, _S.FREE),
        (_T.completed, _S.ENQUEUED, _S.CLEAN),
        (_T.failed, [_S.PINNED, _S.ENQUEUED], _S.DIRTY),
        (_T.failed_partial, [_S.PINNED, _S.ENQUEUED], _S.PINNED),
        (_T.restored, _S.RESERVED, _S.CLEAN),
        (_T.sealed, _S.DIRTY, _S.CLEAN),
        (_T.reopened, _S.CLEAN, _S.DIRTY),
        (_T.cached, _S.CLEAN, _S.CACHED),
        (_T.adopted, _S.CACHED, _S.CLEAN),
        (_T.evicted, _S.CACHED, _S.FREE),
        (_T.dropped, _S.CLEAN, _S.FREE),
        (_T.retired, _S.DIRTY, _S.FREE),
        (_T.quarantined, [_S.RESERVED, _S.PINNED, _S.ENQUEUED], _S.QUARANTINED),
        (_T.fenced, _S.QUARANTINED, _S.FREE),
    ],
    final=[_S.FREE],
)
