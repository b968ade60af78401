"""The event log as the rest of fsm sees it, and the logs that live in memory.

Owns      the order of events: seq counts from 1, without holes, in one stream.
Makes     no events; it keeps those that it is given, and never looks inside them.
Needs     one writer, in one thread. Cursors (`fsm.cursor`) register before they follow.
Edges     a ring keeps the last N events *and* whatever a registered cursor has not read; a seq
          that is no longer kept raises, naming the oldest that is. `off` is a ring of 0.
Crash     everything is lost: durability is `fsm.log_disk`'s.

         dropped         kept: unread or among the last N       next append
    |----------------|------------------------------------|----->
    1            oldest_seq          committed_seq     last_seq  next_seq
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import msgspec

from hisparse.errors import LogError, UsageError

if TYPE_CHECKING:
    from hisparse.fsm.codec import LoggedEvent

_READ_CHUNK = 1024
OFF_KEPT = (
    64  # events that `off` has before it drops them: at each append would cost more than a ring
)


class Positioned(Protocol):
    """What a log must know of a cursor: the last seq that it has read."""

    @property
    def position(self) -> int: ...


class LogStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a log since it was opened; the disk ones stay 0 for a log in memory."""

    mode: str
    last_seq: int
    committed_seq: int
    oldest_seq: int
    kept_events: int
    cursors: int
    segments: int = 0
    commits: int = 0
    failed_commits: int = 0
    failed_rotations: int = 0
    syncs: int = 0
    synced_seq: int = 0
    written_bytes: int = 0
    pending_events: int = 0
    torn_bytes: int = 0
    dropped_events: int = 0  # that the disk refused, with on_error "continue"
    gaps: int = 0
    snapshots: int = 0
    failed_snapshots: int = 0
    failed_seals: int = 0


class Followable(Protocol):
    """What a `LogCursor` needs of a log: a writer's log, or a reader in another process."""

    def since(self, position: int, upto: int | None = None) -> list[tuple[int, LoggedEvent]]:
        """Events of seqs in ``(position, upto]``, or to the end. Raises LogError at a gap."""
        ...

    def register(self, cursor: Positioned) -> None: ...

    def unregister(self, cursor: Positioned) -> None: ...

    def consumed(self) -> None:
        """A cursor has moved on: what nobody needs any more may be dropped."""
        ...


class EventLog(Followable, Protocol):
    """A stream's log, held by its one writer."""

    @property
    def next_seq(self) -> int: ...

    @property
    def last_seq(self) -> int: ...

    @property
    def committed_seq(self) -> int:
        """Last seq handed to `commit` with success: all that another side may act on."""
        ...

    @property
    def oldest_seq(self) -> int:
        """First seq that `read` still has; `next_seq` where nothing is kept."""
        ...

    def claim(self) -> None:
        """Said once, by the one who is going to append. Raises UsageError for a second one."""
        ...

    def append(self, event: LoggedEvent) -> int:
        """Add an event; returns its seq. Raises UsageError once closed."""
        ...

    def commit(self) -> None:
        """Make what was appended visible to others. Raises LogError, and may be tried again."""
        ...

    def read(self, from_seq: int = 1) -> Iterator[tuple[int, LoggedEvent]]:
        """(seq, event) from `from_seq` to the last seq as of the call.

        Raises LogError for a seq that was dropped, UsageError for one that was never written.
        """
        ...

    def statistics(self) -> LogStatistics: ...

    def close(self) -> None: ...


