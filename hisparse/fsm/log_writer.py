"""The files that the writer of a log changes: the open segment, and what a crash left behind.

Owns      the file descriptor of the segment that it writes.
Makes     no events; `Loss` (of `fsm.log_reader`) says what `recover` moved aside.
Needs     a `Disk`; the directory's lock, which the caller holds.
Edges     a batch is written whole or not at all: a failed one is truncated away, at once or before
          the next. A new segment appears under its name with its whole header, or not at all.
Crash     `recover` finds the longest valid prefix, moves a torn rest to a ``*.torn`` file, and
          refuses damage that something valid follows.

    header, frames of whole batches        a failed batch, until it is truncated
    |--------------------------------------|- - - - - - ->
    0                                     size
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from hisparse.errors import LogError
from hisparse.fsm.codec import SegmentHeader, encode_header
from hisparse.fsm.log_files import Disk, write_all
from hisparse.fsm.log_reader import FrameWalk, Loss
from hisparse.fsm.log_segment import CHUNK_BYTES, Segment, segment_numbers


class SegmentWriter:
    """The segment that `fd` is open on, valid up to `size` bytes."""

    def __init__(self, disk: Disk, fd: int, header: SegmentHeader, size: int) -> None:
        self._disk, self._fd, self._dirty = disk, fd, False
        self.number, self.name = header.segment, f"{header.segment:08d}.seg"
        self.first_seq, self.seed, self.size = header.first_seq, header.seed, size

    @classmethod
    def create(
        cls,
        disk: Disk,
        directory: Path,
        header: SegmentHeader,
        *,
        sync: bool,
        frames: bytes = b"",
    ) -> SegmentWriter:
        """Make the segment of `header`, with its first frames. Raises OSError; then there is none.

        It appears under its name with all of that, or not at all.
        """
        data = encode_header(header) + frames
        path = directory / f"{header.segment:08d}.seg"
        temporary = path.with_suffix(".seg.tmp")
        fd = disk.open(temporary, "replace")
        try:
            write_all(disk, fd, data, 0)
            if sync:
                disk.sync(fd)
            disk.rename(temporary, path)  # a reader never sees half of a header
            if sync:
                disk.sync_directory(directory)
        except BaseException:
            disk.close(fd)
            raise
        return cls(disk, fd, header, len(data))

    def write(self, data: bytes, *, sync: bool) -> None:
        """Append a batch. Raises OSError; then nothing of it counts, and it may be tried again."""
        disk, fd = self._disk, self._fd
        self.clean()
        self._dirty = True
        try:
            write_all(disk, fd, data, self.size)
            if sync:
                # After a failed fsync the kernel may call lost pages clean: the retry writes anew.
                disk.sync(fd)
        except OSError:
            with contextlib.suppress(OSError):  # else the retry truncates first
                disk.truncate(fd, self.size)
                self._dirty = False
            raise
        self._dirty = False
        self.size += len(data)

    def clean(self) -> None:
        """Cut off what a failed batch left beyond the last good offset. Raises OSError."""
        if self._dirty:
            self._disk.truncate(self._fd, self.size)
            self._dirty = False

    def sync(self) -> None:
        self._disk.sync(self._fd)

    def close(self) -> None:
        self._disk.close(self._fd)


class Recovered(NamedTuple):
    """What a directory holds. `segment`: the last one, if the writer may go on in it."""

    last_seq: int
    oldest_seq: int
    events: int
    segments: int
    last_number: int  # of the segment with the highest number, 0 if there is none
    loss: Loss | None
    segment: SegmentWriter | None


def recover(
    disk: Disk, directory: Path, header_of: Callable[[int, int], SegmentHeader], *, sync: bool
) -> Recovered:
    """Find the longest valid prefix, and move the rest of the last segment aside.

    `header_of` (number, first_seq) is the header that the writer would give: a last segment with
    another one is not gone on with. Raises LogError for damage before the last segment's tail.
    """
    walk = FrameWalk(disk, directory, 0)
    events = 0
    try:
        while frames := walk.frames():
            events += len(frames)
        here, loss = walk.segment, walk.loss
        if loss is not None:
            if not loss.torn:
                raise LogError(f"{loss}; going on from there would hide what follows")
            set_aside(disk, directory, loss)
        numbers = segment_numbers(disk, directory)
        segment = None
        if here is not None and here.number == numbers[-1] and _continues(here, header_of):
            header = here.header
            assert isinstance(header, SegmentHeader)
            fd = disk.open(directory / here.name, "write")
            segment = SegmentWriter(disk, fd, header, here.offset)
        last_number = numbers[-1] if numbers else 0
        return Recovered(
            walk.next_seq - 1, walk.first_seq, events, len(numbers), last_number, loss, segment
        )
    finally:
        walk.close()


def _continues(here: Segment, header_of: Callable[[int, int], SegmentHeader]) -> bool:
    """Whether the header of `here` is still true of what the writer would add."""
    header = here.header
    assert isinstance(header, SegmentHeader)
    mine = header_of(header.segment, header.first_seq)
    return msgspec.structs.replace(mine, created=header.created) == header


def set_aside(disk: Disk, directory: Path, loss: Loss) -> None:
    """Move the bytes from `loss.offset` on to a ``*.torn`` file: copied first, then cut off."""
    taken = set(disk.names(directory))
    names = (f"{loss.segment}.{loss.offset}.{n}.torn" for n in itertools.count())
    aside = directory / next(name for name in names if name not in taken)
    path = directory / loss.segment
    if loss.offset == 0:  # not even a header
        disk.rename(path, aside)
        return
    fd, side = disk.open(path, "write"), -1
    try:
        side = disk.open(aside, "create")
        at, size = loss.offset, disk.size(fd)
        while at < size:
            data = disk.read(fd, CHUNK_BYTES, at)
            write_all(disk, side, data, at - loss.offset)
            at += len(data)
        disk.sync(side)
        disk.sync_directory(directory)
        disk.truncate(fd, loss.offset)
        disk.sync(fd)
    finally:
        disk.close(fd)
        if side >= 0:
            disk.close(side)
