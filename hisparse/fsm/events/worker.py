"""A worker rank's own stream, kinds 80..99: what it applied, acknowledged, and told its device."""

from __future__ import annotations

from typing import ClassVar

from hisparse.fsm.events.base import Event, Ints


class WorkerOpened(Event, frozen=True, gc=False, array_like=True, tag=80):
    """A rank begins worker epoch `worker_epoch` with its cursor at `at_seq` of the log."""

    is_input: ClassVar[bool] = True
    rank: int
    worker_epoch: int
    at_seq: int


class CommandApplied(Event, frozen=True, gc=False, array_like=True, tag=81):
    step: int
    from_seq: int
    to_seq: int


class AckSent(Event, frozen=True, gc=False, array_like=True, tag=82):
    """Acknowledgement `ack_seq` of this rank: kind as in `wire.AckKind`."""

    ack_seq: int
    kind: int
    ident: int
    epoch: int


class StreamRecorded(Event, frozen=True, gc=False, array_like=True, tag=83):
    """Device event `event` was recorded on `stream`."""

    stream: str
    event: int


class StreamWaited(Event, frozen=True, gc=False, array_like=True, tag=84):
    """Work queued on `stream` from here on waits for device event `event`; `why` names the edge."""

    stream: str
    event: int
    why: str


class MemoryAccessed(Event, frozen=True, gc=False, array_like=True, tag=85):
    """Work queued on `stream` reads or writes whole blocks (`pool` "gpu") or pages ("host")."""

    stream: str
    pool: str
    write: bool
    ids: Ints
    transfer: int
