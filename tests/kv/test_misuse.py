"""Misuse raises UsageError with the fix in it, and changes nothing: not the state, not the log."""

from __future__ import annotations

import pytest
from kv_rig import SchedulerRig, make_config

from hisparse.errors import ProtocolError, UsageError
from hisparse.fsm.wire import Ack, AckKind, Acknowledgements

PROMPT = list(range(40))


def serving():
    """A rig with one request in prefill (row 0) and one waiting for its row."""
    rig = SchedulerRig(make_config(schedule={"max_requests": 1}))
    key = rig.arrive("q", PROMPT)
    rig.step(rows=16)
    waiting = rig.arrive("w", PROMPT)
    rig.coordinator.admit_waiting()
    return rig, key, waiting


MISUSES = {
    "finish during the prompt": (lambda c, q, w: c.finish(*q), "is PREFILL, must be DECODE"),
    "finish of nobody": (lambda c, q, w: c.finish("x", 9), "has no epoch 9"),
    "preempt while it waits": (lambda c, q, w: c.preempt(*w), "is WAITING, must be ADMITTED"),
    "more rows than places": (lambda c, q, w: c.plan_step([0], [25]), "has places for 0 more"),
    "a row twice": (lambda c, q, w: c.plan_step([0, 0], [4, 4]), "name each row once"),
    "a row that is nobody's": (lambda c, q, w: c.grow([7], [1]), "request rows are 0..0"),
    "another step": (lambda c, q, w: c.rows_computed(7, [0], [1]), "the step under way is 1"),
    "rows that were not planned": (lambda c, q, w: c.rows_computed(1, [0], [1]), "planned 0"),
    "time that goes back": (lambda c, q, w: c.tick(-1), "must be an int of 0"),
    "an id in use": (lambda c, q, w: c.arrive("q", 4, 8, [b"x"]), "is live: end it first"),
}


@pytest.mark.parametrize("name", list(MISUSES))
def test_misuse_is_refused_and_changes_nothing(name):
    call, message = MISUSES[name]
    rig, key, waiting = serving()
    before, seq = rig.coordinator.digest(), rig.log.last_seq
    with pytest.raises(UsageError, match=message):
        call(rig.coordinator, key, waiting)
    assert (rig.coordinator.digest(), rig.log.last_seq) == (before, seq)
    rig.step()  # and the service goes on


def told(rank, first_seq, *acks):
    return lambda c: c.update_acknowledgements(Acknowledgements(rank, 1, first_seq, acks))


FOREIGN = {
    "a rank that is not there": (told(2, 1, Ack(AckKind.RETIRED, 1)), "has ranks 0..1"),
    "a rank below zero": (told(-1, 1, Ack(AckKind.RETIRED, 1)), "has ranks 0..1"),
    "a step to come": (told(1, 1, Ack(AckKind.RETIRED, 2)), "the last one planned is 1"),
    "a gap": (told(0, 3, Ack(AckKind.RETIRED, 1)), "read the stream again from 1"),
}


@pytest.mark.parametrize("name", list(FOREIGN))
def test_acknowledgements_that_cannot_be_true_are_refused_and_change_nothing(name):
    call, message = FOREIGN[name]
    rig = SchedulerRig(make_config(ranks=2))
    rig.arrive("q", PROMPT)
    rig.step(ack=False)
    before, seq = rig.coordinator.digest(), rig.log.last_seq
    with pytest.raises(ProtocolError, match=message):
        call(rig.coordinator)
    assert (rig.coordinator.digest(), rig.log.last_seq) == (before, seq)
    rig.retire()  # and those of the ranks themselves are taken in


def test_a_client_may_go_away_between_plan_and_accept():
    rig = SchedulerRig()
    stays, goes = rig.arrive("stays", PROMPT), rig.arrive("goes", PROMPT)
    rig.coordinator.admit_waiting()
    rows = [rig.row(stays), rig.row(goes)]
    step = rig.coordinator.plan_step(rows, rig.coordinator.grow(rows, [16, 16]))
    rig.send()
    rig.coordinator.abort(*goes)
    rig.coordinator.rows_computed(step, rows, [16, 16])
    assert rig.state.rows.computed[rows[0]] == 16
    rig.retire()
    rig.check()


@pytest.mark.parametrize("comes_another", [False, True], ids=["free", "another's"])
@pytest.mark.parametrize("name", ["hybrid", "resident"])
def test_a_row_that_was_given_back_between_plan_and_accept_is_passed_over(name, comes_another):
    """It is free when nothing of its request can be read any more: without a host tier at once,
    with one when the step's accesses are over, which the ranks may say before the step's tokens."""
    rig = SchedulerRig(make_config(name=name, schedule={"max_requests": 2}))
    stays, goes = rig.arrive("stays", PROMPT), rig.arrive("goes", PROMPT)
    rig.coordinator.admit_waiting()
    rows = [rig.row(stays), rig.row(goes)]
    step = rig.coordinator.plan_step(rows, rig.coordinator.grow(rows, [16, 16]))
    rig.coordinator.abort(*goes)
    rig.retire()
    assert goes not in rig.state.requests
    if comes_another:
        comes = rig.arrive("comes", PROMPT[:4])
        rig.coordinator.admit_waiting()
        assert rig.row(comes) == rows[1]
    late = [(rows[1], b"a page of the one that went")] * 3
    rig.coordinator.rows_computed(step, rows, [16, 16], late)
    assert rig.state.rows.computed[rows].tolist() == [16, 0]
    if comes_another:
        assert b"a page of the one that went" not in rig.state.requests[comes].hashes
    rig.check()


def test_a_second_end_is_refused_and_a_late_abort_is_inert():
    rig = SchedulerRig()
    key = rig.arrive("q", PROMPT)
    rig.step()
    rig.coordinator.finish(*key)
    with pytest.raises(UsageError):
        rig.coordinator.finish(*key)
    rig.coordinator.abort(*key)
    for _ in range(3):
        rig.step()
    assert rig.drained()


def test_a_hit_that_would_not_fit_is_taken_shorter():
    # In the smallest pool there is no block left to copy indexer rows from: without a shorter hit
    # the request would wait for ever.
    config = make_config(blocks=64, host_pages=64, longest=20)
    blocks = config.steady_blocks(20)
    rig = SchedulerRig(make_config(blocks=blocks, host_pages=64, longest=20))
    first = rig.arrive("first", PROMPT[:16])
    for _ in range(20):
        rig.step()
    rig.finish(first)
    for _ in range(3):
        rig.step()
    key = rig.arrive("second", [*PROMPT[:9], *range(80, 87)])
    for _ in range(3):
        rig.step()
    assert rig.state.requests[key].live
