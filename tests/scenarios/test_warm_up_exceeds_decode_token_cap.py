"""H09: an engine profiles with as many rows as it may batch, the tier takes fewer, and start-up
crashes; or the dummy rows stay behind in the replacement order and the counters.

Here a rank says what it takes (`capabilities`), and makes the dummy step itself (`warm_up`): of
padding rows, which every kernel passes over, and of no more rows than it takes.
"""

from __future__ import annotations

import numpy as np
import pytest
from byte_rig import ByteRig
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_rig import make_config

from hisparse.device.cpu.streams import SimDevice
from hisparse.device.worker import HiSparseWorker
from hisparse.errors import UsageError


def profile(worker, rows, k=4):
    """What an engine's dummy forward does: writes and gathers of every layer, any selection."""
    layout = worker.config.layout
    with worker.warm_up(rows) as step:
        n, read = len(step.rows), []
        for group, layers in enumerate(layout.index_groups):
            worker.index.write(group, step, np.full((n, layout.index_row_bytes), 7, np.uint8))
            for layer in layers:
                handle = worker.handles[layer]
                handle.write(step, np.full((n, layout.row_bytes), 7, np.uint8))
                chosen = np.arange(n * k).reshape(n, k) if layer == layers[0] else None
                read.append(handle.gather(step, chosen))
    return [pending.result() for pending in read]


def trace(worker):
    """Everything that a step could leave behind."""
    resolvers = [r.resolver for r in worker._runtimes if r.resolver is not None]
    arrays = [worker.gpu_pool, worker.host_pool]
    arrays += [worker.tables[table] for table in worker.tables.entries]
    arrays += [v for r in resolvers for v in vars(r).values() if isinstance(v, np.ndarray)]
    counters = [v for r in resolvers for n, v in sorted(vars(r).items()) if isinstance(v, int)]
    groups = [(g.step, len(g.calls), dict(g.replayed)) for g in worker.groups]
    cursor = (worker.to_seq, worker._step, worker._last_step, worker.acks.last_seq)
    counters += [r.statistics() for r in worker._runtimes]
    return [a.tobytes() for a in arrays], counters, groups, cursor, worker.statistics()


def test_a_dummy_batch_larger_than_the_rank_takes_is_refused_with_the_limit():
    worker = HiSparseWorker(make_config(schedule={"step_rows": 16}), SimDevice())
    assert worker.capabilities.rows == 16
    with pytest.raises(UsageError, match=r"warm_up\(2048\): this rank takes 1\.\.16 rows"):
        profile(worker, 2048)
    for read in profile(worker, worker.capabilities.rows):
        assert read.shape == (16, 4, 32) and not read.any(), "padding reads zeros"


@settings(max_examples=20)
@given(st.integers(1, 64), st.lists(st.integers(0, 2), min_size=1, max_size=4))
def test_before_the_first_command_it_leaves_no_trace(rows, repeats):
    events = []
    worker = HiSparseWorker(make_config(), SimDevice(), sink=events.append)
    before, said = trace(worker), list(events)
    for _ in repeats:
        profile(worker, rows)
    assert trace(worker) == before and events == said
    assert worker.poll() is None


def test_without_a_host_tier_it_leaves_no_trace_either():
    worker = HiSparseWorker(make_config(name="resident"), SimDevice())
    before = trace(worker)
    profile(worker, 8)
    assert trace(worker) == before and worker.capabilities.wave_rows == 0


@pytest.mark.parametrize("policy", ["hybrid", "host_first"])
def test_between_steps_it_leaves_no_trace_and_serving_reads_its_own_rows(policy):
    rig = ByteRig(make_config(name=policy), lag=0.6)
    rig.arrive("q", list(range(40)), new=16)
    for i in range(8):
        rig.step()
        rig.device.synchronize(None)
        before = trace(rig.worker)
        profile(rig.worker, 1 + 7 * i)
        assert trace(rig.worker) == before
        rig.poll()
    assert rig.rows_read


def test_inside_a_step_or_after_the_end_it_is_refused():
    rig = ByteRig(make_config())
    command = rig.send()
    rig.worker.begin_step(command)
    with pytest.raises(UsageError, match="inside step"):
        rig.worker.warm_up(1)
    rig.worker.end_step(command.step)
    rig.worker.shutdown()
    with pytest.raises(UsageError, match="closed"):
        rig.worker.warm_up(1)


def test_a_follower_that_is_left_out_is_told():
    worker = HiSparseWorker(make_config(), SimDevice())
    with pytest.raises(UsageError, match="did not gather"), worker.warm_up(2) as step:
        worker.handles[0].gather(step, np.zeros((2, 4), dtype=np.int32))
    assert worker.statistics()["hits"] == 0