class MemoryLog:
    """The last `capacity` events (None: all of them, 0: none), and all that a cursor awaits.

    `start` is the seq before the first: a disk log puts its tail in one that starts at its end.
    Dropping is amortised: up to an eighth of a ring beyond `capacity` stays allocated.
    """

    __slots__ = (
        *("_base", "_capacity", "_claimed", "_closed", "_committed", "_cursors", "_events"),
        "_limit",
    )

    def __init__(self, capacity: int | None, *, start: int = 0) -> None:
        if start < 0 or (capacity is not None and capacity < 0):
            raise UsageError(f"capacity={capacity} and start={start} must not be negative")
        self._capacity = sys.maxsize if capacity is None else capacity
        self._events: list[LoggedEvent] = []
        self._base = start  # seq of the event before _events[0]
        self._committed = start
        self._limit = self._capacity or OFF_KEPT
        self._cursors: list[Positioned] = []
        self._claimed = self._closed = False

    @property
    def last_seq(self) -> int:
        return self._base + len(self._events)

    @property
    def next_seq(self) -> int:
        return self._base + len(self._events) + 1

    @property
    def committed_seq(self) -> int:
        return self._committed

    @property
    def oldest_seq(self) -> int:
        return max(self._base, self._droppable()) + 1

    @property
    def dropped_seq(self) -> int:
        """The last seq that `since` no longer has; it may have some that `read` refuses."""
        return self._base

    def claim(self) -> None:
        if self._claimed:
            raise UsageError("this log is another engine's: give each engine a log of its own")
        self._claimed = True

    def append(self, event: LoggedEvent) -> int:
        """Add an event; returns its seq. Raises UsageError once closed."""
        events = self._events
        events.append(event)
        if len(events) > self._limit:  # rare; a closed log's limit is -1
            return self._trim()
        return self._base + len(events)

    def commit(self) -> None:
        self._committed = self._base + len(self._events)

    def since(self, position: int, upto: int | None = None) -> list[tuple[int, LoggedEvent]]:
        """Events of seqs in ``(position, upto]``, or to the end. Raises LogError at a gap."""
        base = self._base
        events = self._events
        last = base + len(events)
        end = last if upto is None or upto > last else upto
        if position >= end:
            return []
        if position < base:
            raise LogError(f"event {position + 1} was dropped: the oldest kept is {base + 1}")
        return list(
            zip(range(position + 1, end + 1), events[position - base : end - base], strict=True)
        )

    def read(self, from_seq: int = 1) -> Iterator[tuple[int, LoggedEvent]]:
        """(seq, event) from `from_seq` to the last seq as of the call; see `EventLog.read`."""
        last = check_range(self, from_seq)
        if from_seq < self.oldest_seq:
            raise LogError(f"event {from_seq} was dropped: the oldest kept is {self.oldest_seq}")
        return read_chunks(self, from_seq, last)

    def register(self, cursor: Positioned) -> None:
        """Keep what `cursor` has not read. Raises LogError if some of it is gone already."""
        at = cursor.position
        if at > self.last_seq:
            raise LogError(f"a cursor at {at} is ahead of the log, which ends at {self.last_seq}")
        if at + 1 < self.oldest_seq:
            raise LogError(f"event {at + 1} was dropped: the oldest kept is {self.oldest_seq}")
        self.pin(cursor)

    def pin(self, cursor: Positioned) -> None:
        """Drop nothing beyond `cursor`'s position from now on, wherever that is."""
        self._cursors.append(cursor)

    def unregister(self, cursor: Positioned) -> None:
        """Forget `cursor`. Raises UsageError if it is not registered."""
        kept = [one for one in self._cursors if one is not cursor]
        if len(kept) == len(self._cursors):
            raise UsageError("this cursor is not registered with this log")
        self._cursors = kept
        self.consumed()

    def consumed(self) -> None:
        if self._capacity == 0 and not self._closed:
            self._trim()

    def statistics(self) -> LogStatistics:
        oldest = self.oldest_seq
        return LogStatistics(
            mode="off" if self._capacity == 0 else "ring",
            last_seq=self.last_seq,
            committed_seq=self._committed,
            oldest_seq=oldest,
            kept_events=self.last_seq - oldest + 1,
            cursors=len(self._cursors),
        )

    def close(self) -> None:
        """Refuse appends from now on; what is kept can still be read."""
        self._closed = True
        self._limit = -1

    def _droppable(self) -> int:
        """The last seq that neither the capacity nor a cursor holds on to."""
        floor = max(self.last_seq - self._capacity, 0)
        for cursor in self._cursors:
            floor = min(floor, cursor.position)
        return floor

    def _trim(self) -> int:
        """Drop what may be dropped; returns the last seq, for `append` to return."""
        events = self._events
        if self._closed:
            events.pop()  # the append that led here has not happened
            raise UsageError("the log is closed")
        if not self._cursors and not self._capacity:  # `off`, followed by nobody
            self._base += len(events)
            events.clear()
            self._limit = OFF_KEPT
            return self._base
        drop = self._droppable() - self._base
        if drop > 0:
            del events[:drop]
            self._base += drop
        # The next trim is an eighth of the ring away, however far a slow cursor lags, so that an
        # append stays O(1).
        self._limit = max(self._capacity, len(events)) + max(self._capacity >> 3, 64)
        return self._base + len(events)


def check_range(log: EventLog, from_seq: int) -> int:
    """Last seq of `log`, once `from_seq` lies in ``[1, next_seq]``; else raises UsageError."""
    last = log.last_seq
    if not 1 <= from_seq <= last + 1:
        raise UsageError(f"cannot read from seq {from_seq}: the log holds 1..{last}")
    return last


def read_chunks(log: Followable, from_seq: int, last: int) -> Iterator[tuple[int, LoggedEvent]]:
    """(seq, event) of ``[from_seq, last]``, a chunk at a time, while the log may be appended to."""
    position = from_seq - 1
    while position < last:
        chunk = log.since(position, min(last, position + _READ_CHUNK))
        if not chunk:
            raise LogError(f"event {position + 1} was not found, and the log said it held {last}")
        yield from chunk
        position = chunk[-1][0]
