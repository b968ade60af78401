"""The event log on disk: a directory of segments, one writer, any number of readers.

Owns      the directory: ``00000001.seg`` …, ``lock``, ``*.torn`` (what recovery set aside) and
          ``*.tmp`` (a segment that has no frames yet). Format: `fsm.codec`.
Makes     no events; `Loss` says what a crash or damage took.
Needs     a clock and a `Disk`, injected; a file system with `flock`.
Edges     a frame is committed once `commit` has returned; until then it is in memory only. A batch
          lies in one segment, which may pass `segment_bytes` by that batch.
Crash     what is left is the longest valid prefix. Reopening moves the torn rest of the last
          segment to a side file; damage in an earlier segment is refused, never skipped.

    committed, on disk                        pending, in memory
    |-- 00000001.seg --|-- 00000002.seg -----|--- append ----->
    1                  first_seq   synced_seq  committed_seq    last_seq

A failed `commit` truncates the segment back to its last good offset and keeps the batch, so that a
retry writes each frame once. A reader that had seen part of such a batch keeps it: the retry writes
the same bytes, but a writer that dies first, and reopens, may give those seqs to other events.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from hisparse.config import LogConfig
from hisparse.errors import LogError, UsageError
from hisparse.fsm.codec import (
    Codec,
    Frame,
    LoggedEvent,
    SegmentHeader,
    encode_frame,
    encode_header,
)
from hisparse.fsm.cursor import CHUNK_BYTES, FrameWalk, Loss, Segment, segment_numbers
from hisparse.fsm.log import (
    Disk,
    EventLog,
    LogStatistics,
    MemoryLog,
    OsDisk,
    Positioned,
    check_range,
    read_chunks,
)

Fsync = Literal["never", "interval", "commit"]
_STREAM = re.compile(r"[a-z0-9][a-z0-9._-]*")


class DiskReader:
    """Reads a log's committed frames, in any process, while it is being written or after.

    `loss` says where the last read stopped before the end of the files, if it did. `strict` raises
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
        passed = position + 1 - self._front
        if self._walk is None or not 0 <= passed <= len(self._ahead):
            self.close()
            self._walk, passed = FrameWalk(self._disk, self._directory, position + 1), 0
        del self._ahead[:passed]
        self._front = position + 1
        want = sys.maxsize if upto is None else max(upto - position, 0)
        while len(self._ahead) < want and (found := self._next(self._walk)):
            self._ahead.extend(found)
        return [(seq, self._decode(seq, kind, body)) for seq, kind, body in self._ahead[:want]]

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
        self.loss = walk.loss
        if self._strict and walk.loss is not None and not walk.loss.torn:
            raise LogError(str(walk.loss))
        return found


class _Committed:
    """Holds in the memory tail what is not on disk yet."""

    def __init__(self, memory: MemoryLog) -> None:
        self._memory = memory

    @property
    def position(self) -> int:
        return self._memory.committed_seq


