"""A log as columns: its events, and for each block, host page, request and transfer its lane.

`Recorder` takes the events in and folds them. A lane holds an entry for every event that names its
id or leaves it in another state: the event's place in the log, the state after it, and whether the
event names it. That is all that a page needs to draw states, and to walk back as `fsm.why` does.
Where the fold cannot follow (the writer dropped events, or one contradicts the state) every lane
turns UNKNOWN until a snapshot resumes it; events, causes and texts go on.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from hisparse.config import HiSparseConfig
from hisparse.errors import HiSparseError
from hisparse.export.html.lane import CODES, NAMED, STATES, UNKNOWN, Lane, u32
from hisparse.export.html.payload import Columns
from hisparse.fsm import events as ev
from hisparse.fsm.codec import UnknownEvent
from hisparse.fsm.machines import BlockRole
from hisparse.fsm.state import State
from hisparse.fsm.timeline import Timeline
from hisparse.fsm.wire import TransferKind
from hisparse.fsm.witness import keys_of

KIND_OTHER = 255


class Source(NamedTuple):
    """One log to show. `events` can be read again; `resume` gives the state after a seq from a
    snapshot, if there is one; `apply` evolves a state, or raises a HiSparseError."""

    name: str
    config: HiSparseConfig
    events: Iterable[tuple[int, Any]]
    apply: Callable[[State, int, Any], None]
    resume: Callable[[int], State | None]


class Record(NamedTuple):
    """What a recorder says of the log beside its columns."""

    events: int
    changes: int
    error: HiSparseError | None


class Recorder:
    """Takes one log in, event by event, in seq order."""

    def __init__(self, source: Source) -> None:
        config = source.config
        self.source, self.state = source, State(config)
        self.sizes = {"block": len(self.state.blocks.state), "page": len(self.state.pages.state)}
        self.lanes = {what: Lane(what) for what in STATES}
        self.kinds: list[str] = [kind.__name__ for kind in ev.EVENT_TYPES]
        self.requests: list[dict[str, Any]] = []
        self.gaps: list[dict[str, Any]] = []
        self.error: HiSparseError | None = None
        self._kind_of = {name: at for at, name in enumerate(self.kinds)}
        self._kinds, self._causes = array("B"), array("I")
        self._seqs: list[tuple[int, int]] = []  # (place, seq) where seqs begin to run
        self._next_seq = -1
        self._steps: list[array[int]] = [array("I") for _ in range(4)]  # place, row, start, count
        self._step_at, self._step_of = array("I"), array("I")
        self._indices: dict[str, dict[Any, int]] = {"request": {}, "transfer": {}}
        self._copies: list[array[int]] = [array("I") for _ in range(6)]
        self._timeline: Timeline | None = Timeline(self.state)

    @property
    def record(self) -> Record:
        changes = sum(len(lane.ids) for lane in self.lanes.values())
        return Record(len(self._kinds), changes, self.error)

    def take(self, seq: int, event: Any) -> None:
        """The next event: fold it where that is possible, and note whom it names and moves."""
        at = len(self._kinds)
        if seq != self._next_seq:
            self._seqs.append((at, seq))
        self._next_seq = seq + 1
        kind = type(event).__name__
        if isinstance(event, UnknownEvent):
            kind = f"kind-{event.kind}"
        self._kinds.append(self._kind(kind))
        cause = getattr(event, "cause", 0)
        led = self.place(cause) if 0 < cause < seq else None
        self._causes.append(0 if led is None else at - led)
        self._note(at, event)
        changed = self._fold(seq, at, event)
        named = self._named(event)
        for what, lane in self.lanes.items():
            moved = changed.get(what, {})
            lane.now.update(moved)
            for ident in named.get(what, ()):
                lane.add(ident, at, lane.now.get(ident, 0) | NAMED)
            for ident, state in moved.items():
                if ident not in named.get(what, ()):
                    lane.add(ident, at, state)

    def place(self, seq: int) -> int | None:
        """The place in the log of `seq`, None if that is missing; the next seq is not taken yet."""
        end = len(self._kinds)
        for first, start in reversed(self._seqs):
            if start <= seq:
                return first + seq - start if seq - start < end - first else None
            end = first
        return None

    def _kind(self, name: str) -> int:
        found = self._kind_of.get(name)
        if found is None:
            found = min(len(self.kinds), KIND_OTHER)
            if found < KIND_OTHER:
                self.kinds.append(name)
                self._kind_of[name] = found
        return found

    # -- the fold ---------------------------------------------------------------------------------
    def _fold(self, seq: int, at: int, event: Any) -> dict[str, dict[int, int]]:
        """States that the event changed, by kind and id."""
        changed: dict[str, dict[int, int]] = {}
        if self._timeline is not None:
            try:
                self.source.apply(self.state, seq, event)
            except HiSparseError as error:
                return self._lose(at, event, error)
            for change in self._timeline.changes(event):
                ident = self._index(change.what, change.ident)
                codes = self.lanes[change.what].codes
                if ident is not None:
                    changed.setdefault(change.what, {})[ident] = codes.get(change.state, 0)
            return changed
        state = self.source.resume(seq) if self.error is None else None
        return {} if state is None else self._resume(at, state)

    def _lose(self, at: int, event: Any, error: HiSparseError) -> dict[str, dict[int, int]]:
        self._timeline = None
        dropped = isinstance(event, ev.LogGap)
        self.gaps.append({"from": at, "to": None, "reason": str(error), "dropped": dropped})
        if not dropped:
            self.error = error
        lost = {
            what: {ident: UNKNOWN for ident, state in lane.now.items() if state}
            for what, lane in self.lanes.items()
        }
        for lane in self.lanes.values():
            lane.now = dict.fromkeys(lane.now, UNKNOWN)
        return lost

    def _resume(self, at: int, state: State) -> dict[str, dict[int, int]]:
        self.state, self._timeline = state, Timeline(state)
        self.gaps[-1]["to"] = at
        changed = {what: dict.fromkeys(lane.now, 0) for what, lane in self.lanes.items()}
        for what, column in (("block", state.blocks.state), ("page", state.pages.state)):
            leased = np.flatnonzero(column)
            changed[what].update(zip(leased.tolist(), column[leased].tolist(), strict=True))
        for key, request in state.requests.items():
            ident = self._index("request", key)
            if ident is not None:
                changed["request"][ident] = CODES["request"].get(request.state.name, 0)
        for number, transfer in state.transfers.items():
            ident = self._index("transfer", number)
            if ident is not None:
                changed["transfer"][ident] = CODES["transfer"][transfer.state.name]
        return changed

    # -- what an event names ----------------------------------------------------------------------
    def _named(self, event: Any) -> dict[str, set[int]]:
        """Ids whose chain of causes holds the event: those that it names. Acknowledgements come in
        only as causes; they name thousands of ids and move none."""
        named: dict[str, set[int]] = {}
        if isinstance(event, ev.AcknowledgementsTaken):
            return named
        for what, ident in keys_of(event):
            if what != "row" and (index := self._index(what, ident)) is not None:
                named.setdefault(what, set()).add(index)
        return named

    def _index(self, what: str, ident: Any) -> int | None:
        """The lane of an id; None for one that no pool has."""
        if what in self.sizes:
            return ident if 0 < ident < self.sizes[what] else None
        return self._indices[what].get(ident)

    def _note(self, at: int, event: Any) -> None:
        """What the event says of rows, places and ends of copies."""
        match event:
            case ev.RequestArrived():
                key = (event.request, event.epoch)
                if key not in self._indices["request"]:
                    self._indices["request"][key] = len(self.requests)
                    self.requests.append(
                        {"name": event.request, "epoch": event.epoch, "row": -1, "admitted": -1}
                        | {"prompt": event.prompt_tokens, "max": event.max_tokens, "hit": 0}
                        | {"arrived": at}
                    )
            case ev.RequestAdmitted():
                found = self._indices["request"].get((event.request, event.epoch))
                if found is not None:
                    self.requests[found] |= {
                        "row": event.row, "admitted": at, "hit": event.hit_tokens
                    }  # fmt: skip
            case ev.StepPlanned():
                self._step_at.append(at)
                self._step_of.append(u32(event.step))
                for row, start, count in zip(event.rows, event.starts, event.counts, strict=False):
                    for column, value in zip(self._steps, (at, row, start, count), strict=True):
                        column.append(u32(value))
            case ev.BlocksReserved():
                places = _parallel(event.places, len(event.blocks))
                for block, (row, entry) in zip(event.blocks, places, strict=False):
                    self.lanes["block"].born(at, block, event.role, row, entry)
            case ev.HotLeased():
                for block in event.blocks:
                    self.lanes["block"].born(at, block, BlockRole.HOT, event.row)
            case ev.HostPagesReserved():
                for page in event.pages:
                    self.lanes["page"].born(at, page, 0, event.row)
            case ev.TransferPinned():
                self._pinned(at, event)

    def _pinned(self, at: int, event: ev.TransferPinned) -> None:
        owners = _parallel(event.owners, len(event.transfers))
        ends = zip(event.transfers, event.blocks, event.pages, event.entries, owners, strict=False)
        for ident, block, page, entry, (row, _) in ends:
            if ident in self._indices["transfer"] or not 0 < ident <= 0xFFFFFFFF:
                continue
            self._indices["transfer"][ident] = len(self._copies[0])
            values = (ident, block, page, entry, row, event.kind)
            for column, value in zip(self._copies, values, strict=True):
                column.append(u32(value))

    # -- into a page ------------------------------------------------------------------------------
    def columns(self) -> Columns:
        """Everything taken, as columns."""
        columns = Columns()
        columns.u8("kind", np.frombuffer(self._kinds, dtype=np.uint8))
        columns.u32("cause", np.frombuffer(self._causes, dtype=np.uint32))
        counts = self.sizes | {"request": len(self.requests), "transfer": len(self._copies[0])}
        for what, lane in self.lanes.items():
            lane.write(what, columns, counts[what])
        names = ("id", "block", "page", "entry", "row", "kind")
        for name, column in zip(names, self._copies, strict=True):
            columns.u32(f"copy.{name}", np.frombuffer(column, dtype=np.uint32), ascending=True)
        columns.u32("step.at", np.frombuffer(self._step_at, dtype=np.uint32), ascending=True)
        columns.u32("step.number", np.frombuffer(self._step_of, dtype=np.uint32), ascending=True)
        place, row, start, count = (np.frombuffer(c, dtype=np.uint32) for c in self._steps)
        order = np.argsort(row, kind="stable")
        columns.u32("work.row", row[order], ascending=True)
        columns.u32("work.at", place[order], ascending=True)
        columns.u32("work.start", start[order], ascending=True)
        columns.u32("work.count", count[order])
        return columns

    def meta(self) -> dict[str, Any]:
        """The rest, as JSON can hold it."""
        return {
            "events": len(self._kinds),
            "kinds": self.kinds,
            "states": STATES,
            "seqs": self._seqs,
            "gaps": self.gaps,
            "requests": self.requests,
            "copies": [kind.name for kind in TransferKind],
            "error": None if self.error is None else str(self.error),
            "roles": [role.name for role in BlockRole],
            "page_size": self.source.config.pools.page_size,
            "index_pages": self.source.config.index_pages_per_block,
        }


def _parallel(pairs: Callable[[], list[tuple[int, int]]], count: int) -> list[tuple[int, int]]:
    """What an event says a block or copy; nothing where its columns are not of one length."""
    try:
        return pairs()
    except ValueError:  # a foreign log may say anything
        return [(0, 0)] * count
