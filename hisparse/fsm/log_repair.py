"""Repairs of a log that nobody writes: set a torn tail aside, rewrite what is intact, compress.

Owns      nothing beyond the call; it holds the writer's lock while it changes a stream.
Makes     no events.
Needs     a `Disk`. A directory of streams (``scheduler``, ``rank-0``), as `open_log` makes it.
Edges     a live writer's stream is refused, by its lock. Bytes are moved aside, never deleted.
Crash     as `fsm.log_writer.recover` and `fsm.log_seal`: each step can be done again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from hisparse.errors import LogError
from hisparse.fsm.codec import SegmentHeader
from hisparse.fsm.log_files import Disk, OsDisk
from hisparse.fsm.log_history import check_directory
from hisparse.fsm.log_reader import Loss
from hisparse.fsm.log_seal import seal
from hisparse.fsm.log_segment import segment_numbers
from hisparse.fsm.log_snapshots import Snapshots
from hisparse.fsm.log_writer import recover

_FOREIGN = SegmentHeader(
    segment=0, first_seq=0, schema_digest="", salt=b"", config="", created=0.0
)  # like no segment's: recovery then opens none to go on with


class Recovery(msgspec.Struct, frozen=True):
    """What recovery found in a stream. `loss` was moved aside."""

    last_seq: int
    events: int
    loss: Loss | None


class Compaction(msgspec.Struct, frozen=True):
    """What compaction did to a stream. `failed`: segments that stay as they are, and why."""

    compressed: int
    saved_bytes: int
    failed: list[str]


def streams(directory: Path) -> list[str]:
    """Names of the streams below `directory`. Raises LogError where there is none."""
    disk = OsDisk()
    check_directory(directory)
    found = sorted(p.name for p in directory.iterdir() if p.is_dir() and segment_numbers(disk, p))
    if not found:
        raise LogError(f"{directory} holds no log: no folder in it has a 00000001.seg")
    return found


def recover_stream(path: Path, *, disk: Disk | None = None) -> Recovery:
    """Move a torn tail aside, as a writer that opens the log would. Raises LogError for damage."""
    disk = disk or OsDisk()
    with _locked(disk, path):
        found = recover(disk, path, lambda number, first_seq: _FOREIGN, sync=True)
        Snapshots(disk, path, b"").set_aside_after(found.last_seq)
        return Recovery(found.last_seq, found.events, found.loss)


def compact_stream(path: Path, *, disk: Disk | None = None) -> Compaction:
    """Compress each segment but the last. Raises LogError if a writer holds the log."""
    disk = disk or OsDisk()
    compressed = saved = 0
    failed: list[str] = []
    with _locked(disk, path):
        for number in segment_numbers(disk, path)[:-1]:
            try:
                gained = seal(disk, path, number)
            except LogError as error:
                failed.append(str(error))
                continue
            compressed += gained != 0
            saved += gained
    return Compaction(compressed, saved, failed)


@contextmanager
def _locked(disk: Disk, path: Path) -> Iterator[None]:
    try:
        lock = disk.lock(path / "lock")
        try:
            yield
        finally:
            disk.close(lock)
    except OSError as error:
        raise LogError(f"cannot change log {path.name!r}: {error.strerror or error}") from error
