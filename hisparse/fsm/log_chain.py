"""The chain of segments that a writer makes: the open one, the next, and those that it seals.

Owns      the open `SegmentWriter`, and at most one thread that compresses the segment before it.
Makes     no events, but the frame of a LogGap that a chain goes on with after a failure.
Needs     a `Disk`; the directory's lock, which the caller holds; one calling thread.
Edges     a batch lies in one segment. A segment behind a gap appears with its first batch, whose
          first frame is the LogGap, or not at all.
Crash     a segment that was being compressed is still there in full (`fsm.log_seal`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from hisparse.errors import LogError
from hisparse.fsm.codec import Body, SegmentHeader, encode_frames
from hisparse.fsm.log_files import Disk
from hisparse.fsm.log_gap import gap_body
from hisparse.fsm.log_seal import seal
from hisparse.fsm.log_writer import Recovered, SegmentWriter

HeaderOf = Callable[[int, int], SegmentHeader]  # of (number, first_seq)


class SegmentChain:
    """Begins behind what recovery `found`; `open` is the segment that is written to."""

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        found: Recovered,
        header_of: HeaderOf,
        *,
        sync: bool,
        compress: bool,
    ) -> None:
        self._disk, self._directory, self._header_of = disk, directory, header_of
        self._sync, self._compress = sync, compress
        self._sealing: threading.Thread | None = None
        self.count, self.failed_rotations, self.failed_seals = found.segments, 0, 0
        if found.segment is not None:
            self.open = found.segment
            if sync:
                self.open.sync()
        else:
            self.open = self._create(header_of(found.last_number + 1, found.last_seq + 1))

    def roll(self, first_seq: int) -> bool:
        """Begin the next segment. A failure is counted, and the open one stays open."""
        old = self.open
        try:
            if self._sync:
                old.sync()
            self.open = self._create(self._header_of(old.number + 1, first_seq))
        except OSError:
            self.failed_rotations += 1  # what is committed is safe
            return False
        self._sealed(old)
        return True

    def resume(self, gap_after: int, at_seq: int, reason: str, bodies: list[Body]) -> int:
        """Go on behind a gap: a segment of a LogGap in place of `at_seq`, then `bodies`.

        Returns the bytes written. Raises OSError, and then has changed nothing.
        """
        old = self.open
        old.clean()  # else what is left of the failed batch would read as damage
        header = self._header_of(old.number + 1, at_seq)
        header = msgspec.structs.replace(header, gap_after=gap_after)
        frames = [gap_body(gap_after, reason), *bodies]
        data = encode_frames(header.seed, at_seq, frames)
        if self._sync:
            old.sync()
        self.open = self._create(header, data)
        self._sealed(old)
        return len(data)

    def close(self) -> None:
        """Close the files, once what is being compressed is done."""
        self._join()
        with contextlib.suppress(OSError):
            self.open.close()

    def _create(self, header: SegmentHeader, frames: bytes = b"") -> SegmentWriter:
        made = SegmentWriter.create(
            self._disk, self._directory, header, frames=frames, sync=self._sync
        )
        self.count += 1
        return made

    def _sealed(self, old: SegmentWriter) -> None:
        old.close()
        if self._compress:
            self._join()
            thread = threading.Thread(target=self._seal, args=(old.number,), name="hisparse-seal")
            self._sealing = thread
            thread.start()

    def _seal(self, number: int) -> None:
        try:
            seal(self._disk, self._directory, number)
        except (OSError, LogError):
            self.failed_seals += 1  # it stays as it is, and `hisparse log compact` may try again

    def _join(self) -> None:
        if self._sealing is not None:
            self._sealing.join()
            self._sealing = None
