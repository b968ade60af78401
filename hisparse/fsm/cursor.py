"""Positions that move over a log, every seq once and in order: `LogCursor`, the one way to follow
any log, and under it `FrameWalk`, which moves over the frames of a log on disk.

Owns      a position: the last seq that it has handed out.
Makes     no events; `Loss` says where and why a walk stopped before the end.
Needs     a log to register with, so that a ring keeps what a cursor has not read; for a walk, an
          injected `Disk`, which does all I/O.
Edges     ``(position, upto]`` is handed out exactly once; a gap raises and moves nothing.
Crash     the position is lost; the consumer opens a new cursor at the seq that it had applied.

    handed out before        take(upto) hands out        later
    |---------------------|------------------------|----------->
    1                 position                 upto, or last_seq

A *worker* may only act on what is committed: it passes ``upto=log.committed_seq``. A cursor on a
`DiskReader` of another process sees nothing else.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from hisparse.errors import LogError, UsageError
from hisparse.fsm.codec import (
    Frame,
    LoggedEvent,
    SegmentHeader,
    decode_header,
    frame_follows,
    header_room,
    parse_frames,
)

if TYPE_CHECKING:
    from hisparse.fsm.log import Disk, Followable

CHUNK_BYTES = 1 << 20
_SEGMENT = re.compile(r"(\d{8})\.seg")


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


class Loss(msgspec.Struct, frozen=True):
    """Bytes at the end of the valid prefix that hold no valid frame of `expected_seq`."""

    segment: str
    offset: int
    expected_seq: int
    lost_bytes: int
    reason: str
    last_segment: bool
    torn: bool  # nothing valid follows: what an interrupted write leaves; else it is damage

    def __str__(self) -> str:
        what = "torn tail" if self.torn else "damage"
        return (
            f"{what} in {self.segment} at offset {self.offset}, where seq {self.expected_seq} was "
            f"expected: {self.reason} ({self.lost_bytes} B)"
        )


def segment_numbers(disk: Disk, directory: Path) -> list[int]:
    """Numbers of the segments in `directory`, ascending. Raises LogError if it cannot be read."""
    try:
        names = disk.names(directory)
    except OSError as error:
        raise LogError(f"cannot list the log {directory.name!r}: {error.strerror}") from error
    return sorted(int(m[1]) for m in map(_SEGMENT.fullmatch, names) if m)


class Segment:
    """One open segment file, read in order: `count` frames so far, which end at `offset`."""

    def __init__(self, disk: Disk, directory: Path, number: int) -> None:
        self.disk, self.number, self.name = disk, number, f"{number:08d}.seg"
        self.fd = disk.open(directory / self.name, "read")
        self.offset = self.seed = self.count = 0
        try:
            size = disk.size(self.fd)
            data = disk.read(self.fd, min(size, CHUNK_BYTES), 0)
            room = header_room(data, size)
            # An interrupted write leaves too little, or only zeros; a flipped bit does neither.
            self.torn_header = not room or not data.strip(b"\0")
            if room > len(data):
                data = disk.read(self.fd, room, 0)
            self.header = decode_header(data[:room])
        except LogError as error:
            disk.close(self.fd)
            raise LogError(f"{self.name}: {error}") from error
        except BaseException:
            disk.close(self.fd)
            raise
        if isinstance(self.header, SegmentHeader) and self.header.segment != number:
            self.header = f"the header is of segment {self.header.segment}"
        if isinstance(self.header, SegmentHeader):
            self.offset, self.seed = room, self.header.seed

    def frames(self, expected: int) -> tuple[list[Frame], str]:
        """The next frames, a chunk of them, or none and why ("": the file ends here)."""
        want = CHUNK_BYTES
        while True:
            room = self.disk.size(self.fd) - self.offset
            data = self.disk.read(self.fd, min(want, room), self.offset) if room > 0 else b""
            found = parse_frames(data, room, self.seed, expected)
            if found.frames or not found.need or found.need <= want:
                break
            want = found.need
        self.offset += found.used
        self.count += len(found.frames)
        return found.frames, "" if found.frames else found.fault

    def rest(self) -> int:
        return max(self.disk.size(self.fd) - self.offset, 0)

    def intact_after(self, expected: int) -> bool:
        """Whether a valid frame lies beyond the valid prefix."""
        data = self.disk.read(self.fd, self.rest(), self.offset)
        return frame_follows(data, self.seed, expected)

    def close(self) -> None:
        self.disk.close(self.fd)


class FrameWalk:
    """Walks the frames of a log from `from_seq` on, over all segments, and follows a live one.

    `from_seq` 0 begins at the oldest segment there is. Raises LogError if `from_seq` is gone, and
    OSError as the disk does.
    """

    def __init__(self, disk: Disk, directory: Path, from_seq: int = 1) -> None:
        self.disk, self.directory, self.skip_to = disk, directory, from_seq
        self.segment: Segment | None = None
        self.next_seq = self.first_seq = 1
        self.loss: Loss | None = None

    def frames(self) -> list[Frame]:
        """The next frames from `from_seq` on; [] at the end as of now, or at `loss`."""
        while True:
            # Listed before the read: all of a segment was written before its successor appeared.
            numbers = segment_numbers(self.disk, self.directory)
            if self.segment is None and not self._enter(numbers):
                return []
            here = self.segment
            assert here is not None
            found, fault = here.frames(self.next_seq)
            if found:
                assert found[0][0] == self.next_seq
                self.next_seq, self.loss = found[-1][0] + 1, None
                if self.next_seq <= self.skip_to:
                    continue
                return [f for f in found if f[0] >= self.skip_to]
            later = [n for n in numbers if n > here.number]
            if fault or not later:
                self.loss = self._lost(here, fault, not later) if fault else None
                return []
            if not self._step(later[0], last=len(later) == 1):
                return []

    def _enter(self, numbers: list[int]) -> bool:
        """Open the last segment that begins at or before `skip_to`; False if there is none yet."""
        for index in range(len(numbers) - 1, -1, -1):
            segment = Segment(self.disk, self.directory, numbers[index])
            header = segment.header
            first = header.first_seq if isinstance(header, SegmentHeader) else self.skip_to + 1
            if first > self.skip_to and index > 0:
                segment.close()
                continue
            if isinstance(header, str):
                self.loss = self._lost(segment, header, index == len(numbers) - 1)
                segment.close()
                return False
            if first > self.skip_to > 0:
                segment.close()
                raise LogError(f"event {self.skip_to} is gone: the oldest kept is {first}")
            self.segment = segment
            self.next_seq = self.first_seq = first
            return True
        return False

    def _step(self, number: int, *, last: bool) -> bool:
        """Go on to segment `number`; False, and `loss`, if it does not continue this one."""
        segment = Segment(self.disk, self.directory, number)
        header = segment.header
        fault = header if isinstance(header, str) else ""
        if isinstance(header, SegmentHeader) and header.first_seq != self.next_seq:
            fault, last = f"the segment begins with seq {header.first_seq}", False
        if fault:
            self.loss = self._lost(segment, fault, last)
            segment.close()
            return False
        self.close()
        self.segment = segment
        return True

    def _lost(self, at: Segment, reason: str, last: bool) -> Loss:
        whole = isinstance(at.header, SegmentHeader)
        torn = last and (not at.intact_after(self.next_seq) if whole else at.torn_header)
        return Loss(at.name, at.offset, self.next_seq, at.rest(), reason, last, torn)

    def close(self) -> None:
        if self.segment is not None:
            self.segment.close()
            self.segment = None
