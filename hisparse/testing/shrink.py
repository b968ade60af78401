"""A smaller program that shows the same: operations are left out, then what is left made plain.

Every candidate is done from its beginning, on a replica of its own, so that what is kept was seen
to fail. The work is bounded in scheduler steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from hisparse.testing.program import Operation, Program
from hisparse.testing.simulator import SimulationResult

STEPS_MAX = 6_000
Play = Callable[[Program], SimulationResult]


class _Search:
    def __init__(self, play: Play, invariant: str, steps_max: int) -> None:
        self.play = play
        self.invariant = invariant
        self.steps_left = steps_max
        self.best: SimulationResult | None = None

    def shows(self, program: Program) -> bool:
        if self.steps_left <= 0:
            return False
        result = self.play(program)
        self.steps_left -= result.steps + 20  # a replica takes a while to make, too
        found = result.violation is not None and result.violation.invariant == self.invariant
        if found:
            self.best = result
        return found


def shrink_program(
    result: SimulationResult, play: Play, steps_max: int = STEPS_MAX
) -> SimulationResult:
    """The result of a smaller program that violates the same invariant; `result` if there is none,
    or if its own program, done again, shows something else. Candidates take `steps_max` steps."""
    assert result.violation is not None and result.program is not None
    search = _Search(play, result.violation.invariant, steps_max)
    if not search.shows(replace(result.program, check_every=1)):
        return result
    while search.steps_left > 0:
        before = _program(search)
        _leave_out(search)
        for candidate in _plainer(_program(search)):
            search.shows(candidate)
        if _program(search) == before:
            break
    assert search.best is not None
    search.best.seed = result.seed
    return search.best


def _program(search: _Search) -> Program:
    """The smallest that showed it. It ends where the violation was seen."""
    assert search.best is not None and search.best.program is not None
    return search.best.program


def _leave_out(search: _Search) -> None:
    """Operations, in pieces of half of them, a quarter, and so on down to one."""
    size = max(len(_program(search).operations) // 2, 1)
    while True:
        at = 0
        while at < len(done := _program(search).operations):
            rest = done[:at] + done[at + size :]
            if not search.shows(replace(_program(search), operations=rest)):
                at += size
        if size == 1:
            return
        size //= 2


def _plainer(program: Program) -> Iterator[Program]:
    """One change each, that makes it easier to read or to do."""
    if any(program.lags):
        yield replace(program, lags=(0.0,))
    for kind in program.faults:
        yield replace(program, faults={k: r for k, r in program.faults.items() if k != kind})
    if program.config.ranks > 1:
        config = program.config.model_copy(update={"ranks": program.config.ranks - 1})
        yield replace(program, config=config)
    for at, (verb, given) in enumerate(program.operations):
        if verb == "submit":
            for less in _less_asked(given):
                done: list[Operation] = list(program.operations)
                done[at] = (verb, less)
                yield replace(program, operations=tuple(done))


def _less_asked(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    prompt, max_new = given["prompt"], given["max_new"]
    if len(prompt) > 1:
        yield given | {"prompt": prompt[: (len(prompt) + 1) // 2]}
        yield given | {"prompt": prompt[:-1]}
    if max_new > 1:
        yield given | {"max_new": (max_new + 1) // 2}
        yield given | {"max_new": max_new - 1}
