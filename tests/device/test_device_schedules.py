"""Random schedules of the production scheduler against real copies, the copy streams held open.

Requests arrive, share prefixes, decode, end, are aborted and preempted; their blocks are spilled
and reused at once, and on a GPU kernels hold streams for random times. At the end all but one are
aborted, and its pages are restored into the blocks that this sets free. Rows are copied out or read
where a resolve says they are. The coordinator's checks (`spill_before_free`, `always_readable`) run
after each step; what attention read is compared with the content oracle; a GPU verifies the
checksums of rows itself. The knock-outs leave one of the four edges out of such schedules, and only
out of those that hold with all of them.
"""

from __future__ import annotations

import re
from contextlib import suppress

import numpy as np
import pytest
from backends import close_all
from byte_rig import ByteRig
from device_rig import knock_out
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_rig import make_config

from hisparse.errors import InvariantViolation
from hisparse.fsm import events as ev
from hisparse.fsm.machines import RequestState

pytestmark = pytest.mark.usefixtures("backend")

SHARED = list(range(24))
LAGS = (0.0, 0.3, 0.8, 1.0)
HOLD_MS = (2, 20, 50)  # on a GPU; the longest is so long that the other streams are steps ahead
HOLDS = (("d2h", "h2d"), ("d2h",), ("compute",))
STEPS, LAST_STEPS = 24, 6


def play(seed, write_back, lag, holds=HOLDS[0], hold_ms=HOLD_MS[0], without=None):
    """A run by seed; raises what it finds. Returns the rig."""
    rng = np.random.RandomState(seed)
    sizes = {"blocks": 30, "host_pages": 60}
    promotion = {"promote_after_steps": 1, "promote_pages": 2}
    config = make_config(write_back=write_back, **sizes, **promotion)
    rig = ByteRig(config, lag=lag, seed=seed)
    knock_out(rig.worker.transfers, without)
    rig.holds, rig.hold_ms, rig.resolves = holds, hold_ms, 0.5
    live, count = [], 0
    for _ in range(STEPS):
        state = rig.state
        live = [k for k in live if k not in state.requests or state.requests[k].live]
        if rng.rand() < 0.4 and len(live) < 5:
            start = SHARED[: rng.randint(0, 25)]
            own = [1000 * (count + 1) + i for i in range(rng.randint(1, 20))]
            live.append(rig.arrive(f"r{count}", start + own, new=int(rng.randint(1, 16))))
            count += 1
        running = [key for key in live if key in state.requests and state.requests[key].live]
        if running and rng.rand() < 0.2:
            key = running[rng.randint(len(running))]
            ends = ["abort", "preempt"]
            if state.requests[key].state is RequestState.DECODE:
                ends.append("finish")
            getattr(rig.coordinator, ends[rng.randint(len(ends))])(*key)
        rig.step(rows=int(rng.choice([1, 4, 16])))
        if rng.rand() < 0.5:
            rig.poll()
    restore_one(rig)
    rig.device.synchronize(None)
    rig.read()
    rig.poll()
    return rig


def restore_one(rig):
    """The request with most pages off the GPU stays alone, and they come back. Before each step all
    copies are acknowledged, else a GPU that is held would give nothing back in so few steps; what
    is queued within a step is ordered by its edges alone."""
    live = [request.key for request in rig.state.by_row if request is not None and request.live]
    live.sort(key=lambda key: rig.blocks(key).count(0))
    for key in live[:-1]:
        rig.coordinator.abort(*key)
    for _ in range(LAST_STEPS):
        rig.device.synchronize(None)
        rig.poll()
        rig.step(rows=1)


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 10_000),
    st.sampled_from(["eager", "on_pressure"]),
    st.sampled_from(LAGS),
    st.sampled_from(HOLDS),
    st.sampled_from(HOLD_MS),
)
def test_no_schedule_loses_a_row(seed, write_back, lag, holds, hold_ms):
    play(seed, write_back, lag, holds, hold_ms)
    close_all()


def test_schedules_spill_reuse_and_read_back_and_restore():
    """What the property is about happens: else it would hold for nothing."""
    rig = play(5, "on_pressure", 0.5)
    assert rig.events(ev.PagesSpilled) and rig.rows_read > 100
    assert 30 < rig.rows_resolved < rig.rows_read - 100
    counts = rig.worker.statistics()
    assert counts["misses"] > 20 and counts["spills"] > 5 and counts["restores"] > 2


@pytest.mark.parametrize(
    ("without", "holds", "lag"),
    [
        ("compute_after_spill", HOLDS[1], LAGS[2]),
        ("d2h_after_compute", HOLDS[2], LAGS[2]),
        ("h2d_after_compute", HOLDS[2], LAGS[1]),
        ("compute_after_restore", HOLDS[0], LAGS[2]),
    ],
)
def test_without_an_edge_rows_are_lost_that_are_not_lost_with_it(without, holds, lag, backend):
    lag = lag if backend == "cpu" else LAGS[-1]
    for seed in range(12 if backend == "cpu" else 5):
        schedule = (seed, "on_pressure", lag, holds, HOLD_MS[-1])
        play(*schedule)
        close_all()
        try:
            play(*schedule, without)
        except (AssertionError, InvariantViolation) as lost:
            assert re.search("rows that are not its own|^content: ", str(lost)), lost
            with suppress(InvariantViolation):  # what else of it a GPU has to tell
                close_all()
            return
    raise AssertionError(f"{without} left out, and no schedule shows it")
