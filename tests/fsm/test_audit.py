"""Audit: a log through every invariant; the incremental state checks against the full recount."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invariant_stories import CONFIG, checked
from planted_violations import PLANTED, WRONG_BEFORE
from scheduler_rig import events_of, served, small_config

from hisparse.fsm import events as ev
from hisparse.fsm.audit import Audit
from hisparse.fsm.codec import UnknownEvent
from hisparse.fsm.describe import line
from hisparse.fsm.fold import evolve
from hisparse.fsm.invariants import Checker
from hisparse.fsm.invariants.incremental import Incremental
from hisparse.fsm.machines import BlockState, PageState
from hisparse.fsm.state import State
from hisparse.fsm.wire import Table
from hisparse.fsm.witness import shows, witness

RUN = small_config()
NEVER = 1 << 60


@pytest.fixture(scope="module")
def events():
    return events_of(served(RUN, seed=1))


def audited(config, events, **options):
    audit = Audit(config, **options)
    for seq, event in events:
        if not audit.take(seq, event):
            break
    audit.finish()
    return audit


# -- the log ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("write_back", ["eager", "on_pressure"])
def test_a_clean_log_has_no_violation(seed, write_back):
    config = small_config(write_back=write_back)
    log = events_of(served(config, seed=seed))
    audit = audited(config, log, recount_events=50)
    assert audit.violations == [] and audit.events == len(log) and audit.recounts > 5


def first_fault(events, at, event):
    """The first violation of the log with `event` put in before index `at`."""
    told = [e for _, e in events]
    planted = list(enumerate([*told[:at], event, *told[at:]], 1))
    return audited(RUN, planted).violations[0]


@pytest.mark.parametrize("where", [0.0, 0.5, 1.0], ids=["first", "middle", "last"])
def test_a_planted_violation_is_found_at_its_seq(events, where):
    at = int(len(events) * where)
    found = first_fault(events, at, ev.TransferFailed(0, 0, (1 << 40,)))
    assert (found.invariant, found.seq) == ("settle_once", at + 1)


@pytest.mark.parametrize("where", [0.0, 0.5, 1.0], ids=["first", "middle", "last"])
def test_an_event_that_cannot_be_folded_is_a_violation_and_the_end(events, where):
    at = int(len(events) * where)
    told = [e for _, e in events]
    event = ev.StepPlanned(0, 1 << 40, (), (), ())
    audit = audited(RUN, enumerate([*told[:at], event, *told[at:]], 1))
    assert [(v.invariant, v.seq) for v in audit.violations] == [("AssertionError", at + 1)]
    assert audit.events == at + 1


@pytest.mark.parametrize("counts", [(1 << 60,), (-1,)])
def test_counts_that_no_request_can_have_are_refused_at_once(events, counts):
    audit = audited(RUN, [*events[:6], (7, ev.StepPlanned(0, 1, (0,), (0,), counts))])
    assert [(v.invariant, v.seq) for v in audit.violations] == [("ValueError", 7)]


def test_an_unknown_kind_is_a_violation(events):
    audit = audited(RUN, [*events, (len(events) + 1, UnknownEvent(9999, b""))])
    assert [v.invariant for v in audit.violations] == ["UnknownEvent"]


def test_an_acknowledgement_that_was_never_given_is_missed(events):
    """The fold takes the event as it is; only the run invariant knows that no rank said so."""
    told = [e for _, e in events]
    at = next(i for i, e in enumerate(told) if getattr(e, "completed", ()))
    told[at] = msgspec.structs.replace(told[at], completed=(), completed_epochs=())
    found = audited(RUN, enumerate(told, 1)).violations[0]
    assert (found.invariant, found.seq) == ("rank_quorum", at + 3)


def test_each_fault_is_told_once(events):
    told = [e for _, e in events]
    audit = Audit(RUN, recount_events=1)
    for seq, event in enumerate(told, 1):
        audit.take(seq, event)
        if seq == 100:
            audit.state.blocks.refs[0] = 1
    assert len(audit.violations) == 2, audit.violations


# -- incremental and full -------------------------------------------------------------------------


def named_block(state, event):
    blocks = getattr(event, "blocks", ())
    return blocks[0] if blocks else None


def count(state, event):
    if (block := named_block(state, event)) is not None:
        state.blocks.refs[block] += 1


def leak(state, event):
    block = named_block(state, event)
    if block is not None and state.blocks.state[block] == BlockState.FREE:
        state.blocks.free.remove(state.blocks.free.ordered()[-1:])


def count_page(state, event):
    for page in getattr(event, "pages", ())[:1]:
        state.pages.refs[page] += page > 0


def lose_page_state(state, event):
    for page in getattr(event, "pages", ())[:1]:
        state.pages.state[page] = PageState.FREE


def lose_entry(state, event):
    if isinstance(event, ev.BlocksReserved) and event.role == 0:
        state.table(Table.RESIDENT)[event.row, event.entry] = 0


def empty_a_computed_block(state, event):
    if isinstance(event, ev.RowsComputed) and event.rows:
        row, size = event.rows[0], state.page_size
        block = state.table(Table.RESIDENT)[row, (state.rows.computed[row] - 1) // size]
        state.blocks.state[block] = BlockState.RESERVED


FAULTS = (count, leak, count_page, lose_page_state, lose_entry, empty_a_computed_block)


@pytest.mark.parametrize("spoil", FAULTS, ids=[spoil.__name__ for spoil in FAULTS])
def test_incremental_and_full_find_the_same_fault_at_the_same_event(events, spoil):
    """Each event that `spoil` can spoil, up to 20: the state is spoilt right after it."""
    tried = 0
    for chosen, (_, spoilt) in enumerate(events):
        if not isinstance(spoilt, ev.BlocksReserved | ev.BlocksReleased | ev.RowsComputed
                          | ev.HostPagesReserved | ev.TransferPinned):  # fmt: skip
            continue
        state = State(RUN)
        watch = Incremental(state)
        for seq, event in events[: chosen + 1]:
            watch.before(event)
            evolve(state, event, seq)
            if seq == chosen + 1:
                spoil(state, event)
            found = list(watch.after())
            assert seq == chosen + 1 or not found
        found += watch.readable()
        checker = Checker(RUN)
        full = {v.invariant for v in checker.state(state)}
        if full:
            tried += 1
            assert {name for name, _, _ in found} & full, (chosen, spoilt, full)
        if tried == 20:
            break
    assert tried > 2


# -- the witness ----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [what for what in PLANTED if what not in WRONG_BEFORE])
def test_the_witness_shows_the_violation_alone_and_cannot_be_shorter(what):
    _, before, event = PLANTED[what]
    log = list(enumerate(before, 1))
    violation = checked(*before).event(len(before) + 1, event)[0]
    chain = witness(CONFIG, violation, event, log)
    seqs = [seq for seq, _ in chain]
    assert seqs == sorted(set(seqs)) and chain[-1] == (len(before) + 1, event)
    assert shows(CONFIG, chain, violation)
    for at in range(len(chain) - 1):
        assert not shows(CONFIG, chain[:at] + chain[at + 1 :], violation)


def test_the_witness_of_a_long_run_is_short_and_whole(events):
    """A transfer completes again, hundreds of events into a run."""
    state, checker = State(RUN), Checker(RUN)
    for seq, event in events:
        checker.event(seq, event)
        evolve(state, event, seq)
        if seq > 300 and isinstance(event, ev.TransferCompleted) and len(event.transfers) == 1:
            break
    (violation,) = checker.event(seq + 1, event)
    assert violation.invariant == "settle_once"
    chain = witness(RUN, violation, event, events)
    assert len(chain) <= 9 and shows(RUN, chain, violation)
    kinds = [type(e).__name__ for _, e in chain]
    assert "TransferPinned" in kinds
    assert kinds[-2:] == ["TransferCompleted"] * 2


def test_the_witness_in_a_crowd_names_the_tenant_of_its_time(events):
    """Events name many transfers and rows at once; rows have had other tenants before."""
    told = [e for _, e in events]
    state, tenants = State(RUN), {}
    for at, event in enumerate(told):
        if isinstance(event, ev.RequestAdmitted):
            tenants.setdefault(event.row, []).append(event)
        if isinstance(event, ev.AcknowledgementsTaken) and event.completed:
            row = state.transfers[event.completed[0]].row
            if len(tenants[row]) > 1:
                break
        evolve(state, event, at + 1)
    else:
        raise AssertionError("no such moment")
    told[at] = msgspec.structs.replace(
        event, completed=event.completed[1:], completed_epochs=event.completed_epochs[1:]
    )
    found = [v for v in audited(RUN, enumerate(told, 1)).violations if v.invariant == "rank_quorum"]
    chain = witness(RUN, found[0], told[found[0].seq - 1], list(enumerate(told, 1)))
    admitted = [e for _, e in chain if isinstance(e, ev.RequestAdmitted)]
    assert admitted == [tenants[row][-1]] and len(chain) <= 12


# -- whatever a log says --------------------------------------------------------------------------


def changed(event, data):
    """The event with one field changed to something of its type that nobody would write."""
    names = [
        name for name in event.__struct_fields__ if isinstance(getattr(event, name), int | tuple)
    ]
    name = data.draw(st.sampled_from(names))
    value = getattr(event, name)
    number = data.draw(st.sampled_from([-(1 << 62), -1, 0, 1, 5, 63, 1 << 20, 1 << 62]))
    if isinstance(value, tuple):
        length = data.draw(st.integers(0, 3))
        filler = b"x" if value and isinstance(value[0], bytes) else number
        return msgspec.structs.replace(event, **{name: (filler,) * length})
    return msgspec.structs.replace(event, **{name: type(value)(0) if value is None else number})


@given(data=st.data())
@settings(max_examples=150)
def test_no_log_makes_the_audit_or_its_witness_raise(events, data):
    told = [event for _, event in events]
    at = data.draw(st.integers(0, len(told) - 1))
    how = data.draw(st.sampled_from(["drop", "swap", "repeat", "change", "change", "change"]))
    if how == "drop":
        del told[at]
    elif how == "repeat":
        told.insert(at, told[data.draw(st.integers(0, len(told) - 1))])
    elif how == "swap":
        told[at - 1], told[at] = told[at], told[at - 1]
    else:
        told[at] = changed(told[at], data)
    log = list(enumerate(told, 1))
    audit = audited(RUN, log)
    for violation in audit.violations[:2]:
        event = told[violation.seq - 1]
        chain = witness(RUN, violation, event, log)
        assert chain[-1] == (violation.seq, event)
        for seq, one in chain:
            line(seq, one)


def test_a_check_that_raises_on_an_event_that_folds_is_told(monkeypatch) -> None:
    def broken(run, event):
        raise KeyError("gone")
        yield

    from hisparse.fsm.invariants import run as run_checks

    monkeypatch.setitem(run_checks.RUN_CHECKS, "settle_once", broken)
    audit = Audit(small_config())
    assert audit.take(1, ev.TransferFailed(0, 0, ()))
    (found,) = audit.violations
    assert found.invariant == "settle_once" and "cannot be judged" in found.message
