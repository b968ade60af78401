"""One event as plain data: what `jsonl` and `parquet` are made of.

`records` counts steps and follows who holds which row, so that each event also says its step (the
last one planned at or before it) and, if it names only a row, the request in that row. Hashes and
bodies are hex, enumerations their names. An event of an unknown kind keeps its bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from hisparse.fsm import events as ev
from hisparse.fsm.codec import LoggedEvent, UnknownEvent


class Record(NamedTuple):
    """One event. `fields` are all but its cause, by name, as JSON can hold them."""

    seq: int
    step: int
    kind: str
    cause: int
    request: str | None
    fields: dict[str, Any]


def records(events: Iterable[tuple[int, LoggedEvent]]) -> Iterator[Record]:
    """A record an event, in order."""
    step, held = 0, dict[int, str]()
    for seq, event in events:
        if isinstance(event, ev.StepPlanned | ev.CommandApplied):
            step = event.step
        elif isinstance(event, ev.RequestAdmitted):
            held[event.row] = event.request
        request = getattr(event, "request", None) or held.get(getattr(event, "row", -1))
        names = [name for name in event.__struct_fields__ if name != "cause"]
        fields = {name: plain(getattr(event, name)) for name in names}
        kind = type(event).__name__
        if isinstance(event, UnknownEvent):
            kind = f"kind-{event.kind}"
        yield Record(seq, step, kind, getattr(event, "cause", 0), request, fields)
        if isinstance(event, ev.RequestDrained):
            held.pop(event.row, None)


def plain(value: Any) -> Any:
    """A field as JSON can hold it."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, bytes):
        return value.hex()
    return [plain(item) for item in value] if isinstance(value, tuple) else value
