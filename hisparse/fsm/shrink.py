"""The smallest scenario that still shows a violation. Pure.

For an invariant of the run, that begins with the violation's witness, which `Checker` alone judges:
events, and entries of their parallel tuples, are left out for as long as the rest says the very
same thing. Any other violation, and an event that cannot be folded, begins with all events up to
it: `reduce.Reduction` leaves out whatever `Audit`, from an empty state, can do without to show the
same fault (`reduce.Signature`). Where that log cannot be played again as it is, it is only thinned.
`minimal` says that no event and no entry can go alone; it is False where `BUDGET` ended that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from hisparse.config import HiSparseConfig
from hisparse.fsm import events as ev
from hisparse.fsm.audit import Audit
from hisparse.fsm.codec import LoggedEvent
from hisparse.fsm.invariants.checker import Checker, Violation
from hisparse.fsm.invariants.run import RUN_CHECKS
from hisparse.fsm.reduce import Reduction
from hisparse.fsm.reduce_units import groups, size, without
from hisparse.fsm.witness import subjects, witness

Logged = tuple[int, LoggedEvent]
Shows = Callable[[list[Logged]], Violation | None]
BUDGET = 400_000  # events judged while a scenario is made smaller
_SEQ = re.compile(r"seq[ =]\d+")


class Scenario(NamedTuple):
    """Events that show `violation`, as `shown_by` ("Checker" or "Audit") says of them."""

    violation: Violation
    events: list[Logged]
    origin: list[int]  # the seq of each in the log
    shown_by: str
    minimal: bool


class _Spent:
    def __init__(self, most: int) -> None:
        self.left = most


def first_violation(
    config: HiSparseConfig,
    events: Iterable[Logged],
    invariant: str = "",
    *,
    torn: Callable[[], bool] = lambda: False,
) -> tuple[Violation | None, int]:
    """The first violation (of `invariant`, if given), and the seq at which it was told.

    `torn`, asked after the last event, says whether the log may end inside a decision.
    """
    audit, at = Audit(config), 0

    def found() -> Violation | None:
        named = (v for v in audit.violations if invariant in ("", v.invariant))
        return next(named, None)

    for seq, event in events:
        at = seq
        if isinstance(event, ev.LogGap):
            return None, at
        went_on = audit.take(seq, event)
        if (violation := found()) is not None or not went_on:
            return violation, at
    audit.finish(torn=torn())
    return found(), at


def shrink(
    config: HiSparseConfig,
    violation: Violation,
    told_at: int,
    events: Iterable[Logged],
    *,
    budget: int = BUDGET,
) -> Scenario:
    """The scenario of `violation`, told at seq `told_at` of `events`, which can be read again."""
    spent = _Spent(budget)
    event = next((e for seq, e in events if seq == violation.seq), None)
    if violation.invariant in RUN_CHECKS and isinstance(event, ev.Event):
        chain = list[Logged](witness(config, violation, event, _known(events)))

        for candidate in (_narrowed(chain, violation), chain):
            for strict in (True, False):

                def by_checker(logged: list[Logged], strict: bool = strict) -> Violation | None:
                    return _by_checker(config, violation, logged, strict=strict)

                if by_checker(candidate) is not None:
                    return _smaller(candidate, by_checker, "Checker", spent)
    whole = [(seq, e) for seq, e in events if seq <= told_at]
    found = _reduced(config, violation, whole, budget)
    if found is not None:
        return found
    first = _audited(config, violation, whole, first=True) is not None
    return _smaller(whole, lambda e: _audited(config, violation, e, first=first), "Audit", spent)


def _reduced(
    config: HiSparseConfig, violation: Violation, whole: list[Logged], budget: int
) -> Scenario | None:
    """None where the log cannot be played again as it is."""
    if whole[0][0] != 1 or not all(isinstance(e, ev.Event) for _, e in whole):
        return None
    reduction = Reduction(config, [e for _, e in whole], violation, budget)
    if not reduction.possible:
        return None
    reduction.run()
    events = list(enumerate(reduction.log, 1))
    origin = [whole[at][0] for at in reduction.origin]
    return Scenario(reduction.violation, events, origin, "Audit", reduction.minimal)


def _known(events: Iterable[Logged]) -> list[tuple[int, ev.Event]]:
    return [(seq, e) for seq, e in events if isinstance(e, ev.Event)]


def _by_checker(
    config: HiSparseConfig, wanted: Violation, logged: list[Logged], *, strict: bool
) -> Violation | None:
    """`wanted`, if its check says so of the last event, after a fresh checker took the others in
    (and, if `strict`, found nothing in them)."""
    checker = Checker(config)
    seq, last = logged[-1]
    try:
        for at, event in logged[:-1]:
            if checker.event(at, event) and strict:  # type: ignore[arg-type]
                return None
        found = list(RUN_CHECKS[wanted.invariant](checker.run, last))  # type: ignore[arg-type]
    except Exception:  # an event without the one that it needs
        return None
    return Violation(wanted.invariant, seq, wanted.message) if wanted.message in found else None


def _audited(
    config: HiSparseConfig, wanted: Violation, logged: list[Logged], *, first: bool
) -> Violation | None:
    """What an audit of these events, numbered anew, says, if that is `wanted`."""
    audit = Audit(config)
    for seq, (_, event) in enumerate(logged, 1):
        if not audit.take(seq, event):
            break
    audit.finish()
    told = audit.violations[:1] if first else audit.violations
    return next((v for v in told if _same(v, wanted)), None)


def _same(one: Violation, other: Violation) -> bool:
    same = _SEQ.sub("", one.message) == _SEQ.sub("", other.message)
    return same and one.invariant == other.invariant


# -- making it smaller ----------------------------------------------------------------------------


def _smaller(logged: list[Logged], shows: Shows, shown_by: str, spent: _Spent) -> Scenario:
    before = -1
    while spent.left > 0 and before != (before := size(e for _, e in logged)):
        logged = _fewer(logged, shows, spent)
        logged = _thinner(logged, shows, spent)
    violation = shows(logged)
    assert violation is not None, "what is left shows the violation"
    origin = [seq for seq, _ in logged]
    if shown_by == "Audit":
        logged = [(seq, event) for seq, (_, event) in enumerate(logged, 1)]
    return Scenario(violation, logged, origin, shown_by, spent.left > 0)


def _fewer(logged: list[Logged], shows: Shows, spent: _Spent) -> list[Logged]:
    """Events left out, the oldest first: halves, in the end single ones."""
    size = max(len(logged) // 2, 1)
    while True:
        at = 0
        while at < len(logged) and spent.left > 0:
            rest = logged[:at] + logged[at + size :]
            spent.left -= len(rest) + 1
            if rest and shows(rest) is not None:
                logged = rest
            else:
                at += size
        if size == 1 or spent.left <= 0:
            return logged
        size //= 2


def _thinner(logged: list[Logged], shows: Shows, spent: _Spent) -> list[Logged]:
    """Entries of the events' parallel tuples left out, from the end."""
    for number, (seq, event) in enumerate(logged):
        for names in groups(event):
            for at in reversed(range(len(getattr(event, names[0])))):
                if spent.left <= 0:
                    return logged
                thin = without(logged[number][1], names, {at})
                rest = [*logged[:number], (seq, thin), *logged[number + 1 :]]
                spent.left -= len(rest)
                if shows(rest) is not None:
                    logged = rest
    return logged


def _narrowed(chain: list[Logged], violation: Violation) -> list[Logged]:
    """A step names rows of every request: only those that the chain speaks of are kept."""
    rows: set[object] = {row for _, e in chain if (row := getattr(e, "row", -1)) >= 0}
    last = chain[-1][1]
    if isinstance(last, ev.Event):
        rows |= {ident for what, ident in subjects(violation, last) if what == "row"}
    found: list[Logged] = []
    for seq, event in chain:
        if isinstance(event, ev.StepPlanned | ev.RowsComputed):
            for names in groups(event):
                gone = {at for at, r in enumerate(getattr(event, names[0])) if r not in rows}
                event = without(event, names, gone)
        found.append((seq, event))
    return found
