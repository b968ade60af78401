"""The simulator: production scheduler, connector, worker and log in one process, by seed.

A run is a function of its seed (and of the commit). Two phases:

    safety     operations and faults strike, as the seed's `Swarm` says; every invariant is looked
               at, every byte that is read is compared with the content oracle
    liveness   faults cease: everything has to settle, every request to end, nothing to stay leased,
               and every fault that struck to have been survived

The world is a `SimReplica`; this module only decides what is done to it when.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hisparse.config import HiSparseConfig
from hisparse.errors import InvariantViolation
from hisparse.fsm.invariants.checker import Violation
from hisparse.fsm.log import EventLog
from hisparse.testing.replica import SimReplica
from hisparse.testing.swarm import Swarm


@dataclass
class SimulationResult:
    """What a run did, and the first thing that did not hold (None: everything did)."""

    seed: int
    violation: Violation | None = None
    error: Exception | None = None  # that told of the violation
    steps: int = 0
    events: int = 0
    seconds: float = 0.0
    rows_checked: int = 0
    fired: Mapping[str, int] = field(default_factory=dict)
    sometimes: Mapping[str, int] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    digest: str = ""
    config: HiSparseConfig | None = None
    log: EventLog | None = None


class Simulation:
    """One seed's world. `run` never raises for a fault of the code under test: it reports it.

    Args:
        seed: which world.
        swarm: what is done in it (default: `Swarm.of(seed)`).
        replica: makes the world; a subclass, or a function that patches one, goes here.
    """

    def __init__(
        self,
        seed: int,
        swarm: Swarm | None = None,
        *,
        replica: Callable[..., SimReplica] = SimReplica,
    ) -> None:
        self.seed = seed
        self.swarm = swarm = swarm if swarm is not None else Swarm.of(seed)
        self.rng = random.Random(f"hisparse operations {seed}")
        self.replica = replica(
            swarm.config,
            f"hisparse {seed}",
            lags=swarm.lags,
            faults=swarm.faults,
            check_every=swarm.check_every,
            tides=swarm.tides,
        )

    def run(self) -> SimulationResult:
        """Both phases; returns what was found."""
        replica, result = self.replica, SimulationResult(self.seed)
        began = time.perf_counter()
        try:
            for _ in range(self.swarm.steps):
                self._arrivals()
                replica.step()
                self._operate()
            replica.settle()
        except Exception as error:
            result.error, result.violation = error, self._name(error)
        result.seconds = time.perf_counter() - began
        result.steps, result.events = replica.now, replica.state.seq
        result.rows_checked = replica.rows_checked
        result.fired, result.sometimes = dict(replica.fired), dict(replica.sometimes)
        result.counts = dict(replica.coordinator.metrics.counts)
        result.digest = replica.coordinator.digest()
        result.config, result.log = replica.config, replica.log
        return result

    def _arrivals(self) -> None:
        replica, swarm = self.replica, self.swarm
        while len(replica.engine.live) < swarm.crowd and self.rng.random() < swarm.arrivals:
            replica.submit(replica.workload.next(replica.now * 10.0))

    def _operate(self) -> None:
        """Whatever the swarm has on may happen to whatever is there."""
        replica, chance, rng = self.replica, self.swarm.operations, self.rng
        for served in list(replica.engine.live.values()):
            draw = rng.random()
            for name in ("abort", "preempt", "stop"):
                draw -= chance.get(name, 0.0)
                if draw < 0:
                    getattr(replica, name)(served)
                    break
        if replica.coordinator.is_sleeping:
            if rng.random() < 0.4:
                replica.wake_up()
            return
        if rng.random() < 4 * chance.get("reset", 0.0):
            replica.reset()
        if rng.random() < 4 * chance.get("sleep", 0.0):
            replica.sleep(rng.choice([1, 2]))

    def _name(self, error: Exception) -> Violation:
        """The violation behind `error`: a checker that saw it coming has the better name."""
        coordinator = self.replica.coordinator
        assert coordinator.checker is not None
        if coordinator.checker.violations:
            return coordinator.checker.violations[0]
        seen: BaseException | None = error
        while seen is not None:
            if isinstance(seen, InvariantViolation):
                return Violation(seen.invariant, seen.seq or 0, seen.message)
            seen = seen.__cause__ or seen.__context__
        return Violation(type(error).__name__, coordinator.state.seq, str(error))


def simulate(seed: int, swarm: Swarm | None = None) -> SimulationResult:
    """Run the world of `seed`."""
    return Simulation(seed, swarm).run()
