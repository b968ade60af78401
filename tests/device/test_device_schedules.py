"""Random schedules of the production scheduler against real copies, the copy streams held open.

Requests arrive, share prefixes, decode, end, are aborted and preempted; their blocks are spilled
and reused at once, and on a GPU kernels hold streams for random times. Rows are copied out or read
where a resolve says they are. The coordinator's checks (`spill_before_free`, `always_readable`) run
after each step; what attention read is compared with the content oracle; a GPU verifies the
checksums of rows itself. The knock-outs play schedules that the property draws from.
"""

from __future__ import annotations

import numpy as np
import pytest
from backends import close_all
from byte_rig import ByteRig
from device_rig import knock_out
from hypothesis import HealthCheck, example, given, settings
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


def play(seed, write_back, lag, holds=HOLDS[0], hold_ms=HOLD_MS[0], without=None, steps=30):
    """A run by seed; raises what it finds. Returns the rig."""
    rng = np.random.RandomState(seed)
    config = make_config(blocks=30, host_pages=60, write_back=write_back)
    rig = ByteRig(config, lag=lag, seed=seed)
    knock_out(rig.worker.transfers, without)
    rig.holds, rig.hold_ms, rig.resolves = holds, hold_ms, 0.5
    live, count = [], 0
    for _ in range(steps):
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
    rig.device.synchronize(None)
    rig.read()
    rig.poll()
    return rig


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 10_000),
    st.sampled_from(["eager", "on_pressure"]),
    st.sampled_from(LAGS),
    st.sampled_from(HOLDS),
    st.sampled_from(HOLD_MS),
)
@example(0, "on_pressure", LAGS[-1], HOLDS[1], HOLD_MS[-1])  # what the knock-outs begin with
@example(0, "on_pressure", LAGS[-1], HOLDS[2], HOLD_MS[-1])
def test_no_schedule_loses_a_row(seed, write_back, lag, holds, hold_ms):
    play(seed, write_back, lag, holds, hold_ms)
    close_all()


def test_schedules_spill_reuse_and_read_back():
    """What the property is about happens: else it would hold for nothing."""
    rig = play(5, "on_pressure", 0.5)
    assert rig.events(ev.PagesSpilled) and rig.rows_read > 100
    assert 30 < rig.rows_resolved < rig.rows_read - 100
    counts = rig.worker.statistics()
    assert counts["misses"] > 20 and counts["spills"] > 5


@pytest.mark.parametrize(
    ("without", "holds"), [("compute_after_spill", HOLDS[1]), ("d2h_after_compute", HOLDS[2])]
)
def test_without_the_ordering_edge_rows_are_lost(without, holds, backend):
    lag = LAGS[2] if backend == "cpu" else LAGS[3]
    for seed in range(12 if backend == "cpu" else 3):
        try:
            play(seed, "on_pressure", lag, holds, HOLD_MS[-1], without)
        except (AssertionError, InvariantViolation):
            return
    raise AssertionError(f"{without} left out, and no schedule shows it")
