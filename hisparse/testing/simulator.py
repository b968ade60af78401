"""The simulator: production scheduler, connector, worker and log in one process, by seed.

A run is a function of its seed. Streams are the simulated ones of the `cpu` backend, real bytes;
the model is replaced by rows whose bytes the content oracle knows, and by random selections, so
that nothing ever waits for the device and the compute stream lags as far as the waits allow.
Prompts share prefixes, clients abort, requests are preempted; then everything has to drain.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from hisparse.device.cpu.streams import SimDevice
from hisparse.engine.local import LocalReplica
from hisparse.engine.loop import ReferenceEngine
from hisparse.engine.served import Served
from hisparse.engine.verify import LiveChecks
from hisparse.errors import InvariantViolation
from hisparse.fsm.cursor import LogCursor
from hisparse.fsm.events import RequestRewound
from hisparse.fsm.invariants.checker import Violation
from hisparse.fsm.log import MemoryLog
from hisparse.fsm.state import Key
from hisparse.testing.tagged import TaggedRunner
from hisparse.testing.worlds import EOS, random_config, random_workload, with_suffix


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
