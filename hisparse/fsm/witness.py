"""The witness of a violation: the shortest chain of events that shows it. Pure.

`subjects` are the ids that the violation is about: those that its message names, else those of its
event. `Chains` collects what each lived through in its epoch: its birth, what moved it, the
transfers that copied it. For an invariant of the run, events are then left out for as long as a
fresh checker still says the very same thing of the rest: what is left shows the violation alone,
and none of it can go. Where the chain does not show it, earlier epochs and then the last
`EVENTS_NEAR` events are searched too; where nothing shows it alone, other violations that the same
events bring are put up with. Other violations keep the bounded chain.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import msgspec

from hisparse.config import HiSparseConfig
from hisparse.fsm import events as ev
from hisparse.fsm.invariants.checker import Checker, Violation
from hisparse.fsm.invariants.run import RUN_CHECKS

Key = tuple[str, object]  # ("block", 17), ("page", 3), ("transfer", 5), ("row", 0), ("request", r)
Logged = tuple[int, ev.Event]
EVENTS_OF_ID = 12  # kept of one id: the birth of its epoch, and the last of the rest
EVENTS_SHOWN = 40
EVENTS_NEAR = 1000
BUDGET = 300_000  # events checked while a chain is shortened
SUBJECTS = 8  # ids followed where the message names none
_FIELDS = {
    "blocks": "block",
    "sources": "block",
    "pages": "page",
    "suffixes": "suffix page",
    "transfers": "transfer",
    "enqueued": "transfer",
    "completed": "transfer",
    "failed": "transfer",
    "rows": "row",
}
OF_ROWS = (ev.BlocksReserved, ev.TransferPinned, ev.PagesPublished)  # of one row, or of several
_WORDS = re.compile(r"(host page|suffix page|page|block|row|transfer)s? (\[[\d, ]+\]|\d+)")
_BIRTHS: dict[str, tuple[type[ev.Event], ...]] = {
    "block": (ev.BlocksReserved, ev.HotLeased),
    "page": (ev.HostPagesReserved,),
    "suffix page": (ev.SuffixPinned,),
    "transfer": (ev.TransferPinned, ev.SuffixPinned),
    "row": (ev.RequestAdmitted,),
    "request": (ev.RequestArrived,),
}


def keys_of(event: object) -> Iterator[Key]:
    """The ids that an event names, null ids left out."""
    for field, kind in _FIELDS.items():
        value = getattr(event, field, ())
        for ident in value if isinstance(value, tuple) else ():  # a rewind counts its rows
            if ident or kind == "row":
                yield kind, ident
    row = getattr(event, "row", -1)
    if row >= 0:
        yield "row", row
    request = getattr(event, "request", None)
    if request is not None:
        yield "request", (request, getattr(event, "epoch", 0))


def subjects(violation: Violation, event: object) -> list[Key]:
    """The ids that a violation is about."""
    found: dict[Key, None] = {}
    for word, ids in _WORDS.findall(violation.message):
        kind = "page" if word == "host page" else word
        if word == "page":
            continue  # a page of a request: no id of the pools
        found |= {(kind, int(ident)): None for ident in re.findall(r"\d+", ids)}
    if found:
        return list(found)
    return list(dict.fromkeys(keys_of(event)))[:SUBJECTS]


class Chains:
    """What a few ids lived through: in their last epoch, or in `all_epochs`."""

    def __init__(self, keys: Iterable[Key], all_epochs: bool = False) -> None:
        self._all = all_epochs
        self._events: dict[int, ev.Event] = {}
        self._of: dict[Key, list[int]] = {key: [] for key in keys}

    @property
    def keys(self) -> list[Key]:
        """The ids followed: those asked for, and those that they led to."""
        return list(self._of)

    def take(self, seq: int, event: ev.Event) -> None:
        named = [key for key in keys_of(event) if key in self._of]
        if not named:
            return
        self._events[seq] = event
        for key in named:
            self._note(key, seq, event)
        for key in list(_linked(event, named)):
            if key not in self._of:
                self._of[key] = []
                self._note(key, seq, event)

    def _note(self, key: Key, seq: int, event: ev.Event) -> None:
        held = self._of[key]
        if isinstance(event, _BIRTHS[str(key[0])]) and not self._all:
            held.clear()
        held.append(seq)
        if len(held) > EVENTS_OF_ID * (5 if self._all else 1):
            same = [s for s in held[1:-1] if type(self._events.get(s)) is type(event)]
            held.remove(same[0] if same else held[1])

    def events(self) -> list[Logged]:
        """All of it, by seq."""
        seqs = sorted({seq for held in self._of.values() for seq in held})
        return [(seq, self._events[seq]) for seq in seqs]


def _linked(event: ev.Event, named: list[Key]) -> Iterator[Key]:
    """Ids to follow from here on: the copies of a block or page, the request in a row."""
    if isinstance(event, ev.TransferPinned):
        parts = zip(event.owners(), event.transfers, event.blocks, event.pages, strict=False)
        for (row, _), ident, block, page in parts:
            if not {("transfer", ident), ("block", block), ("page", page)}.isdisjoint(named):
                yield "transfer", ident
                yield "page", page
                yield "row", row
    elif isinstance(event, ev.BlocksReserved):
        for (row, _), block in zip(event.places(), event.blocks, strict=False):
            if ("block", block) in named or ("row", row) in named:
                yield "row", row
    elif isinstance(event, ev.HotLeased | ev.HostPagesReserved):
        yield "row", event.row
    elif isinstance(event, ev.RequestAdmitted):
        yield "request", (event.request, event.epoch)


def followed(
    keys: Iterable[Key], events: Iterable[Logged], upto: int, *, all_epochs: bool = False
) -> list[Logged]:
    """The chain of `keys` before seq `upto`, in a few passes: each also sees how the rows and
    requests that the last one met came to be. `events` must be iterable again (a list, a log)."""
    chosen = list(keys)
    for _ in range(3):
        chains = Chains(chosen, all_epochs)
        for seq, event in events:
            if seq >= upto:
                break
            chains.take(seq, event)
        more = [key for key in chains.keys if key not in chosen]
        if not more:
            break
        chosen += more
    return chains.events()


def witness(
    config: HiSparseConfig, violation: Violation, event: ev.Event, events: Iterable[Logged]
) -> list[Logged]:
    """The chain that shows `violation`, which `event` brought; `events` is the log."""
    keys, last = subjects(violation, event), [(violation.seq, event)]
    chain = followed(keys, events, violation.seq)
    if violation.invariant in RUN_CHECKS:
        wide = list(_candidates(chain, keys, violation.seq, events))
        for strict, candidates in ((strict, one) for strict in (True, False) for one in wide):
            if shows(config, candidates + last, violation, strict=strict):
                found = shortened(config, candidates, last, violation, strict=strict)
                if len(found) <= EVENTS_SHOWN:
                    return found
    return chain[1 - EVENTS_SHOWN :] + last


def _candidates(
    chain: list[Logged], keys: list[Key], upto: int, events: Iterable[Logged]
) -> Iterator[list[Logged]]:
    yield chain
    lives = followed(keys, events, upto, all_epochs=True)
    yield lives
    near: deque[Logged] = deque(maxlen=EVENTS_NEAR)
    for seq, event in events:
        if seq >= upto:
            break
        near.append((seq, event))
    yield sorted(dict([*lives, *near]).items())


def shortened(
    config: HiSparseConfig,
    chain: list[Logged],
    last: list[Logged],
    violation: Violation,
    *,
    strict: bool = True,
) -> list[Logged]:
    """`chain` and `last`, less all that can be left out: the oldest first, for a later tenant of
    a row is the one that counts; halves first, in the end single events."""
    spent, size, before = 0, max(len(chain) // 2, 1), len(chain) + 1
    while chain and spent < BUDGET:
        at = 0
        while at < len(chain):
            fewer = chain[:at] + chain[at + size :]
            spent += len(fewer) + 1
            if shows(config, fewer + last, violation, strict=strict):
                chain = fewer
            else:
                at += size
        if size == 1 and len(chain) == before:
            break
        size, before = max(size // 2, 1), len(chain)
    return chain + last


def shows(
    config: HiSparseConfig, chain: list[Logged], violation: Violation, *, strict: bool = True
) -> bool:
    """Whether these events alone bring the same violation and, if `strict`, nothing before it.

    A step names rows of every request: only those that the chain speaks of are looked at.
    """
    checker = Checker(config)
    rows = {row for word, row in subjects(violation, chain[-1][1]) if word == "row"}
    rows |= {getattr(event, "row", -1) for _, event in chain}
    last = chain[-1][1]
    try:
        for seq, event in chain[:-1]:
            if checker.event(seq, narrowed(event, rows)) and strict:
                return False
        check = RUN_CHECKS[violation.invariant]
        return violation.message in [
            *check(checker.run, narrowed(last, rows)),
            *(check(checker.run, last) if isinstance(last, OF_ROWS) else ()),
        ]
    except Exception:  # an event without the one that it needs
        return False


def narrowed(event: ev.Event, rows: Collection[Any]) -> ev.Event:
    """An event of several rows, less the rows that are not in `rows`."""
    if isinstance(event, OF_ROWS) and event.rows:
        kept_at = [at for at, row in enumerate(event.rows) if row in rows]
        columns = {
            name: tuple(value[at] for at in kept_at)
            for name in event.__struct_fields__
            if isinstance(value := getattr(event, name), tuple)
        }
        return msgspec.structs.replace(event, **columns)
    if isinstance(event, ev.StepPlanned):
        kept = [
            part
            for part in zip(event.rows, event.starts, event.counts, strict=True)
            if part[0] in rows
        ]
        step = tuple(zip(*kept, strict=True)) or ((), (), ())
        return ev.StepPlanned(event.cause, event.step, *step)
    if isinstance(event, ev.RowsComputed):
        counted = [part for part in zip(event.rows, event.counts, strict=True) if part[0] in rows]
        named = [
            part for part in zip(event.hash_rows, event.page_hashes, strict=True) if part[0] in rows
        ]
        return ev.RowsComputed(
            event.cause,
            event.step,
            tuple(row for row, _ in counted),
            tuple(count for _, count in counted),
            tuple(row for row, _ in named),
            tuple(page_hash for _, page_hash in named),
        )
    return event
