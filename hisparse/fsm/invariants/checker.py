"""Checker: runs the invariants that a log can show, beside a fold.

    checker.event(seq, event)    before `evolve`: the run invariants
    checker.state(state)         at any moment after: the state invariants
Both return what they found and keep it; `raise_first` turns the first into an InvariantViolation.
An event goes through the invariants that judge its kind (`JUDGED`); to the others it says nothing.
Made of a state, it begins there, and leaves out those that need what came before (`inherited.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from hisparse.config import HiSparseConfig
from hisparse.errors import InvariantViolation
from hisparse.fsm import events as ev
from hisparse.fsm.events import Event
from hisparse.fsm.invariants.facts import Run
from hisparse.fsm.invariants.inherited import NEEDS_HISTORY, inherited
from hisparse.fsm.invariants.run import RUN_CHECKS
from hisparse.fsm.invariants.state import STATE_CHECKS
from hisparse.fsm.state import State

# Kinds of event that each invariant of the run judges. It yields nothing for any other, whatever
# the run: most events then cost one look-up.
JUDGED: dict[str, tuple[type[Event], ...]] = {
    "spill_before_free": (
        ev.BlocksReleased,
        ev.PagesSpilled,
        ev.BlocksReserved,
        ev.HotLeased,
        ev.BlocksEvicted,
        ev.StepPlanned,
        ev.IndexPagesCopied,
        ev.TransferPinned,
    ),
    "complete_before_publish": (ev.PagesPublished, ev.SuffixPinned),
    "publish_accepted_only": (
        ev.PagesPublished,
        ev.RowsComputed,
        ev.RequestRewound,
        ev.SuffixPinned,
    ),
    "one_content": (
        ev.BlocksReserved,
        ev.HotLeased,
        ev.HostPagesReserved,
        ev.BlocksAdopted,
        ev.IndexPagesCopied,
        ev.PrefixLeased,
        ev.PagesPublished,
        ev.SuffixPinned,
    ),
    "rank_quorum": (
        ev.TransferPinned,
        ev.TransferEnqueued,
        ev.TransferCompleted,
        ev.TransferFailed,
        ev.SuffixPinned,
        ev.SuffixCompleted,
        ev.SuffixFailed,
    ),
    "settle_once": (
        ev.TransferEnqueued,
        ev.TransferCompleted,
        ev.TransferFailed,
        ev.SuffixCompleted,
        ev.SuffixFailed,
    ),
    "host_reuse_after_readers": (
        ev.HostPagesReleased,
        ev.HostPagesReserved,
        ev.HostPagesEvicted,
        ev.SuffixPinned,
        ev.SuffixEvicted,
    ),
}
_WITHOUT_HISTORY = tuple(name for name in RUN_CHECKS if name not in NEEDS_HISTORY)


def _judges(names: Iterable[str]) -> dict[type[Event], tuple[str, ...]]:
    return {kind: tuple(n for n in names if kind in JUDGED[n]) for kind in ev.EVENT_TYPES}


_JUDGES, _JUDGES_WITHOUT_HISTORY = _judges(RUN_CHECKS), _judges(_WITHOUT_HISTORY)


class Violation(msgspec.Struct, frozen=True):
    """A named invariant that did not hold, and the seq at which that showed."""

    invariant: str
    seq: int
    message: str


class Checker:
    """Collects the violations of one run: the first `keep` of them, and the count of all."""

    def __init__(
        self, config: HiSparseConfig, keep: int = 100, *, state: State | None = None
    ) -> None:
        if state is None:
            self.run = Run(config.pools.page_size, config.index_pages_per_block, config.ranks)
            self.names, self._judges = tuple(RUN_CHECKS), _JUDGES
        else:
            self.run = inherited(state)
            self.names, self._judges = _WITHOUT_HISTORY, _JUDGES_WITHOUT_HISTORY
        self.keep = keep
        self.violations: list[Violation] = []
        self.found = 0
        self._events = self._states = 0

    @property
    def checked(self) -> dict[str, int]:
        """How many events, or states, each invariant has been run over."""
        events, states = dict.fromkeys(RUN_CHECKS, self._events), self._states
        return events | dict.fromkeys(STATE_CHECKS, states)

    def event(self, seq: int, event: Event) -> list[Violation]:
        """Check `event`, about to happen as `seq`, then take it in."""
        found: list[Violation] = []
        for name in self._judges.get(type(event), ()):
            for text in RUN_CHECKS[name](self.run, event):
                found.append(Violation(name, seq, text))
        self.run.take(event)
        self._events += 1
        if found:
            self._note(found)
        return found

    def state(self, state: State) -> list[Violation]:
        """Check a state."""
        found = []
        for name, check in STATE_CHECKS.items():
            found += [Violation(name, state.seq, text) for text in check(state)]
        self._states += 1
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
