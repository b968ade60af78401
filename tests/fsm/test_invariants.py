"""Invariants: each finds its planted violation by name, and a clean run has none."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scheduler_rig import PAGE, events_of, served, small_config

from hisparse.errors import InvariantViolation
from hisparse.fsm import events as ev
from hisparse.fsm.fold import evolve
from hisparse.fsm.invariants import INVARIANTS, Checker, Violation
from hisparse.fsm.invariants.checker import JUDGED
from hisparse.fsm.invariants.run import RUN_CHECKS
from hisparse.fsm.invariants.state import STATE_CHECKS
from hisparse.fsm.machines import BlockRole, BlockState, BlockTrigger, PageState, PageTrigger
from hisparse.fsm.state import State
from hisparse.fsm.wire import Table, TransferKind

CONFIG = small_config(ranks=2)
BOTH = 0b11
H = [bytes([i]) * 16 for i in range(8)]
RESIDENT, INDEX = BlockRole.RESIDENT, BlockRole.INDEX
SPILLED, RETIRED, DROPPED = BlockTrigger.spilled, BlockTrigger.retired, BlockTrigger.dropped


# -- a story, told in events ----------------------------------------------------------------------


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


def checked(*events):
    checker = Checker(CONFIG)
    for seq, event in enumerate(events, 1):
        checker.event(seq, event)
    return checker


@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_violation_is_found_by_name(what):
    name, before, event = PLANTED[what]
    checker = checked(*before)
    assert not checker.violations or what in WRONG_BEFORE
    found = checker.event(len(before) + 1, event)
    assert name in {violation.invariant for violation in found}
    assert {violation.seq for violation in found} == {len(before) + 1}


def test_every_run_invariant_has_a_planted_violation():
    assert {name for name, _, _ in PLANTED.values()} == set(RUN_CHECKS)


@pytest.mark.parametrize(
    "story",
    [
        [*COPIED, spilled(0, 1)],
        [*PINNED, *copied(1, 2, completed=False), spilled(0, 1, transfers=(1, 2))],
        DRAINED,
        [*DRAINED, *admitted(1, hit=PAGE), lease(), *placed(1)[1:], copy_index(), adopt()],
        [*PINNED, *FAILED_ON_BOTH, given_back(PageTrigger.reclaimed, (10,))],
        [*PINNED, *FAILED_ON_ONE, acks(1, completed=(1,)),
         ev.TransferCompleted(0, 1, True, (1,)), given_back(PageTrigger.reclaimed, (10,))],
    ],
    ids=["spilled", "spilled in stream order", "drained", "found by prefix", "failed",
         "failed on one rank"],
)  # fmt: skip
def test_what_is_allowed_is_not_reported(story):
    assert list(checked(*story).violations) == []


# -- states ---------------------------------------------------------------------------------------


class Stop(Exception):
    """The moment to look at has come."""


@pytest.fixture
def state():
    """A folded state with live requests that read pages from both tiers."""
    config = small_config()
    events = events_of(served(config, seed=2))
    state = State(config)
    for seq, event in events:
        evolve(state, event, seq)
        hosted = state.table(Table.HOST)[state.rows.live] > 0
        holes = state.table(Table.RESIDENT)[state.rows.live] == 0
        if (hosted & holes).any() and state.transfers and state.blocks.cached.count:
            break
    else:
        raise AssertionError("no such moment in this run")
    assert found_in(state) == set()
    return state


def found_in(state):
    return {violation.invariant for violation in Checker(state.config).state(state)}


def place_of(state, *, on_host):
    """(row, entry, block, page) of a computed page of a live request."""
    resident, host = state.table(Table.RESIDENT), state.table(Table.HOST)
    for row in np.flatnonzero(state.rows.live).tolist():
        for entry in range(int(state.rows.computed[row]) // PAGE):
            if (resident[row, entry] == 0) == on_host:
                return row, entry, int(resident[row, entry]), int(host[row, entry])
    raise AssertionError("no such page")


def leak_block(state):
    state.blocks.free.remove(state.blocks.free.peek(1))


def free_null(state):
    state.blocks.free.push(np.array([0]))


def cache_leased(state):
    state.blocks.cached.push(np.array([place_of(state, on_host=False)[2]]))


def leak_page(state):
    state.pages.free.remove(state.pages.free.peek(1))


def count_block(state):
    state.blocks.refs[place_of(state, on_host=False)[2]] += 1


def count_page(state):
    state.pages.refs[place_of(state, on_host=True)[3]] -= 1


def fail_page(state):
    state.pages.state[place_of(state, on_host=True)[3]] = PageState.FAILED


def lose_hot_region(state):
    request = state.request_of(place_of(state, on_host=True)[0])
    request.hot = type(request.hot).NONE


def empty_block(state):
    """The entry names a block that nothing was written to; a host copy does not help."""
    row, _, block, _ = place_of(state, on_host=False)
    state.blocks.state[block] = BlockState.RESERVED
    state.request_of(row).hot = type(state.request_of(row).hot).LEASED


def lose_host_entry(state):
    row, entry, _, _ = place_of(state, on_host=True)
    state.table(Table.HOST)[row, entry] = 0


@pytest.mark.parametrize(
    "name,spoil",
    [
        *[("conservation", spoil) for spoil in (leak_block, free_null, cache_leased, leak_page)],
        *[("refcount_exact", spoil) for spoil in (count_block, count_page)],
        *[
            ("always_readable", spoil)
            for spoil in (fail_page, lose_hot_region, empty_block, lose_host_entry)
        ],
    ],
)
def test_a_spoilt_state_is_found_by_name(state, name, spoil):
    spoil(state)
    assert name in found_in(state)


# -- runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed,write_back", [*itertools.product(range(4), ("eager", "on_pressure"))]
)
def test_a_clean_run_has_no_violation(seed, write_back):
    config = small_config(write_back=write_back)

    def after_step(engine):
        engine.coordinator.checker.state(engine.coordinator.state)

    coordinator = served(config, seed=seed, after_step=after_step)
    checker = coordinator.checker
    assert list(checker.violations) == []
    assert all(times > 50 for times in checker.checked.values())
    counts = coordinator.metrics.counts
    assert counts["spills"] and counts["pages_published"] and counts["prefix_hit_pages"]


@pytest.mark.parametrize("name", RUN_CHECKS)
def test_an_invariant_does_not_look_at_kinds_that_it_is_not_asked_to_judge(name):
    """`Checker` asks it about no others; without a run, one that looked would raise."""
    others = [kind for kind in ev.EVENT_TYPES if kind not in JUDGED[name]]
    assert others and JUDGED[name]
    for kind in others:
        event = kind(*[(1,)] * len(kind.__struct_fields__))
        assert list(RUN_CHECKS[name](None, event)) == []


def test_the_first_violation_is_raised_with_its_seq():
    checker = checked(*PINNED, spilled(0))
    with pytest.raises(InvariantViolation) as caught:
        checker.raise_first()
    assert (caught.value.invariant, caught.value.seq) == (SPILL, len(PINNED) + 1)


def test_every_invariant_that_a_log_can_show_is_run_and_is_declared():
    on_log = {invariant.name for invariant in INVARIANTS if invariant.where == "log"}
    assert on_log == {*RUN_CHECKS, *STATE_CHECKS}


def test_the_first_violations_are_kept_and_all_are_counted() -> None:
    checker = Checker(small_config(), keep=2)
    checker._note([Violation("one_content", seq, "x") for seq in (3, 4)])
    checker._note([Violation("one_content", 5, "x")])
    assert [v.seq for v in checker.violations] == [3, 4] and checker.found == 3
