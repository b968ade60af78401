"""SimRank: one worker rank of a simulation, and what lies between it and the scheduler.

Owns a production `HiSparseWorker` on a seeded device of its own, an inbox of steps that it has not
begun, and the channel that its acknowledgements come through. A step waits in the inbox while the
rank is behind; a message waits in the channel while that is slow. Nothing is lost in either by
itself: losing, doubling and holding are faults (`hisparse.testing.atlas`).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from hisparse.config import HiSparseConfig
from hisparse.connector.base import KVConnectorRole
from hisparse.connector.hisparse import HiSparseConnector
from hisparse.device import backend
from hisparse.device.backend import Sink
from hisparse.device.cpu.kernels import copy_slots
from hisparse.device.cpu.streams import SimDevice, SimEvent, SimStream
from hisparse.device.handle import PagedCacheView
from hisparse.device.transfers import CopyFault
from hisparse.device.worker import HiSparseWorker
from hisparse.errors import DeviceError, ProtocolError
from hisparse.fsm.wire import Acknowledgements, Table
from hisparse.testing.tagged import ForwardPass

if TYPE_CHECKING:
    from hisparse.testing.on_gpu import CudaRankDevice

INBOX_STEPS_MAX = 6  # a rank is never further behind: an engine has only so many steps in flight


@dataclass(frozen=True)
class Task:
    """A step on its way to a rank: the connector's metadata, and what the model does in it."""

    meta: bytes | None
    work: ForwardPass
    to_seq: int  # of the log, by then


class Channel:
    """Messages under way to the scheduler, each with the step in which it is there."""

    def __init__(self) -> None:
        self.held_until = 0
        self._messages: list[tuple[int, int, Acknowledgements]] = []
        self._sent = 0

    def __len__(self) -> int:
        return len(self._messages)

    def send(self, message: Acknowledgements, due: int) -> None:
        self._sent += 1
        self._messages.append((max(due, self.held_until), self._sent, message))

    def take(self, now: int) -> list[Acknowledgements]:
        """What is there by step `now`, in the order of its coming."""
        if not self._messages:
            return []
        there = sorted(m for m in self._messages if m[0] <= now)
        self._messages = [m for m in self._messages if m[0] > now]
        return [message for _, _, message in there]


class Hold(Protocol):
    """A stream that is held open; ``done = True`` lets go."""

    done: bool


Place = tuple[PagedCacheView, int, int]  # a row of a block of a view


class Refusals:
    """Memory that a device is made to refuse.

    `pinned_left`: allocations of pinned memory that are granted before one is refused (None: all);
    `recommits_refused`: the next return of discarded memory is. `refused` counts what was.
    """

    pinned_left: int | None = None
    recommits_refused = False
    refused = 0

    def grant_pinned(self, size_bytes: int) -> None:
        """Raises DeviceError where it is refused."""
        if self.pinned_left == 0:
            self.refused += 1
            raise DeviceError(f"pinned memory is refused: {size_bytes} B")
        if self.pinned_left is not None:
            self.pinned_left -= 1

    def grant_recommit(self) -> None:
        """Raises DeviceError where it is refused."""
        if self.recommits_refused:
            self.recommits_refused = False
            self.refused += 1
            raise DeviceError("memory that was discarded is not given back")


class RankDevice(Refusals, SimDevice):
    """A `SimDevice` that can refuse memory, and whose streams can be held open: nothing queued
    behind a hold runs before it is let go, or something has to wait for the device as a whole."""

    def __init__(self, seed: int, lag: float) -> None:
        super().__init__(seed, lag)
        self._holds: list[SimEvent] = []

    def allocate_pinned(
        self, size_bytes: int, fill: int = 0, granule: int = 1, layer: int = 0
    ) -> Any:
        self.grant_pinned(size_bytes)
        return super().allocate_pinned(size_bytes, fill, granule, layer)

    def recommit(self, array: Any, fill: int = 0) -> None:
        self.grant_recommit()
        super().recommit(array, fill)

    def look(self, check: Callable[..., None], *arrays: Any) -> None:
        """Inside an op of compute: `check` gets `arrays` as they are now."""
        check(*arrays)

    def copy_rows(self, stream: SimStream, source: Place, target: Place, rows: int) -> None:
        """Queue a copy of adjacent rows."""
        stream.enqueue(lambda: copy_slots(*source, *target, rows))

    def fingerprint(self, tables: Sequence[Any]) -> tuple[object, ...]:
        """Equal to an earlier one only if nothing was queued since, and no table is another."""
        pending = [stream.pending_units for stream in self.streams]
        return *pending, *(table.tobytes() for table in tables)

    def end(self) -> None:
        """Its process is gone: what is queued never runs."""

    def hold(self, stream: SimStream) -> SimEvent:
        """Hold `stream`; ``done = True`` on what is returned lets go."""
        event = self.make_event()
        stream.wait(event)
        self._holds.append(event)
        return event

    def synchronize(self, target: backend.Stream | backend.Event | None = None) -> None:
        for event in self._holds:
            event.done = True
        self._holds.clear()
        super().synchronize(target)


AnyRankDevice: TypeAlias = "RankDevice | CudaRankDevice"


class SimRank:
    """One rank, in one worker epoch; a restarted rank is another object.

    Args:
        config: what scheduler and worker agree on.
        number: the rank's number.
        device: its device; faults of a kind that strikes at the start are on it already.
        seed: how far its device gets meanwhile.
    """

    def __init__(
        self,
        config: HiSparseConfig,
        number: int,
        device: AnyRankDevice,
        seed: str,
        *,
        worker_epoch: int = 1,
        at_seq: int = 0,
        copy_fault: CopyFault | None = None,
        sink: Sink | None = None,
    ) -> None:
        self.number = number
        self.device = device
        self.rng = random.Random(f"{seed} pace of rank {number}")
        self.worker = HiSparseWorker(
            config,
            device,
            rank=number,
            worker_epoch=worker_epoch,
            at_seq=at_seq,
            sink=sink,
            copy_fault=copy_fault,
        )
        self.connector = HiSparseConnector(KVConnectorRole.WORKER, worker=self.worker)
        self.inbox: deque[Task] = deque()
        self.channel = Channel()
        self.dead = False  # it takes nothing and says nothing any more
        self.behind_until = 0  # it begins no step before this one
        self.pace_units = 40  # most that its streams get done after each step, by themselves

    def die(self) -> None:
        """Its process ends here; what it said is under way. Its memory goes with it."""
        self.dead = True
        self.inbox.clear()
        self.device.end()

    def run(self, now: int) -> None:
        """Begin and end what lies in the inbox, unless the rank is behind."""
        while self.inbox and (now >= self.behind_until or len(self.inbox) > INBOX_STEPS_MAX):
            self.run_one()
        self.device.advance(self.rng.randrange(self.pace_units))

    def run_one(self) -> None:
        task = self.inbox.popleft()
        self.connector.start_load_kv(task.meta)
        task.work.run(self.worker, self.device.look)
        self.connector.wait_for_save()

    def refuses(self, meta: bytes | None) -> bool:
        """Whether the worker answers `meta`, given to it now, with ProtocolError and is afterwards
        as it was: its cursor, its tables, its streams."""
        before = self._fingerprint()
        try:
            self.connector.start_load_kv(meta)
        except ProtocolError:
            return self._fingerprint() == before
        return False

    def _fingerprint(self) -> tuple[object, ...]:
        tables = [self.worker.tables[table] for table in Table]
        given = self.device.fingerprint(tables)
        return self.worker.to_seq, len(self.worker.transfers), *given
