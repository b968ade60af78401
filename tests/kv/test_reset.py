"""`reset_prefix_cache`: no while anything is held, and both tiers wholly empty afterwards."""

from __future__ import annotations

import pytest
from kv_rig import SchedulerRig, make_config, warm

from hisparse.connector.base import KVConnectorRole
from hisparse.connector.hisparse import HiSparseConnector
from hisparse.fsm import events as ev
from hisparse.fsm.machines import BlockRole

PROMPT = list(range(40))


def wholly_free(state):
    return (
        state.blocks.free.count == len(state.blocks.state) - 1
        and state.pages.free.count == len(state.pages.state) - 1
        and not (state.prefix or state.index_prefix or state.index_hashes or state.pages.hash_of)
    )


def test_both_tiers_are_wholly_free_afterwards_and_nothing_is_found():
    rig = warm(PROMPT)
    roles = {int(r) for r in rig.state.blocks.role[rig.state.blocks.cached.ordered()]}
    assert roles == {BlockRole.RESIDENT, BlockRole.INDEX}, "both kinds were cached"
    assert rig.coordinator.reset_prefix_cache() is True
    rig.check()
    assert wholly_free(rig.state)
    again = rig.arrive("again", [*PROMPT, 7])
    rig.step()
    assert rig.state.requests[again].hit_tokens == 0


def test_the_worker_is_told_to_forget_what_went():
    rig = warm(PROMPT)
    gone = rig.state.blocks.cached.ordered().tolist(), rig.state.pages.evictable.ordered().tolist()
    rig.coordinator.reset_prefix_cache()
    command = rig.step()
    assert (sorted(command.poison_blocks), sorted(command.poison_hosts)) == tuple(
        sorted(ids) for ids in gone
    )


def held_by_a_live_request(rig):
    rig.arrive("live", [*PROMPT, 7])
    rig.step()


def held_by_a_copy_in_flight(rig):
    key = rig.arrive("ending", [900 + t for t in range(40)])
    rig.step()
    rig.step(ack=False)
    rig.finish(key)
    assert not rig.state.rows.live.any()


def held_by_a_step_that_may_still_read(rig):
    key = rig.arrive("ending", [*PROMPT, 7])
    rig.step()
    step = rig.step(ack=False).step
    rig.coordinator.abort(*key)
    assert rig.state.draining and step > rig.state.retired[0]


@pytest.mark.parametrize(
    "hold",
    [held_by_a_live_request, held_by_a_copy_in_flight, held_by_a_step_that_may_still_read],
)
def test_it_says_no_and_changes_nothing_while_anything_is(hold):
    rig = warm(PROMPT)
    hold(rig)
    before = (rig.coordinator.digest(), rig.state.seq, sorted(rig.state.prefix))
    assert rig.coordinator.reset_prefix_cache() is False
    assert before == (rig.coordinator.digest(), rig.state.seq, sorted(rig.state.prefix))


def test_what_refused_it_ends_and_then_it_goes_through():
    rig = warm(PROMPT)
    held_by_a_copy_in_flight(rig)
    rig.complete(*list(rig.state.transfers))
    rig.retire()
    assert rig.coordinator.reset_prefix_cache() and wholly_free(rig.state)


def test_a_request_that_waits_holds_nothing_and_finds_nothing_after():
    rig = warm(PROMPT)
    key = rig.arrive("waits", [*PROMPT, 7])
    assert rig.coordinator.reset_prefix_cache()
    rig.step()
    assert rig.state.requests[key].hit_tokens == 0


def test_without_offload_the_index_blocks_go():
    rig = SchedulerRig(make_config(name="resident"))
    coordinator = rig.coordinator
    epoch = coordinator.arrive("q", 40, 44, rig.hasher.extend(b"", PROMPT))
    coordinator.admit_waiting()
    coordinator.grow([0], [40])
    coordinator.rows_computed(coordinator.plan_step([0], [40]), [0], [40])
    assert not coordinator.reset_prefix_cache()
    coordinator.finish("q", epoch)
    assert coordinator.state.index_prefix
    assert coordinator.reset_prefix_cache() and wholly_free(coordinator.state)


def test_the_connector_has_the_verb_under_the_engines_name():
    rig = warm(PROMPT)
    connector = HiSparseConnector(KVConnectorRole.SCHEDULER, coordinator=rig.coordinator)
    assert connector.reset_cache() is True
    assert len(rig.events(ev.PrefixCacheReset)) == 1
    held_by_a_live_request(rig)
    assert connector.reset_cache() is False
