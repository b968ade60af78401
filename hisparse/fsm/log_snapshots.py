"""Snapshot files of a log: ``snapshots/SEQ.snap`` in its directory, each of the state after SEQ.

Owns      that folder. What a snapshot's bytes mean is `fsm.snapshot`'s.
Makes     no events.
Needs     a `Disk`; for writing, the directory's lock, which the caller holds.
Edges     a snapshot is a short cut, never a source: one that is damaged is skipped, and the fold
          begins at an earlier one. Sizes are bounded before they are trusted.
Crash     a snapshot appears whole under its name. One that is ahead of the log (its events were
          lost with a machine) is set aside by the writer, and no reader takes it.

    file = magic 8 B | format u16 | seq u64 | raw bytes u64 | crc32c u32 | zstd of the state
    crc  = CRC-32C over the log's salt, then everything before it and after it
"""

from __future__ import annotations

import contextlib
import re
import struct
from pathlib import Path

import google_crc32c
import zstandard

from hisparse.fsm.log_files import Disk, write_file

MAX_SNAPSHOT_BYTES = 1 << 30
FORMAT = 1
_MAGIC = b"hispsnap"
_HEAD = struct.Struct("<8sHQQ")
_CRC = struct.Struct("<I")
_NAME = re.compile(r"(\d{1,19})\.snap")


class Snapshots:
    """The snapshots of the log in `directory`."""

    def __init__(self, disk: Disk, directory: Path, salt: bytes) -> None:
        self._disk, self._salt = disk, salt
        self._folder = Path(directory) / "snapshots"

    def seqs(self) -> list[int]:
        """Seqs of which there is a snapshot, whole or not, ascending."""
        try:
            names = self._disk.names(self._folder)
        except OSError:
            return []
        return sorted(int(m[1]) for m in map(_NAME.fullmatch, names) if m)

    def write(self, seq: int, data: bytes, *, sync: bool) -> None:
        """Store the state after `seq`. Raises OSError; then there is no snapshot of that seq."""
        if len(data) > MAX_SNAPSHOT_BYTES:
            raise OSError(27, f"a snapshot of {len(data)} B is above {MAX_SNAPSHOT_BYTES}")
        body = zstandard.ZstdCompressor(level=1, write_content_size=True).compress(data)
        head = _HEAD.pack(_MAGIC, FORMAT, seq, len(data))
        crc = _CRC.pack(google_crc32c.value(self._salt + head + body))
        self._disk.make_directory(self._folder)
        write_file(self._disk, self._path(seq), head + crc + body, sync=sync)

    def read(self, seq: int) -> bytes | None:
        """The bytes of the snapshot of `seq`, None if it is not there or not intact."""
        try:
            fd = self._disk.open(self._path(seq), "read")
        except OSError:
            return None
        try:
            size = self._disk.size(fd)
            if size > 2 * MAX_SNAPSHOT_BYTES:
                return None
            return self._unpacked(seq, self._disk.read(fd, size, 0))
        except OSError:
            return None
        finally:
            self._disk.close(fd)

    def _unpacked(self, seq: int, data: bytes) -> bytes | None:
        start = _HEAD.size + _CRC.size
        if len(data) < start:
            return None
        head, body = data[: _HEAD.size], data[start:]
        magic, version, stated, raw = _HEAD.unpack(head)
        if (magic, version, stated) != (_MAGIC, FORMAT, seq) or raw > MAX_SNAPSHOT_BYTES:
            return None
        crc = google_crc32c.value(self._salt + head + body)
        if _CRC.unpack_from(data, _HEAD.size)[0] != crc:
            return None
        try:
            if zstandard.frame_content_size(body) != raw:  # checked before it is allocated
                return None
            state: bytes = zstandard.ZstdDecompressor().decompress(body)
        except zstandard.ZstdError:
            return None
        return state if len(state) == raw else None

    def set_aside_after(self, last_seq: int) -> int:
        """Rename what is ahead of a log that ends at `last_seq`; returns how many."""
        ahead = [seq for seq in self.seqs() if seq > last_seq]
        for seq in ahead:
            path = self._path(seq)
            self._disk.rename(path, path.with_name(path.name + ".stale"))
        if ahead:
            with contextlib.suppress(OSError):
                self._disk.sync_directory(self._folder)
        return len(ahead)

    def _path(self, seq: int) -> Path:
        return self._folder / f"{seq}.snap"
