"""One readable line an event: seq, kind, short fields. Pure; used by every verb.

    412  TransferPinned     SPILL row 3, transfers 17-19, blocks 5-7 @1, pages 10-12 @2  <- 400

Runs of ids are joined (``5-7``), epochs follow ``@``, hashes are counted, ``<-`` names the cause.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

SHOWN = 8  # runs of ids shown a field; the rest is counted
_EPOCHS = {
    "blocks": ("block_epochs", "epochs"),
    "pages": ("page_epochs", "epochs"),
    "sources": ("source_epochs",),
    "suffixes": ("suffix_epochs",),
    "enqueued": ("enqueued_epochs",),
    "completed": ("completed_epochs",),
    "failed": ("failed_epochs",),
}
_EPOCH_FIELDS = frozenset(name for names in _EPOCHS.values() for name in names)
_PLAIN = ("request", "kind", "role", "trigger", "policy", "choice", "stream", "pool", "why")


def line(seq: int, event: object) -> str:
    """The event on one line."""
    cause = getattr(event, "cause", 0)
    tail = f"  <- {cause}" if cause else ""
    return f"{seq:>8}  {type(event).__name__:<18} {fields(event)}{tail}"


def fields(event: object) -> str:
    """The event's fields without its cause, comma separated, in the order of declaration."""
    return ", ".join(_parts(event))


def as_dict(seq: int, event: object) -> dict[str, Any]:
    """The event for JSON: its seq, kind, line, and every field by name."""
    return {
        "seq": seq,
        "kind": type(event).__name__,
        "line": line(seq, event).strip(),
        "fields": {name: _plain(getattr(event, name)) for name in _names(event)},
    }


def _names(event: object) -> tuple[str, ...]:
    return event.__struct_fields__ if isinstance(event, msgspec.Struct) else ()


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, bytes):
        return value.hex()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _parts(event: object) -> Iterator[str]:
    names = _names(event)
    for name in names:
        value = getattr(event, name)
        if name == "cause" or (name in _EPOCH_FIELDS and isinstance(value, tuple)) or value == ():
            continue
        if name == "epoch" and "request" in names:
            continue
        if value == -1 and getattr(event, "rows", ()):
            continue  # of several rows: each is named
        if name == "request" and "epoch" in names:
            epoch = getattr(event, "epoch", 0)
            yield f"{value}/{epoch}"
        elif isinstance(value, tuple):
            yield f"{name} {_many(event, name, value)}"
        elif isinstance(value, bytes):
            yield f"{name} {len(value)} B"
        elif name in _PLAIN or isinstance(value, enum.Enum):
            yield value.name if isinstance(value, enum.Enum) else str(value)
        else:
            yield f"{name} {value}"


def _many(event: object, name: str, values: tuple[Any, ...]) -> str:
    if isinstance(values[0], bytes):
        return str(len(values))
    epochs: tuple[int, ...] = ()
    for field in _EPOCHS.get(name, ()):
        epochs = epochs or getattr(event, field, ())
    if len(epochs) != len(values):
        return runs(values) if _EPOCHS.get(name) or name == "transfers" else _listed(values)
    if len(set(epochs)) == 1:
        return f"{runs(values)} @{epochs[0]}"
    return _listed([f"{value}@{epoch}" for value, epoch in zip(values, epochs, strict=True)])


def _listed(values: Iterable[object]) -> str:
    texts = [str(value) for value in values]
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return ",".join(texts[:SHOWN]) + more


def runs(values: Iterable[int]) -> str:
    """Ids with ascending neighbours joined: ``5-7,9``."""
    found: list[list[int]] = []
    for value in values:
        if found and found[-1][1] + 1 == value:
            found[-1][1] = value
        else:
            found.append([value, value])
    return _listed(str(a) if a == b else f"{a}-{b}" for a, b in found)
