"""B04: the GPU is full of resident pages that the host holds too, the host has room, and a request
is refused because the gate asks for blocks that are free right now.

Here admission asks for what a request needs to be sure to finish, and reclaims for it before the
answer is "wait"; a wait names the resource that binds. The tests use the default policy.
"""

from __future__ import annotations

import pytest
from kv_rig import SchedulerRig, make_config

from hisparse.config import PolicyConfig
from hisparse.fsm import events as ev
from hisparse.fsm.fold import evolve
from hisparse.fsm.state import State
from hisparse.kv.budget import excess_pages
from hisparse.testing.calm import CalmSimulation


def prompt(i):
    return [1000 * i + t for t in range(40)]


def full(new=4, **changes):
    """Two requests hold all that is not promised, every page of theirs is on the host."""
    rig = SchedulerRig(make_config(blocks=30, host_pages=60, schedule={"step_rows": 16}, **changes))
    keys = [rig.arrive(name, prompt(i), new=new) for i, name in enumerate("ab")]
    for _ in range(3):
        rig.step()
    return rig, keys


def test_clean_resident_pages_are_room():
    rig, keys = full()
    default = PolicyConfig(top_k=4, hot_rows=8)
    assert rig.config.policy == default, "what users run"
    assert rig.state.blocks.free.count < rig.config.steady_blocks(44)
    c = rig.arrive("c", prompt(3))
    for _ in range(2):
        rig.step()
    assert rig.state.requests[c].live and all(rig.state.requests[k].live for k in keys)
    first = rig.events(ev.PolicyChosen)[0]
    assert first.resource == "admission" and first.need > 0


@pytest.mark.parametrize("write_back", ["eager", "on_pressure"])
@pytest.mark.parametrize("policy", ["hybrid", "lru", "even"])
def test_more_requests_run_than_would_fit_resident(policy, write_back):
    rig, _ = full(12, name=policy, write_back=write_back)
    rig.arrive("c", prompt(3), new=12)
    most = 0
    for _ in range(6):
        rig.step(rows=16)
        most = max(most, int(rig.state.rows.live.sum()))
    resident = rig.config.model_copy(
        update={"policy": rig.config.policy.model_copy(update={"name": "resident"})}
    )
    assert most == 3 > (rig.config.pools.gpu_blocks - 1) // resident.steady_blocks(52)


def refused_unasked(config, events):
    """Waits for GPU blocks that were told before anything was asked to leave, though it could."""
    state, asked, wrong = State(config), False, []
    for seq, event in events:
        if event.is_input and not isinstance(event, ev.PolicyChosen):
            asked = False
        asked |= isinstance(event, ev.PolicyChosen) and event.resource == "admission"
        if isinstance(event, ev.AdmissionDeferred) and event.resource == "gpu_blocks":
            could = int(excess_pages(state).sum()) > 0
            enough = int(state.rows.spilling.sum()) >= event.need - event.have
            if could and not asked and not enough and config.offload:
                wrong.append((seq, event))
        evolve(state, event, seq)
    return wrong


def test_in_any_world_reclaiming_comes_before_a_wait_and_a_wait_has_a_name():
    waits = 0
    for seed in range(5):
        world = CalmSimulation(seed, requests=8)
        assert world.run().violation is None
        assert not refused_unasked(world.config, world.log.read(1))
        for _, event in world.log.read(1):
            if isinstance(event, ev.AdmissionDeferred):
                waits += 1
                assert event.resource in ("rows", "host_pages", "gpu_blocks", "suffix_copy")
                assert event.need > event.have
    assert waits > 10
