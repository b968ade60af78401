"""Opening a log directory for the verbs that ask it something. No torch; nothing is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from hisparse.cli.losses import told
from hisparse.config import HiSparseConfig
from hisparse.errors import LogDamage, LogError, UsageError
from hisparse.fsm.codec import Codec, LoggedEvent, UnknownEvent
from hisparse.fsm.events import EVENT_TYPES, Event
from hisparse.fsm.log_history import STREAM, LogHistory
from hisparse.fsm.log_reader import DiskReader, Gap, Loss
from hisparse.fsm.state import State

DIRECTORY = click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
PLACE = click.option(
    "--at", "where", default="last", show_default=True, help="SEQ, step:N or last."
)


class History:
    """One directory's log. Iterating it again reads it again, up to damage, which `loss` names."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = LogHistory.open(directory)
        self.config: HiSparseConfig = self.log.config
        self.segments = len(self.log.segments)
        self.gaps: list[Gap] = self.log.gaps
        self.rank_losses: dict[str, Loss] = {}
        self._met: Loss | None = None

    @property
    def loss(self) -> Loss | None:
        """The torn tail, or the damage, that was met so far."""
        return self._met or self.log.loss

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self.read()

    def read(self, from_seq: int = 1, stream: str = STREAM) -> Iterator[tuple[int, LoggedEvent]]:
        """(seq, event) up to the end, or to damage."""
        reader = DiskReader(self.directory / stream, Codec(EVENT_TYPES), strict=False)
        yield from reader.read(from_seq)
        if stream == STREAM:
            self._met = reader.loss
        elif reader.loss is not None:
            self.rank_losses[stream] = reader.loss

    def known(self, from_seq: int = 1, upto: int | None = None) -> Iterator[tuple[int, Event]]:
        """(seq, event). Raises LogDamage, and LogError for a kind that this version lacks."""
        for seq, event in self.log.read(from_seq, upto):
            if isinstance(event, UnknownEvent):
                raise LogError(f"event {seq} has kind {event.kind}, which this version lacks")
            yield seq, event

    def rank_streams(self) -> list[str]:
        """Names of the rank streams that lie beside the scheduler's."""
        return sorted(path.name for path in self.directory.glob("rank-*") if path.is_dir())

    def seq_at(self, where: str) -> int:
        """The seq that ``SEQ``, ``step:N`` or ``last`` names; ``step:N`` is that of the event that
        planned step N. Raises UsageError, LogError for a place that the log lacks, and LogDamage
        for one that damage hides."""
        if where == "last":
            return self.log.last_seq
        kind, _, number = where.rpartition(":")
        if kind not in ("", "step") or not number.isdecimal():
            raise UsageError(f"--at {where}: give SEQ, step:N or last")
        if kind:
            return self.log.seq_of_step(int(number))
        self.log.check_seq(int(number))
        return int(number)

    def read_to(self, where: str) -> int:
        """As `seq_at`, but for a verb that reads all before it: ``last`` is the last seq before
        damage, wherever that lies, and any other place must not lie behind it."""
        seq = self.seq_at(where)
        try:
            self.log.verify(seq)
        except LogDamage:
            if where != "last" or self.loss is None:
                raise
            return self.loss.expected_seq - 1
        return seq

    def state_at(self, where: str, *, read: bool = False) -> State:
        """The state there. ``last`` is the last that can be known: before damage, and before
        lacking events that no snapshot takes up. Raises as `LogHistory.state_at`.

        Args:
            read: as `read_to`: no damage may lie before it, even if a snapshot lies behind that.
        """
        seq = self.read_to(where) if read else self.seq_at(where)
        if where != "last":
            return self.log.state_at(seq)
        before = [gap.first_seq - 1 for gap in reversed(self.gaps)]
        while True:
            try:
                return self.log.state_at(seq)
            except LogDamage:
                if self.loss is not None and self.loss.expected_seq <= seq:
                    seq = self.loss.expected_seq - 1
                    continue
                before = [one for one in before if one < seq]
                if not before:
                    raise
                seq = before[0]

    def told(self, where: str, *, crossed: int | None = None, of: str = "") -> int:
        """Say what the log lacks up to `where`, and behind it; returns the exit code."""
        at = None if where == "last" else self.seq_at(where)
        return told(self.loss, self.gaps, at=at, crossed=crossed, of=of)


def open_history(directory: Path) -> History:
    """The log in `directory`. Raises LogError if there is none or its header is unusable."""
    return History(directory)
