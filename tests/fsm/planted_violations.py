"""For each invariant of a run, stories that go on as they must not."""

from __future__ import annotations

from invariant_stories import (
    BOTH,
    COMPUTED,
    COPIED,
    DRAINED,
    DROPPED,
    ENDED,
    FAILED_ON_BOTH,
    FAILED_ON_ONE,
    PINNED,
    PUBLISHED,
    RESIDENT,
    RESTORE,
    RETIRED,
    SECOND,
    H,
    acks,
    admitted,
    adopt,
    computed,
    copied,
    copy_index,
    given_back,
    lease,
    pinned,
    placed,
    published,
    spilled,
)

from hisparse.fsm import events as ev
from hisparse.fsm.invariants.run import RUN_CHECKS
from hisparse.fsm.machines import PageTrigger
from hisparse.fsm.wire import TransferKind

SPILL, COMPLETE, ACCEPTED, CONTENT, QUORUM, ONCE, READERS = RUN_CHECKS

# (the invariant, what happens, how the log goes on and must not)
PLANTED = {
    "the only copy is given back": (
        SPILL,
        COMPUTED,
        ev.BlocksReleased(0, RESIDENT, 0, RETIRED, (0,), (5,), (1,)),
    ),
    "a spill before its copy is enqueued": (SPILL, PINNED, spilled(0)),
    "a spill that one rank has not enqueued": (
        SPILL,
        [*PINNED, acks(0, enqueued=(1, 2))],
        spilled(0),
    ),
    "a spill whose copy failed on a rank": (
        SPILL,
        [*PINNED, *copied(1, 2, completed=False), acks(1, failed=(1,))],
        spilled(0),
    ),
    "a spill whose copy failed and settled": (
        SPILL,
        [*PINNED, *FAILED_ON_BOTH],
        spilled(0),
    ),
    "a spill whose copy another epoch's acknowledgement settled": (
        SPILL,
        [*PINNED, acks(0, enqueued=(1,), epoch=9), acks(1, enqueued=(1,), epoch=9)],
        spilled(0),
    ),
    "a spill whose copy was made of another block": (
        SPILL,
        [*COMPUTED, pinned((0,), (6,), (10,)), *copied(1)],
        spilled(0),
    ),
    "a spill of rows that were computed after the copy was planned": (
        SPILL,
        [
            *admitted(),
            *placed(),
            *computed(count=2),
            pinned((0,), (5,), (10,)),
            *copied(1),
            *computed(step=2, start=2, count=2),
        ],
        spilled(0),
    ),
    "a spill whose host page was given back": (
        SPILL,
        [*COPIED, given_back(PageTrigger.released, (10,))],
        spilled(0),
    ),
    "a block of a live request is given out": (
        SPILL,
        [*COMPUTED, *admitted(1)],
        ev.BlocksReserved(0, RESIDENT, 1, 0, (6,), (2,)),
    ),
    "a block of a live request becomes a hot region": (
        SPILL,
        COMPUTED,
        ev.HotLeased(0, 0, (6, 9), (2, 1)),
    ),
    "a block of a live request is evicted": (SPILL, COMPUTED, ev.BlocksEvicted(0, (5,), (1,))),
    "a block is given back by who does not hold it": (
        SPILL,
        [*COMPUTED, *admitted(1)],
        ev.BlocksReleased(0, RESIDENT, 1, RETIRED, (0,), (5,), (1,)),
    ),
    "a block goes back under a copy that an ended request left": (
        SPILL,
        [*PINNED, ev.RequestFinished(0, "r0", 1, "stop")],
        ev.BlocksReleased(0, RESIDENT, 0, RETIRED, (0,), (5,), (1,)),
    ),
    "a shared block is freed by one of its owners": (
        SPILL,
        [*SECOND[:-2], lease(), adopt(), *admitted(2), adopt(row=2)],
        ev.BlocksReleased(0, RESIDENT, 1, DROPPED, (0,), (5,), (1,)),
    ),
    "a step writes a block that another row holds too": (
        SPILL,
        [*COMPUTED, *admitted(1), adopt(7), *placed(1)[1:]],
        ev.StepPlanned(0, 2, (1,), (0,), (4,)),
    ),
    "a step writes accepted rows again": (
        SPILL,
        COMPUTED,
        ev.StepPlanned(0, 2, (0,), (7,), (2,)),
    ),
    "a step writes a page that has no block": (
        SPILL,
        COMPUTED,
        ev.StepPlanned(0, 2, (0,), (8,), (5,)),
    ),
    "a step writes a block that a copy has yet to read": (
        SPILL,
        [*COMPUTED, pinned((2,), (7,), (12,))],
        ev.StepPlanned(0, 2, (0,), (8,), (1,)),
    ),
    "a restore writes a block that holds the only copy": (
        SPILL,
        COMPUTED,
        pinned((0,), (5,), (10,), kind=RESTORE),
    ),
    "index rows are copied into another row's block": (
        SPILL,
        SECOND,
        copy_index(block=16),
    ),
    "a page is published before its copy is complete": (
        COMPLETE,
        [*PINNED, *copied(1, 2, completed=False)],
        published(),
    ),
    "a page is published that one rank has not written": (
        COMPLETE,
        [*PINNED, acks(0, completed=(1, 2)), acks(1, enqueued=(1, 2))],
        published(),
    ),
    "a page is published that nothing was copied to": (COMPLETE, COMPUTED, published()),
    "a page is published that was copied before its rows were computed": (
        COMPLETE,
        [
            *admitted(),
            *placed(),
            *computed(count=2),
            pinned((0,), (5,), (10,)),
            *copied(1),
            *computed(step=2, start=2, count=2),
        ],
        published((10,), (H[0],)),
    ),
    "a page is published for what its last life held": (
        COMPLETE,
        [
            *DRAINED,
            ev.HostPagesEvicted(0, (10,), (1,)),
            *admitted(0)[:2],
            *placed()[:0],
            ev.HostPagesReserved(0, 0, (10,), (2,)),
        ],
        published((10,), (H[0],)),
    ),
    "publication passes the computed rows": (
        ACCEPTED,
        [*admitted(), *placed(), *computed(count=7), pinned(), *copied(1, 2)],
        published(),
    ),
    "publication leaves a gap": (ACCEPTED, COPIED, published((11,), (H[1],), entry=1)),
    "more rows are accepted than were planned": (
        ACCEPTED,
        [*admitted(), *placed(), ev.StepPlanned(0, 1, (0,), (0,), (4,))],
        ev.RowsComputed(0, 1, (0,), (5,), (), ()),
    ),
    "a block is given out under its old epoch": (
        CONTENT,
        [*DRAINED, ev.BlocksEvicted(0, (5,), (1,)), *admitted(1)],
        ev.BlocksReserved(0, RESIDENT, 1, 0, (5,), (1,)),
    ),
    "a host page is given out under its old epoch": (
        CONTENT,
        [*DRAINED, ev.HostPagesEvicted(0, (10,), (1,)), *admitted(1)],
        ev.HostPagesReserved(0, 1, (10,), (1,)),
    ),
    "an adopted block holds another page": (CONTENT, SECOND, adopt(6)),
    "an adopted block was evicted": (
        CONTENT,
        [*SECOND, ev.BlocksEvicted(0, (5,), (1,))],
        adopt(),
    ),
    "an adopted block is named under another epoch": (CONTENT, SECOND, adopt(epoch=2)),
    "an adopted block has another role": (CONTENT, SECOND, adopt(15)),
    "an adopted block was reserved and not yet computed": (
        CONTENT,
        [*admitted(), *placed(), *admitted(1)],
        adopt(),
    ),
    "a block is adopted for a page that has no hash": (CONTENT, SECOND, adopt(5, entry=4)),
    "index rows are copied from another page": (CONTENT, SECOND, copy_index(slot=1)),
    "index rows are copied from a block that was evicted": (
        CONTENT,
        [*SECOND, ev.BlocksEvicted(0, (15,), (1,))],
        copy_index(),
    ),
    "a leased page was never published": (CONTENT, [*COPIED, *admitted(1)], lease()),
    "a leased page holds another prefix": (CONTENT, SECOND, lease((11,))),
    "a leased page was evicted": (
        CONTENT,
        [*SECOND, ev.HostPagesEvicted(0, (10,), (1,))],
        lease(),
    ),
    "a page is leased beyond the hashes of the request": (CONTENT, SECOND, lease((10, 11, 10))),
    "a page is leased under another epoch": (CONTENT, SECOND, lease(epochs=(2,))),
    "a page is published under another hash": (CONTENT, COPIED, published((10,), (H[5],))),
    "a page is published as another page": (CONTENT, COPIED, published((11,), (H[0],))),
    "a last answer that a rank did not give": (
        QUORUM,
        [*PINNED, acks(0, enqueued=(1, 2))],
        ev.TransferEnqueued(0, 1, True, (1,)),
    ),
    "an answer of a rank that said nothing": (
        QUORUM,
        [*PINNED, acks(0, enqueued=(1, 2))],
        ev.TransferEnqueued(0, 1, False, (1,)),
    ),
    "a completion that was only enqueued": (
        QUORUM,
        [*PINNED, *copied(1, 2, completed=False)],
        ev.TransferCompleted(0, 1, True, (1,)),
    ),
    "a completion of a copy that a rank failed": (
        QUORUM,
        [*PINNED, acks(0, completed=(1,)), acks(1, failed=(1,))],
        ev.TransferCompleted(0, 0, False, (1,)),
    ),
    "a failed copy that settles before every rank has answered": (
        QUORUM,
        [*PINNED, acks(0, failed=(1,))],
        ev.TransferFailed(0, 0, (1,)),
    ),
    "a failure on a rank that said nothing": (
        QUORUM,
        [*PINNED, *FAILED_ON_ONE, acks(1, completed=(1,))],
        ev.TransferFailed(0, 1, (1,)),
    ),
    "a copy that declares no reader": (
        QUORUM,
        COMPUTED,
        ev.TransferPinned(
            0, TransferKind.SPILL, 0, 1, 0, BOTH, (1,), (0,), (5,), (1,), (10,), (1,)
        ),
    ),
    "a copy that declares a rank which does not exist": (
        QUORUM,
        COMPUTED,
        ev.TransferPinned(
            0, TransferKind.SPILL, 0, 1, BOTH, 4, (1,), (0,), (5,), (1,), (10,), (1,)
        ),
    ),
    "a transfer completes twice": (ONCE, COPIED, ev.TransferCompleted(0, 1, True, (1,))),
    "a completed transfer fails": (ONCE, COPIED, ev.TransferFailed(0, 1, (1,))),
    "a transfer that was never planned": (ONCE, PINNED, ev.TransferFailed(0, 1, (7,))),
    "a host page goes back before a rank retired the step": (
        READERS,
        [*PUBLISHED, ev.RequestFinished(0, "r0", 1, "stop"), acks(0, retired=1)],
        given_back(None, (10, 11)),
    ),
    "a filled host page is abandoned": (
        READERS,
        [*COPIED, ev.RequestFinished(0, "r0", 1, "stop"), acks(0, retired=1)],
        given_back(PageTrigger.abandoned, (10,)),
    ),
    "a host page goes back under its copy": (
        READERS,
        [*PINNED, ev.RequestFinished(0, "r0", 1, "stop"), acks(0, retired=1), acks(1, retired=1)],
        given_back(PageTrigger.released, (10,)),
    ),
    "a live request loses a host page": (
        READERS,
        [*COPIED, acks(0, retired=1), acks(1, retired=1)],
        given_back(PageTrigger.released, (10,)),
    ),
    "a host page is given back by who does not hold it": (
        READERS,
        [*COMPUTED, *admitted(1)],
        given_back(PageTrigger.abandoned, (12,), row=1),
    ),
    "a host page is reclaimed whose copy did not fail": (
        READERS,
        COMPUTED,
        given_back(PageTrigger.reclaimed, (12,)),
    ),
    "a host page is reclaimed that another rank may still be writing": (
        READERS,
        [*PINNED, *FAILED_ON_ONE],
        given_back(PageTrigger.reclaimed, (10,)),
    ),
    "a leased host page is given out": (
        READERS,
        COPIED,
        ev.HostPagesReserved(0, 0, (10,), (2,)),
    ),
    "a leased host page is evicted": (
        READERS,
        [*SECOND, lease()],
        ev.HostPagesEvicted(0, (10,), (1,)),
    ),
    "a host page is evicted under a restore": (
        READERS,
        [*PUBLISHED, pinned((0,), (5,), (10,), first=3, kind=RESTORE)],
        ev.HostPagesEvicted(0, (10,), (1,)),
    ),
    "a host page is freed under another row's lease": (
        READERS,
        [*PUBLISHED, *admitted(1), lease(), *ENDED],
        given_back(PageTrigger.released, (10,)),
    ),
}


# Stories whose beginning breaks another invariant already.
WRONG_BEFORE = (
    "a spill whose host page was given back",
    "a step writes a block that another row holds too",
)
