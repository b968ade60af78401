"""A28: blocks are allocated and freed many times, each holder keeps the view of the free list that
it was given, and with the views every list that ever was.

Here a decision turns ids into tuples of plain ints before they reach an event; state keeps columns
that own their memory, and records of what is live. What a scheduler holds is bounded by what lives.
"""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest
from kv_rig import make_config

from hisparse.fsm import columns
from hisparse.fsm.idqueue import IdQueue
from hisparse.fsm.log import MemoryLog
from hisparse.fsm.wire import Ack, AckKind, Acknowledgements
from hisparse.kv.coordinator import HiSparseCoordinator
from hisparse.kv.prefix import PageHasher
from hisparse.testing.calm import CalmSimulation


def leaves(value):
    """The values of an event or record, containers opened."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from leaves(item)
    elif hasattr(value, "__struct_fields__"):
        for name in value.__struct_fields__:
            yield from leaves(getattr(value, name))
    else:
        yield value


def arrays(thing):
    """Every array that a part of the state holds, those of queues included."""
    slots = {n: getattr(thing, n) for n in getattr(type(thing), "__slots__", ())}
    for name, value in {**slots, **getattr(thing, "__dict__", {})}.items():
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, np.ndarray):
                yield name, one
            elif isinstance(one, IdQueue):
                yield from arrays(one)


@pytest.mark.parametrize("seed", range(4))
def test_events_hold_plain_values_and_columns_own_their_memory(seed):
    world = CalmSimulation(seed, requests=6)
    assert world.run().violation is None
    for _, event in world.log.read(1):
        for value in leaves(event):
            builtin = isinstance(value, str | bytes | int) and not isinstance(value, np.generic)
            assert builtin or value is None, (event, type(value))
    state = world.coordinator.state
    for part in (state.blocks, state.pages, state.rows):
        for name, array in arrays(part):
            assert array.base is None, f"{name} is a view"


class Cycle:
    """A scheduler that serves one request after another; half of them share their prompt."""

    def __init__(self):
        self.config = make_config(blocks=40, host_pages=60).model_copy(update={"checks": "off"})
        self.coordinator = HiSparseCoordinator(self.config, MemoryLog(200))
        self.hasher, self.acked, self.served = PageHasher(4), 0, 0

    def acknowledge(self):
        state = self.coordinator.state
        acks = [Ack(AckKind.COMPLETED, t.transfer, t.epoch) for t in state.transfers.values()]
        acks.append(Ack(AckKind.RETIRED, state.step))
        message = Acknowledgements(0, 1, self.acked + 1, tuple(acks))
        self.acked = message.last_seq
        self.coordinator.update_acknowledgements(message)

    def serve(self):
        c, name = self.coordinator, f"request {self.served}"
        first = 0 if self.served % 2 else 100 * self.served
        tokens = list(range(first, first + 20))
        key = (name, c.arrive(name, 20, 24, self.hasher.extend(b"", tokens)))
        c.admit_waiting()
        row = c.state.requests[key].row
        left = 20 - int(c.state.rows.computed[row])
        c.grow([row], [left])
        step = c.plan_step([row], [left])
        c.rows_computed(step, [row], [left])
        (c.finish, c.preempt, c.abort)[self.served % 3](*key)
        self.acknowledge()
        self.acknowledge()
        self.served += 1

    def sizes(self):
        state = self.coordinator.state
        return {
            name: len(value)
            for part in (state, state.pages, self.coordinator)
            for name, value in vars(part).items()
            if isinstance(value, dict | list)
        } | {"columns": len(columns._recent)}


def test_hundreds_of_requests_leave_what_a_few_left():
    cycle = Cycle()
    for _ in range(100):
        cycle.serve()
    few = cycle.sizes()
    tracemalloc.start()
    for _ in range(30):
        cycle.serve()
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(100):
        cycle.serve()
    gc.collect()
    after = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    many = cycle.sizes()
    assert many.keys() == few.keys() and all(many[n] <= few[n] + 8 for n in few), (few, many)
    assert not cycle.coordinator.state.requests and not cycle.coordinator.state.transfers
    # A view of the free list kept for each decision would be a kilobyte a request.
    assert after - before < 50_000, f"{after - before} B more after 100 requests"
