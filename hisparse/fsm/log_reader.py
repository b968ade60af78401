"""Reading a log on disk: `DiskReader`, and under it `FrameWalk`, which moves over the segments.

Owns      open file descriptors, and a position: the next seq that it expects.
Makes     no events; `Loss` says where and why a walk stopped before the end.
Needs     a `Disk`, which does all I/O, and for a reader the codec of the events.
Edges     frames come out in seq order, each once; damage before the end is never skipped. A torn
          tail of the last segment is an end as of now: a live writer leaves one for moments.
Crash     reads only; the reader opens again where it wants to go on.

    00000001.seg         00000002.seg          (a live writer adds here)
    |-- frames ---------|-- frames -----|torn|
    first_seq                       next_seq   `loss` names the torn or damaged rest
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hisparse.errors import LogError
from hisparse.fsm.codec import (
    Codec,
    Frame,
    LoggedEvent,
    SegmentHeader,
)
from hisparse.fsm.log import Positioned
from hisparse.fsm.log_files import Disk, OsDisk
from hisparse.fsm.log_gap import gap_reason, lacking
from hisparse.fsm.log_segment import Segment, segment_numbers


class Gap(msgspec.Struct, frozen=True):
    """Events that a log lacks by its own account: a LogGap stands for the last of them."""

    segment: str  # the one that goes on behind the gap
    first_seq: int
    last_seq: int
    reason: str  # the LogGap's; "" where that is damaged

    def __str__(self) -> str:
        return lacking(self.first_seq, self.last_seq, self.reason, self.segment)


class Loss(msgspec.Struct, frozen=True):
    """Bytes at the end of the valid prefix that hold no valid frame of `expected_seq`."""

    segment: str
    offset: int
    expected_seq: int
    lost_bytes: int
    reason: str
    torn: bool  # nothing valid follows: what an interrupted write leaves; else it is damage

    def __str__(self) -> str:
        what = "torn tail" if self.torn else "damage"
        return (
            f"{what} in {self.segment} at offset {self.offset}, where seq {self.expected_seq} was "
            f"expected: {self.reason} ({self.lost_bytes} B)"
        )


def _seq(frame: Frame) -> int:
    return frame[0]


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
        self.gaps: list[Gap] = []

    def start(self, segment: Segment, seq: int) -> None:
        """Begin in `segment`, which stands at the frame of `seq`; it is closed with the walk."""
        self.segment, self.next_seq, self.first_seq = segment, seq, seq

    def frames(self) -> list[Frame]:
        """The next frames from `from_seq` on; [] at the end as of now, or at `loss`.

        Seqs that the log says it lacks are missing, and listed in `gaps`.
        """
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
        if (
            isinstance(header, SegmentHeader)
            and not self._gap(segment, header)
            and header.first_seq != self.next_seq
        ):
            fault, last = f"the segment begins with seq {header.first_seq}", False
        if fault:
            self.loss = self._lost(segment, fault, last)
            segment.close()
            return False
        self.close()
        self.segment = segment
        return True

    def _gap(self, segment: Segment, header: SegmentHeader) -> bool:
        """Take in that the log says it lacks what is missing before `segment`; False if it does
        not."""
        first, last = self.next_seq, header.first_seq
        if header.gap_after != first - 1 or last < first:
            return False
        self.gaps.append(Gap(segment.name, first, last, gap_reason(segment)))
        self.next_seq = last
        return True

    def _lost(self, at: Segment, reason: str, last: bool) -> Loss:
        whole = isinstance(at.header, SegmentHeader)
        torn = last and not at.compressed  # that one is never written in place
        if torn:
            torn = not at.intact_after(self.next_seq) if whole else at.torn_header
        return Loss(at.name, at.offset, self.next_seq, at.rest(), reason, torn)

    def close(self) -> None:
        if self.segment is not None:
            self.segment.close()
            self.segment = None


class DiskReader:
    """Reads a log's committed frames, in any process, while it is being written or after.

    `loss` says where the last read stopped before the end of the files, if it did; `gaps`, which
    seqs it did not find because the log says that it lacks them. `strict` raises
    LogError there instead, unless it is a torn tail (a live writer leaves one for moments). Follow
    a live log with a `LogCursor`, one a reader: a second one at another place makes it seek.
    """

    def __init__(
        self, directory: Path, codec: Codec, *, strict: bool = True, disk: Disk | None = None
    ) -> None:
        self._disk: Disk = disk or OsDisk()
        self._directory, self._codec, self._strict = Path(directory), codec, strict
        self._walk: FrameWalk | None = None
        self._front = 0  # seq of the first frame in _ahead, or of the next that _walk gives
        self._ahead: list[Frame] = []
        self.loss: Loss | None = None
        self.gaps: list[Gap] = []  # that the last read came by

    def frames(self, from_seq: int = 1) -> Iterator[Frame]:
        """(seq, kind, body) from `from_seq` (0: the oldest) to the end as of now, undecoded."""
        walk = FrameWalk(self._disk, self._directory, from_seq)
        try:
            while found := self._next(walk):
                yield from found
        finally:
            walk.close()

    def read(self, from_seq: int = 1) -> Iterator[tuple[int, LoggedEvent]]:
        """(seq, event) from `from_seq` to the end as of now. Raises LogError as `frames` does."""
        for seq, kind, body in self.frames(from_seq):
            yield seq, self._decode(seq, kind, body)

    def __iter__(self) -> Iterator[tuple[int, LoggedEvent]]:
        return self.read()

    def since(self, position: int, upto: int | None = None) -> list[tuple[int, LoggedEvent]]:
        """Events of seqs in ``(position, upto]``, or all that are committed. LogError at a gap."""
        walk = self._walk
        if walk is None or not self._front <= position + 1 <= walk.next_seq:
            self.close()
            walk = self._walk = FrameWalk(self._disk, self._directory, position + 1)
        ahead = self._ahead
        del ahead[: bisect_right(ahead, position, key=_seq)]
        self._front = position + 1
        last = sys.maxsize if upto is None else upto
        while (not ahead or ahead[-1][0] < last) and (found := self._next(walk)):
            ahead.extend(found)
        wanted = ahead[: bisect_right(ahead, last, key=_seq)]
        return [(seq, self._decode(seq, kind, body)) for seq, kind, body in wanted]

    def register(self, cursor: Positioned) -> None:
        """A reader keeps nothing for a cursor, which may also wait for what is not written yet."""

    def unregister(self, cursor: Positioned) -> None:
        self.close()

    def consumed(self) -> None:
        """Nothing is dropped here."""

    def close(self) -> None:
        """Close the files; a later read opens them again."""
        self._ahead.clear()
        if self._walk is not None:
            self._walk.close()
            self._walk = None

    def _decode(self, seq: int, kind: int, body: bytes) -> LoggedEvent:
        try:
            return self._codec.decode(kind, body)
        except LogError as error:
            raise LogError(f"event {seq} of log {self._directory.name!r}: {error}") from error

    def _next(self, walk: FrameWalk) -> list[Frame]:
        try:
            found = walk.frames()
        except OSError as error:
            raise LogError(f"cannot read log {self._directory.name!r}: {error.strerror}") from error
        self.loss, self.gaps = walk.loss, walk.gaps
        if self._strict and walk.loss is not None and not walk.loss.torn:
            raise LogError(str(walk.loss))
        return found
