"""history: the last events that name an id, for whoever has to say how it came to this."""

from __future__ import annotations

from collections.abc import Iterable

FIELDS = {
    "BlockLease": ("blocks", "sources"),
    "HostPage": ("pages",),
    "Transfer": ("transfers", "enqueued", "completed", "failed"),
    "HotRegion": ("row",),
    "Request": ("request",),
}


def names_id(event: object, machine: str, ident: object) -> bool:
    """Whether `event` is about instance `ident` of `machine`."""
    for field in FIELDS.get(machine, ()):
        value = getattr(event, field, None)
        if value == ident or (isinstance(value, tuple) and ident in value):
            return True
    return False


def last_events(
    events: Iterable[tuple[int, object]], machine: str, ident: object, most: int = 5
) -> list[str]:
    """Up to `most` of the last events about the instance, oldest first, as ``seq Kind``."""
    found = [
        f"{seq} {type(event).__name__}" for seq, event in events if names_id(event, machine, ident)
    ]
    return found[-most:]
