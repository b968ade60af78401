"""What can be left out of a log: requests, pages of requests, events, entries of tuples. Pure.

`UNITS` pairs what lists the units of a log, in its order, with what leaves some of them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from hisparse.fsm import events as ev
from hisparse.fsm.codec import LoggedEvent
from hisparse.fsm.machines import BlockRole

Edited = list[LoggedEvent | None]
Column = tuple[int, tuple[str, ...], int]  # place in the log, names of the tuples, place in those
Units = Callable[[list[LoggedEvent]], list[Any]]
Cut = Callable[[list[LoggedEvent], list[Any]], Edited]
Page = tuple[int, int]  # epoch of a request, page of it
_GROUPS: dict[type, tuple[tuple[str, ...], ...]] = {
    ev.RowsComputed: (("rows", "counts"), ("hash_rows", "page_hashes")),
    ev.AcknowledgementsTaken: (
        ("enqueued", "enqueued_epochs"),
        ("completed", "completed_epochs"),
        ("failed", "failed_epochs"),
    ),
}


def groups(event: LoggedEvent) -> list[tuple[str, ...]]:
    """The names of an event's tuples, those that run parallel together."""
    fixed = _GROUPS.get(type(event))
    if fixed is not None:
        return list(fixed)
    lengths: dict[int, list[str]] = {}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if isinstance(value, tuple) and value:
            lengths.setdefault(len(value), []).append(name)
    return [tuple(names) for names in lengths.values()]


def without(event: LoggedEvent, names: Iterable[str], gone: Iterable[int]) -> LoggedEvent:
    """`event` without the entries `gone` of the tuples `names`."""
    left = set(gone)
    kept = {n: tuple(v for at, v in enumerate(getattr(event, n)) if at not in left) for n in names}
    return msgspec.structs.replace(event, **kept)


def size(log: Iterable[LoggedEvent]) -> int:
    """Events, and entries of their tuples."""
    return sum(1 + sum(len(getattr(e, names[0])) for names in groups(e)) for e in log)


def arrivals(log: list[LoggedEvent]) -> list[int]:
    return [at for at, event in enumerate(log) if isinstance(event, ev.RequestArrived)]


def without_events(log: list[LoggedEvent], gone: list[int]) -> Edited:
    edited: Edited = list(log)
    for at in gone:
        edited[at] = None
    return edited


def columns(log: list[LoggedEvent]) -> list[Column]:
    return [
        (at, names, place)
        for at, event in enumerate(log)
        for names in groups(event)
        for place in range(len(getattr(event, names[0])))
    ]


def without_columns(log: list[LoggedEvent], gone: list[Column]) -> Edited:
    edited: Edited = list(log)
    places: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for at, names, place in gone:
        places.setdefault((at, names), []).append(place)
    for (at, names), left in places.items():
        event = edited[at]
        assert event is not None
        edited[at] = without(event, names, left)
    return edited


def tenants(log: list[LoggedEvent]) -> list[list[int]]:
    """The epochs of the requests that each event names, by row or by name."""
    held: dict[int, int] = {}
    found = []
    for event in log:
        if isinstance(event, ev.RequestAdmitted):
            held[event.row] = event.epoch
        named = getattr(event, "rows", ())  # a rewind counts its rows
        rows = [getattr(event, "row", -1), *(named if isinstance(named, tuple) else ())]
        own = [held[row] for row in rows if row in held]
        found.append([*own, event.epoch] if hasattr(event, "request") else own)  # type: ignore
    return found


def instances(event: LoggedEvent) -> list[tuple[str, int, int]]:
    """(field, id, epoch) of the blocks and host pages that an event names."""
    found: list[tuple[str, int, int]] = []
    for ids, fields in (
        ("blocks", ("block_epochs", "epochs")),
        ("blocks", ("source_epochs",)),
        ("pages", ("page_epochs", "epochs")),
    ):
        field = "sources" if fields == ("source_epochs",) else ids
        name = next((n for n in fields if hasattr(event, n)), None)
        if name is not None and hasattr(event, field):
            pairs = zip(getattr(event, field), getattr(event, name), strict=False)
            found += [(ids, ident, epoch) for ident, epoch in pairs if ident]
    return found


def pages(log: list[LoggedEvent]) -> list[Page]:
    return list(dict.fromkeys(page for page, _ in _page_columns(log) if page is not None))


def without_pages(log: list[LoggedEvent], gone: list[Page]) -> Edited:
    """Without what names these pages of requests, hashes and reservations included."""
    left = set(gone)
    return without_columns(log, [column for page, column in _page_columns(log) if page in left])


def _page_columns(log: list[LoggedEvent]) -> list[tuple[Page | None, Column]]:
    """Each column that is about one page of a request, with that."""
    held: dict[int, int] = {}
    hashes: dict[int, int] = {}
    filled: dict[tuple[str, int, int], Page] = {}
    found: list[tuple[Page | None, Column]] = []
    reserved: list[tuple[tuple[str, int, int], Column]] = []

    def add(at: int, names: tuple[str, ...], pages: Iterable[tuple[int | None, int]]) -> None:
        for place, (tenant, page) in enumerate(pages):
            if tenant is not None:
                found.append(((tenant, page), (at, names, place)))

    for at, e in enumerate(log):
        own = held.get(getattr(e, "row", -1))
        names = next(iter(groups(e)), ())
        match e:
            case ev.RequestArrived():
                hashes[e.epoch] = len(e.page_hashes)
                add(at, names, ((e.epoch, page) for page in range(len(e.page_hashes))))
            case ev.RequestAdmitted():
                held[e.row] = e.epoch
            case ev.RowsComputed():
                for place, row in enumerate(e.hash_rows):
                    tenant = held.get(row, 0)
                    page = hashes[tenant] = hashes.get(tenant, 0) + 1
                    found.append(((tenant, page - 1), (at, _GROUPS[ev.RowsComputed][1], place)))
            case ev.PrefixLeased():
                add(at, names, ((own, page) for page in range(len(e.pages))))
            case ev.BlocksReserved() if e.role is BlockRole.RESIDENT:
                add(at, names, ((held.get(row), entry) for row, entry in e.places()))
            case ev.PagesPublished():
                add(at, names, ((held.get(row), entry) for row, entry in e.places()))
            case ev.TransferPinned():
                parts = zip(e.owners(), e.entries, e.pages, e.page_epochs, strict=True)
                for place, ((row, _), entry, page, epoch) in enumerate(parts):
                    tenant = held.get(row, 0)
                    found.append(((tenant, entry), (at, names, place)))
                    filled["pages", page, epoch] = (tenant, entry)
            case ev.SuffixPinned():
                add(at, names, ((own, entry) for entry in e.entries))
            case ev.HostPagesReserved():
                pairs = zip(e.pages, e.epochs, strict=True)
                for place, (page, epoch) in enumerate(pairs):
                    reserved.append((("pages", page, epoch), (at, names, place)))
    return found + [(filled.get(key), column) for key, column in reserved]


UNITS: tuple[tuple[Units, Cut], ...] = (
    (arrivals, without_events),
    (pages, without_pages),
    (lambda log: list(range(len(log))), without_events),
    (columns, without_columns),
)
