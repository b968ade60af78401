"""Ends of requests: leases are handed over at once, and everything comes back exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_rig import SchedulerRig, make_config

from hisparse.fsm import events as ev
from hisparse.fsm.machines import BlockState
from hisparse.fsm.wire import TransferKind

PROMPT = list(range(40))


def drain(rig, steps=4):
    for _ in range(steps):
        rig.step()


def test_everything_comes_back_after_a_finish():
    rig = SchedulerRig()
    key = rig.arrive("q", PROMPT)
    drain(rig)
    rig.finish(key)
    drain(rig, 2)
    assert rig.drained()


def test_finish_with_copies_in_flight_still_publishes():
    rig = SchedulerRig()
    key = rig.arrive("q", PROMPT)
    rig.step(ack=False)
    command = rig.step(ack=False)
    rig.finish(key)
    flying = [t.block for t in command.transfers]
    assert all(rig.state.blocks.state[b] == BlockState.PINNED for b in flying)
    rig.enqueue(*[t.transfer for t in command.transfers])
    assert not rig.state.prefix
    rig.complete(*[t.transfer for t in command.transfers])
    assert len(rig.state.prefix) == 10
    rig.retire()
    assert rig.drained()


def test_on_pressure_pages_are_written_back_at_finish():
    rig = SchedulerRig(make_config(write_back="on_pressure"))
    key = rig.arrive("q", PROMPT)
    drain(rig)
    assert not rig.state.prefix, "pages that live only on the GPU are not findable"
    rig.finish(key)
    command = rig.step()
    assert [t.kind for t in command.transfers] == [TransferKind.WRITE_BACK] * 10
    assert len(rig.state.prefix) == 10


def test_a_page_with_unaccepted_rows_is_never_published():
    rig = SchedulerRig()
    key = rig.arrive("q", PROMPT[:39], new=1)  # the row of the last token is never computed
    rig.step()
    rig.finish(key)
    drain(rig, 2)
    assert len(rig.state.prefix) == 9


def test_the_page_that_fills_on_the_last_step_is_written_back_and_published():
    rig = SchedulerRig()
    key = rig.arrive("q", PROMPT[:39], new=2)
    rig.step()
    rig.step()  # computes row 39: the tenth page is sealed by the finishing step
    rig.finish(key)
    drain(rig, 2)
    assert len(rig.state.prefix) == 10


def test_host_pages_wait_for_the_last_step_that_reads_them():
    rig = SchedulerRig()
    key = rig.arrive("q", PROMPT)
    drain(rig, 2)
    rig.step(ack=False)
    rig.finish(key)
    assert rig.state.pages.refs.any(), "a step under way may still read them"
    assert rig.row(key) >= 0
    rig.retire()
    assert rig.drained()


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_is_legal_in_every_state_and_leaves_nothing(steps):
    rig = SchedulerRig()
    key = rig.arrive("q", PROMPT)
    for _ in range(steps):
        rig.step(rows=16)
    rig.coordinator.abort(*key)
    rig.coordinator.abort(*key)  # after an end it changes nothing
    drain(rig, 2)
    assert rig.drained()
    rig.coordinator.abort(*key)
    assert rig.drained()


def test_abort_publishes_what_was_computed_and_accepted_and_no_more():
    rig = SchedulerRig()
    key = rig.arrive("q", PROMPT)
    rig.step(rows=18)
    rig.coordinator.abort(*key)
    drain(rig, 2)
    assert len(rig.state.prefix) == 4


def test_a_preempted_request_comes_back_under_a_new_epoch_and_finds_its_pages():
    rig = SchedulerRig()
    key = rig.arrive("q", PROMPT)
    drain(rig, 3)
    rig.coordinator.preempt(*key)
    again = rig.arrive("q", rig.tokens[key])
    assert again[1] > key[1]
    rig.step()
    assert rig.state.requests[again].hit_tokens == 40
    assert rig.coordinator.metrics.counts["preemptions"] == 1


def test_old_acknowledgements_settle_the_old_epoch_alone():
    # preempt with copies in flight, resume, plan more, then the old completions arrive
    rig = SchedulerRig()
    old = rig.arrive("q", PROMPT, new=20)
    rig.step(ack=False)
    command = rig.step(ack=False)
    rig.enqueue(*[t.transfer for t in command.transfers])
    rig.coordinator.preempt(*old)
    new = rig.arrive("q", PROMPT, new=20)
    rig.step(ack=False)
    later = rig.step(ack=False)
    mine = rig.state.requests[new].in_flight
    rig.complete(*[t.transfer for t in command.transfers])
    assert rig.state.requests[new].in_flight == mine
    rig.complete(*[t.transfer for t in later.transfers])
    rig.retire()
    rig.finish(new)
    drain(rig, 3)
    assert rig.drained()


def test_a_source_block_outlives_preemption_until_its_copy_is_known():
    # the block of a sent, unacknowledged transfer may go to nobody, whatever ends the request
    rig = SchedulerRig(make_config(blocks=24, host_pages=60))
    victim = rig.arrive("victim", PROMPT)
    rig.step(ack=False)
    command = rig.step(ack=False)
    sources = {t.block for t in command.transfers}
    rig.coordinator.preempt(*victim)
    rig.arrive("z", [700 + t for t in range(40)])
    for _ in range(3):
        rig.step(ack=False)
        given = {b for e in rig.events(ev.BlocksReserved)[1:] for b in e.blocks if e.row}
        assert not sources & given
    assert all(rig.state.blocks.state[b] == BlockState.PINNED for b in sources)


@given(st.permutations(["finish", "enqueue", "complete", "retire"]))
def test_drain_in_any_order_frees_exactly_once(order):
    order = sorted(order, key=lambda s: (order.index(s), s))
    if order.index("complete") < order.index("enqueue"):
        order.remove("enqueue")  # COMPLETED implies ENQUEUED
    rig = SchedulerRig()
    key = rig.arrive("q", PROMPT)
    rig.step(ack=False)
    command = rig.step(ack=False)
    transfers = [t.transfer for t in command.transfers]
    for action in order:
        if action == "finish":
            rig.finish(key)
        elif action == "retire":
            rig.retire()
        else:
            getattr(rig, action)(*transfers)
    drain(rig, 2)
    assert rig.drained()
    assert len(rig.events(ev.RequestDrained)) == 1


def test_a_row_that_changes_hands_between_commands_keeps_nothing_of_its_last_request():
    rig = SchedulerRig(make_config(schedule={"max_requests": 1}, write_back="on_pressure"))
    first = rig.arrive("first", PROMPT)
    drain(rig, 2)
    rig.coordinator.abort(*first)  # its blocks and its row go back, and no command has said so yet
    second = rig.arrive("second", [700 + t for t in range(8)])
    rig.retire()
    command = rig.step()
    assert rig.row(second) == 0 and command.resets == (0,)
    resident = [u for u in command.tables if u.table == 0]
    assert [(u.entry, len(u.ids)) for u in resident] == [(0, 2)]
