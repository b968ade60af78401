"""Batches of a log on disk: what is appended and not yet written, and how it is committed.

Owns      the pending bodies, when a sync is due, and a gap that is not on disk yet.
Makes     no events of its own; a LogGap on disk in place of what the disk refused.
Needs     the segments to write to, the events in memory, a clock.
Edges     a batch is committed whole or not at all. With on_error "stop" a refused batch is kept and
          tried again; with "continue" it is dropped: it keeps its seqs, and its place in memory,
          and once the disk takes writes again a LogGap in place of the last of them says so.
Crash     what is pending is lost. A gap that is not on disk yet is lost with it: an end of the log.

    on disk                    dropped, in memory only          on disk, in a segment of its own
    |-- … committed -----|- - - - - - - - - - - - - - -|LogGap|-- pending --->
                     gap_after                          committed_seq
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from hisparse.errors import LogError
from hisparse.fsm.codec import Body, encode_frames
from hisparse.fsm.log import MemoryLog
from hisparse.fsm.log_chain import SegmentChain

Fsync = Literal["never", "interval", "commit"]
OnError = Literal["stop", "continue"]


class BatchWriter:
    """Writes the batches of `memory`'s events to `chain`. `pending`: their kinds and bodies."""

    def __init__(
        self,
        name: str,
        chain: SegmentChain,
        memory: MemoryLog,
        clock: Callable[[], float],
        *,
        fsync: Fsync,
        interval_s: float,
        segment_bytes: int,
        on_error: OnError,
        synced_seq: int,
    ) -> None:
        self._name, self._chain, self._memory = name, chain, memory
        self._clock, self._last_sync = clock, clock()
        self._fsync, self._interval_s, self._on_error = fsync, interval_s, on_error
        self._segment_bytes = segment_bytes
        self._gap_after, self._refused = -1, ""
        self.pending: list[Body] = []
        self.synced_seq = synced_seq
        self.resumed = False  # behind a gap; whoever takes a snapshot of it clears this
        self.commits = self.failed = self.syncs = self.written = self.dropped = self.gaps = 0

    @property
    def in_gap(self) -> bool:
        """Whether events were dropped and the disk does not say so yet."""
        return self._gap_after >= 0

    def commit(self) -> None:
        """Write what is pending, and sync it, as `fsync` says. Raises LogError as `DiskLog`'s."""
        if self.pending or self.in_gap:
            self._write()
        if self._fsync == "interval" and self._due():
            self.sync()
        here = self._chain.open
        if here.size >= self._segment_bytes and self._memory.committed_seq >= here.first_seq:
            self._roll()

    def sync(self) -> None:
        """Sync the open segment. Raises LogError, or with on_error "continue" counts a failure."""
        try:
            self._chain.open.sync()
        except OSError as error:
            if self._on_error == "stop":
                raise self._error("sync", error) from error
            self.failed += 1
            self._last_sync = self._clock()
            return
        self.syncs += 1
        self._last_sync, self.synced_seq = self._clock(), self._memory.committed_seq

    def finish(self) -> None:
        """Commit, and sync unless `fsync` is "never"."""
        self.commit()
        if self._fsync != "never" and self.synced_seq < self._memory.committed_seq:
            self.sync()

    def _write(self) -> None:
        sync = self._fsync == "commit"
        try:
            if self.in_gap:
                self._resume()
            else:
                here = self._chain.open
                data = encode_frames(here.seed, self._memory.committed_seq + 1, self.pending)
                here.write(data, sync=sync)
                self.written += len(data)
        except OSError as error:
            self.failed += 1
            if self._on_error == "stop":
                raise self._error("write", error) from error
            self._drop(error)
            return
        self.syncs += sync
        self.commits += 1
        self.pending.clear()
        self._memory.commit()
        if sync:
            self.synced_seq = self._memory.committed_seq

    def _drop(self, error: OSError) -> None:
        """Go on without what is pending: it stays in memory only."""
        if not self.in_gap:
            self._gap_after = self._memory.committed_seq
            self._refused = error.strerror or str(error)
        self.dropped += len(self.pending)
        self.pending.clear()
        self._memory.commit()

    def _resume(self) -> None:
        """Write a LogGap in place of the last event dropped, and what is pending behind it."""
        at = self._memory.committed_seq
        self.written += self._chain.resume(self._gap_after, at, self._refused, self.pending)
        self._gap_after, self.resumed = -1, True
        self.gaps += 1

    def _due(self) -> bool:
        if self.synced_seq >= self._memory.committed_seq:
            return False
        # A clock set back counts as due: better one sync too many than none for hours.
        return not 0 <= self._clock() - self._last_sync < self._interval_s

    def _roll(self) -> None:
        """Seal the segment and open the next. A failure is counted, and tried at each commit."""
        if self._chain.roll(self._memory.committed_seq + 1) and self._fsync != "never":
            self.synced_seq = self._memory.committed_seq

    def _error(self, what: str, error: OSError) -> LogError:
        here, why = self._chain.open, error.strerror or str(error)
        return LogError(
            f"cannot {what} log {self._name!r} segment {here.name} at offset {here.size}: seq "
            f"{self._memory.committed_seq} is committed, {self.synced_seq} synced, "
            f"{len(self.pending)} events wait ({why})"
        )
