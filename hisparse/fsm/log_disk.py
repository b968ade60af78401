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
With on_error "continue" the batch is dropped instead (`fsm.log_batch`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from hisparse.errors import LogError, UsageError
from hisparse.fsm.codec import Codec, LoggedEvent, SegmentHeader
from hisparse.fsm.log import (
    LogStatistics,
    MemoryLog,
    Positioned,
    check_range,
    read_chunks,
)
from hisparse.fsm.log_batch import BatchWriter, Fsync, OnError
from hisparse.fsm.log_chain import SegmentChain
from hisparse.fsm.log_files import Disk, OsDisk
from hisparse.fsm.log_reader import DiskReader, Loss
from hisparse.fsm.log_segment import recorded_salt
from hisparse.fsm.log_snapshots import Snapshots
from hisparse.fsm.log_writer import Recovered, recover


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
    not continued but followed by a new one. A salt that is a function is asked for a new log's; one
    that is there keeps its own. `fsync` "interval" syncs at a `commit` that comes
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
        salt: bytes | Callable[[], bytes] = b"",
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
        self._sync = fsync != "never"
        self._encode = codec.encode
        self._reader = DiskReader(self._directory, codec, disk=self._disk)
        self._every, self._stored, self._failed_snapshots = snapshot_events, 0, 0
        self._chain: SegmentChain | None = None
        self._lock, self._closed = -1, False
        self.loss: Loss | None = None
        try:
            self._disk.make_directory(self._directory)
            self._lock = self._disk.lock(self._directory / "lock")
            try:
                self._salt = salt if isinstance(salt, bytes) else self._salt_of(salt)
                self._snapshots = Snapshots(self._disk, self._directory, self._salt)
                found = self._recover(ring)
                chain = self._chain = SegmentChain(
                    self._disk,
                    self._directory,
                    found,
                    self._header,
                    sync=self._sync,
                    compress=compress,
                )
            except BaseException:
                self._release()
                raise
        except OSError as error:
            why = error.strerror or str(error)
            raise LogError(
                f"cannot open log {self._directory.name!r} in {str(self._directory.parent)!r} "
                f"({why}): give a directory that can be written, or made"
            ) from error
        self._batch = BatchWriter(
            self._directory.name,
            chain,
            self._memory,
            clock,
            fsync=fsync,
            interval_s=fsync_interval_s,
            segment_bytes=segment_bytes,
            on_error=on_error,
            synced_seq=found.last_seq if self._sync else 0,
        )
        self._pending = self._batch.pending

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
        return self._batch.synced_seq

    @property
    def oldest_seq(self) -> int:
        return self._oldest

    def claim(self) -> None:
        self._memory.claim()

    def append(self, event: LoggedEvent) -> int:
        """Encode an event and keep it for `commit`; returns its seq.

        Raises UsageError for an event that the codec cannot encode, or once closed, and LogError
        for one that is too large; the log is then as it was.
        """
        body = self._encode(event)
        seq = self._memory.append(event)
        self._pending.append(body)
        return seq

    def commit(self) -> None:
        """Write what was appended, in one write, and sync it as `fsync` says.

        Raises LogError if the disk refuses: nothing of the batch is then committed, all of it is
        kept, and calling again retries. (Where only an interval's sync failed, the batch *is*
        committed, and calling again syncs: see `committed_seq` and `synced_seq`.) With on_error
        "continue" it drops the batch instead, counted, and raises nothing.
        """
        if self._closed:
            raise UsageError("the log is closed")
        self._batch.commit()

    @property
    def snapshot_due(self) -> bool:
        """Whether `snapshot` is wanted: `snapshot_events` after the last, or behind a gap."""
        if self._batch.in_gap:
            return False
        return self._batch.resumed or 0 < self._every <= self.last_seq - self._taken_at

    def snapshot(self, seq: int, data: bytes) -> None:
        """Store `data`, the state after event `seq`. A disk that refuses it is counted, no more.

        Commits first where `seq` is not committed yet. Raises UsageError for a seq not written.
        """
        if seq > self.committed_seq:
            self.commit()
        if not 1 <= seq <= self.committed_seq:
            raise UsageError(f"no snapshot of seq {seq}: the log holds 1..{self.committed_seq}")
        self._taken_at, self._batch.resumed = seq, False
        try:
            self._snapshots.write(seq, data, sync=self._sync)
            self._stored += 1
        except OSError:
            self._failed_snapshots += 1

    def stored_snapshots(self) -> Iterator[bytes]:
        """The snapshots that are intact and not ahead of the log, newest first."""
        for seq in reversed(self._snapshots.seqs()):
            data = self._snapshots.read(seq) if seq <= self.last_seq else None
            if data is not None:
                yield data

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
        memory, batch, chain = self._memory.statistics(), self._batch, self._chain
        assert chain is not None
        return msgspec.structs.replace(
            memory,
            mode="disk",
            oldest_seq=self._oldest,
            cursors=memory.cursors - 1,  # less the log's own hold
            segments=chain.count,
            commits=batch.commits,
            failed_commits=batch.failed,
            failed_rotations=chain.failed_rotations,
            syncs=batch.syncs,
            synced_seq=batch.synced_seq,
            written_bytes=batch.written,
            pending_events=len(batch.pending),
            torn_bytes=self.loss.lost_bytes if self.loss else 0,
            dropped_events=batch.dropped,
            gaps=batch.gaps,
            snapshots=self._stored,
            failed_snapshots=self._failed_snapshots,
            failed_seals=chain.failed_seals,
        )

    def close(self) -> None:
        """Commit, sync unless `fsync` is "never", and unlock, whatever fails. Idempotent."""
        if self._closed:
            return
        try:
            self._batch.finish()
        finally:
            self._closed = True
            self._memory.close()
            self._reader.close()
            self._release()

    # -- files ------------------------------------------------------------------------------------
    def _header(self, number: int, first_seq: int) -> SegmentHeader:
        return SegmentHeader(
            segment=number,
            first_seq=first_seq,
            schema_digest=self._codec.schema_digest,
            salt=self._salt,
            config=self._config,
            created=self._clock(),
        )

    def _salt_of(self, new: Callable[[], bytes]) -> bytes:
        found = recorded_salt(self._disk, self._directory)
        return new() if found is None else found

    def _recover(self, ring: int) -> Recovered:
        """Find the longest valid prefix; what followed it is moved aside."""
        found = recover(self._disk, self._directory, self._header, sync=self._sync)
        self.loss, self._oldest = found.loss, found.oldest_seq
        self._memory = MemoryLog(ring, start=found.last_seq)
        self._memory.pin(_Committed(self._memory))
        self._snapshots.set_aside_after(found.last_seq)
        self._taken_at = found.last_seq
        return found

    def _release(self) -> None:
        if self._chain is not None:
            self._chain.close()
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                self._disk.close(self._lock)
        self._lock = -1
