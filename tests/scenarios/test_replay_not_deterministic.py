"""H06: the same trace and binary give other residency on replay, with equal totals: three transfers
run at once, and in which order they complete is left to the wall clock.

Here the order of completions is an input, AcknowledgementsTaken, recorded where it was taken in.
Nothing else about a worker's timing reaches a decision. The oracle is the state's hash after each
event; totals are shown not to be one.
"""

from __future__ import annotations

import itertools

import pytest
from kv_rig import SchedulerRig, make_config

from hisparse.connector.base import KVConnectorRole
from hisparse.connector.hisparse import HiSparseConnector
from hisparse.fsm import events as ev
from hisparse.fsm.fold import evolve
from hisparse.fsm.log import MemoryLog
from hisparse.fsm.state import State, digest
from hisparse.fsm.wire import Ack, AckKind, Acknowledgements
from hisparse.kv.coordinator import HiSparseCoordinator
from hisparse.testing.calm import CalmSimulation

PROMPT = list(range(12))  # three pages, three transfers at once


def recorded(order, failing=None):
    """(rig, its state's hash after each event): three copies that end in `order`."""
    rig = SchedulerRig(make_config(blocks=24, host_pages=24))
    hashes, record = [], rig.coordinator._record

    def hashed(event):
        seq = record(event)
        hashes.append(digest(rig.state))
        return seq

    rig.coordinator._record = hashed
    key = rig.arrive("q", PROMPT, new=8)
    rig.step(ack=False)
    transfers = [t.transfer for t in rig.step(ack=False).transfers]
    assert len(transfers) == 3
    rig.enqueue(*transfers)
    for i in order:
        (rig.fail if i == failing else rig.complete)(transfers[i])
    rig.retire()
    rig.finish(key)
    rig.step()
    rig.arrive("again", [*PROMPT, 99], new=2)
    rig.step()
    return rig, hashes


def folded(rig):
    state, hashes = State(rig.config), []
    for seq, event in rig.log.read(1):
        evolve(state, event, seq)
        hashes.append(digest(state))
    return hashes


def decided_again(config, events):
    """A fresh coordinator that is told the inputs of `events` and nothing else: its whole log."""
    log = MemoryLog(None)
    c = HiSparseCoordinator(config, log)
    HiSparseConnector(KVConnectorRole.SCHEDULER, coordinator=c)
    events = [e for _, e in events]
    for i, e in enumerate(events):
        match e:
            case ev.RequestArrived():
                c.arrive(e.request, e.prompt_tokens, e.max_tokens, e.page_hashes)
            case ev.RequestAdmitted() if log.next_seq <= i + 1:
                c.admit_waiting()
            case ev.BlocksReserved() | ev.PolicyChosen() if log.next_seq <= i + 1:
                planned = next(p for p in events[i:] if isinstance(p, ev.StepPlanned))
                c.grow(planned.rows, planned.counts)
            case ev.StepPlanned():
                c.plan_step(e.rows, e.counts)
            case ev.RowsComputed():
                c.rows_computed(
                    e.step, e.rows, e.counts, list(zip(e.hash_rows, e.page_hashes, strict=True))
                )
            case ev.RequestFinished():
                c.finish(e.request, e.epoch, e.reason)
            case ev.AcknowledgementsTaken():
                c.update_acknowledgements(_message(e))
    return list(log.read(1))


def _message(e):
    acks = [
        Ack(kind, ident, epoch)
        for kind, idents, epochs in (
            (AckKind.ENQUEUED, e.enqueued, e.enqueued_epochs),
            (AckKind.COMPLETED, e.completed, e.completed_epochs),
            (AckKind.FAILED, e.failed, e.failed_epochs),
        )
        for ident, epoch in zip(idents, epochs, strict=True)
    ]
    missing = e.last_seq - e.first_seq + 1 - len(acks)
    acks += [Ack(AckKind.RETIRED, e.retired_step)] * missing
    return Acknowledgements(e.rank, e.worker_epoch, e.first_seq, tuple(acks))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("failing", [None, 1])
def test_every_replay_has_the_hash_of_the_run_after_every_event(order, failing):
    rig, hashes = recorded(order, failing)
    assert folded(rig) == hashes and folded(rig) == hashes
    events = list(rig.log.read(1))
    assert decided_again(rig.config, events) == events, "inputs alone decide all the rest"


def test_orders_differ_in_their_hashes_where_totals_say_nothing():
    runs = [recorded(order) for order in itertools.permutations(range(3))]
    totals = {tuple(rig.coordinator.metrics.counts.values()) for rig, _ in runs}
    assert len(totals) == 1, "equal totals"
    assert len({tuple(hashes) for _, hashes in runs}) == len(runs), "six different runs"


@pytest.mark.parametrize("seed", range(8))
def test_a_worker_of_any_pace_leaves_a_log_that_replays_to_every_hash(seed):
    world = CalmSimulation(seed, requests=6)  # how far its streams lag is drawn, too
    record, hashes = world.coordinator._record, []

    def hashed(event):
        seq = record(event)
        hashes.append(digest(world.coordinator.state))
        return seq

    world.coordinator._record = hashed
    assert world.run().violation is None
    state = State(world.config)
    for live, (seq, event) in zip(hashes, world.log.read(1), strict=True):
        evolve(state, event, seq)
        assert digest(state) == live, seq
