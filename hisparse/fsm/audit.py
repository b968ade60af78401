"""Audit: a log, folded through every invariant that a log can show, after every event. Pure.

    audit = Audit(config)
    for seq, event in log:
        if not audit.take(seq, event): break        the event cannot be folded: nothing can follow
    audit.finish()                                  the last full recount
    audit.resume(state)                             at a snapshot, behind a gap in the log

A full recount runs when a step is planned, at most every `recount_events`: between those a decision
may be half told. Owns a state, a `Checker` for the run invariants and an `Incremental` for those of
the state. `violations` holds each fault once, at most `keep` of them, as they were found; `more`
counts the rest. An event that cannot be folded is a violation with the name of its error.
"""

from __future__ import annotations

from typing import Any

from hisparse.config import HiSparseConfig
from hisparse.fsm.codec import UnknownEvent
from hisparse.fsm.events import Event, RowsComputed, StepPlanned
from hisparse.fsm.fold import evolve
from hisparse.fsm.invariants.checker import Checker, Violation
from hisparse.fsm.invariants.incremental import Incremental
from hisparse.fsm.invariants.registry import INVARIANTS
from hisparse.fsm.invariants.run import RUN_CHECKS
from hisparse.fsm.invariants.state import STATE_CHECKS
from hisparse.fsm.state import State

RECOUNT_EVENTS = 2000
CHECKED = (*RUN_CHECKS, *STATE_CHECKS)
_COUNTED = (StepPlanned, RowsComputed)  # events that count rows
NOT_CHECKED = tuple(i for i in INVARIANTS if i.name not in CHECKED)


class Audit:
    """Takes a log in from its first event on."""

    def __init__(
        self, config: HiSparseConfig, *, recount_events: int = RECOUNT_EVENTS, keep: int = 100
    ) -> None:
        self.state = State(config)
        self.events = self.recounts = self.more = 0
        self.violations: list[Violation] = []
        self._checker = Checker(config)
        self._watch = Incremental(self.state)
        self._every, self._keep = recount_events, keep
        self._most = config.schedule.max_model_len
        self._told: set[tuple[str, str]] = set()
        self._next_recount = recount_events
        self._stopped = False
        self._unjudged: list[Violation] = []
        self.refused: Exception | None = None  # what the fold raised at the event that it stopped

    def take(self, seq: int, event: Event | UnknownEvent) -> bool:
        """Check and fold the next event; False if it cannot be folded."""
        self.events += 1
        if isinstance(event, UnknownEvent):
            text = f"kind {event.kind} is not one that this version knows"
            return self._stop(Violation("UnknownEvent", seq, text))
        counted = type(event) in _COUNTED
        if counted and self._absurd(event):
            text = f"{type(event).__name__} counts more rows than a request can have"
            return self._stop(Violation("ValueError", seq, text))
        for violation in self._judge(seq, event):
            self._tell(violation)
        try:
            self._watch.before(event)
            evolve(self.state, event, seq)
            faults = self._watch.after()
        except Exception as error:  # ids and lengths of a foreign log may be anything
            self.refused = error
            return self._stop(Violation(type(error).__name__, seq, _cannot(event, error)))
        for violation in self._unjudged:  # the fold takes an event that a check could not judge
            self._tell(violation)
        for fault in faults:
            self._tell(Violation(*fault))
        if counted and self.events >= self._next_recount and isinstance(event, StepPlanned):
            self._recount()
        return True

    def resume(self, state: State) -> None:
        """Go on from `state`, a snapshot behind a gap. Of what came before nothing is judged any
        more; invariants that need it (`NEEDS_HISTORY`) are not run from here on."""
        self.state = state
        self._checker = Checker(state.config, state=state)
        self._watch = Incremental(state)
        self._next_recount = self.events  # once a step is planned: a decision may be half told

    def finish(self, *, torn: bool = False) -> None:
        """The last full recount, of the state that the log ends in. A log that is `torn`, or that
        stopped at an event, may end inside a decision: its last entries are not judged."""
        if torn or self._stopped:
            return
        for fault in self._watch.readable():
            self._tell(Violation(*fault))
        self._recount()

    def _stop(self, violation: Violation) -> bool:
        self._tell(violation)
        self._stopped = True
        return False

    def _absurd(self, event: Any) -> bool:
        """Whether a check that walks over the rows of a step would not end in reasonable time."""
        counts = (*event.counts, *getattr(event, "starts", ()))
        return bool(counts) and not 0 <= min(counts) <= max(counts) <= self._most

    def _judge(self, seq: int, event: Event) -> list[Violation]:
        """Every check of the run. A check that raises met an event that names what the log never
        spoke of: as a rule the fold says so in the next moment; where it does not, `take` does."""
        self._unjudged = []
        try:
            return self._checker.event(seq, event)
        except Exception:
            found = []
            for name in self._checker.names:
                check = RUN_CHECKS[name]
                try:
                    found += [
                        Violation(name, seq, text) for text in check(self._checker.run, event)
                    ]
                except Exception as error:
                    text = f"cannot be judged: {_cannot(event, error)}"
                    self._unjudged.append(Violation(name, seq, text))
            return found

    def _recount(self) -> None:
        self._next_recount = self.events + self._every
        self.recounts += 1
        found = self._checker.state(self.state)
        for violation in found:
            self._tell(violation)
        if found:
            self._watch.resync()

    def _tell(self, violation: Violation) -> None:
        key = (violation.invariant, violation.message)
        if key in self._told:
            return
        if len(self.violations) >= self._keep:
            self.more += 1
            return
        self._told.add(key)
        self.violations.append(violation)


def _cannot(event: object, error: Exception) -> str:
    return f"{type(event).__name__} cannot follow the state: {error or type(error).__name__}"
