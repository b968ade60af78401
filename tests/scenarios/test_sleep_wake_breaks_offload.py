"""H02: an engine that slept is dead on the first request after it woke.

Here sleep says no while a copy is in flight, drops what the GPU cached by events, and gives memory
up behind addresses that stay; control tables are not in it. After wake the same request decodes the
same tokens, from the host tiers if they were kept.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hisparse.backend import HiSparseBackend
from hisparse.device import open_device
from hisparse.engine.loop import ReferenceEngine
from hisparse.engine.run import Job, RunConfig
from hisparse.engine.runner import TieredRunner
from hisparse.engine.tiered import TieredCache

SMALL = {"requests": 4, "scale": 0.006, "page_size": 4, "top_k": 8, "hot_rows": 8, "suffix": "cpu"}


class World:
    """A replica under the real model, and an engine that serves it."""

    def __init__(self):
        self.job = Job(RunConfig(suffix_gib=0.0005, **SMALL))
        self.replica = HiSparseBackend(
            self.job.hisparse, device=open_device("cpu", seed=1, lag=0.8)
        )
        self.coordinator = self.replica.coordinator
        runner = TieredRunner(self.job.model, TieredCache(self.replica.worker), self.replica.rank)
        self.engine = ReferenceEngine(
            self.coordinator, self.replica.scheduler, runner, eos=self.job.model.eos
        )

    def serve(self, more):
        later = self.coordinator.state.now_us / 1000
        work = [
            replace(w, request=w.request + more, arrival_ms=w.arrival_ms + later)
            for w in self.job.workload
        ]
        hits = self.coordinator.metrics.counts["prefix_hit_pages"]
        self.engine.run(work)
        self.coordinator.checker.raise_first()
        tokens = {served.request: served.tokens for served in self.engine.done}
        found = self.coordinator.metrics.counts["prefix_hit_pages"] - hits
        return [tokens[w.request] for w in work], found


@pytest.mark.parametrize("level,kept", [(1, True), (2, False)])
def test_what_woke_decodes_the_same_tokens(level, kept):
    world = World()
    first, plain = world.serve("")
    pools = world.replica.worker.gpu_pool, world.replica.worker.host_pool
    assert world.replica.sleep(level) and world.replica.worker.asleep == level
    assert not world.replica.worker.gpu_pool.any(), "the content is gone"
    world.replica.wake_up()
    again, found = world.serve(" again")
    assert again == first
    assert (found > plain) is kept
    assert pools[0] is world.replica.worker.gpu_pool and pools[1] is world.replica.worker.host_pool


def test_it_says_no_while_a_copy_is_in_flight():
    world = World()
    refused = []

    def asked(engine):
        if world.coordinator.state.transfers:
            refused.append(world.replica.coordinator.sleep())

    world.engine.run(world.job.workload, after_step=asked)
    assert refused and not any(refused)


def test_a_shutdown_with_requests_live_aborts_and_drains_them_and_frees_all_memory():
    world = World()

    class Stop(Exception):
        pass

    def stop(engine):
        if world.coordinator.state.transfers and world.coordinator.state.rows.live.any():
            raise Stop

    with pytest.raises(Stop):
        world.engine.run(world.job.workload, after_step=stop)
    world.replica.shutdown()
    world.replica.shutdown()
    state = world.coordinator.state
    assert not state.requests and not state.transfers and not state.suffix_copies
    assert state.blocks.available == len(state.blocks.state) - 1
    assert state.pages.available == len(state.pages.state) - 1
    assert world.replica.device.statistics()["allocated_bytes"] == 0
