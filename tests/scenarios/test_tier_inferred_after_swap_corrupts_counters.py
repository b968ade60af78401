"""A21: two blocks swap tiers, the claim that follows asks the block in which tier it is *now*, and
counts in the other tier's queue: free exceeds capacity, used is negative.

Here blocks and host pages are two id spaces with two sets of columns; which is meant is a field of
the event's type (and the role of a block is in the event). Nothing asks a block where it lives.
"""

from __future__ import annotations

import numpy as np
import pytest
from kv_rig import SchedulerRig, make_config

from hisparse.errors import HiSparseError
from hisparse.fsm import events as ev
from hisparse.fsm.fold import evolve
from hisparse.fsm.machines import BlockRole, BlockState, PageState
from hisparse.fsm.state import State
from hisparse.testing.calm import CalmSimulation

PROMPT = list(range(40))


def bounded(state):
    """0 <= free <= total in both pools; queue and columns agree about every id."""
    for columns, idle, free in (
        (state.blocks, state.blocks.cached, BlockState.FREE),
        (state.pages, state.pages.evictable, PageState.FREE),
    ):
        total = len(columns.state) - 1
        assert 0 <= columns.free.count <= columns.available <= total
        is_free = columns.state == free
        assert (columns.free.members()[1:] == is_free[1:]).all() and not columns.free.members()[0]
        assert not (columns.free.members() & idle.members()).any()
        held = np.count_nonzero(columns.refs)
        assert columns.available + held <= total and (columns.refs >= 0).all()


def test_a_page_that_left_and_came_back_is_counted_where_its_events_say():
    rig = SchedulerRig(make_config(blocks=26, promote_after_steps=1, schedule={"step_rows": 16}))
    q = rig.arrive("q", PROMPT, new=24)
    rig.step()
    z = rig.arrive("z", [700 + t for t in range(40)], new=4)
    for _ in range(6):
        rig.step(rows=16)
    assert rig.events(ev.PagesSpilled), "down"
    rig.coordinator.abort(*z)
    for _ in range(10):
        rig.step()
    back = [e for e in rig.events(ev.TransferPinned) if e.kind is e.kind.RESTORE]
    back += [e for e in rig.events(ev.BlocksAdopted) if e.role is BlockRole.RESIDENT]
    assert back, "and up again"
    state = State(rig.config)
    for seq, event in rig.log.read(1):
        evolve(state, event, seq)
        bounded(state)
    rig.coordinator.abort(*q)
    rig.step()
    assert rig.drained()


@pytest.mark.parametrize("seed", range(6))
def test_after_every_event_of_any_run_both_pools_are_within_their_bounds(seed):
    world = CalmSimulation(seed, requests=6)
    assert world.run().violation is None
    state = State(world.config)
    for seq, event in world.log.read(1):
        evolve(state, event, seq)
        bounded(state)


def test_an_event_that_names_an_id_of_the_other_tier_is_refused():
    rig = SchedulerRig(make_config())
    q = rig.arrive("q", PROMPT, new=8)
    rig.step()
    row, block, page = rig.row(q), rig.blocks(q)[0], rig.host(q)[-1] or rig.host(q)[0]
    epoch = int(rig.state.blocks.epoch[block])
    wrong = [
        ev.HostPagesReleased(0, row, None, (block + 40,), (1,), (0,)),
        ev.BlocksReleased(0, BlockRole.RESIDENT, row, None, (0,), (page + 40,), (1,)),
        ev.BlocksReleased(0, BlockRole.INDEX, row, None, (0,), (block,), (epoch,)),
        ev.BlocksAdopted(0, BlockRole.INDEX, row, (5,), (block,), (epoch,)),
    ]
    for event in wrong:
        state = State(rig.config)
        for seq, past in rig.log.read(1):
            evolve(state, past, seq)
        with pytest.raises((HiSparseError, AssertionError)):
            evolve(state, event, seq + 1)
