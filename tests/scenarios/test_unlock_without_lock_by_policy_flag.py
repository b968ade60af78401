"""A24: the policy that plans takes no lock, the acknowledgement path unlocks all the same, because
a flag said so; ranks that disagree about a failed copy trigger it.

Here the lease is its own token: the table entry, the reservation, or the transfer that holds it.
A release names it and is refused without it; no flag of the caller's stands for it, and no policy
knows about leases at all.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_rig import SchedulerRig, make_config

from hisparse.errors import IllegalTransition
from hisparse.fsm import events as ev
from hisparse.fsm.fold import evolve
from hisparse.fsm.machines import BlockRole
from hisparse.fsm.wire import TransferKind
from hisparse.testing.calm import CalmSimulation

PROMPT = list(range(40))


def unbalanced(events):
    """Leases of blocks that were released without having been taken, or were taken twice: each is
    (role, row, entry, block, epoch)."""
    held, wrong = Counter(), []
    for _, e in events:
        match e:
            case ev.BlocksReserved():
                places = e.places()
            case ev.BlocksAdopted() | ev.BlocksReleased() | ev.PagesSpilled():
                places = [(e.row, entry) for entry in e.entries]
            case ev.HotLeased():
                places = [(e.row, entry) for entry in range(len(e.blocks))]
            case _:
                continue
        role = BlockRole.HOT if isinstance(e, ev.HotLeased) else BlockRole.RESIDENT
        role = getattr(e, "role", role)
        step = -1 if isinstance(e, ev.BlocksReleased | ev.PagesSpilled) else 1
        for place, block, epoch in zip(places, e.blocks, e.epochs, strict=True):
            lease = (role, *place, block, epoch)
            held[lease] += step
            wrong += [lease] * (held[lease] not in (0, 1))
    return wrong


@pytest.mark.parametrize("policy", ["hybrid", "lru", "even", "host_first"])
@pytest.mark.parametrize("write_back", ["eager", "on_pressure"])
def test_under_every_policy_each_release_has_its_acquire(policy, write_back):
    config = make_config(
        blocks=30, name=policy, write_back=write_back, schedule={"step_rows": 16},
        promote_after_steps=1,
    )  # fmt: skip
    rig = SchedulerRig(config)
    keys = [rig.arrive(f"q{i}", [100 * i + t for t in PROMPT], new=12) for i in range(3)]
    for i in range(14):
        rig.step(rows=16)
        if i == 8:
            rig.coordinator.preempt(*keys.pop(0))
    for key in keys:
        rig.coordinator.abort(*key)
    rig.step()
    assert rig.drained() and not unbalanced(rig.log.read(1))


@settings(max_examples=12)
@given(st.tuples(*[st.sampled_from(["complete", "fail"])] * 3), st.permutations(range(3)))
def test_ranks_that_disagree_about_a_copy_release_each_lease_once(answers, order):
    rig = SchedulerRig(make_config(blocks=26, write_back="on_pressure", ranks=3))
    q = rig.arrive("q", PROMPT, new=20)
    rig.step()
    rig.arrive("z", [900 + t for t in PROMPT])
    command = rig.step(only=[q], ack=False)
    spills = [t.transfer for t in command.transfers if t.kind is TransferKind.SPILL]
    for rank in order:
        rig.enqueue(*spills, rank=rank)
    for rank in order:
        getattr(rig, answers[rank])(spills[0], rank=rank)
        rig.complete(*spills[1:], rank=rank)
    rig.retire()
    for request in list(rig.state.requests):
        rig.coordinator.abort(*request)
    for _ in range(2):
        command = rig.step(ack=False)
        for rank in range(3):
            rig.complete(*rig.state.transfers, rank=rank)
        rig.retire()
    assert rig.drained() and not unbalanced(rig.log.read(1))


@pytest.mark.parametrize("seed", range(4))
def test_in_any_world_each_release_has_its_acquire(seed):
    world = CalmSimulation(seed, requests=6)
    assert world.run().violation is None and not unbalanced(world.log.read(1))


@pytest.mark.parametrize("entries", [(), (1,)])
def test_a_release_without_the_entry_that_holds_the_page_is_refused(entries):
    rig = SchedulerRig(make_config())
    a, b = rig.arrive("a", PROMPT, new=4), rig.arrive("b", [900 + t for t in PROMPT], new=4)
    rig.step()
    page, state = rig.host(a)[0], rig.state
    for row in (rig.row(a), rig.row(b)):
        event = ev.HostPagesReleased(0, row, None, (page,), (1,), entries)
        with pytest.raises(IllegalTransition, match="not held by"):
            evolve(state, event, state.seq + 1)
    assert int(state.pages.refs[page]) == 1
