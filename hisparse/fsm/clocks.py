"""Vector clocks over a rank's streams: which accesses to one block or page nothing orders. Pure.

Reads a rank's own stream (records, waits, accesses, acknowledgements) beside the fold of the
scheduler's log. One access happens before another if a chain of these edges leads from it to it:

    on one stream            whatever was queued earlier
    StreamRecorded E         .. StreamWaited E    from all before the record to all after the wait
    StreamRecorded E         .. AckSent           the rank saw E pass, and queued the rest after it
    whatever was queued      .. WorkerOpened      a rank that was lost; another worker follows

Two accesses to one (pool, id), one of them a write, with no such chain are `Unordered`.

Transfers, poison and index copies are in the stream. Row writes and gathers find their blocks on
the device and are not: `step_accesses` derives them from the scheduler's tables at the command's
`to_seq`. They are taken to happen just before the step's last record on compute, after all waits of
the command.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import gt

import msgspec
import numpy as np
import numpy.typing as npt

from hisparse.errors import LogError
from hisparse.fsm import events as ev
from hisparse.fsm.step_accesses import StepAccesses
from hisparse.fsm.wire import AckKind

I64 = npt.NDArray[np.int64]
Logged = tuple[int, object]
COMPUTE = "compute"
STREAMS_MAX = 8
EVENTS_KEPT = 1000  # that are held at least, before those that passed are looked for
WAITS = {
    ("d2h", COMPUTE): "compute_after_spill",
    (COMPUTE, "d2h"): "d2h_after_compute",
    (COMPUTE, "h2d"): "h2d_after_compute",
    ("h2d", COMPUTE): "compute_after_restore",
}


class Unordered(msgspec.Struct, frozen=True):
    """Two accesses that nothing orders. Seqs are those of the rank's stream; a step's own rows have
    that of its `CommandApplied`."""

    pool: str
    ident: int
    first_seq: int
    first: str
    second_seq: int
    second: str
    missing_edge: str


class _Pool:
    """Of each id: its last write, and its last read on each stream, as (clock, seq). `newest_write`
    and `newest_read` have the clock of the last of all on each stream: a clock that knows those
    knows every id's, and no id needs to be looked at."""

    def __init__(self, n: int) -> None:
        self.newest_write = [0] * STREAMS_MAX
        self.newest_read = [0] * STREAMS_MAX
        self.write_stream = np.zeros(n, dtype=np.int64)
        self.write_time = np.zeros(n, dtype=np.int64)
        self.write_seq = np.zeros(n, dtype=np.int64)
        self.read_time = np.zeros((STREAMS_MAX, n), dtype=np.int64)
        self.read_seq = np.zeros((STREAMS_MAX, n), dtype=np.int64)


