"""A log, made smaller for as long as it still shows the same fault. Pure.

Requests, pages of requests, events and entries of their parallel tuples are left out, halves first
(delta debugging, Zeller and Hildebrandt), each with all that it led to (`fsm.rerun`); what is
left is numbered anew and judged by `Audit`, from an empty state. The fault is the same if its
`Signature` is, and if nothing is violated before it where nothing was in the log.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from hisparse.config import HiSparseConfig
from hisparse.fsm import events as ev
from hisparse.fsm.codec import LoggedEvent
from hisparse.fsm.invariants.checker import Violation
from hisparse.fsm.reduce_units import (
    UNITS,
    Cut,
    Edited,
    Page,
    Units,
    instances,
    pages,
    size,
    tenants,
    without_events,
    without_pages,
)
from hisparse.fsm.rerun import Played, Rerun

PAGES_ALONE = 8  # the first and the last ones, each of which is tried with no other
_QUOTED = re.compile(r"'[^']*'")
_NUMBERS = re.compile(r"-?\d+(?:[,\s]+-?\d+)*,?")


class Signature(NamedTuple):
    """A fault without ids and numbers."""

    invariant: str  # or the class of the error
    kind: str  # of the event
    message: str  # machine, state and trigger of an illegal transition are words of it
    place: str  # where the fold raised it: function and line


def signature(violation: Violation, event: object, refused: Exception | None = None) -> Signature:
    """Of `violation`, brought by `event`; `refused` if it is that `event` cannot be folded."""
    place, at = "", None if refused is None else refused.__traceback__
    while at is not None:
        place, at = f"{at.tb_frame.f_code.co_qualname}:{at.tb_lineno}", at.tb_next
    message = _NUMBERS.sub("#", _QUOTED.sub(_word, violation.message))
    return Signature(violation.invariant, type(event).__name__, message, place)


def _word(quoted: re.Match[str]) -> str:
    """Names of triggers and machines are told in quotes, as those of requests are."""
    return quoted[0] if quoted[0].strip("'").isalpha() or "_" in quoted[0] else "'#'"


class Reduction:
    """`log`, which ends with what shows the fault, on its way to the smallest one."""

    def __init__(
        self, config: HiSparseConfig, log: Sequence[LoggedEvent], wanted: Violation, budget: int
    ) -> None:
        self.log, self.origin = list(log), list(range(len(log)))
        self.violation, self.minimal = wanted, False
        self.left = budget  # events to be judged
        self._rerun = Rerun(config, self.log)
        whole = self._rerun.play(self.log, clean=False)
        self._signature: Signature | None = None
        self._clean = False
        if whole is not None and _causeless(whole.events) == _causeless(self.log):
            same = (v for v in whole.violations if v == wanted)
            if (found := next(same, None)) is not None:
                self._signature = _of(found, whole)
                self._clean = all(v.seq >= found.seq for v in whole.violations)

    @property
    def possible(self) -> bool:
        """Whether the log, with nothing left out, plays as it is and shows the fault."""
        return self._signature is not None

    def run(self) -> None:
        """Leave out what can be, in several ways; the fewest events that any came to are kept, from
        which nothing can go alone (`minimal`), or none could be found for the budget."""
        self._cone()
        start, every = self._saved(), pages(self.log)
        alone: list[Page | None] = [*every[:PAGES_ALONE], *every[PAGES_ALONE:][-PAGES_ALONE:]]
        best, fewest = start, (len(start[0]) + 1, 0)
        for page, last_first in ((None, False), (None, True), *((page, False) for page in alone)):
            self.log, self.origin, self.violation, self._rerun = start
            if page is not None:
                others = [other for other in every if other != page]
                if not self._shows(without_pages(self.log, others)):
                    continue
            self._fixpoint(last_first)
            found = (len(self.log), size(self.log))
            if found < fewest:
                best, fewest, self.minimal = self._saved(), found, self.left > 0
            if self.left <= 0:
                break
        self.log, self.origin, self.violation, self._rerun = best

    def _fixpoint(self, last_first: bool) -> None:
        before = -1
        while self.left > 0 and before != (before := size(self.log)):
            for units, cut in UNITS:
                self._sweep(units, cut, last_first)

    def _saved(self) -> tuple[list[LoggedEvent], list[int], Violation, Rerun]:
        return self.log, self.origin, self.violation, self._rerun

    def _cone(self) -> None:
        """Only the requests that the last event names, or those that they share pages with too."""
        owners = tenants(self.log)
        named, before = set(owners[-1]), set[int]()
        if self._only(named):
            return
        shared: dict[object, set[int]] = {}
        for event, own in zip(self.log, owners, strict=True):
            for key in instances(event):
                shared.setdefault(key, set()).update(own)
        while named and named != before:
            before = set(named)
            for sharers in shared.values():
                if not sharers.isdisjoint(before):
                    named |= sharers
        self._only(named)

    def _only(self, epochs: set[int]) -> bool:
        arrived = [(at, e) for at, e in enumerate(self.log) if isinstance(e, ev.RequestArrived)]
        gone = [at for at, e in arrived if e.epoch not in epochs]
        fewer = 0 < len(gone) < len(arrived)
        return fewer and self._shows(without_events(self.log, gone))

    def _sweep(self, units: Units, cut: Cut, last_first: bool) -> None:
        """Leave out units of the log: halves of them, in the end single ones."""
        step = -1 if last_first else 1
        many = max(len(units(self.log)) // 2, 1)
        while True:
            at = 0
            while self.left > 0 and at < len(found := units(self.log)[::step]):
                if not self._shows(cut(self.log, found[at : at + many])):
                    at += many
            if many == 1 or self.left <= 0:
                return
            many //= 2

    def _shows(self, edited: Edited) -> bool:
        """Whether `edited` still shows the fault; if so, that is the log from now on."""
        judged = self._rerun.judged
        played = self._rerun.play(edited, clean=self._clean)
        self.left -= self._rerun.judged - judged + 1
        if played is None or not played.events:
            return False
        told = played.violations[:1] if self._clean else played.violations
        same = (v for v in played.violations if _of(v, played) == self._signature)
        found = next(same, None)
        if found is None or (self._clean and told[0].seq < found.seq):
            return False
        if size(played.events) >= size(self.log):
            return False
        self.log, self.violation = played.events, found
        self.origin = [self.origin[at] for at in played.kept]
        judged = self._rerun.judged
        self._rerun = Rerun(self._rerun.config, self.log)
        self._rerun.judged = judged
        self.left -= len(self.log)
        return True


def _causeless(log: Iterable[LoggedEvent]) -> list[LoggedEvent]:
    return [msgspec.structs.replace(e, cause=0) if isinstance(e, ev.Event) else e for e in log]


def _of(violation: Violation, played: Played) -> Signature:
    event = played.events[min(violation.seq, len(played.events)) - 1]
    at_end = violation.seq == len(played.events)
    refused = played.refused if at_end and _told(violation, played.refused) else None
    return signature(violation, event, refused)


def _told(violation: Violation, refused: Exception | None) -> bool:
    return violation.invariant == type(refused).__name__
