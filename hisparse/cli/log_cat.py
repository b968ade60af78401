"""Which events of a log `hisparse log cat` prints, and how: a line an event, or a line a step.

Ranges are ``A..B``, both ends included, ``A..``, ``..B`` or ``A``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import click
import msgspec

from hisparse.errors import LogError
from hisparse.fsm.codec import LoggedEvent, UnknownEvent
from hisparse.fsm.events import RequestAdmitted, RequestDrained, StepPlanned
from hisparse.fsm.history import names_id
from hisparse.fsm.log_history import LogHistory
from hisparse.fsm.machines import BlockState
from hisparse.fsm.state import State

Range = tuple[int | None, int | None]
if TYPE_CHECKING:
    _ParamType = click.ParamType[Range]
else:
    _ParamType = click.ParamType  # not generic in older releases
LETTERS = {
    BlockState.FREE: ".",
    BlockState.RESERVED: "r",
    BlockState.DIRTY: "d",
    BlockState.PINNED: "p",
    BlockState.ENQUEUED: "e",
    BlockState.CLEAN: "c",
    BlockState.CACHED: "k",
    BlockState.QUARANTINED: "Q",
}


class RangeType(_ParamType):
    """``A..B`` as (A, B); an end that is not given is None."""

    name = "A..B"

    def convert(self, value: Any, param: Any, ctx: Any) -> Range:
        if isinstance(value, tuple):
            return value
        low, dots, high = str(value).partition("..")
        try:
            first = int(low) if low else None
            last = (int(high) if high else None) if dots else first
        except ValueError:
            self.fail(f"{value!r} is no range: give A..B, A.., ..B or A", param, ctx)
        empty = first is not None and last is not None and first > last
        if empty or first is last is None:
            self.fail(f"{value!r} is an empty range: give A..B, A.., ..B or A", param, ctx)
        return first, last


RANGE = RangeType()


@dataclass
class Filter:
    """What to print. An empty collection asks for everything; ids of all kinds are alternatives."""

    kinds: Collection[str] = ()
    blocks: Collection[int] = ()
    pages: Collection[int] = ()
    transfers: Collection[int] = ()
    requests: Collection[str] = ()
    held: dict[int, str] = field(default_factory=dict)  # request of a row, as of the last event

    def wants(self, event: LoggedEvent) -> bool:
        """Whether `event` is asked for; it must see every event, in order, to know the rows."""
        if isinstance(event, RequestAdmitted):
            self.held[event.row] = event.request
        found = self._named(event)
        if isinstance(event, RequestDrained):
            self.held.pop(event.row, None)
        return found and (not self.kinds or kind_name(event) in self.kinds)

    def _named(self, event: LoggedEvent) -> bool:
        if not (self.blocks or self.pages or self.transfers or self.requests):
            return True
        ids = (
            ("BlockLease", self.blocks),
            ("HostPage", self.pages),
            ("Transfer", self.transfers),
        )
        if any(names_id(event, machine, one) for machine, wanted in ids for one in wanted):
            return True
        rows = (getattr(event, "row", None), *getattr(event, "rows", ()))
        of = {getattr(event, "request", None), *(self.held.get(row) for row in rows)}
        return not of.isdisjoint(self.requests)


def kind_name(event: LoggedEvent) -> str:
    return f"kind-{event.kind}" if isinstance(event, UnknownEvent) else type(event).__name__


def fields_of(event: LoggedEvent) -> dict[str, Any]:
    """The event's fields, plain: enums by name, bytes as hex."""
    names = (info.name for info in msgspec.structs.fields(event))
    return {name: _plain(getattr(event, name)) for name in names}


def _plain(value: Any) -> Any:
    match value:
        case Enum():
            return value.name
        case bytes():
            return value.hex()
        case tuple() | list():
            return [_plain(item) for item in value]
        case _:
            return value


def line(seq: int, event: LoggedEvent, *, as_json: bool) -> str:
    """One event as a line."""
    values = fields_of(event)
    if as_json:
        return json.dumps({"seq": seq, "event": kind_name(event), **values})
    shown = " ".join(f"{name}={_short(value)}" for name, value in values.items())
    return f"{seq:>8}  {kind_name(event):<21} {shown}"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",".join(_short(item) for item in value) + "]"
    text = str(value)
    return text if len(text) <= 32 else text[:12] + "…"


def bounds(history: LogHistory, seqs: Range, steps: Range) -> tuple[int, int]:
    """First and last seq of what lies in both ranges. Raises LogError for a step that is not."""
    first, last = history.first_seq, history.last_seq
    first = max(first, seqs[0] if seqs[0] is not None else first)
    last = min(last, seqs[1] if seqs[1] is not None else last)
    if steps[0] is not None:
        first = max(first, history.seq_of_step(steps[0]))
    if steps[1] is not None:
        try:
            last = min(last, history.seq_of_step(steps[1] + 1) - 1)
        except LogError:
            history.seq_of_step(steps[1])  # the last step has no next one
    return first, last


def events(history: LogHistory, chosen: Filter, first: int, last: int) -> Iterator[Any]:
    """(seq, event) in ``[first, last]`` that are asked for."""
    start = history.first_seq if chosen.requests else first
    if first > last:
        return
    for seq, event in history.read(start):
        if seq > last:
            return
        if chosen.wants(event) and seq >= first:
            yield seq, event


def wide(
    history: LogHistory, blocks: list[int], first: int, last: int, *, as_json: bool
) -> Iterator[str]:
    """One line a step: the state of each block, a letter a block, at the end of that step."""
    if first > last:
        return
    state = history.state_at(first - 1)
    chosen = blocks or list(range(1, len(state.blocks.state)))
    if max(chosen) >= len(state.blocks.state):
        raise LogError(f"block {max(chosen)} is not there: {len(state.blocks.state) - 1} are")
    show = _wide_json if as_json else _wide_text
    letters = "".join(LETTERS[one] for one in BlockState)
    seen = False
    for seq, event in history.read(first):
        if seq > last:
            break
        if isinstance(event, StepPlanned):
            if seen:
                yield show(state, chosen, letters)
            seen = True
        history.apply(state, seq, event)
    if seen:
        yield show(state, chosen, letters)


def _row(state: State, blocks: list[int], letters: str) -> str:
    return "".join(letters[code] for code in state.blocks.state[blocks])


def _wide_text(state: State, blocks: list[int], letters: str) -> str:
    return f"{state.step:>6} {_row(state, blocks, letters)}"


def _wide_json(state: State, blocks: list[int], letters: str) -> str:
    return json.dumps(
        {"step": state.step, "seq": state.seq, "blocks": _row(state, blocks, letters)}
    )
