"""LogCursor: a position that moves over a log, every seq once and in order.

The one way to follow any log, in memory or on disk, of this process or of another.

Owns      a position: the last seq that it has handed out.
Makes     no events.
Needs     a log to register with, so that a ring keeps what a cursor has not read.
Edges     ``(position, upto]`` is handed out exactly once; a gap raises and moves nothing.
Crash     the position is lost; the consumer opens a new cursor at the seq that it had applied.

    handed out before        take(upto) hands out        later
    |---------------------|------------------------|----------->
    1                 position                 upto, or last_seq

A *worker* may only act on what is committed: it passes ``upto=log.committed_seq``. A cursor on a
`DiskReader` of another process sees nothing else.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from hisparse.errors import LogError, UsageError

if TYPE_CHECKING:
    from hisparse.fsm.codec import LoggedEvent
    from hisparse.fsm.log import Followable


class LogCursor:
    """Follows `log` from after seq `at` (0: from the start), until closed.

    Raises LogError if an event after `at` is no longer kept, or if `at` is ahead of the log. An
    open cursor holds memory in a ring: close it, or use it in a `with`.
    """

    __slots__ = ("_closed", "_log", "_position")

    def __init__(self, log: Followable, at: int = 0) -> None:
        if at < 0:
            raise UsageError(f"a cursor cannot start at seq {at}: 0 is before the first event")
        self._log = log
        self._position = at
        self._closed = False
        log.register(self)

    @property
    def position(self) -> int:
        """The last seq handed out, or where the cursor started."""
        return self._position

    def take(self, upto: int | None = None) -> list[tuple[int, LoggedEvent]]:
        """(seq, event) after the position, up to seq `upto` or the last; moves past them.

        Raises LogError at a gap, and then has not moved; UsageError once closed.
        """
        events = self.peek(upto)
        if events:
            self._position = events[-1][0]
            self._log.consumed()
        return events

    def peek(self, upto: int | None = None) -> list[tuple[int, LoggedEvent]]:
        """What `take` would return, without moving."""
        if self._closed:
            raise UsageError("the cursor is closed")
        position = self._position
        events = self._log.since(position, upto)
        if events:
            first, last = events[0][0], events[-1][0]
            if first != position + 1 or last - first + 1 != len(events):
                raise LogError(
                    f"gap after seq {position}: the log gave {len(events)} events, "
                    f"{first} to {last}"
                )
        return events

    def close(self) -> None:
        """Stop following; the log may drop what this cursor has not read. Idempotent."""
        if not self._closed:
            self._closed = True
            self._log.unregister(self)

    def __enter__(self) -> LogCursor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
