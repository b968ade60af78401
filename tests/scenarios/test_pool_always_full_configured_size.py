"""G11: start-up takes tens of minutes for memory that is never used, or says "increase the size".

Here a pool is whole pages, their stride included, of no more than was configured; one that cannot
hold a request of the longest context is refused with the size that would. Pools are pinned while
the engine sets itself up and serves: `statistics()` tells how far that is
(`device/test_host_progress.py`), and a step waits for the pages that it names
(`device/test_host_reach.py`).

The arms: a budget of 180 where 40 are needed, one of 40 where 180 are, and an alignment of 2 MiB.
Of GPU, host pool and workload the least limits what runs, and what waits is told which it is.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_rig import SchedulerRig, make_config

import hisparse.config
from hisparse.config import (
    GIB,
    RESIDENT,
    HiSparseConfig,
    ModelLayout,
    PolicyConfig,
    PoolConfig,
    ScheduleConfig,
    check_capacity,
    host_page_bounds,
)
from hisparse.device.host_demand import check_node
from hisparse.device.host_limits import HostLimits, Limit
from hisparse.device.layout import Geometry
from hisparse.errors import CapacityError
from hisparse.fsm import events as ev

PAGES = 10  # of a request here: 36 tokens and 4 new ones in pages of 4


def config(host_gib, layers=8, row_bytes=656, longest=4096, requests=2, gpu_blocks=4000):
    return HiSparseConfig(
        layout=ModelLayout(
            row_bytes=row_bytes, index_row_bytes=132, index_groups=(tuple(range(layers)),)
        ),
        pools=PoolConfig(page_size=64, gpu_blocks=gpu_blocks, host_pool_gib=host_gib),
        policy=PolicyConfig(top_k=256, hot_rows=512),
        schedule=ScheduleConfig(max_requests=requests, max_model_len=longest),
    )


@given(
    st.floats(0.05, 500, allow_nan=False),
    st.integers(1, 78),
    st.sampled_from([576, 656, 1152]),
)
def test_pages_and_their_alignment_are_within_the_budget_by_construction(gib, layers, row_bytes):
    chosen = config(gib, layers, row_bytes)
    geometry = Geometry.of(chosen)
    assert geometry.host_pages * chosen.host_page_bytes <= gib * GIB
    assert (geometry.host_pages + 1) * chosen.host_page_bytes > int(gib * GIB)
    assert geometry.host_pool_bytes <= gib * GIB


@pytest.mark.parametrize(
    ("host_gib", "requests", "gpu_blocks", "bound_by", "pages"),
    [
        (180, 40, 4000, "schedule.max_requests", 40 * 64),
        (1, 180, 4000, "pools.host_pool_gib", 3196 - 1),
        (40, 180, 160, "pools.gpu_blocks", 13 * 64),
    ],
)
def test_what_bounds_the_planned_pages_is_named(host_gib, requests, gpu_blocks, bound_by, pages):
    chosen = config(host_gib, requests=requests, gpu_blocks=gpu_blocks)
    bounds = host_page_bounds(chosen)
    assert min(bounds, key=bounds.get) == bound_by and bounds[bound_by] == pages
    assert chosen.steady_blocks(4096) == 2 + 8 + 2, "window, hot region, index: 13 fit 159"
    resident = chosen.policy.model_copy(update={"name": RESIDENT})
    assert host_page_bounds(chosen.model_copy(update={"policy": resident})) == {}


def test_a_budget_below_one_request_is_refused_with_the_number_that_would_do():
    with pytest.raises(CapacityError, match=r"pools\.host_pool_gib=0\.01 holds .* use at least"):
        check_capacity(config(0.01))
    with pytest.raises(CapacityError) as caught:
        check_capacity(config(0.01))
    enough = caught.value.fixes["pools.host_pool_gib"]
    assert check_capacity(config(enough)).host_pages == config(enough).max_pages + 1


def arrivals(requests, *, host_pages, blocks=600, longest=4 * PAGES):
    """A system in its first step, with `requests` of `PAGES` pages that have come."""
    rig = SchedulerRig(make_config(blocks=blocks, host_pages=host_pages, longest=longest))
    for i in range(requests):
        rig.arrive(f"q{i}", [1000 * i + t for t in range(4 * PAGES - 4)])
    rig.step()
    return rig


def run_to_the_end(rig):
    """Every request ends when its last row is computed; the most that were live at a time."""
    most = 0
    for _ in range(400):
        live = [r for r in rig.state.requests.values() if r.live]
        most = max(most, len(live))
        for request in live:
            if rig.state.rows.computed[request.row] >= request.max_tokens - 1:
                rig.finish(request.key)
        if not rig.state.requests:
            return most
        rig.step()
    raise AssertionError("some request does not end")


def test_budget_180_need_40_nobody_waits_and_the_lowest_40_pages_are_used():
    """So what is pinned first is what is needed, and the rest is there for prefixes."""
    rig = arrivals(4, host_pages=180)
    assert run_to_the_end(rig) == 4
    assert not rig.events(ev.AdmissionDeferred)
    used = [page for event in rig.events(ev.HostPagesReserved) for page in event.pages]
    assert sorted(used) == [*range(1, 41)]


def test_budget_40_need_180_four_run_at_a_time_the_others_wait_for_host_pages_by_name():
    rig = arrivals(18, host_pages=40)
    assert run_to_the_end(rig) == 4
    assert len(rig.events(ev.RequestFinished)) == 18
    waits = [(event.resource, event.need) for event in rig.events(ev.AdmissionDeferred)]
    assert waits and set(waits) == {("host_pages", PAGES)}


def test_budget_40_and_one_request_of_180_is_refused_by_the_configuration_and_at_its_arrival():
    with pytest.raises(CapacityError, match=r"holds 41 host pages, and .* needs 181: use at least"):
        check_capacity(make_config(blocks=600, host_pages=40, longest=720))
    rig = SchedulerRig(make_config(blocks=600, host_pages=40, longest=720))
    rig.arrive("q", [*range(716)])
    refused = rig.events(ev.RequestRefused)
    assert [(e.resource, e.need, e.have) for e in refused] == [("host_pages", 180, 40)]


@pytest.mark.parametrize(
    ("requests", "host_pages", "blocks", "limiting"),
    [
        (4, 180, 600, None),
        (8, 40, 600, "host_pages"),
        (8, 180, 60, "gpu_blocks"),
        (9, 180, 600, "rows"),
    ],
)
def test_the_least_of_gpu_host_pool_and_workload_limits_and_is_named(
    requests, host_pages, blocks, limiting
):
    rig = arrivals(requests, host_pages=host_pages, blocks=blocks)
    named = {event.resource for event in rig.events(ev.AdmissionDeferred)}
    assert named == ({limiting} if limiting else set())


def test_a_budget_of_180_gib_on_a_node_with_40_is_refused_by_the_limit_that_is_short():
    machine = Limit("machine", 500 * GIB, "MemAvailable", "add memory")
    pod = Limit("cgroup /pod", 40 * GIB, "limit 64 GiB", "raise it")
    limits = HostLimits(None, (machine,), (pod,), None)
    with pytest.raises(CapacityError, match=r"cgroup /pod leaves 40 GiB") as caught:
        check_node(config(180), limits)
    assert "machine" not in str(caught.value)
    fits = caught.value.fixes["pools.host_pool_gib"]
    assert 39.9 < fits <= 40 and check_node(config(fits), limits)


@pytest.mark.parametrize("gib", [40, 180])
def test_an_alignment_of_2_mib_is_within_the_budget_too(gib, monkeypatch):
    monkeypatch.setattr(hisparse.config, "HOST_ALIGNMENT_BYTES", 2 << 20)
    chosen = config(gib, layers=61)
    assert chosen.page_bytes % (2 << 20) and chosen.host_page_bytes % (2 << 20) == 0
    pages = Geometry.of(chosen).host_pages
    assert pages * chosen.host_page_bytes <= gib * GIB < (pages + 1) * chosen.host_page_bytes
