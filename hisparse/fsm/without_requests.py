"""A log as if some of its requests had never come. Pure.

Their events go; of steps, acknowledgements and what tells of several requests, their part goes.
What counts up without a gap (epochs of requests, blocks and pages; transfers; steps) is numbered
anew, or the fold would refuse the rest. None where the rest names what they left behind (a page
found by prefix, a shared block); where it builds on that unnamed, the fold may refuse what is left:
who asks has to judge it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from hisparse.fsm import events as ev
from hisparse.fsm.codec import LoggedEvent
from hisparse.fsm.state import Key
from hisparse.fsm.witness import OF_ROWS, narrowed

Logged = tuple[int, LoggedEvent]
_GIVEN = (ev.BlocksReserved, ev.HotLeased, ev.HostPagesReserved)
_SHARED = (ev.BlocksEvicted, ev.BlocksSealed, ev.HostPagesEvicted, ev.SuffixEvicted)
_SETTLED = (
    ev.TransferEnqueued,
    ev.TransferCompleted,
    ev.TransferFailed,
    ev.SuffixCompleted,
    ev.SuffixFailed,
)
_IDS = (  # ids, and the fields that may hold their epochs
    ("blocks", ("block_epochs", "epochs")),
    ("sources", ("source_epochs",)),
    ("pages", ("page_epochs", "epochs")),
    ("suffixes", ("suffix_epochs",)),
)
_POOLS = {"blocks": "gpu", "sources": "gpu", "pages": "host", "suffixes": "suffix"}
_ACKED = ("enqueued", "completed", "failed")


def without_requests(events: Iterable[Logged], dropped: Collection[Key]) -> list[Logged] | None:
    """`events`, each with the seq that it had, less those of `dropped`."""
    rebuilt = _Rebuilt(dropped)
    found: list[Logged] = []
    try:
        for seq, event in events:
            made = rebuilt.event(event)
            if made is not None:
                found.append((seq, made))
    except (KeyError, ValueError):  # what a dropped request left behind; lists of other lengths
        return None
    return found


class _Rebuilt:
    def __init__(self, dropped: Collection[Key]) -> None:
        self._dropped = set(dropped)
        self._held: dict[int, Key] = {}
        self._request_epoch: dict[Key, int] = {}
        self._epochs: dict[tuple[str, int, int], int] = {(pool, 0, 0): 0 for pool in _POOLS}
        self._last: dict[tuple[str, int], int] = {}
        self._transfers: dict[int, int] = {0: 0}
        self._epoch_of_transfer: dict[int, int] = {}
        self._steps: dict[int, int] = {}

    def event(self, event: LoggedEvent) -> LoggedEvent | None:
        """The event as it would have been; None if it would not."""
        key = self._key(event)
        if isinstance(event, ev.RequestAdmitted):
            self._held[event.row] = (event.request, event.epoch)
        elif isinstance(event, ev.RequestDrained):
            self._held.pop(event.row, None)
        if key in self._dropped:
            return None
        if isinstance(event, OF_ROWS) and event.rows:
            others = {row for row, held in self._held.items() if held not in self._dropped}
            if others.isdisjoint(event.rows):
                return None
            event = narrowed(event, others)
        changed: dict[str, Any] = {}
        match event:
            case ev.RequestArrived():
                self._request_epoch[event.request, event.epoch] = len(self._request_epoch) + 1
            case ev.StepPlanned() | ev.RowsComputed():
                return self._step(event)
            case ev.AcknowledgementsTaken():
                return self._acknowledged(event)
            case ev.IndexPagesCopied():
                return self._copied(event)
            case _ if isinstance(event, _SETTLED):
                kept = tuple(self._transfers[t] for t in event.transfers if t in self._transfers)
                return msgspec.structs.replace(event, transfers=kept) if kept else None
            case ev.TransferPinned():
                owners = zip(event.owners(), event.transfers, strict=True)
                for (row, _), ident in owners:
                    self._transfers[ident] = len(self._transfers)
                    self._epoch_of_transfer[ident] = self._request_epoch[self._held[row]]
                epochs = tuple(self._request_epoch[self._held[row]] for row in event.rows)
                changed["request_epochs"] = epochs
            case ev.SuffixPinned():
                for ident in event.transfers:
                    self._transfers[ident] = len(self._transfers)
                    self._epoch_of_transfer[ident] = self._request_epoch[self._held[event.row]]
        if key is not None and hasattr(event, "epoch"):
            changed["epoch"] = self._request_epoch[key]
        if hasattr(event, "transfers"):
            changed["transfers"] = tuple(self._transfers[ident] for ident in event.transfers)
        return self._with_epochs(event, changed)

    def _key(self, event: LoggedEvent) -> Key | None:
        request = getattr(event, "request", None)
        if request is not None:
            return request, getattr(event, "epoch", 0)
        return self._held.get(getattr(event, "row", -1))

    def _with_epochs(self, event: LoggedEvent, changed: dict[str, Any]) -> LoggedEvent | None:
        for field, names in _IDS:
            ids = getattr(event, field, ())
            name = next((name for name in names if hasattr(event, name)), None)
            if not ids or name is None:
                continue
            pool, named = _POOLS[field], zip(ids, getattr(event, name), strict=True)
            if isinstance(event, _SHARED):
                known = [(i, new) for i, e in named if (new := self._epochs.get((pool, i, e)))]
                if not known:
                    return None
                changed[field], changed[name] = zip(*known, strict=True)
                continue
            pairs = list(named)
            stored = isinstance(event, ev.SuffixPinned) and not event.load and field == "suffixes"
            if isinstance(event, _GIVEN) or stored:
                for ident, epoch in pairs:
                    self._last[pool, ident] = self._last.get((pool, ident), 0) + 1
                    self._epochs[pool, ident, epoch] = self._last[pool, ident]
            changed[name] = tuple(self._epochs[pool, ident, epoch] for ident, epoch in pairs)
        return msgspec.structs.replace(event, **changed)

    def _step(self, event: ev.StepPlanned | ev.RowsComputed) -> LoggedEvent | None:
        columns: list[tuple[str, ...]] = [("rows", "counts"), ("hash_rows", "page_hashes")]
        if isinstance(event, ev.StepPlanned):
            columns = [("rows", "starts", "counts")]
        changed: dict[str, Any] = {}
        for names in columns:
            kept = [
                part
                for part in zip(*(getattr(event, name) for name in names), strict=True)
                if self._held.get(part[0]) not in self._dropped
            ]
            parts = zip(*kept, strict=True) if kept else [()] * len(names)
            changed |= dict(zip(names, parts, strict=True))
        if not changed["rows"] and event.rows:
            return None
        if isinstance(event, ev.StepPlanned):
            self._steps[event.step] = len(self._steps) + 1
        return msgspec.structs.replace(event, step=self._steps[event.step], **changed)

    def _copied(self, event: ev.IndexPagesCopied) -> LoggedEvent | None:
        """Copies out of blocks that a dropped request filled go too."""
        columns = (
            event.sources,
            event.source_epochs,
            event.source_slots,
            event.blocks,
            event.slots,
        )
        kept = [
            (source, new, *rest)
            for source, epoch, *rest in zip(*columns, strict=True)
            if (new := self._epochs.get(("gpu", source, epoch)))
        ]
        return (
            ev.IndexPagesCopied(event.cause, event.row, *zip(*kept, strict=True)) if kept else None
        )

    def _acknowledged(self, event: ev.AcknowledgementsTaken) -> LoggedEvent:
        changed: dict[str, Any] = {
            "retired_step": sum(step <= event.retired_step for step in self._steps)
        }
        for name in _ACKED:
            kept = [t for t in getattr(event, name) if t in self._transfers]
            changed[name] = tuple(self._transfers[t] for t in kept)
            changed[f"{name}_epochs"] = tuple(self._epoch_of_transfer[t] for t in kept)
        return msgspec.structs.replace(event, **changed)
