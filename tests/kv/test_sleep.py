"""Sleep and wake on the scheduler side: what is forgotten, what is kept, and when it says no."""

from __future__ import annotations

import pytest
from kv_rig import SchedulerRig, make_config

from hisparse.errors import UsageError
from hisparse.fsm import events as ev
from hisparse.fsm.fold import fold
from hisparse.fsm.snapshot import restore, snapshot
from hisparse.fsm.state import digest

STEM = list(range(40))


def warm(**changes):
    rig = SchedulerRig(make_config(suffix_pages=40, **changes))
    key = rig.arrive("first", STEM)
    for _ in range(4):
        rig.step()
    rig.finish(key)
    for _ in range(2):
        rig.step()
    assert rig.drained()
    return rig


def test_level_1_forgets_the_gpu_and_keeps_the_host_tiers():
    rig = warm()
    host, tier = dict(rig.state.prefix), dict(rig.state.suffix_index)
    assert rig.coordinator.sleep() and rig.coordinator.is_sleeping
    assert rig.state.blocks.free.count == len(rig.state.blocks.state) - 1
    assert not rig.state.index_prefix
    assert (rig.state.prefix, rig.state.suffix_index) == (host, tier)
    assert rig.step().memory == (1,)
    rig.coordinator.wake_up()
    key = rig.arrive("again", [*STEM, 7])
    command = rig.step()
    assert command.memory == (0,) and rig.state.requests[key].hit_tokens == 40
    assert sum(t.load for t in command.index_transfers) == 10, "indexer rows from the CPU tier"
    assert len(command.transfers) == 10, "latent rows from the host pool"


def test_level_2_forgets_everything():
    rig = warm()
    assert rig.coordinator.sleep(2)
    state = rig.state
    assert not state.prefix and not state.suffix_index and not state.index_prefix
    assert state.pages.free.count == len(state.pages.state) - 1
    rig.coordinator.wake_up()
    key = rig.arrive("again", [*STEM, 7])
    rig.step()
    assert state.requests[key].hit_tokens == 0


def test_it_says_no_and_changes_nothing_while_anything_is_held():
    rig = warm()
    key = rig.arrive("live", [*STEM, 7])
    rig.step()
    rig.step(ack=False)
    for _ in range(2):
        before = rig.coordinator.digest(), rig.state.seq
        assert not rig.coordinator.sleep() and not rig.coordinator.sleep(2)
        assert before == (rig.coordinator.digest(), rig.state.seq)
        rig.coordinator.abort(*key)
    assert rig.state.draining
    rig.complete(*list(rig.state.transfers), *list(rig.state.suffix_copies))
    rig.step()
    rig.step()
    assert rig.coordinator.sleep() and not rig.coordinator.sleep(), "asleep already"


def test_requests_arrive_and_wait_until_it_wakes():
    rig = warm()
    rig.coordinator.sleep()
    key = rig.arrive("waits", STEM)
    rig.step()
    assert key in rig.state.waiting
    rig.coordinator.wake_up()
    rig.coordinator.wake_up()  # awake, it changes nothing
    rig.step()
    assert rig.state.requests[key].live and len(rig.events(ev.MemoryRestored)) == 1


def test_a_level_that_nobody_knows_is_refused():
    with pytest.raises(UsageError, match="sleep level 3: use 1"):
        warm().coordinator.sleep(3)


def test_asleep_is_in_the_digest_and_in_a_snapshot():
    rig = warm()
    rig.coordinator.sleep()
    state = restore(rig.config, snapshot(rig.state))
    assert state.asleep == 1 and digest(state) == rig.coordinator.digest()
    assert digest(fold(rig.config, rig.log.read(1))) == rig.coordinator.digest()
    state.asleep = 2
    assert digest(state) != rig.coordinator.digest()
