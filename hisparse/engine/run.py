"""The main job: serve a workload over the tiers, verify every bit, and report.

1. oracle      every request alone, everything resident, no pools at all
2. hisparse    the same requests through scheduler, log, worker and tiers, checked as it runs
3. resident    the same arrivals and tokens through the same scheduler with offload off, at the
               same GPU budget and without bound: concurrency and peak blocks (no forward pass)
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from hisparse.backend import HiSparseBackend
from hisparse.config import HiSparseConfig, ceil_div, check_sizes
from hisparse.config_check import checked_config
from hisparse.config_packing import packed
from hisparse.device import open_device
from hisparse.device.cuda.kernels import ResolveSizes
from hisparse.engine.builtin import BuiltinModel
from hisparse.engine.fixed import FixedDecode, refuse_unfit
from hisparse.engine.graph import GraphCapture
from hisparse.engine.loop import ReferenceEngine
from hisparse.engine.options import RunConfig, sections_of
from hisparse.engine.options_check import refuse_lost_selections, refuse_mismatched
from hisparse.engine.reference import FixedModel, Model, ReferenceResult, reference_decode_many
from hisparse.engine.report import served_figures, verified_figures
from hisparse.engine.resident import ResidentBaseline
from hisparse.engine.runner import TieredRunner
from hisparse.engine.selections import STREAM as SELECTIONS
from hisparse.engine.selections import SelectionRecorder, SelectionsTaken
from hisparse.engine.served import Served
from hisparse.engine.tiered import TieredCache
from hisparse.engine.trace import WorkloadRequest, read_trace, scale_trace
from hisparse.engine.trace_generate import generate_trace
from hisparse.engine.verify import ContentOracle, LiveChecks
from hisparse.engine.watch import StepWatch
from hisparse.errors import ConfigError, UsageError
from hisparse.fsm.codec import Codec
from hisparse.fsm.events import EVENT_TYPES, Event
from hisparse.fsm.log import EventLog
from hisparse.fsm.log_disk import DiskLog
from hisparse.fsm.log_open import open_log
from hisparse.fsm.snapshot import snapshot
from hisparse.fsm.state_size import check_state

Progress = Callable[[str, int, int], None]
BuildModel = Callable[[RunConfig, int], Model]  # (options, positions that it must accept)


def build_builtin(config: RunConfig, max_model_len: int) -> BuiltinModel:
    """The built-in model, with a draft head where there are drafts."""
    if config.model != "builtin":
        raise UsageError(f"model={config.model!r}: give Job a `build` that makes it")
    return BuiltinModel(
        seed=config.seed,
        top_k=config.top_k,
        max_model_len=max_model_len,
        draft=config.spec > 0,
        device="cuda" if config.device == "cuda" else "cpu",
    )


def load_workload(config: RunConfig, model: Model) -> list[WorkloadRequest]:
    """The first `requests` requests of the trace (or of a generated one), scaled."""
    if config.trace is None:
        trace = generate_trace(config.requests, config.seed)
    else:
        trace = read_trace(config.trace, limit=config.requests)
    if not trace:
        raise ConfigError(f"trace={str(config.trace)!r} holds no request: nothing to serve")
    return scale_trace(
        trace, config.scale, seed=config.seed, vocab_size=model.vocab_size, eos=model.eos
    )


def build_config(config: RunConfig, model: Model, longest: int) -> HiSparseConfig:
    """The shared configuration for requests of at most `longest` tokens.

    Without `gpu_blocks` the pool is the smallest in which the longest request fits all-resident.
    """

    sized = partial(sections_of, config, model.layout, longest=longest)
    if config.gpu_blocks is not None:
        return checked_config(sized(config.gpu_blocks))
    probe = packed(check_sizes(HiSparseConfig.model_validate(sized(2))))
    pages = ceil_div(longest, config.page_size)
    resident = pages + ceil_div(pages, probe.index_pages_per_block) + 1
    return checked_config(sized(max(resident, probe.steady_blocks(longest) + 1)))


def choose_some(
    workload: list[WorkloadRequest], what: str, rate: float, seed: int
) -> dict[str, int]:
    """A seeded share of the requests, each with the generated tokens after which `what` happens."""
    rng = random.Random(f"{what} {seed}")
    return {
        work.request: rng.randrange(0, max(work.max_new, 1))
        for work in workload
        if rng.random() < rate
    }


class Job:
    """One `hisparse run`, step by step.

    Args:
        config: its options.
        progress: called with (stage, done, total).
        build: makes the model that `config.model` names; it has to be batch-invariant.
    """

    def __init__(
        self,
        config: RunConfig,
        progress: Progress | None = None,
        *,
        build: BuildModel = build_builtin,
    ) -> None:
        refuse_mismatched(config)
        refuse_lost_selections(config)
        self.config = config
        self.progress = progress or (lambda stage, done, total: None)
        device = open_device(config.device, seed=config.seed, lag=0.5)
        self.workload = load_workload(config, build(config, 1))
        longest = max(len(work.prompt) + work.max_new for work in self.workload)
        self.model = build(config, longest + config.spec)  # drafts may lie behind the last token
        self.hisparse = build_config(config, self.model, longest)
        if self.hisparse.log.mode == "disk":
            check_state(self.hisparse)
        self.aborts = choose_some(self.workload, "aborts", config.abort_rate, config.seed)
        rate = config.preempt_rate
        self.preemptions = choose_some(self.workload, "preemptions", rate, config.seed)
        if config.device == "cuda":  # what would else be found after the oracle's minutes
            ResolveSizes.of(self.hisparse)
        if config.graph:
            refuse_unfit(self.hisparse, config.spec)
        self.device = device
        self.capture = GraphCapture() if config.graph else None
        self.seconds: dict[str, float] = {}

    def run(self) -> dict[str, Any]:
        """All three parts; returns the report."""
        log = self._open_log("scheduler")
        try:
            return self._served(self._oracle() if self.config.verify else {}, log)
        finally:
            log.close()

    def _open_log(self, stream: str, types: tuple[type[Event], ...] = EVENT_TYPES) -> EventLog:
        return open_log(
            self.hisparse.log,
            Codec(types),
            stream=stream,
            config_json=self.hisparse.model_dump_json(),
        )

    def _oracle(self) -> dict[str, ReferenceResult]:
        start = time.perf_counter()
        # indexers of transformers hold the whole context of each row of a step
        chunk, batch = (256, 32) if self.config.model == "builtin" else (64, 8)
        results = reference_decode_many(
            self.model,
            [work.prompt for work in self.workload],
            [work.max_new for work in self.workload],
            chunk=chunk,
            batch=batch,
            progress=lambda done, total: self.progress("oracle", done, total),
        )
        self.seconds["oracle"] = time.perf_counter() - start
        return {work.request: r for work, r in zip(self.workload, results, strict=True)}

    def _served(self, expected: dict[str, ReferenceResult], log: EventLog) -> dict[str, Any]:
        start = time.perf_counter()
        verify, log_mode = self.config.verify, self.hisparse.log.mode
        rank_log = self._open_log("rank-0") if log_mode == "disk" else None
        sink = rank_log.append if rank_log is not None else None
        replica = HiSparseBackend(self.hisparse, log=log, device=self.device, sink=sink)
        coordinator, worker = replica.coordinator, replica.worker
        oracle, live = ContentOracle(expected), LiveChecks(coordinator, worker)
        selections = self._recorder(replica)

        watch = None
        if verify or selections is not None:
            check = oracle if verify else None
            watch = StepWatch(worker, self.model.device, check=check, recorder=selections)
        runner = self._runner(replica, live.probe_tables if verify else None, watch)
        engine = ReferenceEngine(
            coordinator,
            replica.scheduler,
            runner,
            eos=self.model.eos,
            salt=f"{self.config.model}-{self.config.seed}".encode(),
            step_ms=self.config.step_ms,
            drafts=runner.drafts,
        )
        oracle.engine = engine

        def after_step(engine: ReferenceEngine) -> None:
            if rank_log is not None:
                rank_log.commit()
            if selections is not None:
                selections.log.commit()
            if isinstance(log, DiskLog) and log.snapshot_due:
                log.snapshot(coordinator.state.seq, snapshot(coordinator.state))
            if verify:
                live.after_step()
            self.progress("hisparse", len(engine.done), len(self.workload))

        served = engine.run(
            self.workload,
            abort_at=self.aborts,
            preempt_at=self.preemptions,
            after_step=after_step,
        )
        self.seconds["hisparse"] = time.perf_counter() - start
        device = worker.statistics()  # of memory that the shutdown frees
        replica.shutdown()  # its last acknowledgements are events too: figures come after it
        if rank_log is not None:
            rank_log.close()
        if selections is not None:
            selections.log.close()
        report = served_figures(self.config, self.hisparse, engine, served, device)
        report |= self._device_figures(runner)
        report |= verified_figures(expected, served, engine.coordinator, oracle, live)
        report |= self._resident(served)
        report["seconds"] = {name: round(value, 3) for name, value in self.seconds.items()}
        return report

    def _runner(
        self, replica: HiSparseBackend, on_begin: Callable[[], None] | None, watch: StepWatch | None
    ) -> TieredRunner:
        spec, verify = self.config.spec, self.config.verify
        cache = TieredCache(replica.worker, self.model.device, keep=watch is not None)
        fixed = None
        if self.capture is not None:
            model = cast(FixedModel, self.model)  # others were refused
            fixed = FixedDecode(
                self.hisparse, model, cache, spec=spec, logits=verify, capture=self.capture
            )
        return TieredRunner(
            self.model,
            cache,
            replica.rank,
            on_begin,
            spec=spec,
            fixed=fixed,
            watch=watch,
            logits=verify,
        )

    def _device_figures(self, runner: TieredRunner) -> dict[str, int]:
        """What ran on a GPU, and how; nothing of simulated streams."""
        if self.config.device != "cuda":
            return {}
        figures = {
            "steps_eager": runner.steps["eager"],
            "kernel_launches": self.device.statistics()["launches"],
        }
        if self.capture is not None:
            assert self.capture.replays == runner.steps["fixed"]
            figures["steps_replayed"] = self.capture.replays
            figures["graphs_captured"] = len(self.capture.nodes)
            figures["graph_nodes_max"] = max(self.capture.nodes, default=0)
        return figures

    def _recorder(self, replica: HiSparseBackend) -> SelectionRecorder | None:
        if not self.config.record_selections:
            return None
        log = self._open_log(SELECTIONS, (SelectionsTaken,))
        one_in = self.config.record_selections
        page_size = self.hisparse.pools.page_size
        return SelectionRecorder(replica.coordinator.state, page_size, log, one_in)

    def _resident(self, served: list[Served]) -> dict[str, int]:
        start = time.perf_counter()
        baseline = ResidentBaseline(
            self.hisparse,
            self.workload,
            served,
            eos=self.model.eos,
            step_ms=self.config.step_ms,
            abort_at=self.aborts,
        )
        figures = baseline.figures()
        self.seconds["resident"] = time.perf_counter() - start
        return figures


def succeeded(report: dict[str, Any]) -> bool:
    """Exit code 0: tokens identical (or not verified) and nothing violated."""
    return report["tokens_identical"] is not False and not report["invariants"]["violations"]


def as_json(report: dict[str, Any]) -> str:
    return json.dumps(report, indent=2, default=float)
