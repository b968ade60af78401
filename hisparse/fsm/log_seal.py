"""Sealing: a segment that is written no more is replaced by its compressed form.

Owns      ``NNNNNNNN.seg.zst`` files, written once. Layout: `fsm.log_segment`.
Makes     no events.
Needs     a `Disk`; that nobody writes the segment any more.
Edges     only an intact segment is compressed; the result is checked before the original goes.
Crash     the compressed file appears whole, under its name, before the original is removed; where
          both are there, the original counts, and sealing again replaces the other.
"""

from __future__ import annotations

from pathlib import Path

import google_crc32c
import msgspec
import zstandard

from hisparse.errors import LogError
from hisparse.fsm.codec import SegmentHeader, encode_header
from hisparse.fsm.log_files import Disk, write_file
from hisparse.fsm.log_segment import CHUNK_BYTES, MAX_RAW_BYTES, Segment

LEVEL = 3


def seal(disk: Disk, directory: Path, number: int) -> int:
    """Compress segment `number`; returns the bytes saved (0: it is compressed already).

    Raises LogError for a segment that is damaged or too large, OSError as the disk does; the
    segment is then as it was.
    """
    segment = Segment(disk, directory, number)
    try:
        header = segment.header
        if isinstance(header, str):
            raise LogError(f"{segment.name} is damaged, so it is not compressed: {header}")
        if header.compression != "none":
            return 0
        data = _packed(segment, header)
        before = segment.bytes.size()
    finally:
        segment.close()
    plain = directory / f"{number:08d}.seg"
    write_file(disk, plain.with_name(plain.name + ".zst"), data, sync=True)
    disk.remove(plain)
    disk.sync_directory(directory)
    return before - len(data)


def _packed(segment: Segment, header: SegmentHeader) -> bytes:
    """The compressed file of an intact segment. Raises LogError if it is not."""
    start, raw = segment.start, segment.rest()
    if raw > MAX_RAW_BYTES:
        raise LogError(f"{segment.name} has {raw} B, above {MAX_RAW_BYTES}: not compressed")
    expected = header.first_seq
    while found := segment.frames(expected)[0]:
        expected = found[-1][0] + 1
    if segment.rest():
        raise LogError(
            f"{segment.name} is damaged at offset {segment.offset}, so it is not compressed"
        )
    compressor = zstandard.ZstdCompressor(level=LEVEL, write_content_size=True)
    chunks, places = [], []
    for at in range(start, start + raw, CHUNK_BYTES):
        plain = segment.bytes.read(min(CHUNK_BYTES, start + raw - at), at)
        chunk = compressor.compress(plain)
        if zstandard.ZstdDecompressor().decompress(chunk) != plain:
            raise LogError(f"{segment.name} does not come back from its compressed form")
        chunks.append(chunk)
        places.append((len(chunk), google_crc32c.value(chunk)))
    sealed = msgspec.structs.replace(
        header, compression="zstd", raw_bytes=raw, chunks=tuple(places)
    )
    return encode_header(sealed) + b"".join(chunks)
