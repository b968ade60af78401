"""The CPU tier of indexer pages under the real model: more is found, and every bit is the same."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hisparse.backend import HiSparseBackend
from hisparse.device import open_device
from hisparse.engine.loop import ReferenceEngine
from hisparse.engine.run import Job, RunConfig
from hisparse.engine.runner import TieredRunner
from hisparse.engine.tiered import TieredCache
from hisparse.fsm.events import BlocksEvicted
from hisparse.fsm.machines import BlockRole

SMALL = {"requests": 8, "scale": 0.006, "page_size": 4, "top_k": 8, "hot_rows": 8, "step_ms": 100.0}


def served_twice(suffix, copy_fault=None, **policy):
    """A workload, then the same prompts once more after the GPU lost all indexer rows: the tokens
    of both rounds, and what the second one did."""
    job = Job(RunConfig(suffix=suffix, suffix_gib=0.0005, **SMALL))
    device = open_device("cpu", seed=3, lag=0.5)
    policy = job.hisparse.policy.model_copy(update=policy)
    config = job.hisparse.model_copy(update={"policy": policy})
    replica = HiSparseBackend(config, device=device, copy_fault=copy_fault)
    coordinator = replica.coordinator
    runner = TieredRunner(job.model, TieredCache(replica.worker), replica.rank)
    engine = ReferenceEngine(coordinator, replica.scheduler, runner, eos=job.model.eos)
    engine.run(job.workload)
    cached = coordinator.state.blocks.cached.ordered()
    gone = cached[coordinator.state.blocks.role[cached] == BlockRole.INDEX]
    epochs = coordinator.state.blocks.epoch[gone].tolist()
    coordinator._record(BlocksEvicted(0, tuple(gone.tolist()), tuple(epochs)))
    before = dict(coordinator.metrics.counts)
    later = coordinator.state.now_us / 1000
    engine.run(
        [
            replace(work, request=f"{work.request} again", arrival_ms=work.arrival_ms + later)
            for work in job.workload
        ]
    )
    coordinator.checker.raise_first()
    counts = {name: n - before[name] for name, n in coordinator.metrics.counts.items()}
    tokens = {served.request: served.tokens for served in engine.done}
    assert all(served.outcome == "finished" for served in engine.done)
    return [[tokens[w.request + more] for w in job.workload] for more in ("", " again")], counts


def test_prefixes_whose_indexer_rows_were_evicted_are_found_again():
    (first, again), counts = served_twice("cpu")
    (_, plain), without = served_twice("none")
    assert first == again == plain
    assert counts["suffix_pages_loaded"] == counts["suffix_pages_asked"] > 0
    assert without["prefix_hit_pages"] < counts["prefix_hit_pages"]
    assert counts["rows_computed"] < without["rows_computed"]


@pytest.mark.parametrize(("policy", "how"), [("rewind", "rewinds"), ("fail", "preemptions")])
@pytest.mark.parametrize("seed", [0, 1])
def test_failed_loads_cost_time_and_no_bit(seed, policy, how):
    rng = random.Random(seed)

    def fails(transfer):
        return getattr(transfer, "load", False) and rng.random() < 0.1

    (first, again), counts = served_twice("cpu", fails, on_copy_failure=policy)
    assert first == again
    assert counts["suffix_copies_failed"] and counts[how]
    assert counts["rewinds"] + counts["preemptions"] == counts[how]
