"""Salvage: every intact frame of a damaged log, and what is missing between them.

Owns      nothing; it reads the segments in order, past whatever is damaged.
Makes     no events; a `Lost` for each stretch that holds no intact frame of its place.
Needs     a `Disk`.
Edges     frames come out in ascending seq, each once, each whole by its checksum; a seq that is
          not there is in exactly one `Lost`. What a search for the next frame costs is bounded:
          where it gives up, the rest of the segment is lost, and the next segment is read.
Crash     reads only; `rewrite` makes a log of its own elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from hisparse.errors import LogError
from hisparse.fsm.codec import FRAME_HEAD_BYTES, Frame, SegmentHeader, encode_frame
from hisparse.fsm.events import LogGap
from hisparse.fsm.log_files import Disk, OsDisk
from hisparse.fsm.log_gap import SALVAGED, gap_body, gap_of, gap_reason
from hisparse.fsm.log_segment import Segment, segment_numbers
from hisparse.fsm.log_writer import SegmentWriter

BATCH_FRAMES = 4096
MAX_LOSSES = 1000  # of a segment, after which its rest is given up


class Lost(msgspec.Struct, frozen=True):
    """A stretch without an intact frame. No seqs (0, 0): bytes behind the last frame."""

    segment: str
    offset: int
    lost_bytes: int
    first_seq: int
    last_seq: int
    reason: str

    def __str__(self) -> str:
        seqs = f"seqs {self.first_seq} to {self.last_seq}" if self.first_seq else "no whole seq"
        return f"{self.segment} at offset {self.offset}: {self.lost_bytes} B, {seqs}: {self.reason}"


class Salvage:
    """Reads the log in `directory` past damage: iterate over `frames`, then look at `lost`."""

    def __init__(self, directory: Path, *, disk: Disk | None = None) -> None:
        self._disk, self._directory = disk or OsDisk(), directory
        self.lost: list[Lost] = []
        self.header: SegmentHeader | None = None  # of the first segment that has one
        self.first_seq = self._next = 0  # of the first frame; the seq that comes next

    @property
    def last_seq(self) -> int:
        """Of the last frame, or lost behind it, so far."""
        return max(self._next - 1, 0)

    def frames(self) -> Iterator[Frame]:
        """Every intact frame in ascending seq. Raises LogError if the disk or format refuses."""
        numbers = segment_numbers(self._disk, self._directory)
        firsts = [self._first_of(number) for number in numbers]
        for at, number in enumerate(numbers):
            bound = next((first for first in firsts[at + 1 :] if first), 0)
            try:
                segment = Segment(self._disk, self._directory, number)
            except OSError as error:
                raise LogError(f"cannot read segment {number}: {error.strerror}") from error
            try:
                yield from self._segment(segment, bound)
            finally:
                segment.close()

    def _first_of(self, number: int) -> int:
        """First seq of a segment, 0 if its header is damaged."""
        try:
            segment = Segment(self._disk, self._directory, number)
        except (OSError, LogError):
            return 0
        header = segment.header
        segment.close()
        return header.first_seq if isinstance(header, SegmentHeader) else 0

    def _segment(self, segment: Segment, bound: int) -> Iterator[Frame]:
        """The frames of one segment. `bound`: first seq of a later one, 0 if there is none."""
        header = segment.header
        if isinstance(header, str):  # without its header no frame of it can be checked
            size = segment.bytes.size()
            if bound > self._next or not bound:
                self._lose(segment, 0, size, max(bound, self._next), header)
            return
        self.header = self.header or header
        if self._next == 0:
            self.first_seq = self._next = header.first_seq
        if header.gap_after >= 0 and header.first_seq >= self._next > header.gap_after:
            had = gap_reason(segment) == SALVAGED
            reason = "an earlier salvage had lost them" if had else "the writer had dropped them"
            self._lose(segment, segment.offset, 0, header.first_seq, reason)
        elif header.first_seq > self._next:
            self._lose(segment, segment.offset, 0, header.first_seq, "a segment is missing")
        while True:
            found, fault = segment.frames(self._next)
            if found:
                self._next = found[-1][0] + 1
                yield from found
            elif not fault or not self._resync(segment, bound, fault):
                return

    def _resync(self, segment: Segment, bound: int, fault: str) -> bool:
        """Move on to the next intact frame of the segment; False if there is none."""
        most = bound - 1 if bound else self._next + segment.rest() // FRAME_HEAD_BYTES
        at, sure = -1, False
        if sum(one.segment == segment.name for one in self.lost[-MAX_LOSSES:]) < MAX_LOSSES:
            at, sure = segment.find(self._next, most, segment.offset + 1)
        start, rest = segment.offset, segment.rest()
        if at < 0:
            reason = fault if sure else f"{fault}; the search for what follows was given up"
            self._lose(segment, start, rest, max(bound, self._next), reason)
            return False
        segment.offset = at
        head = segment.bytes.read(FRAME_HEAD_BYTES, at)
        self._lose(segment, start, at - start, int.from_bytes(head[6:14], "little"), fault)
        return True

    def _lose(self, at: Segment, offset: int, count: int, until: int, reason: str) -> None:
        """Note that nothing intact lies before seq `until`, with which the reading goes on."""
        first, last = (self._next, until - 1) if until > self._next else (0, 0)
        self.lost.append(Lost(at.name, offset, count, first, last, reason))
        self._next = max(self._next, until)


def rewrite(salvage: Salvage, out: Path, *, disk: Disk | None = None) -> int:
    """Write what `salvage` finds as a log in `out`, a folder without one; returns the frames.

    Events keep their seqs: where some are lost a segment ends, and the next begins with a LogGap in
    place of the last of them. Raises LogError if `out` holds a log or the disk refuses.
    """
    disk = disk or OsDisk()
    try:
        disk.make_directory(out)
        if segment_numbers(disk, out):
            raise LogError(f"{out} already holds a log: give an empty directory")
        return _Rewriter(disk, out, salvage).run()
    except OSError as error:
        raise LogError(f"cannot write {out}: {error.strerror or error}") from error


class _Rewriter:
    """Copies frames, a segment a stretch without a loss."""

    def __init__(self, disk: Disk, out: Path, salvage: Salvage) -> None:
        self._disk, self._out, self._salvage = disk, out, salvage
        self._writer: SegmentWriter | None = None
        self._next = 0

    def run(self) -> int:
        count, batch = 0, bytearray()
        for seq, kind, body in self._salvage.frames():
            gap = gap_of((seq, kind, body))
            if self._writer is None or seq != self._next or gap is not None:
                self._flush(batch)
                self._begin(seq, gap)
            assert self._writer is not None
            batch += encode_frame(self._writer.seed, seq, kind, body)
            self._next, count = seq + 1, count + 1
            if count % BATCH_FRAMES == 0:
                self._flush(batch)
        self._flush(batch)
        if self._writer is not None:
            self._writer.sync()
            self._writer.close()
        return count

    def _begin(self, seq: int, gap: LogGap | None) -> None:
        """The segment that goes on with `seq`: behind what is lost, or with `gap`, a LogGap that
        the salvaged log had itself."""
        after = (self._salvage.first_seq if self._writer is None else self._next) - 1
        if gap is not None and after < gap.after_seq < seq:
            self._segment(gap.after_seq, after, lost=True)  # damage took what lay before the gap
            after = gap.after_seq
        if gap is not None and gap.after_seq == after:
            self._segment(seq, after)
        elif seq <= after + 1:
            self._segment(seq, -1)
        else:
            self._segment(seq - 1, after, lost=True)

    def _segment(self, first_seq: int, gap_after: int, *, lost: bool = False) -> None:
        """Begin the next; if `lost`, with a LogGap for seqs in ``(gap_after, first_seq]``."""
        old, number = self._writer, 1
        if old is not None:
            old.sync()
            old.close()
            number = old.number + 1
        header = self._salvage.header
        assert header is not None
        header = msgspec.structs.replace(
            header, segment=number, compression="none", raw_bytes=0, chunks=(),
            first_seq=first_seq, gap_after=gap_after,
        )  # fmt: skip
        body = gap_body(gap_after, SALVAGED)
        frames = encode_frame(header.seed, first_seq, *body) if lost else b""
        self._writer = SegmentWriter.create(self._disk, self._out, header, frames=frames, sync=True)

    def _flush(self, batch: bytearray) -> None:
        if batch:
            assert self._writer is not None
            self._writer.write(bytes(batch), sync=False)
            batch.clear()
