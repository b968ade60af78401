"""An audit that is taken up at a snapshot, behind events that a writer dropped."""

from __future__ import annotations

from functools import cache

import msgspec
import pytest
from log_rig import recorded
from scheduler_rig import events_of, served, small_config

from hisparse.fsm import events as ev
from hisparse.fsm.audit import Audit
from hisparse.fsm.fold import evolve
from hisparse.fsm.machines import PageTrigger
from hisparse.fsm.snapshot import restore, snapshot
from hisparse.fsm.state import State
from hisparse.fsm.wire import Table

RUN = small_config(ranks=2)


@cache
def run(name):
    """(config, events) of a small service: of two ranks, or one whose copies fail."""
    if name == "two ranks":
        return RUN, [event for _, event in events_of(served(RUN, seed=1))]
    config, events, _ = recorded(seed=5)
    return config, [event for _, event in events]


def resumed(config, told, at):
    """Audit of `told` less its first `at` events, of which the state is known."""
    audit, state = Audit(config, recount_events=20), State(config)
    for seq, event in enumerate(told[:at], 1):
        evolve(state, event, seq)
    audit.resume(restore(config, snapshot(state)))
    for seq, event in enumerate(told[at:], at + 1):
        if not audit.take(seq, event):
            break
    audit.finish()
    return audit


@pytest.mark.parametrize("name", ["two ranks", "failing copies"])
def test_what_is_right_stays_right_wherever_it_is_taken_up(name):
    """In the midst of a decision, too: what a rank answered before the snapshot is not known."""
    config, told = run(name)
    for at in range(1, len(told), 7):
        assert resumed(config, told, at).violations == [], at


@pytest.mark.parametrize("where", [0.0, 0.5, 1.0], ids=["first", "middle", "last"])
def test_a_violation_behind_the_gap_is_found_at_its_seq(where):
    _, told = run("two ranks")
    at = len(told) // 3
    spoilt = at + int((len(told) - at) * where)
    told = [*told[:spoilt], ev.TransferFailed(0, 0, (1 << 40,)), *told[spoilt:]]
    found = resumed(RUN, told, at).violations[0]
    assert (found.invariant, found.seq) == ("settle_once", spoilt + 1)


def test_an_answer_that_a_rank_never_gave_is_missed():
    _, told = run("two ranks")
    at = len(told) // 3
    news = next(i for i, e in enumerate(told) if i > at + 40 and getattr(e, "completed", ()))
    silent = dict.fromkeys(("enqueued", "enqueued_epochs", "completed", "completed_epochs"), ())
    told = [*told[:news], msgspec.structs.replace(told[news], **silent), *told[news + 1 :]]
    found = resumed(RUN, told, at).violations[0]
    assert found.invariant == "rank_quorum" and found.seq > news


def held():
    """(events, state after them, row): a live row of which a host page holds a copy."""
    _, told = run("two ranks")
    state = State(RUN)
    for seq, event in enumerate(told, 1):
        evolve(state, event, seq)
        if isinstance(event, ev.RowsComputed) and seq > 100:
            for row in event.rows:
                if state.rows.live[row] and state.table(Table.HOST)[row].any():
                    return told[:seq], state, row
    raise AssertionError("no such moment")


def last_fault(told, event):
    return resumed(RUN, [*told, event], len(told)).violations[0].invariant


def test_a_block_that_somebody_holds_is_known_from_the_snapshot():
    told, state, row = held()
    block = next(int(b) for b in state.table(Table.RESIDENT)[row] if b)
    event = ev.BlocksEvicted(0, (block,), (int(state.blocks.epoch[block]),))
    assert last_fault(told, event) == "spill_before_free"


def test_a_page_that_somebody_reads_is_known_from_the_snapshot():
    told, state, row = held()
    page = next(int(p) for p in state.table(Table.HOST)[row] if p)
    epochs = (int(state.pages.epoch[page]),)
    event = ev.HostPagesReleased(0, row, PageTrigger.released, (page,), epochs)
    assert last_fault(told, event) == "host_reuse_after_readers"
