"""Opening a log directory for the verbs that read all of it. No torch; nothing is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hisparse.config import HiSparseConfig
from hisparse.errors import LogError, UsageError
from hisparse.fsm.codec import Codec, LoggedEvent, UnknownEvent
from hisparse.fsm.events import EVENT_TYPES, Event
from hisparse.fsm.log_history import STREAM, LogHistory
from hisparse.fsm.log_reader import DiskReader, Loss
from hisparse.fsm.state import State


class History:
    """One directory's log. Iterating it again reads it again, up to damage, which `loss` names."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = LogHistory.open(directory)
        self.config: HiSparseConfig = self.log.config
        self.segments = len(self.log.segments)
        self.loss: Loss | None = self.log.loss
        self.rank_losses: dict[str, Loss] = {}

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self.read()

    def read(self, from_seq: int = 1, stream: str = STREAM) -> Iterator[tuple[int, LoggedEvent]]:
        """(seq, event) up to the end, or to damage."""
        reader = DiskReader(self.directory / stream, Codec(EVENT_TYPES), strict=False)
        yield from reader.read(from_seq)
        if stream == STREAM:
            self.loss = reader.loss
        elif reader.loss is not None:
            self.rank_losses[stream] = reader.loss

    def known(self, from_seq: int = 1) -> Iterator[tuple[int, Event]]:
        """(seq, event). Raises LogError for damage and for a kind that this version lacks."""
        for seq, event in self.log.read(from_seq):
            if isinstance(event, UnknownEvent):
                raise LogError(f"event {seq} has kind {event.kind}, which this version lacks")
            yield seq, event

    def event(self, seq: int) -> Event:
        """The event of one seq. Raises LogError as `known`."""
        return next(self.known(seq))[1]

    def rank_streams(self) -> list[str]:
        """Names of the rank streams that lie beside the scheduler's."""
        return sorted(path.name for path in self.directory.glob("rank-*") if path.is_dir())

    def seq_at(self, where: str) -> int:
        """The seq that ``SEQ``, ``step:N`` or ``last`` names; ``step:N`` is that of the event that
        planned step N. Raises UsageError, and LogError for a place that the log lacks."""
        if where == "last":
            return self.log.last_seq
        kind, _, number = where.rpartition(":")
        if kind not in ("", "step") or not number.isdigit():
            raise UsageError(f"--at {where}: give SEQ, step:N or last")
        if kind:
            return self.log.seq_of_step(int(number))
        if int(number) > self.log.last_seq:
            raise LogError(f"seq {number} is beyond the log, which ends at {self.log.last_seq}")
        return int(number)

    def state_at(self, seq: int) -> State:
        """The state after seq `seq`; see `LogHistory.state_at`."""
        return self.log.state_at(seq)


def open_history(directory: Path) -> History:
    """The log in `directory`. Raises LogError if there is none or its header is unusable."""
    return History(directory)


def lost(loss: Loss | None) -> dict[str, Any] | None:
    """What a reader could not read, for JSON."""
    if loss is None:
        return None
    names = ("segment", "offset", "expected_seq", "lost_bytes", "reason", "torn")
    return {name: getattr(loss, name) for name in names}
