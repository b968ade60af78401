"""A20: a request is retracted and keeps its host pages, is aborted while it is parked, and the
pages stay leased for ever.

Here a preempted request holds nothing once its copies have settled: its pages live on in the prefix
cache, leased by nobody, and it comes back under a new epoch. Abort is legal in every state.
"""

from __future__ import annotations

import numpy as np
import pytest
from kv_rig import SchedulerRig, make_config

from hisparse.fsm import events as ev
from hisparse.fsm.fold import fold
from hisparse.fsm.machines import RequestState

PROMPT = list(range(40))
OTHER = [900 + t for t in range(48)]


def leases(rig):
    return int(np.count_nonzero(rig.state.pages.refs)) + int(
        np.count_nonzero(rig.state.blocks.refs)
    )


def test_a_parked_request_that_is_aborted_leaves_no_lease_in_either_pool():
    rig = SchedulerRig(make_config(host_pages=24))
    q = rig.arrive("q", PROMPT, new=4)
    for _ in range(2):
        rig.step()
    rig.coordinator.preempt(*q)
    rig.step()
    assert leases(rig) == 0 and len(rig.state.prefix) == 10, "kept, and held by nobody"
    big = rig.arrive("big", OTHER, new=16)
    parked = rig.arrive("q", [*PROMPT, 7], new=23)
    rig.step(only=[big])
    held = leases(rig)
    assert rig.state.requests[parked].state is RequestState.WAITING
    rig.coordinator.abort(*parked)
    assert parked not in rig.state.requests and leases(rig) == held
    rig.coordinator.abort(*big)
    rig.step()
    assert leases(rig) == 0 and rig.drained()


def reach(state):
    """(rig, request in that state)."""
    rig = SchedulerRig(make_config(blocks=26, write_back="on_pressure"))
    q = rig.arrive("q", PROMPT, new=20)
    if state is RequestState.WAITING:
        return rig, q
    if state is RequestState.ADMITTED:
        rig.coordinator.admit_waiting()
    elif state is RequestState.PREFILL:
        rig.step(rows=16)
    elif state is RequestState.REWINDING:
        rig.step()
        rig.arrive("z", OTHER)
        spills = [t.transfer for t in rig.step(only=[q], ack=False).transfers]
        rig.enqueue(*spills)
        rig.step(only=[q], ack=False)
        rig.fail(spills[0])
    else:
        rig.step()
        if state is RequestState.DRAINING:
            rig.step(ack=False)
            rig.coordinator.preempt(*q)
    return rig, q


STATES = ["WAITING", "ADMITTED", "PREFILL", "DECODE", "REWINDING", "DRAINING"]


@pytest.mark.parametrize("name", STATES)
def test_abort_is_legal_in_every_state_and_the_log_says_which_it_was(name):
    rig, q = reach(RequestState[name])
    assert rig.state.requests[q].state.name == name
    rig.coordinator.abort(*q)
    at = next(s for s, e in rig.log.read(1) if isinstance(e, ev.RequestAborted))
    before = fold(rig.config, ((s, e) for s, e in rig.log.read(1) if s < at))
    assert before.requests[q].state.name == name
    for _ in range(3):
        rig.send()
        rig.complete(*rig.state.transfers)
        for request in list(rig.state.requests):
            rig.coordinator.abort(*request)
        rig.retire()
    rig.coordinator.abort(*q)  # and after everything is gone
    assert leases(rig) == 0 and rig.drained()


def test_no_state_of_a_request_is_left_out():
    ended = {"FINISHED", "ABORTED", "PREEMPTED"}  # passed through within one event
    assert {s.name for s in RequestState} == {*STATES, *ended, "GONE"}
