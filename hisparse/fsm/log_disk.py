"""The event log on disk: a directory of segments, one writer, any number of readers.

Owns      the directory: ``00000001.seg`` … (sealed: ``.seg.zst``), ``snapshots/``, ``lock``,
          ``*.torn`` (what recovery set aside) and ``*.tmp`` (not yet whole). Format: `fsm.codec`.
Makes     a LogGap on disk, in place of what a disk refused; `Loss` says what a crash took.
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
With on_error "continue" the batch is dropped instead: it keeps its seqs, and its place in memory,
and once the disk takes writes again a LogGap with the last of those seqs says so on disk.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from hisparse.errors import LogError, UsageError
from hisparse.fsm.codec import Codec, LoggedEvent, SegmentHeader, encode_frame
from hisparse.fsm.log import (
    LogStatistics,
    MemoryLog,
    Positioned,
    check_range,
    read_chunks,
)
from hisparse.fsm.log_chain import SegmentChain
from hisparse.fsm.log_files import Disk, OsDisk
from hisparse.fsm.log_reader import DiskReader, Loss
from hisparse.fsm.log_snapshots import Snapshots
from hisparse.fsm.log_writer import recover

Fsync = Literal["never", "interval", "commit"]
OnError = Literal["stop", "continue"]


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
    `compress`: sealed segments, in a thread. `snapshot_events`: see `snapshot_due`. `loss`: what
    recovery moved aside, or None. Raises LogError if another process writes the log, if it is
    damaged before its last segment, or if the disk refuses.
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
        snapshot_events: int = 0,
        compress: bool = False,
        on_error: OnError = "stop",
        disk: Disk | None = None,
    ) -> None:
        if fsync not in ("never", "interval", "commit") or segment_bytes < 1 or ring < 0:
            raise UsageError(f"bad log option: {fsync=}, {segment_bytes=}, {ring=}")
        if snapshot_events < 0 or on_error not in ("stop", "continue"):
            raise UsageError(f"bad log option: {snapshot_events=}, {on_error=}")
        self._directory, self._codec, self._clock = Path(directory), codec, clock
        self._disk: Disk = disk or OsDisk()
        self._config = config_json if isinstance(config_json, str) else config_json.decode()
        self._salt, self._fsync, self._interval_s = salt, fsync, fsync_interval_s
        self._segment_bytes, self._ring, self._on_error = segment_bytes, ring, on_error
        self._pending: list[bytes] = []
        self._encode = codec.encode
        self._reader = DiskReader(self._directory, codec, disk=self._disk)
        self._snapshots = Snapshots(self._disk, self._directory, salt)
        self._every, self._taken_at, self._resumed = snapshot_events, 0, False
        self._chain: SegmentChain | None = None
        self._lock, self._closed = -1, False
        self._gap_after, self._refused = -1, ""  # where a gap that is not on disk yet begins, why
        self._commits = self._failed = self._syncs = self._written = 0
        self._dropped = self._gaps = self._stored = self._failed_snapshots = 0
        self.loss: Loss | None = None
        try:
            self._disk.make_directory(self._directory)
            self._lock = self._disk.lock(self._directory / "lock")
            try:
                self._recover(compress)
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
        committed, and calling again syncs: see `committed_seq` and `synced_seq`.) With on_error
        "continue" it drops the batch instead, counted, and raises nothing.
        """
        if self._closed:
            raise UsageError("the log is closed")
        if self._pending or self._gap_after >= 0:
            self._write()
        if self._fsync == "interval" and self._synced < self.committed_seq and self._due():
            self._sync()
        here = self._segments.open
        if here.size >= self._segment_bytes and self.committed_seq >= here.first_seq:
            self._roll()

    @property
    def snapshot_due(self) -> bool:
        """Whether `snapshot` is wanted: `snapshot_events` after the last, or behind a gap."""
        if self._gap_after >= 0:
            return False
        return self._resumed or 0 < self._every <= self.last_seq - self._taken_at

    def snapshot(self, seq: int, data: bytes) -> None:
        """Store `data`, the state after event `seq`. A disk that refuses it is counted, no more.

        Commits first where `seq` is not committed yet. Raises UsageError for a seq not written.
        """
        if seq > self.committed_seq:
            self.commit()
        if not 1 <= seq <= self.committed_seq:
            raise UsageError(f"no snapshot of seq {seq}: the log holds 1..{self.committed_seq}")
        self._taken_at, self._resumed = seq, False
        try:
            self._snapshots.write(seq, data, sync=self._fsync != "never")
            self._stored += 1
        except OSError:
            self._failed_snapshots += 1

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
            segments=self._segments.count,
            commits=self._commits,
            failed_commits=self._failed,
            failed_rotations=self._segments.failed_rotations,
            syncs=self._syncs,
            synced_seq=self._synced,
            written_bytes=self._written,
            pending_events=len(self._pending),
            torn_bytes=self.loss.lost_bytes if self.loss else 0,
            dropped_events=self._dropped,
            gaps=self._gaps,
            snapshots=self._stored,
            failed_snapshots=self._failed_snapshots,
            failed_seals=self._segments.failed_seals,
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
    def _write(self) -> None:
        sync = self._fsync == "commit"
        try:
            if self._gap_after >= 0:
                self._resume()
            else:
                data = b"".join(self._pending)
                self._segments.open.write(data, sync=sync)
                self._written += len(data)
        except OSError as error:
            self._failed += 1
            if self._on_error == "stop":
                raise self._error("write", error) from error
            self._drop(error)
            return
        self._syncs += sync
        self._commits += 1
        self._pending.clear()
        self._memory.commit()
        if sync:
            self._synced = self.committed_seq

    def _drop(self, error: OSError) -> None:
        """Go on without what is pending: it stays in memory only."""
        if self._gap_after < 0:
            self._gap_after = self.committed_seq
            self._refused = error.strerror or str(error)
        self._dropped += len(self._pending)
        self._pending.clear()
        self._memory.commit()

    def _resume(self) -> None:
        """Write a LogGap in place of the last event dropped, and what is pending behind it."""
        at = self.committed_seq
        bodies = [self._encode(event) for _, event in self._memory.since(at)]
        written = self._segments.resume(self._gap_after, at, self._refused, bodies)
        self._seed, self._gap_after, self._resumed = self._segments.open.seed, -1, True
        self._written += written
        self._gaps += 1

    def _due(self) -> bool:
        # A clock set back counts as due: better one sync too many than none for hours.
        return not 0 <= self._clock() - self._last_sync < self._interval_s

    def _sync(self) -> None:
        try:
            self._segments.open.sync()
        except OSError as error:
            if self._on_error == "stop":
                raise self._error("sync", error) from error
            self._failed += 1
            self._last_sync = self._clock()
            return
        self._syncs += 1
        self._last_sync, self._synced = self._clock(), self.committed_seq

    def _roll(self) -> None:
        """Seal the segment and open the next. A failure is counted, and tried at each commit."""
        assert not self._pending  # their checksums are salted for the old segment
        if self._segments.roll(self.committed_seq + 1):
            self._seed = self._segments.open.seed
            if self._fsync != "never":
                self._synced = self.committed_seq

    def _header(self, number: int, first_seq: int) -> SegmentHeader:
        return SegmentHeader(
            segment=number,
            first_seq=first_seq,
            schema_digest=self._codec.schema_digest,
            salt=self._salt,
            config=self._config,
            created=self._clock(),
        )

    def _recover(self, compress: bool) -> None:
        """Go on behind the longest valid prefix; what followed it is moved aside."""
        sync = self._fsync != "never"
        found = recover(self._disk, self._directory, self._header, sync=sync)
        self.loss, self._oldest = found.loss, found.oldest_seq
        self._memory = MemoryLog(self._ring, start=found.last_seq)
        self._memory.pin(_Committed(self._memory))
        self._synced = found.last_seq if sync else 0
        self._snapshots.set_aside_after(found.last_seq)
        self._taken_at = found.last_seq
        self._chain = SegmentChain(
            self._disk, self._directory, found, self._header, sync=sync, compress=compress
        )
        self._seed = self._chain.open.seed

    @property
    def _segments(self) -> SegmentChain:
        assert self._chain is not None, "the log was not opened"
        return self._chain

    def _release(self) -> None:
        if self._chain is not None:
            self._chain.close()
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                self._disk.close(self._lock)
        self._lock = -1

    def _error(self, what: str, error: OSError) -> LogError:
        at = ""
        if self._chain is not None:
            here = self._chain.open
            at = (
                f" segment {here.name} at offset {here.size}: seq "
                f"{self.committed_seq} is committed, {self._synced} synced, "
                f"{len(self._pending)} events wait"
            )
        why = error.strerror or str(error)
        return LogError(f"cannot {what} log {self._directory.name!r}{at} ({why})")
