"""The vector-clock pass: what orders two accesses, what does not, and each wait of the worker."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
from mutants.streams import WAITS, drop_wait
from scheduler_rig import PAGE, events_of, served, small_config

from hisparse.fsm import events as ev
from hisparse.fsm.audit import Audit
from hisparse.fsm.clocks import Clocks
from hisparse.fsm.fold import evolve
from hisparse.fsm.rank_order import RankOrder
from hisparse.fsm.state import State
from hisparse.fsm.step_accesses import step_accesses
from hisparse.fsm.wire import AckKind, Table
from hisparse.testing import calm


def access(stream, write, *ids, pool="gpu"):
    return ev.MemoryAccessed(0, stream, pool, write, ids, 0)


def record(stream, event):
    return ev.StreamRecorded(0, stream, event)


def wait(stream, event):
    return ev.StreamWaited(0, stream, event, "test")


def ack(kind, ident):
    return ev.AckSent(0, 1, int(kind), ident, 1)


def pairs(*events):
    clocks = Clocks(10, 10)
    clocks.segment(list(enumerate(events, 1)), None)
    return [(pair.ident, pair.first_seq, pair.second_seq) for pair in clocks.found]


READ, WRITE = access("d2h", False, 3), access("compute", True, 3)


@pytest.mark.parametrize(
    "first,second", [(READ, WRITE), (WRITE, READ), (WRITE, access("h2d", True, 3))]
)
def test_a_write_and_another_access_on_two_streams_are_unordered(first, second):
    assert pairs(first, second) == [(3, 1, 2)]


@pytest.mark.parametrize(
    "first,second",
    [
        (READ, access("compute", False, 3)),
        (READ, access("d2h", True, 3)),
        (READ, access("compute", True, 4)),
        (READ, access("compute", True, 3, pool="host")),
    ],
    ids=["two reads", "one stream", "two ids", "two pools"],
)
def test_what_cannot_clash_needs_no_order(first, second):
    assert pairs(first, second) == []


def test_a_wait_orders_what_was_before_the_record():
    assert pairs(READ, record("d2h", 7), wait("compute", 7), WRITE) == []


def test_a_wait_does_not_order_what_came_after_the_record():
    assert pairs(record("d2h", 7), READ, wait("compute", 7), WRITE) == [(3, 2, 4)]


def test_pairs_beyond_those_kept_are_counted():
    """A pair of events counts once, however many ids they clash over."""
    clocks = Clocks(10, 10, keep=2)
    both = [access("d2h", False, 3, 4), *(access("compute", True, 3, 4) for _ in range(5))]
    clocks.segment(list(enumerate(both, 1)), None)
    assert len(clocks.found) == 2 and clocks.total == 5


def test_a_wait_after_the_access_comes_too_late():
    assert pairs(READ, record("d2h", 7), WRITE, wait("compute", 7)) == [(3, 1, 3)]


def test_order_is_transitive():
    through = [record("d2h", 7), wait("h2d", 7), record("h2d", 8), wait("compute", 8)]
    assert pairs(READ, *through, WRITE) == []


def test_work_queued_after_an_acknowledged_copy_follows_it():
    told = [record("d2h", 7), ack(AckKind.ENQUEUED, 5)]
    assert pairs(READ, *told, ack(AckKind.COMPLETED, 5), WRITE) == []
    assert pairs(READ, *told, WRITE, ack(AckKind.COMPLETED, 5)) == [(3, 1, 4)]


def test_a_retired_step_is_over_for_what_is_queued_later():
    step = [ev.CommandApplied(0, 9, 0, 1), WRITE, record("compute", 7)]
    assert pairs(*step, ack(AckKind.RETIRED, 9), READ) == []
    assert pairs(*step, ack(AckKind.RETIRED, 8), READ) == [(3, 2, 5)]


def test_the_missing_edge_names_the_event_that_should_have_been_waited_for():
    clocks = Clocks(10, 10)
    clocks.segment(list(enumerate([READ, record("d2h", 7), WRITE], 1)), None)
    (pair,) = clocks.found
    assert "compute has to wait for device event 7, recorded on d2h" in pair.missing_edge
    assert (pair.first, pair.second) == ("d2h reads block 3", "compute writes block 3")


def test_ids_and_pools_that_do_not_exist_are_passed_over():
    assert pairs(access("d2h", True, -1, 10, 3), access("compute", True, 99, pool="moon")) == []


def test_events_that_the_rank_saw_pass_are_not_held():
    clocks = Clocks(10, 10)
    for step in range(1, 5001):
        applied = ev.CommandApplied(0, step, step - 1, step)
        work = [access("compute", True, 3), record("compute", step)]
        told = [ack(AckKind.RETIRED, step)]
        clocks.segment(list(enumerate([applied, *work, *told], 4 * step)), None)
    assert clocks.found == [] and len(clocks._events) < 1100 and len(clocks._records[0][0]) < 1100
    # What it forgot orders nothing that was not ordered without it: the rest is as it was.
    late = [access("d2h", True, 3), record("d2h", 6000), access("compute", False, 3)]
    clocks.segment(list(enumerate(late, 30_000)), None)
    (pair,) = clocks.found
    assert (pair.first_seq, pair.second_seq) == (30_000, 30_002)
    assert "device event 6000, recorded on d2h" in pair.missing_edge


@pytest.mark.parametrize("few", [0, 10**6], ids=["by arrays", "by numbers"])
def test_the_rows_of_a_step_touch_what_the_tables_say(few, monkeypatch):
    """Pages before their end from block or host, the blocks written, hot blocks; nothing else."""
    monkeypatch.setattr("hisparse.fsm.step_accesses.FEW", few)
    config = small_config()
    state, looked = State(config), 0
    for seq, event in events_of(served(config, seed=2)):
        evolve(state, event, seq)
        if not isinstance(event, ev.StepPlanned) or not event.rows:
            continue
        reads, writes, host = (set(ids.tolist()) for ids in step_accesses(state, event))
        expected, paged = set(), set()
        for row, start, count in zip(event.rows, event.starts, event.counts, strict=True):
            for page in range(-(-(start + count) // PAGE)):
                block = int(state.table(Table.RESIDENT)[row, page])
                if block:
                    expected.add(block)
                else:
                    paged.add(int(state.table(Table.HOST)[row, page]))
                if block and (page + 1) * PAGE > start:
                    assert block in writes
        assert host == paged
        index = {*state.table(Table.INDEX)[list(event.rows)].ravel().tolist()} - {0}
        hot = {*state.table(Table.HOT)[list(event.rows)].ravel().tolist()} - {0}
        assert reads == expected | index and hot <= writes <= expected | index | hot
        looked += bool(host)
    assert looked


# -- the worker -----------------------------------------------------------------------------------


def checked(seed, without=None):
    """(unordered pairs, steps looked at) of a simulated run, from its two logs alone."""
    rank = []
    replica = calm.HiSparseBackend

    def recorded(*args, **more):
        return replica(*args, sink=rank.append, **more)

    with (
        drop_wait(without) if without else nullcontext(),
        mock.patch.object(calm, "HiSparseBackend", recorded),
    ):
        world = calm.CalmSimulation(seed)
        world.run()
    audit = Audit(world.config)
    blocks, pages = len(audit.state.blocks.state), len(audit.state.pages.state)
    order = RankOrder("rank-0", list(enumerate(rank, 1)), blocks, pages)
    for seq, event in world.log.read(1):
        assert audit.take(seq, event)
        order.folded(seq, event, audit.state)
    order.finish()
    return order.clocks.found, order.steps


@pytest.mark.parametrize("seed", range(8))
def test_a_clean_run_has_nothing_unordered(seed):
    found, steps = checked(seed)
    assert found == [] and steps > 5


@pytest.mark.parametrize("why", WAITS)
def test_each_wait_left_out_is_found_on_the_log_alone(why):
    """Where the bytes happen to come out right, too: the order is what is missing."""
    named = [pair.missing_edge for seed in range(12) for pair in checked(seed, without=why)[0]]
    assert sum(f"(the wait named {why})" in edge for edge in named) > len(named) * 0.8 > 0