class DiskLog:
    """The one writer of the log in `directory`, which it creates, or recovers and goes on with.

    `config_json` and `salt` go into each segment's header; a segment whose header would differ is
    not continued but followed by a new one. `fsync` "interval" syncs at a `commit` that comes
    `fsync_interval_s` or more after the last sync. `ring`: events that stay in memory for cursors.
    `loss`: what recovery moved aside, or None. Raises LogError if another process writes the log,
    if it is damaged before its last segment, or if the disk refuses.
    """

    def __init__(
        self,
        directory: Path,
        codec: Codec,
        *,
        clock: Callable[[], float],
        config_json: bytes | str = "{}",
        salt: bytes = b"",
        fsync: Fsync = "never",
        fsync_interval_s: float = 1.0,
        segment_bytes: int = 64 << 20,
        ring: int = 100_000,
        disk: Disk | None = None,
    ) -> None:
        if fsync not in ("never", "interval", "commit") or segment_bytes < 1 or ring < 0:
            raise UsageError(f"bad log option: {fsync=}, {segment_bytes=}, {ring=}")
        self._directory, self._codec, self._clock = Path(directory), codec, clock
        self._disk: Disk = disk or OsDisk()
        self._config = config_json if isinstance(config_json, str) else config_json.decode()
        self._salt, self._fsync, self._interval_s = salt, fsync, fsync_interval_s
        self._segment_bytes, self._ring = segment_bytes, ring
        self._pending: list[bytes] = []
        self._encode = codec.encode
        self._reader = DiskReader(self._directory, codec, disk=self._disk)
        self._fd, self._closed, self._dirty = -1, False, False
        self._commits = self._failed = self._failed_rotations = self._syncs = self._written = 0
        self.loss: Loss | None = None
        try:
            self._disk.make_directory(self._directory)
            self._lock = self._disk.lock(self._directory / "lock")
            try:
                self._recover()
            except BaseException:
                self._release()
                raise
        except OSError as error:
            raise self._error("open", error) from error
        self._last_sync = clock()

    # -- the log ----------------------------------------------------------------------------------
    @property
    def last_seq(self) -> int:
        return self._memory.last_seq

    @property
    def next_seq(self) -> int:
        return self._memory.next_seq

    @property
    def committed_seq(self) -> int:
        return self._memory.committed_seq

    @property
    def synced_seq(self) -> int:
        """Last seq known to be on stable storage. Unsynced ones outlive a crash of the process."""
        return self._synced

    @property
    def oldest_seq(self) -> int:
        return self._oldest

    def append(self, event: LoggedEvent) -> int:
        """Encode an event and keep it for `commit`; returns its seq.

        Raises UsageError for an event that the codec cannot encode, or once closed, and LogError
        for one that is too large; the log is then as it was.
        """
        memory = self._memory
        kind, body = self._encode(event)
        self._pending.append(encode_frame(self._seed, memory.next_seq, kind, body))
        return memory.append(event)

    def commit(self) -> None:
        """Write what was appended, in one write, and sync it as `fsync` says.

        Raises LogError if the disk refuses: nothing of the batch is then committed, all of it is
        kept, and calling again retries. (Where only an interval's sync failed, the batch *is*
        committed, and calling again syncs: see `committed_seq` and `synced_seq`.)
        """
        if self._closed:
            raise UsageError("the log is closed")
        if self._pending:
            data = b"".join(self._pending)
            try:
                self._write_batch(data)
            except OSError as error:
                self._failed += 1
                with contextlib.suppress(OSError):  # else the retry truncates first
                    self._disk.truncate(self._fd, self._size)
                    self._dirty = False
                raise self._error("write", error) from error
            self._size += len(data)
            self._written += len(data)
            self._commits += 1
            self._pending.clear()
            self._memory.commit()
            if self._fsync == "commit":
                self._synced = self.committed_seq
        if self._fsync == "interval" and self._synced < self.committed_seq and self._due():
            self._sync()
        if self._size >= self._segment_bytes and self.committed_seq >= self._first:
            self._roll()

    def since(self, position: int, upto: int | None = None) -> list[tuple[int, LoggedEvent]]:
        """Events of seqs in ``(position, upto]``: from memory, or from disk where dropped there."""
        dropped = self._memory.dropped_seq
        if position >= dropped:
            return self._memory.since(position, upto)
        if position + 1 < self._oldest:
            raise LogError(f"event {position + 1} is gone: the oldest kept is {self._oldest}")
        limit = dropped if upto is None else min(upto, dropped)
        return self._reader.since(position, limit) + self._memory.since(dropped, upto)

    def read(self, from_seq: int = 1) -> Iterator[tuple[int, LoggedEvent]]:
        """(seq, event) from `from_seq` to the last seq as of the call; see `EventLog.read`."""
        last = check_range(self, from_seq)
        if from_seq < self._oldest:
            raise LogError(f"event {from_seq} is gone: the oldest kept is {self._oldest}")
        return self._read(from_seq, last)

    def _read(self, from_seq: int, last: int) -> Iterator[tuple[int, LoggedEvent]]:
        dropped = self._memory.dropped_seq
        if from_seq <= dropped:  # a reader of its own: cursors must not make it seek
            reader = DiskReader(self._directory, self._codec, disk=self._disk)
            for seq, event in reader.read(from_seq):
                if seq > dropped:
                    break
                yield seq, event
                from_seq = seq + 1
        yield from read_chunks(self, from_seq, last)

    def register(self, cursor: Positioned) -> None:
        """Keep in memory what `cursor` has not read; it may begin with what only the disk has."""
        if not self._oldest - 1 <= cursor.position <= self.last_seq:
            raise LogError(
                f"a cursor at {cursor.position} is outside of the log: it holds "
                f"{self._oldest}..{self.last_seq}"
            )
        self._memory.pin(cursor)

    def unregister(self, cursor: Positioned) -> None:
        self._memory.unregister(cursor)

    def consumed(self) -> None:
        self._memory.consumed()

    def statistics(self) -> LogStatistics:
        return msgspec.structs.replace(
            self._memory.statistics(),
            mode="disk",
            oldest_seq=self._oldest,
            cursors=self._memory.statistics().cursors - 1,  # less the log's own hold
            segments=self._segments,
            commits=self._commits,
            failed_commits=self._failed,
            failed_rotations=self._failed_rotations,
            syncs=self._syncs,
            synced_seq=self._synced,
            written_bytes=self._written,
            pending_events=len(self._pending),
            torn_bytes=self.loss.lost_bytes if self.loss else 0,
        )

    def close(self) -> None:
        """Commit, sync unless `fsync` is "never", and unlock, whatever fails. Idempotent."""
        if self._closed:
            return
        try:
            self.commit()
            if self._fsync != "never" and self._synced < self.committed_seq:
                self._sync()
        finally:
            self._closed = True
            self._memory.close()
            self._reader.close()
            self._release()

    # -- files ------------------------------------------------------------------------------------
    def _write_batch(self, data: bytes) -> None:
        if self._dirty:  # a failed batch left bytes beyond the last good offset
            self._disk.truncate(self._fd, self._size)
        self._dirty = True
        self._write_all(self._fd, data, self._size)
        if self._fsync == "commit":
            # After a failed fsync the kernel may call lost pages clean, so the retry writes anew.
            self._disk.sync(self._fd)
            self._syncs += 1
        self._dirty = False

    def _write_all(self, fd: int, data: bytes, offset: int) -> None:
        view, done = memoryview(data), 0
        while done < len(data):
            count = self._disk.write(fd, view[done:], offset + done)
            if not 0 < count <= len(data) - done:
                raise OSError(errno.EIO, f"a write of {len(data) - done} B returned {count}")
            done += count

    def _due(self) -> bool:
        # A clock set back counts as due: better one sync too many than none for hours.
        return not 0 <= self._clock() - self._last_sync < self._interval_s

    def _sync(self) -> None:
        try:
            self._disk.sync(self._fd)
        except OSError as error:
            raise self._error("sync", error) from error
        self._syncs += 1
        self._last_sync, self._synced = self._clock(), self.committed_seq

    def _roll(self) -> None:
        """Seal the segment and open the next. A failure is counted, and tried at each commit."""
        assert not self._pending  # their checksums are salted for the old segment
        old = self._fd
        try:
            if self._fsync != "never":
                self._disk.sync(old)
                self._synced = self.committed_seq
            self._create(self._number + 1)
        except OSError:
            self._failed_rotations += 1  # what is committed is safe, and the segment still open
            return
        self._disk.close(old)

    def _create(self, number: int) -> None:
        header = self._header(number, self.committed_seq + 1)
        data = encode_header(header)
        path = self._directory / f"{number:08d}.seg"
        temporary = path.with_suffix(".seg.tmp")
        fd = self._disk.open(temporary, "replace")
        try:
            self._write_all(fd, data, 0)
            if self._fsync != "never":
                self._disk.sync(fd)
            self._disk.rename(temporary, path)  # a reader never sees half of a header
            if self._fsync != "never":
                self._disk.sync_directory(self._directory)
        except BaseException:
            self._disk.close(fd)
            raise
        self._fd, self._number, self._first = fd, number, header.first_seq
        self._size, self._seed = len(data), header.seed
        self._segments += 1

    def _header(self, number: int, first_seq: int) -> SegmentHeader:
        return SegmentHeader(
            segment=number,
            first_seq=first_seq,
            schema_digest=self._codec.schema_digest,
            salt=self._salt,
            config=self._config,
            created=self._clock(),
        )

    def _recover(self) -> None:
        """Find the longest valid prefix, move the rest of the last segment aside, and go on."""
        walk = FrameWalk(self._disk, self._directory, 0)
        try:
            while walk.frames():
                pass
            here, loss = walk.segment, walk.loss
            last_seq, self._oldest = walk.next_seq - 1, walk.first_seq
            if loss is not None:
                if not loss.last_segment or (loss.offset == 0 and not loss.torn):
                    raise LogError(f"{loss}; going on from there would hide what follows")
                self._set_aside(loss)
                self.loss = loss
            self._memory = MemoryLog(self._ring, start=last_seq)
            self._memory.pin(_Committed(self._memory))
            self._synced = last_seq if self._fsync != "never" else 0
            numbers = segment_numbers(self._disk, self._directory)
            self._segments = len(numbers)
            if here is not None and here.number == numbers[-1] and self._continues(here):
                self._fd = self._disk.open(self._directory / here.name, "write")
                self._number, self._first = here.number, walk.next_seq - here.count
                self._size, self._seed = here.offset, here.seed
                if self._fsync != "never":
                    self._disk.sync(self._fd)
            else:
                self._create(numbers[-1] + 1 if numbers else 1)
        finally:
            walk.close()

    def _continues(self, here: Segment) -> bool:
        """Whether the header of `here` is still true of what this writer would add."""
        header = here.header
        assert isinstance(header, SegmentHeader)
        mine = self._header(header.segment, header.first_seq)
        return msgspec.structs.replace(mine, created=header.created) == header

    def _set_aside(self, loss: Loss) -> None:
        """Move the bytes from `loss.offset` on to a ``*.torn`` file: copied first, then cut off."""
        taken = set(self._disk.names(self._directory))
        names = (f"{loss.segment}.{loss.offset}.{n}.torn" for n in itertools.count())
        aside = self._directory / next(name for name in names if name not in taken)
        path = self._directory / loss.segment
        if loss.offset == 0:  # not even a header
            self._disk.rename(path, aside)
            return
        fd, side = self._disk.open(path, "write"), -1
        try:
            side = self._disk.open(aside, "create")
            at, size = loss.offset, self._disk.size(fd)
            while at < size:
                data = self._disk.read(fd, CHUNK_BYTES, at)
                self._write_all(side, data, at - loss.offset)
                at += len(data)
            self._disk.sync(side)
            self._disk.sync_directory(self._directory)
            self._disk.truncate(fd, loss.offset)
            self._disk.sync(fd)
        finally:
            self._disk.close(fd)
            if side >= 0:
                self._disk.close(side)

    def _release(self) -> None:
        for fd in (self._fd, self._lock):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    self._disk.close(fd)
        self._fd = self._lock = -1

    def _error(self, what: str, error: OSError) -> LogError:
        at = ""
        if self._fd >= 0:
            at = (
                f" segment {self._number:08d}.seg at offset {self._size}: seq "
                f"{self.committed_seq} is committed, {self._synced} synced, "
                f"{len(self._pending)} events wait"
            )
        why = error.strerror or str(error)
        return LogError(f"cannot {what} log {self._directory.name!r}{at} ({why})")


def open_log(
    config: LogConfig,
    codec: Codec,
    *,
    stream: str,
    config_json: bytes | str = "{}",
    salt: bytes = b"",
    clock: Callable[[], float] = time.time,
    disk: Disk | None = None,
) -> EventLog:
    """The log that `config` asks for. `stream` names its directory: ``scheduler``, ``rank-0``.

    Raises UsageError for a stream name that is no plain file name, LogError as `DiskLog` does.
    """
    if not _STREAM.fullmatch(stream):
        raise UsageError(f"stream={stream!r} must match {_STREAM.pattern}")
    if config.mode != "disk":
        return MemoryLog(0 if config.mode == "off" else config.ring_events)
    assert config.dir is not None  # LogConfig refuses disk mode without it
    return DiskLog(
        config.dir / stream,
        codec,
        clock=clock,
        config_json=config_json,
        salt=salt,
        fsync=config.fsync,
        ring=config.ring_events,
        disk=disk,
    )
