"""Mutants: how soon a campaign finds faults that were put into the code on purpose.

The seeded faults lie beside the package, in `tests/mutants/` of its repository, and no wheel holds
them: `load` is the one seam to them. Each is a context manager under a name; in its `with` some
production code breaks a promise. Nothing that looks for faults knows their names.

`hunt` runs seeds of the simulator in such a `with` until one of them fails, and makes the program
that failed smaller. Where a log alone shows the fault to the checks of `hisparse check`, its
witness is the fewest events that do; else it is the program's operations.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from hisparse.errors import ConfigError
from hisparse.testing.campaign import scenario_of
from hisparse.testing.program import Program
from hisparse.testing.shrink import shrink_program
from hisparse.testing.simulator import Simulation, SimulationResult, play
from hisparse.testing.swarm import STEPS, Swarm

Broken = Callable[[], AbstractContextManager[None]]
WHERE = Path(__file__).resolve().parents[2] / "tests" / "mutants"
SEEDS = range(200)
SHRINK_STEPS = 40_000  # scheduler steps of candidates, of each mutant
SHRINK_EVENTS = 60_000


@dataclass(frozen=True)
class Caught:
    """What became of one mutant. `seeds` and `events` were run until it was found, or in vain."""

    name: str
    told: str  # what it breaks
    seeds: int
    events: int
    result: SimulationResult | None = None  # of the smallest program that shows it
    shrunk: bool = True  # or of the seed's own, as it was drawn: no witness

    @cached_property
    def witness(self) -> tuple[int, str]:
        """How long it is, and in what."""
        if self.result is None or not self.shrunk:
            return 0, ""
        scenario = scenario_of(self.result, SHRINK_EVENTS)
        if scenario is not None:
            return len(scenario.events), "events"
        assert self.result.program is not None
        return len(self.result.program.lines()), "operations"

    @property
    def invariant(self) -> str:
        violation = self.result.violation if self.result is not None else None
        return violation.invariant if violation is not None else ""

    def report(self) -> dict[str, Any]:
        """A row of ``hisparse fuzz --mutants --json``."""
        length, unit = self.witness
        return {
            "name": self.name,
            "found": self.result is not None,
            "seeds": self.seeds,
            "events": self.events,
            "invariant": self.invariant,
            "witness": length,
            "witness_of": unit,
        }


def load() -> Mapping[str, Broken]:
    """Every seeded fault, by name. Raises ConfigError where they are not there."""
    name = "hisparse_mutants"
    if name not in sys.modules:
        start = WHERE / "__init__.py"
        if not start.is_file():
            raise ConfigError(
                "--mutants: an installed hisparse holds no seeded faults: call it in a checkout of "
                "its repository, installed by pip install -e ."
            )
        spec = importlib.util.spec_from_file_location(
            name, start, submodule_search_locations=[str(WHERE)]
        )
        assert spec is not None and spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return _mutants_of(sys.modules[name])


def _mutants_of(module: ModuleType) -> Mapping[str, Broken]:
    found: Mapping[str, Broken] = module.MUTANTS
    return found


def select(mutants: Mapping[str, Broken], words: str) -> dict[str, Broken]:
    """Those of a list of names; ``I/N``: every N-th, from the I-th on, counted from 0; "": all.
    Raises ConfigError for a name that is none."""
    part, slash, parts = words.partition("/")
    if slash and part.isdecimal() and parts.isdecimal() and int(part) < int(parts):
        return dict(list(mutants.items())[int(part) :: int(parts)])
    chosen = {}
    for name in filter(None, (word.strip() for word in words.split(","))):
        if name not in mutants:
            raise ConfigError(
                f"--mutants: {name!r} is no mutant: use I/N, or of {', '.join(mutants)}"
            )
        chosen[name] = mutants[name]
    return chosen or dict(mutants)


def hunt(
    name: str,
    broken: Broken,
    seeds: Iterable[int] = SEEDS,
    *,
    ranks: int | None = None,
    steps: int = STEPS,
    shrink: bool = True,
) -> Caught:
    """Run `seeds` with the fault `broken` in the code, until one of them fails; and, with `shrink`,
    make that one smaller. Raises ConfigError for a mutant that no longer fits the code: what it put
    there was called in another way, which is no fault that a campaign found."""

    told = " ".join((broken.__doc__ or "").split())
    ran = events = 0
    for seed in seeds:
        with broken():
            result = Simulation(seed, Swarm.of(seed, ranks=ranks, steps=steps)).run()
        ran += 1
        events += result.events
        if isinstance(result.error, (TypeError, AttributeError, NameError)):
            raise ConfigError(f"--mutants: {name} does not fit the code: {result.error!r}")
        if result.violation is not None:

            def again(program: Program, settles: bool = result.calm) -> SimulationResult:
                with broken():
                    return play(program, settles=settles)

            small = shrink_program(result, again, SHRINK_STEPS) if shrink else result
            return Caught(name, told, ran, events, small, shrink)
    return Caught(name, told, ran, events)
