"""A rank's acknowledgement stream, read by the scheduler's cursor.

Owns the acknowledgements that the scheduler has not said it took in. Seqs count up from 1. All of
them go out with every message, so that a lost one is sent again by itself; a duplicate carries seqs
that the reader already has, and is inert there.

    dropped by trim   pending                  not made yet
    [1 .. first)      [first .. last]          (last ..
"""

from __future__ import annotations

from hisparse.device.backend import DeviceCalls
from hisparse.errors import ProtocolError
from hisparse.fsm.events import AckSent
from hisparse.fsm.wire import Ack, Acknowledgements


class AckStream:
    """Append-only, trimmed only on request. `calls` is told of each acknowledgement."""

    def __init__(self, rank: int, worker_epoch: int, calls: DeviceCalls | None = None) -> None:
        self.rank = rank
        self.worker_epoch = worker_epoch
        self._calls = calls
        self._acks: list[Ack] = []
        self._first = 1
        self._closed = False

    @property
    def last_seq(self) -> int:
        """Seq of the newest acknowledgement, 0 if there never was one."""
        return self._first + len(self._acks) - 1

    def close(self) -> None:
        """Nothing more is said; what was not taken in yet stays to be read."""
        self._closed = True

    def append(self, ack: Ack) -> None:
        assert not self._closed, f"rank {self.rank} acknowledges {ack} after its end"
        self._acks.append(ack)
        if (calls := self._calls) is not None:
            sent = AckSent(calls.cause, self.last_seq, int(ack.kind), ack.ident, ack.epoch)
            calls.emit(sent)

    def pending(self) -> Acknowledgements | None:
        """Everything that was not trimmed, or None."""
        if not self._acks:
            return None
        return Acknowledgements(self.rank, self.worker_epoch, self._first, tuple(self._acks))

    def trim(self, seq: int) -> None:
        """Drop everything up to and with `seq`: the scheduler has it. Trimmed twice is inert."""
        if seq > self.last_seq:
            raise ProtocolError(f"rank {self.rank}: cannot trim to {seq}, last is {self.last_seq}")
        if seq >= self._first:
            del self._acks[: seq + 1 - self._first]
            self._first = seq + 1
