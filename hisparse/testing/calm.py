"""The calm world: production scheduler, connector, one worker and log in one process, by seed.

A run is a function of its seed; tests take logs and states from it. Its only faults are copies
that fail: `hisparse.testing.simulator` is the world where everything goes wrong. Streams are the
simulated ones of the `cpu` backend, with real bytes; the model is replaced by rows whose bytes the
content oracle knows, and by random selections, so that nothing ever waits for the device and the
compute stream lags as far as the waits allow. Prompts share prefixes, clients abort, requests are
preempted; then everything has to drain.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hisparse.backend import HiSparseBackend
from hisparse.connector.base import KVConnectorOutput
from hisparse.connector.hisparse import HiSparseConnector
from hisparse.device.cpu.streams import SimDevice
from hisparse.device.rows import StepRows
from hisparse.engine.loop import ReferenceEngine
from hisparse.engine.served import Served
from hisparse.engine.verify import LiveChecks
from hisparse.errors import InvariantViolation
from hisparse.fsm.invariants.checker import Violation
from hisparse.fsm.log import MemoryLog
from hisparse.testing.losses import Losses
from hisparse.testing.tagged import Seen, TaggedModel
from hisparse.testing.worlds import EOS, random_config, random_workload, with_suffix


@dataclass
class CalmResult:
    """What a run did, and the first invariant that did not hold (None: all did)."""

    seed: int
    violation: Violation | None = None
    steps: int = 0
    events: int = 0
    rows_checked: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    digest: str = ""
    log: MemoryLog | None = None


class CalmRunner:
    """The model's place in it: see `hisparse.testing.tagged`."""

    def __init__(self, connector: HiSparseConnector, device: SimDevice, rng: random.Random) -> None:
        self.connector = connector
        self.worker = connector.worker
        self.device = device
        self.rng = rng
        self.seen = Seen()
        self.model = TaggedModel(self.worker.config, rng)
        self.engine: ReferenceEngine | None = None

    def execute(
        self, meta: Any, tokens: np.ndarray, rows: StepRows, sampled: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, KVConnectorOutput]:
        assert self.engine is not None
        self.connector.start_load_kv(meta)
        self.model.prepare(self.engine, rows, self.seen).run(self.worker)
        self.connector.wait_for_save()
        self.device.advance(self.rng.randrange(40))
        chosen = self.model.choose(tokens, rows, sampled)
        return chosen, np.zeros((len(chosen), 0), dtype=np.float32), self.connector.get_output()


class CalmSimulation:
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
        replica = HiSparseBackend(
            self.config,
            log=self.log,
            device=self.device,
            copy_fault=lambda transfer: faults.random() < self.fault_rate,
        )
        self.coordinator, self.worker = replica.coordinator, replica.worker
        self.live = LiveChecks(self.coordinator, self.worker)
        self.runner = CalmRunner(replica.rank, self.device, self.rng)
        self.engine = ReferenceEngine(
            self.coordinator,
            replica.scheduler,
            self.runner,
            eos=EOS,
            step_ms=10,
            drafts=self.runner.model.drafts,
        )
        self.runner.engine = self.engine
        self.losses = Losses(self.coordinator, self.runner.seen)
        self.runner.seen.tolerates_faults = self.fault_rate > 0
        longest = self.config.schedule.max_model_len
        self.workload = random_workload(self.rng, longest, requests, tides)
        self.disturbance = self.rng.choice([0.0, 0.02, 0.1])
        self.resets = self.naps = 0

    def _after_step(self, engine: ReferenceEngine) -> None:
        self.live.after_step()
        self._raise_first()
        self.losses.check()
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

    def run(self) -> CalmResult:
        """Serve, disturb, drain; returns what was found."""
        result = CalmResult(self.seed, log=self.log)
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
        result.rows_checked = self.runner.seen.rows_checked
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


def simulate(seed: int, *, requests: int = 14) -> CalmResult:
    """Run the world of `seed`."""
    return CalmSimulation(seed, requests=requests).run()
