"""A campaign: many seeds, their tallies, and for the first that fails what it takes to see it.

Red where a seed fails, and where a mark of the kinds that were asked for was not hit by any: a
fault that never fired, or that nobody saw survived, proves nothing. One seed by itself is a
repetition and no campaign: nothing is asked of its marks; nor is it of ranks on a GPU, where seeds
are few.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hisparse.fsm.describe import line
from hisparse.fsm.shrink import Scenario, first_violation, shrink
from hisparse.testing.atlas import ATLAS, marks_of
from hisparse.testing.shrink import Play, shrink_program
from hisparse.testing.simulator import Simulation, SimulationResult
from hisparse.testing.simulator import play as play_one
from hisparse.testing.swarm import RANKS_MAX, STEPS, Swarm

SHRINK_BUDGET = 200_000  # events judged while a witness is made smaller
Run = Callable[[int, Swarm], SimulationResult]


@dataclass(frozen=True)
class Found:
    """A seed that failed, shrunk: the least that has to be on and to be done, and the events that
    show it. `result` is of the smallest program that does."""

    result: SimulationResult
    faults: tuple[str, ...]
    operations: tuple[str, ...]
    scenario: Scenario | None  # None: a log alone does not show it

    def witness(self) -> list[str]:
        if self.scenario is None:
            return []
        return [line(seq, event).strip() for seq, event in self.scenario.events]

    def program(self) -> list[str]:
        """What has to be done, a line each."""
        return [] if self.result.program is None else self.result.program.lines()

    def told(self) -> list[str]:
        """For people: what does not hold, what it takes, what has to be done, which events show
        it."""
        violation = self.result.violation
        assert violation is not None
        on = ", ".join([*self.faults, *self.operations]) or "no fault and no operation"
        lines = [f"{violation.invariant} at seq {violation.seq}: {violation.message}"]
        lines += [f"it takes {on}", "what is done, before faults cease and all has to settle:"]
        lines += [f"  {text}" for text in self.program()]
        if self.scenario is not None:
            lines += ["events that show it:", *(f"  {text}" for text in self.witness())]
        return lines


@dataclass
class Campaign:
    """What the seeds did, added up."""

    kinds: tuple[str, ...]
    ranks: int | None
    asks_marks: bool = True
    seeds: list[int] = field(default_factory=list)
    steps: int = 0
    events: int = 0
    rows_checked: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    sometimes: Counter[str] = field(default_factory=Counter)
    found: list[Found] = field(default_factory=list)
    last: SimulationResult | None = None

    @property
    def marks_missing(self) -> list[str]:
        """Marks that no seed hit; of one seed nothing is asked."""
        if len(self.seeds) < 2 or not self.asks_marks:
            return []
        marks = marks_of(self.kinds, self.ranks or RANKS_MAX)
        return [mark for mark in marks if not self.sometimes[mark]]

    @property
    def red(self) -> bool:
        return bool(self.found or self.marks_missing)

    def add(self, result: SimulationResult) -> None:
        self.seeds.append(result.seed)
        self.last = result
        self.steps += result.steps
        self.events += result.events
        self.rows_checked += result.rows_checked
        self.faults.update(result.fired)
        self.sometimes.update(result.sometimes)

    def report(self) -> dict[str, Any]:
        """The keys of ``hisparse fuzz --json``; they are stable. Rates are per CPU second."""
        failed = self.found[0].result.seed if self.found else None
        seconds = max(self.cpu_seconds, 1e-9)
        return {
            "seed": self.seeds[0] if failed is None and self.seeds else failed,
            "seeds": len(self.seeds),
            "steps": self.steps,
            "events": self.events,
            "seconds": round(self.seconds, 3),
            "cpu_seconds": round(self.cpu_seconds, 3),
            "steps_per_minute": round(self.steps / seconds * 60),
            "events_per_second": round(self.events / seconds),
            "rows_checked": self.rows_checked,
            "faults": {kind: self.faults[kind] for kind in self.kinds},
            "sometimes": {
                mark: self.sometimes[mark]
                for kind in self.kinds
                for mark in ATLAS[kind].all_marks()
            },
            "marks_missing": self.marks_missing,
            "violations": [_violation(found) for found in self.found],
        }


def _violation(found: Found) -> dict[str, Any]:
    violation = found.result.violation
    assert violation is not None
    return {
        "seed": found.result.seed,
        "invariant": violation.invariant,
        "seq": violation.seq,
        "step": found.result.steps,
        "message": violation.message,
        "needs_faults": list(found.faults),
        "needs_operations": list(found.operations),
        "witness": found.witness(),
        "program": found.program(),
    }


def simulate_one(seed: int, swarm: Swarm) -> SimulationResult:
    return Simulation(seed, swarm).run()


def run_campaign(
    seeds: Iterable[int],
    *,
    kinds: Sequence[str] | None = None,
    ranks: int | None = None,
    steps: int = STEPS,
    minutes: float | None = None,
    failures_max: int = 1,
    run: Run = simulate_one,
    play: Play | None = None,
    asks_marks: bool = True,
    progress: Callable[[Campaign], None] = lambda campaign: None,
) -> Campaign:
    """Run `seeds` in order, until `failures_max` have failed or `minutes` are over.

    Args:
        kinds: kinds of fault that may strike (default: the whole atlas).
        ranks: of every world; None: 1 to 3, drawn.
        steps: of each safety phase.
        run: runs one seed; a test of another backend or policy passes its own, and
        play: does a program on the same kind of replica (default: none, where `run` is given; then
            programs are not made smaller).
        asks_marks: whether it is red where a mark was hit by no seed.
        progress: called after each seed.
    """
    campaign = Campaign(tuple(ATLAS) if kinds is None else tuple(kinds), ranks, asks_marks)
    began, began_cpu = time.perf_counter(), time.process_time()
    for seed in seeds:
        swarm = Swarm.of(seed, ranks=ranks, steps=steps, kinds=campaign.kinds)
        result = run(seed, swarm)
        campaign.add(result)
        campaign.seconds = time.perf_counter() - began
        campaign.cpu_seconds = time.process_time() - began_cpu
        progress(campaign)
        if result.violation is not None:
            campaign.found.append(explain(result, swarm, run, play))
        if len(campaign.found) >= failures_max:
            break
        if minutes is not None and time.perf_counter() - began >= minutes * 60:
            break
    return campaign


def explain(
    result: SimulationResult, swarm: Swarm, run: Run = simulate_one, play: Play | None = None
) -> Found:
    """The same fault with as little as possible switched on, looked for after every step, the
    fewest operations that still lead to it, and the fewest events that show it."""
    assert result.violation is not None
    name = result.violation.invariant
    least, best = replace(swarm, check_every=1), result

    def shows(candidate: Swarm) -> SimulationResult | None:
        again = run(result.seed, candidate)
        same = again.violation is not None and again.violation.invariant == name
        return again if same else None

    best = shows(least) or result
    for which in ("faults", "operations"):
        for kind in list(getattr(least, which)):
            fewer = {k: rate for k, rate in getattr(least, which).items() if k != kind}
            candidate = _with(least, which, fewer)
            if (again := shows(candidate)) is not None:
                least, best = candidate, again
    if play is None and run is simulate_one:
        play = play_one
    if play is not None:
        best = shrink_program(best, play)
    return Found(best, tuple(least.faults), tuple(least.operations), scenario_of(best))


def _with(swarm: Swarm, which: str, chances: Mapping[str, float]) -> Swarm:
    if which == "faults":
        return replace(swarm, faults=chances)
    return replace(swarm, operations=chances)


def scenario_of(result: SimulationResult, budget: int = SHRINK_BUDGET) -> Scenario | None:
    """The fewest events that show what the log shows of it, if it does; `budget` of them are
    judged for that."""
    assert result.violation is not None and result.config is not None and result.log is not None
    events = list(result.log.read(1))
    violation, told_at = first_violation(result.config, events, torn=lambda: True)
    if violation is None or violation.invariant != result.violation.invariant:
        return None
    return shrink(result.config, violation, told_at, events, budget=budget)
