"""B05: the gate looks at one allocator; seven requests are admitted where the host pool has room
for four, and from then on every request times out; or hot buffers are missing after admission.

Here one decision checks rows, host pages and GPU blocks (hot region, indexer blocks to the end,
resident window) together, for the request's steady state, and takes all of it or nothing. Sizes of
pages and blocks come from one configuration; there is no second allocator with sizes of its own.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_rig import SchedulerRig, make_config

from hisparse.fsm import events as ev
from hisparse.kv.budget import promised, spare


def prompt(i, n=40):
    return [1000 * i + t for t in range(n)]


def held(rig):
    """Everything that somebody holds: all columns, and all records but who waits for what."""
    state = rig.state
    columns = [
        value.tobytes()
        for part in (state.blocks, state.pages, state.rows)
        for _, value in sorted(vars(part).items())
        if isinstance(value, np.ndarray)
    ]
    return columns, state.transfers, promised(state), {
        key: (r.row, list(r.reserved), r.hot) for key, r in state.requests.items()
    }  # fmt: skip


def test_seven_requests_and_a_host_pool_for_four():
    rig = SchedulerRig(make_config(blocks=200, host_pages=4 * 11 + 3, longest=44))
    keys = [rig.arrive(f"q{i}", prompt(i)) for i in range(7)]
    rig.step(rows=16)
    assert [rig.state.requests[k].live for k in keys] == [True] * 4 + [False] * 3
    assert rig.state.requests[keys[4]].deferred == "host_pages"
    for _ in range(40):
        rig.step(rows=16)
        for key in keys:
            request = rig.state.requests.get(key)
            if request and request.live and rig.state.rows.computed[request.row] >= 43:
                rig.finish(key)
    assert not rig.state.requests, "the others had their turn, and nobody timed out"
    assert len(rig.events(ev.RequestFinished)) == 7


@pytest.mark.parametrize(
    ("change", "resource"),
    [
        ({"host_pages": 12, "blocks": 64}, "host_pages"),
        ({"blocks": 9, "host_pages": 64}, "gpu_blocks"),
        ({"schedule": {"max_requests": 1}}, "rows"),
    ],
)
def test_whichever_budget_binds_nothing_of_the_others_is_taken(change, resource):
    rig = SchedulerRig(make_config(**change))
    first = rig.arrive("first", prompt(1))
    rig.step()
    waiting = rig.arrive("waits", prompt(2))
    before = held(rig)
    for _ in range(3):
        assert not rig.coordinator.admit_waiting()
    assert rig.state.requests[waiting].deferred == resource and held(rig) == before
    rig.coordinator.abort(*first)
    rig.step()
    rig.step()
    assert rig.state.requests[waiting].live


def test_a_hot_region_and_indexer_blocks_are_promised_before_they_are_needed():
    rig = SchedulerRig(make_config(blocks=64))
    key = rig.arrive("q", prompt(1), new=20)
    rig.coordinator.admit_waiting()
    config = rig.config
    assert rig.state.requests[key].hot.name == "NONE"
    index = -(-15 // config.index_pages_per_block)
    assert promised(rig.state) == config.hot_blocks + index + config.window_pages
    assert rig.state.requests[key].steady_blocks == promised(rig.state)
    assert len(rig.state.requests[key].reserved) == 15


@settings(max_examples=5)
@given(
    st.integers(14, 60),
    st.integers(16, 80),
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 16)), min_size=2, max_size=6),
    st.sampled_from(["eager", "on_pressure"]),
)
def test_whoever_is_admitted_can_run_to_its_end(blocks, hosts, sizes, write_back):
    config = make_config(
        blocks=blocks, host_pages=hosts, write_back=write_back, schedule={"step_rows": 16}
    )
    rig = SchedulerRig(config)
    for i, (n, new) in enumerate(sizes):
        rig.arrive(f"q{i}", prompt(i, n), new=new)
    for _ in range(120):
        rig.step(rows=16)
        assert spare(rig.state) >= 0
        for request in list(rig.state.requests.values()):
            if request.live and rig.state.rows.computed[request.row] >= request.max_tokens - 1:
                rig.finish(request.key)
        if not rig.state.requests:
            break
    assert not rig.state.requests, "no livelock"
    ends = len(rig.events(ev.RequestFinished)) + len(rig.events(ev.RequestRefused))
    assert ends == len(sizes)
