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
from hisparse.testing.program import MakeReplica, Player, Program
from hisparse.testing.replica import SimReplica
from hisparse.testing.swarm import Swarm
from hisparse.testing.worlds import Workload

PAUSE_STEPS = 40
RUSH_FROM = 1 / 3  # of the safety phase: who has not spilled by then is filled until it does


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
    program: Program | None = None  # what was done, up to what did not hold
    calm: bool = False  # whether faults had ceased by then


class Simulation:
    """One seed's world. `run` never raises for a fault of the code under test: it reports it.

    Args:
        seed: which world.
        swarm: what is done in it (default: `Swarm.of(seed)`).
        replica: makes the world; a subclass, or a function that patches one, goes here.
    """

    def __init__(
        self, seed: int, swarm: Swarm | None = None, *, replica: MakeReplica = SimReplica
    ) -> None:
        self.seed = seed
        self.swarm = swarm = swarm if swarm is not None else Swarm.of(seed)
        self.rng = random.Random(f"hisparse operations {seed}")
        world = Program(
            swarm.config,
            f"hisparse {seed}",
            swarm.lags,
            swarm.faults,
            swarm.tides,
            swarm.check_every,
            disk=swarm.disk,
        )
        self.player = Player(world, replica)
        self.replica = self.player.replica
        longest = swarm.config.schedule.max_model_len
        self._pause: tuple[int, str, dict[str, int]] | None = None  # its end, what for
        self._spilled = not swarm.config.offload
        self.workload = Workload(random.Random(f"{world.seed} workload"), longest, swarm.tides)

    def run(self) -> SimulationResult:
        """Both phases; returns what was found."""
        return _observed(self.seed, self.player, self._safety)

    def _safety(self) -> None:
        for _ in range(self.swarm.steps):
            if not (self.replica.down or self._pause):
                self._arrivals()
            self.player.do("step")
            self._spilled |= self.replica.coordinator.metrics.counts["spills"] > 0
            if not self.replica.down:
                self._operate()

    def _arrivals(self) -> None:
        """Some come now and then; in a rush as many as there are rows, half as long as may be."""
        replica, swarm = self.replica, self.swarm
        rush = not self._spilled and replica.now >= swarm.steps * RUSH_FROM
        crowd = max(swarm.crowd, swarm.config.schedule.max_requests) if rush else swarm.crowd
        while len(replica.engine.live) < crowd and (rush or self.rng.random() < swarm.arrivals):
            greedy = rush and self.rng.random() < 0.5
            work = self.workload.next(replica.now * 10.0, greedy=greedy)
            prompt = work.prompt.tolist()
            self.player.do("submit", request=work.request, prompt=prompt, max_new=work.max_new)

    def _operate(self) -> None:
        """Whatever the swarm has on may happen to whatever is there."""
        replica, chance, rng, do = self.replica, self.swarm.operations, self.rng, self.player.do
        for served in list(replica.engine.live.values()):
            draw = rng.random()
            for name in ("abort", "preempt", "stop"):
                draw -= chance.get(name, 0.0)
                if draw < 0:
                    do(name, request=served.request)
                    break
        if replica.coordinator.is_sleeping:
            if rng.random() < 0.4:
                do("wake_up")
            return
        if rng.random() < 4 * chance.get("reset", 0.0):
            self._when_idle("reset")
        if rng.random() < 4 * chance.get("sleep", 0.0):
            self._when_idle("sleep", level=rng.choice([1, 2]))
        if self._pause is not None:
            until, verb, arguments = self._pause
            if replica.now >= until or do(verb, **arguments):
                self._pause = None

    def _when_idle(self, verb: str, **arguments: int) -> None:
        """Whoever asks for it knows that it is refused while somebody holds something: arrivals
        pause for it. Sometimes nobody knows."""
        if self._pause is None and self.rng.random() < 0.5:
            self._pause = (self.replica.now + PAUSE_STEPS, verb, arguments)
        elif not self.replica.coordinator.is_sleeping:
            self.player.do(verb, **arguments)


def simulate(seed: int, swarm: Swarm | None = None) -> SimulationResult:
    """Run the world of `seed`."""
    return Simulation(seed, swarm).run()


def play(
    program: Program, replica: MakeReplica = SimReplica, *, settles: bool = True
) -> SimulationResult:
    """Do what `program` says; then, where `settles`, everything has to settle. Raises what
    `replica` raises."""
    player = Player(program, replica)

    def operate() -> None:
        for verb, arguments in program.operations:
            player.do(verb, **arguments)

    return _observed(0, player, operate, settles)


def _observed(
    seed: int, player: Player, operate: Callable[[], None], settles: bool = True
) -> SimulationResult:
    began, failed = time.perf_counter(), None
    try:
        operate()
        if settles:
            player.replica.settle()
    except Exception as error:
        failed = error
    result = result_of(player, failed, seed)
    result.seconds = time.perf_counter() - began
    return result


def result_of(player: Player, error: Exception | None, seed: int = 0) -> SimulationResult:
    """What has been done by now, and what `error`, which ended it, tells of."""
    replica, result = player.replica, SimulationResult(seed)
    if error is not None:
        result.error, result.violation = error, violation_of(replica, error)
    result.calm = replica.calm
    result.steps, result.events = replica.now, replica.state.seq
    result.rows_checked = replica.rows_checked
    result.fired, result.sometimes = dict(replica.fired), dict(replica.sometimes)
    result.counts = dict(replica.coordinator.metrics.counts)
    result.digest = replica.coordinator.digest()
    result.config, result.log, result.program = replica.config, replica.log, player.program
    return result


def violation_of(replica: SimReplica, error: Exception) -> Violation:
    """The violation behind `error`: a checker that saw it coming has the better name."""
    coordinator = replica.coordinator
    assert coordinator.checker is not None
    if coordinator.checker.violations:
        return coordinator.checker.violations[0]
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, InvariantViolation):
            return Violation(seen.invariant, seen.seq or 0, seen.message)
        seen = seen.__cause__ or seen.__context__
    return Violation(type(error).__name__, coordinator.state.seq, str(error))
