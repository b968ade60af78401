"""history: the last events that name an id, for whoever has to say how it came to this."""

from __future__ import annotations

from collections.abc import Iterable

from hisparse.errors import IllegalTransition
from hisparse.fsm.events import AckSent, MemoryAccessed
from hisparse.fsm.log import EventLog
from hisparse.fsm.wire import AckKind

HISTORY_EVENTS = 10_000  # how far back an error looks for the last events of an id
FIELDS = {
    "BlockLease": ("blocks", "sources"),
    "HostPage": ("pages",),
    "Transfer": ("transfers", "enqueued", "completed", "failed"),
    "HotRegion": ("row",),
    "Request": ("request",),
}
POOLS = {"BlockLease": "gpu", "HostPage": "host"}  # as a rank names them


def names_id(event: object, machine: str, ident: object) -> bool:
    """Whether `event` is about instance `ident` of `machine`."""
    if isinstance(event, MemoryAccessed):
        if machine == "Transfer":
            return event.transfer == ident
        return event.pool == POOLS.get(machine) and ident in event.ids
    if isinstance(event, AckSent):
        return machine == "Transfer" and event.kind != AckKind.RETIRED and event.ident == ident
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


def with_history(error: IllegalTransition, log: EventLog) -> IllegalTransition:
    """The same error, with what `log` last says of the instance that it is about."""
    events = log.read(max(log.oldest_seq, log.next_seq - 1 - HISTORY_EVENTS))
    return IllegalTransition(
        error.machine,
        error.ident,
        error.state,
        error.trigger,
        epoch=error.epoch,
        seq=error.seq,
        history=last_events(events, error.machine, error.ident),
    )