class Clocks:
    """The clocks of one rank. `found` holds one `Unordered` a pair of events, at most `keep`;
    `total` counts the pairs, those beyond included."""

    def __init__(self, blocks: int, pages: int, suffixes: int = 0, *, keep: int = 100) -> None:
        self.found: list[Unordered] = []
        self.accesses = self.total = 0
        self._keep = keep
        self._pools = {"gpu": _Pool(blocks), "host": _Pool(pages), "suffix": _Pool(suffixes)}
        self._streams: list[str] = []
        self._clocks = [[0] * STREAMS_MAX for _ in range(STREAMS_MAX)]
        self._host = [0] * STREAMS_MAX  # what the rank saw pass
        self._joined: list[list[int] | None] = [None] * STREAMS_MAX  # what of that each knows
        self._events: dict[int, list[int]] = {}
        self._records: list[tuple[list[int], list[int]]] = []  # a stream's (clock, event) records
        self._room = EVENTS_KEPT  # events held at which to forget some
        self._last_event = 0
        self._copies: dict[int, int] = {}  # transfer -> the event behind its copy
        self._steps: dict[int, int] = {}  # step -> the event at its end
        # First events told of with the second event at hand: it is over with the next access.
        self._told: set[int] = set()
        self._telling = 0

    # -- the stream -------------------------------------------------------------------------------
    def segment(self, events: list[Logged], accesses: StepAccesses | None) -> None:
        """One command and all up to the next; `accesses` are those of its step's rows."""
        command = events[0][1] if events else None
        end = _end_of_step(events)
        for at, (seq, event) in enumerate(events):
            if at == end and isinstance(command, ev.CommandApplied):
                if accesses is not None:
                    self._rows(events[0][0], accesses)
                assert isinstance(event, ev.StreamRecorded)
                self._steps[command.step] = event.event
            self._take(seq, event)

    def _rows(self, seq: int, accesses: StepAccesses) -> None:
        self._access(COMPUTE, "gpu", False, accesses.gpu_reads, seq)
        self._access(COMPUTE, "gpu", True, accesses.gpu_writes, seq)
        self._access(COMPUTE, "host", False, accesses.host_reads, seq)

    def _take(self, seq: int, event: object) -> None:
        match event:
            case ev.WorkerOpened():
                self._begin_again()
            case ev.AckSent():
                self._seen(event)
            case ev.StreamRecorded():
                stream = self._stream(event.stream)
                clock = self._events[event.event] = self._clocks[stream].copy()
                self._last_event = event.event
                times, idents = self._records[stream]
                times.append(clock[stream])
                idents.append(event.event)
            case ev.MemoryAccessed():
                held = self._pools.get(event.pool)
                if held is not None:  # a log may say anything
                    size = len(held.write_seq)
                    ids = np.array([i for i in event.ids if 0 <= i < size], dtype=np.int64)
                    self._access(event.stream, event.pool, event.write, ids, seq)
            case ev.StreamWaited():
                stream, passed = self._stream(event.stream), self._events.get(event.event)
                if passed is not None:
                    self._clocks[stream] = _later(self._clocks[stream], passed)

    def _begin_again(self) -> None:
        """Another worker: what an earlier one had queued is over, with the memory that it was in.
        Its device numbers events anew."""
        self._host = [max(clock[n] for clock in self._clocks) for n in range(STREAMS_MAX)]
        for gone in (self._events, self._copies, self._steps):
            gone.clear()

    def _seen(self, event: ev.AckSent) -> None:
        """An acknowledgement says that the rank saw an event pass: all it queues later follows."""
        if event.kind == AckKind.ENQUEUED:
            self._copies[event.ident] = self._last_event
            return
        of = self._steps if event.kind == AckKind.RETIRED else self._copies
        passed = self._events.get(of.pop(event.ident, -1))
        if passed is not None:
            self._host = _later(self._host, passed)
            if len(self._events) > self._room:
                self._forget()

    def _forget(self) -> None:
        """Drop what the rank saw pass: every stream knows it before its next work, so that a wait
        for it says nothing, and no access before it is ever late."""
        passed = self._host
        self._events = {e: c for e, c in self._events.items() if any(map(gt, c, passed))}
        for (times, idents), known in zip(self._records, passed, strict=False):
            behind = bisect_right(times, known)
            del times[:behind], idents[:behind]
        self._room = 2 * len(self._events) + EVENTS_KEPT

    def _stream(self, name: str) -> int:
        """The number of a stream, whose clock now knows all that the rank saw."""
        if name not in self._streams:
            if len(self._streams) == STREAMS_MAX:
                raise LogError(f"the rank's stream names more than {STREAMS_MAX} device streams")
            self._streams.append(name)
            self._records.append(([], []))
        number = self._streams.index(name)
        if self._joined[number] is not self._host:
            self._joined[number] = self._host
            self._clocks[number] = _later(self._clocks[number], self._host)
        return number

    # -- accesses ---------------------------------------------------------------------------------
    def _access(self, name: str, pool: str, write: bool, ids: I64, seq: int) -> None:
        """`ids`, all of the pool, are read or written by the next work on stream `name`."""
        if not len(ids):
            return
        self.accesses += len(ids)
        stream, held = self._stream(name), self._pools[pool]
        clock = self._clocks[stream]
        clock[stream] += 1
        if any(map(gt, held.newest_write, clock)):
            writer = held.write_stream[ids]
            for at in (held.write_time[ids] > np.array(clock)[writer]).nonzero()[0][:1].tolist():
                ident = int(ids[at])
                first = (int(held.write_seq[ident]), int(writer[at]), True)
                self._tell(pool, ident, first, int(held.write_time[ident]), (seq, stream, write))
        if not write:
            held.read_time[stream, ids], held.read_seq[stream, ids] = clock[stream], seq
            held.newest_read[stream] = clock[stream]
            return
        for other, newest in enumerate(held.newest_read):
            if newest <= clock[other]:
                continue
            late = held.read_time[other, ids]
            for at in (late > clock[other]).nonzero()[0][:1].tolist():
                ident = int(ids[at])
                first = (int(held.read_seq[other, ident]), other, False)
                self._tell(pool, ident, first, int(late[at]), (seq, stream, True))
        held.write_stream[ids], held.write_time[ids] = stream, clock[stream]
        held.write_seq[ids] = seq
        held.newest_write[stream] = clock[stream]

    def _tell(
        self,
        pool: str,
        ident: int,
        first: tuple[int, int, bool],
        time: int,
        second: tuple[int, int, bool],
    ) -> None:
        if second[0] != self._telling:
            self._telling, self._told = second[0], set()
        if first[0] in self._told:
            return
        self._told.add(first[0])
        self.total += 1
        if len(self.found) >= self._keep:
            return
        earlier, later = self._streams[first[1]], self._streams[second[1]]
        times, idents = self._records[first[1]]
        at = bisect_left(times, time)
        event = f"device event {idents[at]}" if at < len(idents) else "an event that is missing too"
        name = WAITS.get((earlier, later))
        edge = (
            f"{later} has to wait for {event}, recorded on {earlier} after seq {first[0]}, before "
            f"seq {second[0]}" + (f" (the wait named {name})" if name else "")
        )
        self.found.append(
            Unordered(
                pool,
                ident,
                first[0],
                _words(earlier, first[2], pool, ident),
                second[0],
                _words(later, second[2], pool, ident),
                edge,
            )
        )


def _later(clock: list[int], other: list[int]) -> list[int]:
    """What either clock knows."""
    return [a if a > b else b for a, b in zip(clock, other, strict=True)]


def _words(stream: str, write: bool, pool: str, ident: int) -> str:
    what = {"gpu": "block", "host": "host page", "suffix": "suffix page"}[pool]
    return f"{stream} {'writes' if write else 'reads'} {what} {ident}"


def _end_of_step(events: list[Logged]) -> int:
    """Index of the record that ends the step, -1 where the stream stops before it. A command with
    transfers records on compute once more, before it queues them."""
    on_compute, copies = [], False
    for at, (_, event) in enumerate(events):
        if type(event) is ev.StreamRecorded:
            if event.stream == COMPUTE:
                on_compute.append(at)
            else:
                copies = True
    return on_compute[-1] if len(on_compute) == 1 + copies else -1
