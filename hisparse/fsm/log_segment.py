"""One segment file, open for reading: plain, or sealed and compressed, which reads the same.

Owns      a file descriptor, and a position in the segment's frames.
Makes     no events.
Needs     a `Disk`.
Edges     sizes that a header states are bounded before they are trusted: a compressed chunk is
          decompressed into at most `CHUNK_BYTES`, whatever it claims. A chunk that is damaged
          reads as zeros, of which no frame is made.
Crash     reads only.

    00000001.seg        header frame*
    00000001.seg.zst    header chunk*      a chunk: zstd of CHUNK_BYTES of frames (the last: less)
"""

from __future__ import annotations

import re
from pathlib import Path

import google_crc32c
import zstandard

from hisparse.errors import LogError
from hisparse.fsm.codec import (
    MAX_FRAME_BYTES,
    RESYNC_SEQS,
    Frame,
    SegmentHeader,
    decode_header,
    find_frame,
    header_room,
    parse_frames,
)
from hisparse.fsm.log_files import Disk

CHUNK_BYTES = 1 << 20
FIRST_BYTES = 4 << 10  # that hold a LogGap
NEAR_BYTES = (4 << 10, 64 << 10)
MAX_RAW_BYTES = 1 << 30  # of a compressed segment's frames
_SEGMENT = re.compile(r"(\d{8})\.seg(\.zst)?")


def segment_numbers(disk: Disk, directory: Path) -> list[int]:
    """Numbers of the segments in `directory`, ascending. Raises LogError if it cannot be read."""
    try:
        names = disk.names(directory)
    except OSError as error:
        raise LogError(f"cannot list the log {directory.name!r}: {error.strerror}") from error
    return sorted({int(m[1]) for m in map(_SEGMENT.fullmatch, names) if m})


def recorded_salt(disk: Disk, directory: Path) -> bytes | None:
    """The salt of the log in `directory`, as its first whole header has it; None without one."""
    for number in segment_numbers(disk, directory):
        segment = Segment(disk, directory, number)
        header = segment.header
        segment.close()
        if isinstance(header, SegmentHeader):
            return header.salt
    return None


class _Plain:
    """The bytes of an uncompressed segment."""

    def __init__(self, disk: Disk, fd: int) -> None:
        self._disk, self._fd = disk, fd

    def size(self) -> int:
        return self._disk.size(self._fd)

    def read(self, size: int, offset: int) -> bytes:
        return self._disk.read(self._fd, size, offset)


