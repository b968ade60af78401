"""Stories told in events, for invariants to be judged on: what a request and its copies go through.

Pages and blocks are of a fixed numbering, so that a test can name one: row 0 has blocks from 5,
index blocks from 15 and host pages from 10.
"""

from __future__ import annotations

from scheduler_rig import PAGE, small_config

from hisparse.fsm import events as ev
from hisparse.fsm.invariants import Checker
from hisparse.fsm.machines import BlockRole, BlockTrigger
from hisparse.fsm.wire import TransferKind

CONFIG = small_config(ranks=2)
BOTH = 0b11
H = [bytes([i]) * 16 for i in range(8)]
RESIDENT, INDEX = BlockRole.RESIDENT, BlockRole.INDEX
SPILLED, RETIRED, DROPPED = BlockTrigger.spilled, BlockTrigger.retired, BlockTrigger.dropped


def admitted(row=0, hit=0):
    """A request of 9 prompt tokens in row `row`; blocks 5+, index blocks 15+ and pages from 10."""
    name, epoch = f"r{row}", row + 1
    at = 10 * row
    return [
        ev.RequestArrived(0, name, epoch, 9, 20, tuple(H[:2])),
        ev.RequestAdmitted(0, name, epoch, row, hit, 6),
        ev.HostPagesReserved(0, row, (10 + at, 11 + at, 12 + at), (1, 1, 1)),
    ]


def placed(row=0):
    at = 4 * row
    return [
        ev.BlocksReserved(0, RESIDENT, row, 0, (5 + at, 6 + at, 7 + at), (1, 1, 1)),
        ev.BlocksReserved(0, INDEX, row, 0, (15 + at, 16 + at), (1, 1)),
    ]


def computed(row=0, step=1, start=0, count=8):
    return [
        ev.StepPlanned(0, step, (row,), (start,), (count,)),
        ev.RowsComputed(0, step, (row,), (count,), (), ()),
    ]


def pinned(entries=(0, 1), blocks=(5, 6), pages=(10, 11), first=1, kind=TransferKind.SPILL):
    idents = tuple(range(first, first + len(entries)))
    ones = (1,) * len(entries)
    return ev.TransferPinned(0, kind, 0, 1, BOTH, BOTH, idents, entries, blocks, ones, pages, ones)


def acks(rank, *, enqueued=(), completed=(), failed=(), retired=0, epoch=1):
    """One rank's news of request epoch `epoch`, whatever their seqs."""
    named = [(idents, (epoch,) * len(idents)) for idents in (enqueued, completed, failed)]
    flat = [part for pair in named for part in pair]
    return ev.AcknowledgementsTaken(0, rank, 1, 1, 1, *flat, retired)


def copied(*idents, completed=True):
    """Both ranks enqueue, and complete."""
    word = {"completed": idents} if completed else {"enqueued": idents}
    told = [acks(0, **word), acks(1, **word)]
    told += [ev.TransferEnqueued(0, rank, rank == 1, idents) for rank in (0, 1)]
    if completed:
        told += [ev.TransferCompleted(0, rank, rank == 1, idents) for rank in (0, 1)]
    return told


def spilled(*entries, blocks=(5, 6), transfers=(1, 2)):
    n = len(entries)
    return ev.PagesSpilled(0, 0, SPILLED, entries, blocks[:n], (1,) * n, transfers[:n])


def given_back(trigger, pages, row=0):
    return ev.HostPagesReleased(0, row, trigger, pages, (1,) * len(pages))


def published(pages=(10, 11), hashes=(H[0], H[1]), entry=0):
    return ev.PagesPublished(0, 0, entry, pages, (1,) * len(pages), hashes)


COMPUTED = [*admitted(), *placed(), *computed()]  # rows 0..7: pages 0 and 1 of row 0
PINNED = [*COMPUTED, pinned()]
FAILED_ON_ONE = [acks(0, failed=(1,)), ev.TransferFailed(0, 0, (1,), False)]
FAILED_ON_BOTH = [*FAILED_ON_ONE, acks(1, failed=(1,)), ev.TransferFailed(0, 1, (1,))]
COPIED = [*PINNED, *copied(1, 2)]
PUBLISHED = [*COPIED, published()]
ENDED = [ev.RequestFinished(0, "r0", 1, "stop"), acks(0, retired=1), acks(1, retired=1)]
DRAINED = [
    *PUBLISHED,
    *ENDED,
    ev.BlocksReleased(0, RESIDENT, 0, BlockTrigger.cached, (0, 1), (5, 6), (1, 1)),
    ev.BlocksReleased(0, INDEX, 0, BlockTrigger.cached, (0,), (15,), (1,)),
    given_back(None, (10, 11)),
    ev.RequestDrained(0, "r0", 1, 0),
]
RESTORE = TransferKind.RESTORE


def lease(pages=(10,), epochs=None, row=1):
    return ev.PrefixLeased(0, row, pages, epochs or (1,) * len(pages))


def adopt(block=5, epoch=1, entry=0, role=RESIDENT, row=1):
    return ev.BlocksAdopted(0, role, row, (entry,), (block,), (epoch,))


def copy_index(source=15, slot=0, block=19, to=0, epoch=1):
    return ev.IndexPagesCopied(0, 1, (source,), (epoch,), (slot,), (block,), (to,))


SECOND = [*DRAINED, *admitted(1, hit=PAGE), *placed(1)]


def checked(*events):
    checker = Checker(CONFIG)
    for seq, event in enumerate(events, 1):
        checker.event(seq, event)
    return checker
