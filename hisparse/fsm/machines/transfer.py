"""Transfer: one page on its way between the tiers (spill, write-back, restore).

Reader and writer ranks are declared at PINNED and kept as bit masks beside the state; `decide`
compares masks and picks the `_partial` or the `_last` trigger. A transfer settles at COMPLETED,
FAILED, CANCELLED, or when a QUARANTINED one is fenced.

One rank that fails makes the copy worthless at once (FAILING); the others may be copying all the
same, so that it settles, and its leases end, only when each of them has answered.
"""

from __future__ import annotations

import enum

from hisparse.fsm.machine import Machine


class TransferState(enum.IntEnum):
    PINNED = 0  # both leases taken, handed over or about to be
    ENQUEUED = 1  # every reading rank has the copy in its stream
    COMPLETED = 2  # every writing rank saw its copy's event
    FAILED = 3  # a rank could not copy, and all have answered: the destination is not valid
    CANCEL_REQUESTED = 4  # cancelled after hand-over: leases stay until all ranks answered
    CANCELLED = 5  # no rank copied
    QUARANTINED = 6  # outcome unknown: leases stay until a fence
    FAILING = 7  # a rank could not copy, others have not answered


class TransferTrigger(enum.IntEnum):
    enqueued_partial = 0
    enqueued_last = 1
    completed_partial = 2
    completed_last = 3
    failed = 4
    cancelled = 5
    cancel_requested = 6
    cancelled_partial = 7
    cancelled_last = 8
    quarantined = 9
    fenced = 10
    failed_partial = 11


_S, _T = TransferState, TransferTrigger

TRANSFER = Machine(
    "Transfer",
    TransferState,
    TransferTrigger,
    [
        (_T.enqueued_partial, _S.PINNED, _S.PINNED),
        (_T.enqueued_last, _S.PINNED, _S.ENQUEUED),
        # One rank's copy may be over before another rank's is in its stream.
        (_T.completed_partial, _S.PINNED, _S.PINNED),
        (_T.completed_partial, _S.ENQUEUED, _S.ENQUEUED),
        (_T.completed_last, _S.ENQUEUED, _S.COMPLETED),
        (_T.failed, [_S.PINNED, _S.ENQUEUED, _S.FAILING, _S.CANCEL_REQUESTED], _S.FAILED),
        (_T.failed_partial, [_S.PINNED, _S.ENQUEUED, _S.FAILING], _S.FAILING),
        (_T.completed_partial, _S.FAILING, _S.FAILING),
        (_T.completed_last, _S.FAILING, _S.FAILED),
        (_T.cancelled, _S.PINNED, _S.CANCELLED),
        (_T.cancel_requested, _S.PINNED, _S.CANCEL_REQUESTED),
        (_T.cancelled_partial, _S.CANCEL_REQUESTED, _S.CANCEL_REQUESTED),
        (_T.cancelled_last, _S.CANCEL_REQUESTED, _S.CANCELLED),
        (_T.enqueued_partial, _S.CANCEL_REQUESTED, _S.CANCEL_REQUESTED),
        (_T.enqueued_last, _S.CANCEL_REQUESTED, _S.ENQUEUED),
        (_T.quarantined, [_S.PINNED, _S.ENQUEUED, _S.CANCEL_REQUESTED], _S.QUARANTINED),
        (_T.fenced, _S.QUARANTINED, _S.FAILED),
    ],
    final=[_S.COMPLETED, _S.FAILED, _S.CANCELLED],
)
