"""The simulator: production scheduler, connector, worker and log in one process, by seed.

A run is a function of its seed. Streams are the simulated ones of the `cpu` backend, real bytes;
the model is replaced by rows whose bytes the content oracle knows, and by random selections, so
that nothing ever waits for the device and the compute stream lags as far as the waits allow.
Prompts share prefixes, clients abort, requests are preempted; then everything has to drain.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hisparse.config import (
    GIB,
    HiSparseConfig,
    ModelLayout,
    PolicyConfig,
    PoolConfig,
    ScheduleConfig,
    SuffixConfig,
    check_capacity,
)
from hisparse.connector.base import KVConnectorOutput
from hisparse.connector.hisparse import HiSparseConnector
from hisparse.device.cpu.streams import SimDevice
from hisparse.device.rows import StepRows
from hisparse.engine.local import LocalReplica
from hisparse.engine.loop import ReferenceEngine
from hisparse.engine.served import Served
from hisparse.engine.trace import WorkloadRequest
from hisparse.engine.verify import LiveChecks
from hisparse.errors import InvariantViolation
from hisparse.fsm.cursor import LogCursor
from hisparse.fsm.events import RequestRewound
from hisparse.fsm.invariants.checker import Violation
from hisparse.fsm.log import MemoryLog
from hisparse.fsm.state import Key
from hisparse.testing.content import Chain, row_bytes

EOS = 96  # never sampled: lengths are the workload's
INDEX_CACHE = 1000  # cache numbers of the index groups, beside those of the layers


def random_config(rng: random.Random, tides: bool = False, spec: int = 0) -> HiSparseConfig:
    """A small world under pressure: few blocks, few host pages, every policy."""
    layout = ModelLayout(row_bytes=16, index_row_bytes=4, index_groups=((0, 1), (2,)))
    page_size, longest = rng.choice([2, 4, 8]), 64 if tides else rng.choice([24, 48])
    page_bytes = page_size * 48
    stride = -(-page_bytes // 256) * 256
    pages = -(-longest // page_size)
    policy = PolicyConfig(
        write_back=rng.choice(["eager", "on_pressure"]),
        top_k=4,
        hot_rows=rng.choice([4, 8, 11]),
        watermark_blocks=rng.choice([0, 0, 3]),
        name=rng.choice(["hybrid", "lru", "even"] + ["hybrid", "host_first"] * (not tides)),
        promote_pages=rng.choice([1, 4] if tides else [0, 1, 4]),
        promote_after_steps=rng.choice([1, 3, 8]),
    )
    schedule = ScheduleConfig(
        max_requests=8 if tides else rng.choice([4, 8]),
        max_model_len=longest,
        prefill_chunk=rng.choice([4, 8, 16]),
        step_rows=rng.choice([16, 32]),
        lookahead_rows=spec,
    )

    def sized(blocks: int) -> HiSparseConfig:
        host_pages = (10 if tides else rng.choice([1.3, 3, 10])) * (pages + 1)
        return HiSparseConfig(
            layout=layout,
            pools=PoolConfig(
                page_size=page_size,
                gpu_blocks=blocks,
                host_pool_gib=(int(host_pages) + 1) * stride / GIB,
            ),
            policy=policy,
            schedule=schedule,
            checks="on",
        )

    least = sized(2).steady_blocks(longest) + 1
    return check_capacity(
        sized(int(least * rng.choice([2, 3, 4] if tides else [1, 1.5, 2, 4])) + 1)
    )


def with_suffix(config: HiSparseConfig, rng: random.Random) -> HiSparseConfig:
    """The same world, in two cases of three with a CPU tier of indexer pages, small or large."""
    pages = rng.choice([0, rng.randrange(2, 30), 400])
    if not pages:
        return config
    suffix = SuffixConfig(name="cpu", gib=(pages + 0.5) * config.index_page_bytes / GIB)
    return check_capacity(config.model_copy(update={"suffix": suffix}))


def random_workload(
    rng: random.Random, longest: int, n: int, tides: bool = False
) -> list[WorkloadRequest]:
    """Requests over a few shared prefixes, arriving in bursts; or in `tides`: a few long ones stay
    while short ones squeeze them and go, so that pages can come back."""
    stems = [[rng.randrange(EOS) for _ in range(longest)] for _ in range(2)]
    work, now_ms = [], 0.0
    for i in range(n):
        total = rng.randrange(2, longest + 1)
        prompt = rng.randrange(1, total)
        if tides:
            total, prompt = (longest, 4) if i % 5 == 0 else (total // 2 + 2, total // 2 + 1)
        shared = rng.randrange(prompt + 1) if rng.random() < 0.8 else 0
        tokens = rng.choice(stems)[:shared] + [rng.randrange(EOS) for _ in range(prompt - shared)]
        now_ms += (200 if i % 5 == 4 else 0) if tides else rng.choice([0, 0, 10, 60])
        work.append(
            WorkloadRequest(f"q{i}", now_ms, np.array(tokens, dtype=np.int64), total - prompt)
        )
    return work


class TaggedRunner:
    """Writes rows that the oracle knows, reads random selections, checks bytes on the device.

    Every access is queued; the checks run inside the stream, when the bytes are read.
    """

    def __init__(
        self, connector: HiSparseConnector, device: SimDevice, live: LiveChecks, rng: random.Random
    ) -> None:
        self.connector = connector
        self.worker = connector.worker
        self.device = device
        self.live = live
        self.rng = rng
        self.random = np.random.RandomState(rng.randrange(1 << 31))
        self.engine: ReferenceEngine | None = None
        self.chains: dict[str, Chain] = {}
        self.rows_checked = 0
        self.tolerates_faults = False
        self.spec = connector.worker.config.schedule.lookahead_rows
        self.guesses = random.Random(rng.random() if self.spec else 0)
        self.tainted: dict[Key, set[tuple[int, int]]] = {}  # (step, row) that read other bytes

    def execute(
        self, meta: Any, tokens: np.ndarray, rows: StepRows, sampled: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, KVConnectorOutput]:
        self.connector.start_load_kv(meta)
        self.live.probe_tables()
        if len(tokens):
            self._forward(rows)
        self.connector.wait_for_save()
        self.device.advance(self.rng.randrange(40))
        chosen = np.array([self._choose(tokens, rows, i) for i in sampled], dtype=np.int64)
        return chosen, np.zeros((len(chosen), 0), dtype=np.float32), self.connector.get_output()

    def _choose(self, tokens: np.ndarray, rows: StepRows, i: int) -> int:
        """The token after the step's `i`-th: where a draft follows it, that one, more often than
        not."""
        follows = i + 1 < len(tokens) and rows.rows[i + 1] == rows.rows[i]
        if follows and self.guesses.random() < 0.6:
            return int(tokens[i + 1])
        return self.rng.randrange(EOS)

    def drafts(self) -> dict[int, list[int]]:
        """Drafts of everybody, some of which will stand."""
        rows = range(self.worker.config.schedule.max_requests if self.spec else 0)
        return {row: [self.guesses.randrange(EOS) for _ in range(self.spec)] for row in rows}

    def _forward(self, rows: StepRows) -> None:
        layout, tags = self.worker.config.layout, self._tags(rows)
        own = np.array([tags[r][p] for r, p in zip(rows.rows, rows.positions, strict=True)])
        for group, layers in enumerate(layout.index_groups):
            cache = INDEX_CACHE + group
            self.worker.index.write(group, rows, row_bytes(own, cache, layout.index_row_bytes))
            for row in tags:
                length = int(rows.positions[rows.rows == row].max()) + 1
                want = row_bytes(tags[row][:length], cache, layout.index_row_bytes)
                keys = self.worker.index.keys(group, row, length)
                self._expect(keys, want, f"index {group}", rows, row)
            selection = self._select(rows)
            for layer in layers:
                handle = self.worker.handles[layer]
                handle.write(rows, row_bytes(own, layer, layout.row_bytes))
                picked = handle.gather(rows, selection if layer == layers[0] else None)
                want = np.zeros((*selection.shape, layout.row_bytes), dtype=np.uint8)
                for i, (row, chosen) in enumerate(zip(rows.rows, selection, strict=True)):
                    kept = chosen >= 0
                    want[i, kept] = row_bytes(tags[row][chosen[kept]], layer, layout.row_bytes)
                self._expect(picked, want, f"layer {layer}", rows)

    def _tags(self, rows: StepRows) -> dict[int, np.ndarray]:
        """Tags of every position, by request row of the step."""
        assert self.engine is not None
        state = self.engine.coordinator.state
        tags = {}
        for row in np.unique(rows.rows).tolist():
            served = self.engine.live[state.request_of(row).key]
            tags[row] = self.chains.setdefault(served.request, Chain()).tags(
                served.tokens + served.drafts
            )
        return tags

    def _select(self, rows: StepRows) -> np.ndarray:
        """int32 [n, k]: random causal positions, some padding, some duplicates, some locality."""
        k = self.worker.config.policy.top_k
        width = np.where(self.random.rand(len(rows.positions), 1) < 0.3, 6, 1 << 30)
        reach = np.minimum(rows.positions[:, None] + 1, width)
        back = (self.random.rand(len(rows.positions), k) * reach).astype(np.int64)
        chosen = rows.positions[:, None] - back
        if self.random.rand() < 0.5:
            chosen = chosen // 2
        chosen[self.random.rand(*chosen.shape) < 0.1] = -1
        return np.asarray(chosen, dtype=np.int32)

    def _expect(
        self, pending: Any, want: np.ndarray, what: str, rows: StepRows, keys_of: int | None = None
    ) -> None:
        """Check `pending` when it is read: rows gathered for each of `rows`, or the indexer rows of
        request row `keys_of`, which all its rows of the step read. With faults, rows that read the
        page of a failed copy are noted instead: they may never be confirmed."""
        assert self.engine is not None
        state = self.engine.coordinator.state
        seq, step = state.seq, state.step
        keys = {r: state.request_of(r).key for r in set(rows.rows.tolist())}

        def check(data: np.ndarray) -> None:
            self.rows_checked += want.size // want.shape[-1]
            wrong = (data != want).any(axis=-1)
            if wrong.any() and self.tolerates_faults:
                by_row = wrong.any(axis=-1) if keys_of is None else rows.rows == keys_of
                for i in np.flatnonzero(by_row).tolist():
                    key = keys[int(rows.rows[i])]
                    self.tainted.setdefault(key, set()).add((step, int(rows.positions[i])))
            elif wrong.any():
                at = np.argwhere(wrong)[0].tolist()
                raise InvariantViolation(
                    "content", f"{what} in step {step} read other bytes at {at}", seq=seq
                )

        pending.on_done(check)


@dataclass
class SimulationResult:
    """What a run did, and the first invariant that did not hold (None: all did)."""

    seed: int
    violation: Violation | None = None
    steps: int = 0
    events: int = 0
    rows_checked: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    digest: str = ""
    log: MemoryLog | None = None


class Simulation:
    """One seed's world. `run` never raises for a fault of the code under test: it reports it."""

    def __init__(self, seed: int, *, requests: int = 14) -> None:
        self.seed = seed
        self.rng = random.Random(f"hisparse simulation {seed}")
        self.caches = random.Random(f"hisparse caches {seed}")
        tides = self.rng.random() < 0.3
        spec = random.Random(f"hisparse drafts {seed}").choice([0, 0, 1, 3])
        config = with_suffix(random_config(self.rng, tides, spec), self.caches)
        faults = random.Random(f"hisparse faults {seed}")
        answer = faults.choice(["rewind", "fail"])
        self.config = config.model_copy(
            update={"policy": config.policy.model_copy(update={"on_copy_failure": answer})}
        )
        self.log = MemoryLog(None)
        # Each extreme of lag hides two of the four waits, so the whole range is drawn.
        self.device = SimDevice(seed, lag=self.rng.choice([0.0, 0.3, 0.6, 0.9, 0.97]))
        self.fault_rate = self.rng.choice([0.0, 0.0, 0.0, 0.03, 0.3])
        replica = LocalReplica(
            self.config,
            log=self.log,
            device=self.device,
            copy_fault=lambda transfer: faults.random() < self.fault_rate,
        )
        self.coordinator, self.worker = replica.coordinator, replica.worker
        self.live = LiveChecks(self.coordinator, self.worker)
        self.runner = TaggedRunner(replica.rank, self.device, self.live, self.rng)
        self.engine = ReferenceEngine(
            self.coordinator,
            replica.scheduler,
            self.runner,
            eos=EOS,
            step_ms=10,
            drafts=self.runner.drafts,
        )
        self.runner.engine = self.engine
        self.rewound: dict[Key, list[tuple[int, int]]] = {}  # step after it, rows kept
        self._rewinds = LogCursor(self.log, 0)
        self.runner.tolerates_faults = self.fault_rate > 0
        longest = self.config.schedule.max_model_len
        self.workload = random_workload(self.rng, longest, requests, tides)
        self.disturbance = self.rng.choice([0.0, 0.02, 0.1])
        self.resets = self.naps = 0

    def _after_step(self, engine: ReferenceEngine) -> None:
        self.live.after_step()
        self._raise_first()
        self._check_tainted()
        for served in list(engine.live.values()):
            if self.rng.random() < self.disturbance:
                self._disturb(served)
        self._empty_caches()

    def _empty_caches(self) -> None:
        """Where nothing is held: a reset, or sleep for a while."""
        if self.coordinator.is_sleeping:
            if self.caches.random() < 0.4:
                self.coordinator.wake_up()
            return
        chance = self.caches.random()
        if chance < 0.15:
            self.resets += self.coordinator.reset_prefix_cache()
        elif chance < 0.3:
            self.naps += self.coordinator.sleep(self.caches.choice([1, 2]))

    def _sleep_and_come_back(self) -> None:
        """All is served; memory is given up and taken again; then some of it is asked once more."""
        self.naps += self.coordinator.sleep(1)
        self.engine.step()
        self.coordinator.wake_up()
        now_ms = self.coordinator.state.now_us / 1000
        again = [
            replace(work, request=f"{work.request}-again", arrival_ms=now_ms + 10 * i)
            for i, work in enumerate(self.workload[-4:])
        ]
        self.engine.run(again, after_step=self._after_step)

    def _check_tainted(self) -> None:
        """`no_silent_loss`: rows computed from the page of a failed copy are never confirmed; they
        are computed again, in a later step, or end with their request."""
        state = self.coordinator.state
        for _, event in self._rewinds.take():
            if isinstance(event, RequestRewound):
                key = (event.request, event.epoch)
                self.rewound.setdefault(key, []).append((state.step, event.rows))
        for key, tainted in self.runner.tainted.items():
            for end, kept in self.rewound.get(key, ()):
                tainted -= {(step, row) for step, row in tainted if step < end and row >= kept}
            request = state.requests.get(key)
            if tainted and request is not None and request.row >= 0:
                confirmed = int(state.rows.confirmed[request.row])
                row = min(row for _, row in tainted)
                if confirmed > row:
                    raise InvariantViolation(
                        "no_silent_loss",
                        f"{key} is confirmed up to {confirmed}, row {row} read a failed copy",
                        seq=state.seq,
                    )

    def _disturb(self, served: Served) -> None:
        request = self.coordinator.state.requests[served.key]
        if request.live and self.rng.random() < 0.5:
            self.engine.preempt(served)
        else:
            self.engine.abort(served)

    def _raise_first(self) -> None:
        assert self.coordinator.checker is not None
        found = [*self.coordinator.checker.violations, *self.live.violations]
        if found:
            first = min(found, key=lambda v: v.seq)
            raise InvariantViolation(first.invariant, first.message, seq=first.seq)

    def run(self) -> SimulationResult:
        """Serve, disturb, drain; returns what was found."""
        result = SimulationResult(self.seed, log=self.log)
        try:
            self.engine.run(self.workload, after_step=self._after_step)
            if self.caches.random() < 0.3:
                self._sleep_and_come_back()
            self.device.synchronize(None)
            self.live.after_step()
            self._raise_first()
        except Exception as error:
            result.violation = self._name(error)
        result.steps = self.coordinator.state.step
        result.events = self.coordinator.state.seq
        result.rows_checked = self.runner.rows_checked
        result.counts = dict(self.coordinator.metrics.counts)
        result.digest = self.coordinator.digest()
        return result

    def _name(self, error: Exception) -> Violation:
        """The violation behind `error`: a checker that saw it coming has the better name."""
        assert self.coordinator.checker is not None
        if self.coordinator.checker.violations:
            return self.coordinator.checker.violations[0]
        seen: BaseException | None = error
        while seen is not None:
            if isinstance(seen, InvariantViolation):
                return Violation(seen.invariant, seen.seq or 0, seen.message)
            seen = seen.__cause__ or seen.__context__
        return Violation(type(error).__name__, self.coordinator.state.seq, str(error))


def simulate(seed: int, *, requests: int = 14) -> SimulationResult:
    """Run the world of `seed`."""
    return Simulation(seed, requests=requests).run()
