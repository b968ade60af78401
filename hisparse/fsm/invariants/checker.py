"""Checker: runs the invariants that a log can show, beside a fold.

    checker.event(seq, event)    before `evolve`: the run invariants
    checker.state(state)         at any moment after: the state invariants
Both return what they found and keep it; `raise_first` turns the first into an InvariantViolation.
"""

from __future__ import annotations

import msgspec

from hisparse.config import HiSparseConfig
from hisparse.errors import InvariantViolation
from hisparse.fsm.events import Event
from hisparse.fsm.invariants.facts import Run
from hisparse.fsm.invariants.run import RUN_CHECKS
from hisparse.fsm.invariants.state import STATE_CHECKS
from hisparse.fsm.state import State


class Violation(msgspec.Struct, frozen=True):
    """A named invariant that did not hold, and the seq at which that showed."""

    invariant: str
    seq: int
    message: str


class Checker:
    """Collects the violations of one run: the first `keep` of them, and the count of all."""

    def __init__(self, config: HiSparseConfig, keep: int = 100) -> None:
        self.run = Run(config.pools.page_size, config.index_pages_per_block, config.ranks)
        self.keep = keep
        self.violations: list[Violation] = []
        self.found = 0
        self.checked = dict.fromkeys((*RUN_CHECKS, *STATE_CHECKS), 0)

    def event(self, seq: int, event: Event) -> list[Violation]:
        """Check `event`, about to happen as `seq`, then take it in."""
        found = []
        for name, check in RUN_CHECKS.items():
            found += [Violation(name, seq, text) for text in check(self.run, event)]
            self.checked[name] += 1
        self.run.take(event)
        self._note(found)
        return found

    def state(self, state: State) -> list[Violation]:
        """Check a state."""
        found = []
        for name, check in STATE_CHECKS.items():
            found += [Violation(name, state.seq, text) for text in check(state)]
            self.checked[name] += 1
        self._note(found)
        return found

    def _note(self, found: list[Violation]) -> None:
        self.found += len(found)
        self.violations += found[: max(0, self.keep - len(self.violations))]

    def raise_first(self) -> None:
        """Raise InvariantViolation for the first violation found, if any."""
        if self.violations:
            first = self.violations[0]
            raise InvariantViolation(first.invariant, first.message, seq=first.seq)
