"""H03: 1000 tokens, of which the GPU has 600 and the host 200 more: the host is counted as asked
for 1000, since its counter stands on the wrong side of the decision; a request that skips the
look-up counts as a miss.

Here every metric is a fold over the log, and nothing else writes one: it can be computed again from
any log, and compared. Each tier is asked for what the one before it did not have.
"""

from __future__ import annotations

import pytest
from kv_rig import SchedulerRig, make_config

from hisparse.fsm import events as ev
from hisparse.fsm.machines import BlockState
from hisparse.fsm.metrics import Metrics
from hisparse.fsm.wire import Table
from hisparse.testing.calm import CalmSimulation

LOOKUPS = ("gpu_prefix_queries", "gpu_prefix_hits", "host_prefix_queries", "host_prefix_hits")


def lookups(rig):
    return tuple(rig.coordinator.metrics.counts[name] for name in LOOKUPS)


def cached_pages(rig, tokens):
    """How many pages of `tokens` still have a readable block that nobody holds."""
    pages = [rig.state.prefix[name] for name in rig.hasher.extend(b"", tokens)]
    blocks = rig.state.pages.partner[pages]
    return int((rig.state.blocks.state[blocks] == BlockState.CACHED).sum())


def test_six_hundred_on_the_gpu_two_hundred_on_the_host():
    config = make_config(blocks=300, host_pages=700, longest=1100, write_back="on_pressure")
    rig = SchedulerRig(config)
    rig.check = lambda: None  # this log is long: it is checked once, at the end
    stem = list(range(800))
    first = rig.arrive("first", stem)
    rig.step(rows=1000)
    rig.finish(first)
    rig.step()
    assert cached_pages(rig, stem) == 200
    other = rig.arrive("other", [5000 + t for t in range(700)])
    while cached_pages(rig, stem) > 150:
        rig.step(rows=4, only=[other])
    rig.coordinator.abort(*other)
    rig.step()
    assert cached_pages(rig, stem) == 150
    before = lookups(rig)
    rig.arrive("again", [*stem, *range(9000, 9200)])
    rig.step()
    assert [a - b for a, b in zip(lookups(rig), before, strict=True)] == [1000, 600, 400, 200]
    del rig.check
    rig.check()


@pytest.mark.parametrize("skips", ["no whole page", "no host tier", "waits", "aborted before"])
def test_a_look_up_that_does_not_happen_changes_no_counter(skips):
    changes = {"name": "resident"} if skips == "no host tier" else {}
    rig = SchedulerRig(make_config(schedule={"max_requests": 1}, **changes))
    if skips in ("waits", "aborted before"):
        rig.arrive("first", [77, 78, 79])
        rig.step()
    before = lookups(rig)
    key = rig.arrive("q", [1, 2, 3] if skips == "no whole page" else list(range(40)))
    for _ in range(3):
        rig.coordinator.admit_waiting()
    if skips == "aborted before":
        rig.coordinator.abort(*key)
    assert lookups(rig) == before and not rig.coordinator.metrics._prompts.keys() - {key}


def test_a_page_that_is_taken_back_later_is_no_hit_of_a_look_up():
    rig = SchedulerRig(make_config(blocks=26, promote_after_steps=1, schedule={"step_rows": 16}))
    rig.arrive("q", list(range(40)), new=24)
    rig.step()
    z = rig.arrive("z", [700 + t for t in range(40)], new=4)
    for _ in range(6):
        rig.step(rows=16)
    rig.coordinator.abort(*z)
    before = lookups(rig)
    for _ in range(10):
        rig.step()
    assert rig.state.table(Table.RESIDENT)[0, :10].all(), "all of it is back"
    assert lookups(rig) == before


@pytest.mark.parametrize("seed", range(6))
def test_every_counter_is_the_fold_of_the_log_after_every_event(seed):
    world = CalmSimulation(seed, requests=6)
    again, seen = Metrics(world.config), []
    record = world.coordinator._record

    def recorded(event):
        seq = record(event)
        seen.append(dict(world.coordinator.metrics.counts))
        return seq

    world.coordinator._record = recorded
    assert world.run().violation is None
    for live, (_, event) in zip(seen, world.log.read(1), strict=True):
        again.take(event)
        assert again.counts == live
    counts = again.counts
    hits = sum(e.hit_tokens for _, e in world.log.read(1) if isinstance(e, ev.RequestAdmitted))
    assert counts["gpu_prefix_hits"] + counts["host_prefix_hits"] == hits
    assert counts["host_prefix_queries"] == (
        counts["gpu_prefix_queries"] - counts["gpu_prefix_hits"]
    )
    assert counts["host_prefix_hits"] <= counts["host_prefix_queries"]
    assert not again._prompts, "nobody waits any more"
