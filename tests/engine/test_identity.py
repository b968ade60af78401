"""Bit identity over the tiers, with the real model: whatever became of a request's pages, its
tokens and logits are those of the dense oracle. And what offload is for: more requests a pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hisparse.config import (
    GIB,
    HiSparseConfig,
    PolicyConfig,
    PoolConfig,
    ScheduleConfig,
    check_capacity,
)
from hisparse.connector.base import KVConnectorRole
from hisparse.connector.hisparse import HiSparseConnector
from hisparse.device.cpu.streams import SimDevice
from hisparse.device.worker import HiSparseWorker
from hisparse.engine.builtin import EOS, BuiltinModel
from hisparse.engine.loop import ReferenceEngine
from hisparse.engine.options import RunConfig
from hisparse.engine.reference import reference_decode_many
from hisparse.engine.run import Job
from hisparse.engine.runner import TieredRunner
from hisparse.engine.served import Served
from hisparse.engine.tiered import TieredCache
from hisparse.engine.trace import WorkloadRequest, write_trace
from hisparse.engine.trace_generate import generate_trace
from hisparse.fsm.log import MemoryLog
from hisparse.fsm.machines import RequestState
from hisparse.kv.coordinator import HiSparseCoordinator

PAGE, LONGEST = 8, 160
LATER_MS = 1e6  # after everything before it has ended


@pytest.fixture(scope="module")
def model() -> BuiltinModel:
    return BuiltinModel(seed=11, top_k=16, max_model_len=LONGEST)


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.RandomState(seed).randint(0, EOS, size=length).astype(np.int64)


@dataclass
class Run:
    """What was served, by request, and the counters of both sides."""

    served: dict[str, Served]
    counts: dict[str, int]
    device: dict[str, int]

    @property
    def tokens(self) -> dict[str, list[int]]:
        return {name: request.generated for name, request in self.served.items()}


def serve(
    model: BuiltinModel,
    workload: Sequence[WorkloadRequest],
    *,
    gpu_blocks: int,
    write_back: str = "eager",
    index_pages: int = 0,
    after_step: Callable[[ReferenceEngine], None] | None = None,
) -> Run:
    """Serve `workload` through scheduler, connector, worker and tiers, on simulated streams."""
    pages = 40 * LONGEST // PAGE
    config = check_capacity(
        HiSparseConfig(
            layout=model.layout,
            pools=PoolConfig(
                page_size=PAGE,
                gpu_blocks=gpu_blocks,
                index_pages_per_block=index_pages,
                host_pool_gib=pages * PAGE * model.layout.layers * model.layout.row_bytes / GIB,
            ),
            policy=PolicyConfig.model_validate(
                {"top_k": model.top_k, "hot_rows": 32, "write_back": write_back}
            ),
            schedule=ScheduleConfig(max_model_len=LONGEST, prefill_chunk=32, step_rows=64),
            checks="on",
        )
    )
    coordinator = HiSparseCoordinator(config, MemoryLog(0))
    worker = HiSparseWorker(config, SimDevice(seed=1, lag=0.5))
    engine = ReferenceEngine(
        coordinator,
        HiSparseConnector(KVConnectorRole.SCHEDULER, coordinator=coordinator),
        TieredRunner(
            model, TieredCache(worker), HiSparseConnector(KVConnectorRole.WORKER, worker=worker)
        ),
        eos=model.eos,
    )
    served = engine.run(workload, after_step=after_step)
    assert [request.outcome for request in served] == ["finished"] * len(workload)
    counts, device = dict(coordinator.metrics.counts), worker.statistics()
    worker.shutdown()
    return Run({request.request: request for request in served}, counts, device)


def bits(request: Served) -> bytes:
    return np.stack(request.logits).tobytes()


# -- a prefix hit: the same prompt cold, and then warm ---------------------------------------------
COLD = WorkloadRequest("cold", 0.0, prompt(0, 100), 40)


def warm(at_ms: float) -> WorkloadRequest:
    return WorkloadRequest("warm", at_ms, COLD.prompt, COLD.max_new)


def others(count: int) -> list[WorkloadRequest]:
    return [WorkloadRequest(f"other{i}", 1.0, prompt(1 + i, 120), 20) for i in range(count)]


# name -> (pool, workload, whether pages of the hit were adopted on the GPU, and restored to it)
WARM = {
    "its_pages_are_adopted": (40, [COLD, warm(LATER_MS)], (True, False)),
    "its_pages_are_restored": (40, [COLD, *others(2), warm(300.0)], (False, True)),
    "its_pages_are_read_from_the_host": (50, [COLD, *others(1), warm(100.0)], (False, False)),
}


@pytest.mark.parametrize("name", WARM)
def test_a_warm_request_has_the_logits_of_the_cold_one(model: BuiltinModel, name: str) -> None:
    gpu_blocks, workload, placed = WARM[name]
    run = serve(model, workload, gpu_blocks=gpu_blocks)
    hit_tokens = run.counts["prefix_hit_pages"] * PAGE
    computed = sum(len(request.tokens) - 1 for request in run.served.values())
    assert hit_tokens > 0 and run.counts["rows_computed"] == computed - hit_tokens
    assert (run.counts["blocks_adopted"] > 0, run.counts["restores"] > 0) == placed
    assert any(placed) or run.device["host_rows"] > 0
    assert len(run.tokens["cold"]) > 1 and run.tokens["warm"] == run.tokens["cold"]
    assert bits(run.served["warm"]) == bits(run.served["cold"])


# -- preemption: taken off the GPU in the middle of decode, and back by prefix and recompute -------
CROWD = [WorkloadRequest(f"q{i}", 0.0, prompt(i, 60 + 10 * i), 12) for i in range(6)]


class Preemptions:
    """Preempts the first `most` requests that are in decode after `tokens` tokens, once each."""

    def __init__(self, most: int, tokens: int) -> None:
        self.most, self.tokens = most, tokens
        self.names: set[str] = set()

    def __call__(self, engine: ReferenceEngine) -> None:
        for served in list(engine.live.values()):
            state = engine.coordinator.state.requests[served.key].state
            due = len(served.generated) == self.tokens and served.request not in self.names
            if state is RequestState.DECODE and due and len(self.names) < self.most:
                self.names.add(served.request)
                engine.preempt(served)


def test_a_preempted_decode_goes_on_as_the_oracle_does(model: BuiltinModel) -> None:
    run = serve(model, CROWD, gpu_blocks=60, after_step=Preemptions(most=4, tokens=4))
    expected = reference_decode_many(
        model, [work.prompt for work in CROWD], [work.max_new for work in CROWD], chunk=64
    )
    assert run.counts["preemptions"] == 4
    assert run.counts["restores"] > 0 and run.device["host_rows"] > 0  # both ways back were taken
    for work, want in zip(CROWD, expected, strict=True):
        assert run.tokens[work.request] == want.tokens
        assert bits(run.served[work.request]) == want.logits.tobytes()


# -- policies --------------------------------------------------------------------------------------
def test_when_pages_are_written_back_changes_no_token(model: BuiltinModel) -> None:
    eager = serve(model, CROWD, gpu_blocks=40, write_back="eager")
    late = serve(model, CROWD, gpu_blocks=40, write_back="on_pressure")
    assert eager.device["host_rows"] > 0 and late.device["host_rows"] > 0
    # the policies did differ: under pressure more pages go by a copy that was made for it
    assert late.counts["spills_planned"] > eager.counts["spills_planned"]
    assert late.tokens == eager.tokens


@pytest.mark.parametrize("index_pages", [3, 25])
def test_how_blocks_are_shaped_changes_no_token(model: BuiltinModel, index_pages: int) -> None:
    """Fewer indexer pages a block than would fit; and more, so that pages of rows leave a tail."""
    plain = serve(model, CROWD, gpu_blocks=60)
    run = serve(model, CROWD, gpu_blocks=60, index_pages=index_pages)
    assert run.device["host_rows"] > 0 and run.tokens == plain.tokens
    assert all(bits(run.served[name]) == bits(plain.served[name]) for name in run.served)


def test_offload_holds_three_times_the_requests_in_the_same_pool(tmp_path: Path) -> None:
    trace = generate_trace(
        16,
        seed=3,
        requests_per_s=50,
        median_input=10_000,
        sigma_input=0.2,
        median_output=1000,
        sigma_output=0.1,
        followups=0,
    )
    write_trace(tmp_path / "load.jsonl", trace)
    options = RunConfig(
        trace=tmp_path / "load.jsonl", requests=16, scale=0.04, step_ms=10, gpu_blocks=100
    )
    report = Job(options).run()
    assert report["requests_finished"] == 16 and report["tokens_identical"] is True
    assert report["concurrent_requests_resident"] * 3 <= report["concurrent_requests_hisparse"]
