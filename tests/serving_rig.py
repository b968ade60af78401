"""Serving with the real model over the tiers: simulated streams, every check after every step."""

from __future__ import annotations

import numpy as np

from hisparse.backend import HiSparseBackend
from hisparse.config import (
    GIB,
    HiSparseConfig,
    PolicyConfig,
    PoolConfig,
    ScheduleConfig,
    check_capacity,
)
from hisparse.device.cpu.streams import SimDevice
from hisparse.engine.builtin import EOS
from hisparse.engine.fixed import FixedDecode
from hisparse.engine.graph import GraphCapture
from hisparse.engine.loop import ReferenceEngine
from hisparse.engine.runner import TieredRunner
from hisparse.engine.tiered import TieredCache
from hisparse.engine.verify import LiveChecks
from hisparse.engine.watch import StepWatch
from hisparse.fsm.log import MemoryLog

PAGE, LONGEST = 8, 120
OPEN = []  # replicas whose memory has to be unpinned before its addresses are used again


def prompt(seed, length):
    return np.random.RandomState(seed).randint(0, EOS, size=length).astype(np.int64)


def serve(
    model,
    workload,
    *,
    spec=0,
    gpu_blocks=40,
    chunk=32,
    after_step=None,
    fixed=False,
    check=None,
    device=None,
    **policy,
):
    """(engine, replica) after `workload` was served; nothing is leased any more. `fixed`: decode
    steps have fixed shapes, captured where `device` can."""
    layout = model.layout
    config = HiSparseConfig(
        layout=layout,
        pools=PoolConfig(
            page_size=PAGE,
            gpu_blocks=gpu_blocks,
            host_pool_gib=400 * PAGE * layout.layers * layout.row_bytes / GIB,
        ),
        policy=PolicyConfig.model_validate({"top_k": 16, "hot_rows": 32} | policy),
        schedule=ScheduleConfig(
            max_model_len=LONGEST, prefill_chunk=chunk, step_rows=64, lookahead_rows=spec
        ),
        checks="on",
    )
    device = device or SimDevice(seed=1, lag=0.5)
    replica = HiSparseBackend(check_capacity(config), device=device, log=MemoryLog(None))
    if device.name == "cuda":
        OPEN.append(replica)
    live = LiveChecks(replica.coordinator, replica.worker)
    capture = GraphCapture() if model.device.type == "cuda" else None
    cache = TieredCache(replica.worker, model.device, keep=check is not None)
    runner = TieredRunner(
        model,
        cache,
        replica.rank,
        live.probe_tables,
        spec=spec,
        fixed=FixedDecode(config, model, cache, spec=spec, capture=capture) if fixed else None,
        watch=StepWatch(replica.worker, model.device, check=check) if check else None,
    )
    engine = ReferenceEngine(
        replica.coordinator, replica.scheduler, runner, eos=model.eos, drafts=runner.drafts
    )
    if hasattr(model, "told"):
        model.told(engine)

    def checked(engine):
        live.after_step()
        found = [*replica.coordinator.checker.violations, *live.violations]
        assert not found, found[0]
        if after_step is not None:
            after_step(engine)

    engine.run(workload, after_step=checked)
    state = replica.coordinator.state
    assert state.blocks.available == len(state.blocks.state) - 1
    assert state.pages.available == len(state.pages.state) - 1
    return engine, replica


def events_of(replica, kind):
    return [event for _, event in replica.coordinator.log.read(1) if isinstance(event, kind)]


def assert_identical(engine, expected):
    """Everybody finished, with the tokens and the logits of the oracle, to the bit."""
    for served in engine.done:
        want = expected[served.request]
        assert served.outcome == "finished" and served.generated == want.tokens, served.request
        assert np.stack(served.logits).tobytes() == want.logits.tobytes()