class _Compressed:
    """The bytes of a compressed segment as if they were not. Its header lies in front of them."""

    def __init__(self, disk: Disk, fd: int, header: SegmentHeader, start: int) -> None:
        self._disk, self._fd, self._start = disk, fd, start
        self._raw, self._chunks = header.raw_bytes, header.chunks
        self._places = [start]
        for length, _ in header.chunks:
            self._places.append(self._places[-1] + length)
        self._held: tuple[int, bytes] = (-1, b"")

    @staticmethod
    def fault(header: SegmentHeader) -> str:
        """Why the sizes that `header` states cannot be true; "" if they can."""
        count = -(-header.raw_bytes // CHUNK_BYTES)
        if not 0 <= header.raw_bytes <= MAX_RAW_BYTES:
            return f"it states {header.raw_bytes} B of frames, above {MAX_RAW_BYTES}"
        if len(header.chunks) != count:
            return f"it states {len(header.chunks)} chunks, and {header.raw_bytes} B make {count}"
        if any(not 0 <= length <= 2 * CHUNK_BYTES for length, _ in header.chunks):
            return f"it states a compressed chunk above {2 * CHUNK_BYTES} B"
        return ""

    def size(self) -> int:
        return self._start + self._raw

    def read(self, size: int, offset: int) -> bytes:
        at, end = offset - self._start, min(offset - self._start + size, self._raw)
        parts = []
        while at < end:
            number, within = divmod(at, CHUNK_BYTES)
            part = self._chunk(number)[within : within + end - at]
            parts.append(part)
            at += len(part)
        return b"".join(parts)

    def _chunk(self, number: int) -> bytes:
        if self._held[0] != number:
            self._held = number, self._decompressed(number)
        return self._held[1]

    def _decompressed(self, number: int) -> bytes:
        want = min(CHUNK_BYTES, self._raw - number * CHUNK_BYTES)
        length, crc = self._chunks[number]
        data = self._disk.read(self._fd, length, self._places[number])
        if len(data) == length and google_crc32c.value(data) == crc:
            try:
                if zstandard.frame_content_size(data) == want:  # checked before it is allocated
                    raw: bytes = zstandard.ZstdDecompressor().decompress(data)
                    if len(raw) == want:
                        return raw
            except zstandard.ZstdError:
                pass
        return bytes(want)


class Segment:
    """One open segment file, read in order: `count` frames so far, which end at `offset`.

    Offsets in a compressed segment count bytes as if its frames were not compressed.
    """

    def __init__(self, disk: Disk, directory: Path, number: int) -> None:
        self.disk, self.number, self.name = disk, number, f"{number:08d}.seg"
        try:
            self.fd = disk.open(directory / self.name, "read")
        except FileNotFoundError:  # sealed meanwhile: its successor was there before it went
            self.name += ".zst"
            self.fd = disk.open(directory / self.name, "read")
        self.compressed = self.name.endswith(".zst")
        self.offset = self.seed = self.count = 0
        self.chunk = CHUNK_BYTES  # bytes that are read at once; a seek begins with fewer
        self.bytes: _Plain | _Compressed = _Plain(disk, self.fd)
        try:
            self._read_header(number)
        except LogError as error:
            disk.close(self.fd)
            raise LogError(f"{self.name}: {error}") from error
        except BaseException:
            disk.close(self.fd)
            raise

    def _read_header(self, number: int) -> None:
        self.file_bytes = size = self.bytes.size()
        data = self.bytes.read(min(size, CHUNK_BYTES), 0)
        room = header_room(data, size)
        # An interrupted write leaves too little, or only zeros; a flipped bit does neither.
        self.torn_header = not room or not data.strip(b"\0")
        if room > len(data):
            data = self.bytes.read(room, 0)
        self.header = decode_header(data[:room])
        if isinstance(self.header, str):
            return
        if self.header.segment != number:
            self.header = f"the header is of segment {self.header.segment}"
            return
        packed = self.header.compression != "none"
        if packed and (fault := _Compressed.fault(self.header)):
            self.header = fault
            return
        self.offset = self.start = room
        self.seed = self.header.seed
        if packed:
            self.bytes = _Compressed(self.disk, self.fd, self.header, room)

    def frames(self, expected: int) -> tuple[list[Frame], str]:
        """The next frames, a chunk of them, or none and why ("": the file ends here)."""
        want, self.chunk = self.chunk, min(2 * self.chunk, CHUNK_BYTES)
        while True:
            room = self.bytes.size() - self.offset
            data = self.bytes.read(min(want, room), self.offset) if room > 0 else b""
            found = parse_frames(data, room, self.seed, expected)
            if found.frames or not found.need or found.need <= want:
                break
            want = found.need
        self.offset += found.used
        self.count += len(found.frames)
        return found.frames, "" if found.frames else found.fault

    def first(self, seq: int) -> Frame | None:
        """The first frame, if it is whole and of `seq`; where the reading stands stays so."""
        room = self.bytes.size() - self.start
        data = self.bytes.read(min(FIRST_BYTES, room), self.start) if room > 0 else b""
        found = parse_frames(data, room, self.seed, seq).frames
        return found[0] if found else None

    def rest(self) -> int:
        return max(self.bytes.size() - self.offset, 0)

    def intact_after(self, expected: int) -> bool:
        """Whether a valid frame of one of the next seqs lies beyond the valid prefix.

        Tells damage (something intact follows) from a torn tail (nothing does). Where the search
        gave up, it counts as damage: that is refused, and nothing is cut off.
        """
        at, sure = self.find(expected, expected + RESYNC_SEQS - 1, self.offset)
        return at >= 0 or not sure

    def find(self, first: int, last: int, start: int) -> tuple[int, bool]:
        """(offset from `start` on of a valid frame of a seq in ``[first, last]``, or -1; sure)."""
        size, sure = self.bytes.size(), True
        for near in NEAR_BYTES:  # most often it is not far
            window = self.bytes.read(max(min(near, size - start), 0), start)
            found, _ = find_frame(window, self.seed, first, last)
            if found >= 0:
                return start + found, True
        for at in range(start, size, MAX_FRAME_BYTES):  # windows that hold any frame whole
            window = self.bytes.read(min(2 * MAX_FRAME_BYTES, size - at), at)
            found, certain = find_frame(window, self.seed, first, last, MAX_FRAME_BYTES)
            if found >= 0:
                return at + found, sure
            sure = sure and certain
        return -1, sure

    def close(self) -> None:
        self.disk.close(self.fd)
