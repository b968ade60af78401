"""LogHistory: a finished or live log, opened for questions: the state at a seq, the seq of a step.

Owns      a sparse index in memory: the first seq of each segment, and where snapshots are. Within a
          segment it jumps by bisection, so that a seek reads little, however long the log.
Makes     no events; `loss` and `gaps` say what is missing.
Needs     a `Disk`; for states, the configuration in the first segment's header.
Edges     all that is read is checked, and damage in it raises; what a seek jumps over is not looked
          at. `verify` reads everything. A snapshot that is damaged, ahead of the log, or not of
          its seq is skipped: the fold begins at an earlier one, or at the first event.
Crash     reads only. `last_seq` is as of `open`; `loss` too, or it is the damage last met.

    seg 1        seg 2        seg 3               snapshots    ^ at 100, ^ at 200
    |1 .. 90     |91 .. 180   |181 .. 240|torn    state_at(230): restore 200, fold 201..230
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import msgspec
from pydantic import ValidationError

from hisparse.config import HiSparseConfig, recorded_config
from hisparse.config_check import config_error
from hisparse.errors import HiSparseError, InvariantViolation, LogDamage, LogError
from hisparse.fsm.codec import Codec, Frame, LoggedEvent, SegmentHeader, UnknownEvent
from hisparse.fsm.events import EVENT_TYPES, LogGap, StepPlanned
from hisparse.fsm.fold import evolve
from hisparse.fsm.log_files import Disk, OsDisk
from hisparse.fsm.log_gap import SALVAGED, gap_reason, lacking
from hisparse.fsm.log_reader import FrameWalk, Gap, Loss
from hisparse.fsm.log_seek import NEAR_BYTES, jump
from hisparse.fsm.log_segment import Segment, segment_numbers
from hisparse.fsm.log_snapshots import Snapshots
from hisparse.fsm.snapshot import restore
from hisparse.fsm.state import State, state_bytes
from hisparse.fsm.state_size import MAX_STATE_BYTES

STREAM = "scheduler"
_STEP_KIND = StepPlanned.__struct_config__.tag


def check_directory(directory: Path) -> None:
    """Raises LogError for what is no directory, or one of the streams inside of a log."""
    if not directory.is_dir():
        what = "not a directory" if directory.exists() else "no such directory"
        raise LogError(f"{directory}: {what}; give the one that --log wrote to")
    if any(directory.glob("*.seg*")):
        raise LogError(f"{directory} is one stream of a log: give the directory that it lies in")


class SegmentInfo(msgspec.Struct, frozen=True):
    """What the index holds of a segment. `bytes` is the size of its file."""

    number: int
    name: str
    first_seq: int
    bytes: int
    gap_after: int
    compression: str
    gap_reason: str  # of the LogGap that it begins with; "" without one


class LogHistory:
    """The log of one stream; make it with `open`."""

    def __init__(
        self, directory: Path, header: SegmentHeader, index: list[SegmentInfo], disk: Disk
    ) -> None:
        self.directory, self.header, self.segments = directory, header, index
        self._disk, self._codec = disk, Codec(EVENT_TYPES)
        self._firsts = [info.first_seq for info in index]
        self.snapshots = Snapshots(disk, directory, header.salt)
        self.first_seq = self._firsts[0]
        self.last_seq, self.loss = self._end()
        self._config: HiSparseConfig | None = None

    @classmethod
    def open(cls, directory: Path, *, stream: str = STREAM, disk: Disk | None = None) -> LogHistory:
        """The log of `stream` below `directory`. Raises LogError where there is none to read."""
        disk = disk or OsDisk()
        check_directory(directory)
        path = directory / stream
        numbers = segment_numbers(disk, path) if path.is_dir() else []
        if not numbers:
            there = sorted({path.parent.name for path in directory.glob("*/*.seg*")})
            if there:
                raise LogError(f"{directory} has no stream {stream!r}, but {', '.join(there)}")
            raise LogError(f"{directory} holds no log: {stream}/00000001.seg is missing")
        index: list[SegmentInfo] = []
        first: SegmentHeader | None = None
        try:
            for number in numbers:
                segment = Segment(disk, path, number)
                header, name, size = segment.header, segment.name, segment.file_bytes
                reason = gap_reason(segment)
                segment.close()
                if isinstance(header, str):
                    if first is None:
                        raise LogDamage(f"{directory}: {name} is damaged: {header}")
                    continue  # reading comes by it, and says so
                first = first or header
                index.append(
                    SegmentInfo(
                        number,
                        name,
                        header.first_seq,
                        size,
                        header.gap_after,
                        header.compression,
                        reason,
                    )
                )
            assert first is not None
            return cls(path, first, index, disk)
        except OSError as error:
            raise LogError(f"cannot read {directory}: {error.strerror or error}") from error

    @property
    def config(self) -> HiSparseConfig:
        """The configuration that the log was written under. Raises LogError if it is unusable."""
        if self._config is None:
            try:
                self._config = recorded_config(self.header.config)
            except ValidationError as error:
                where = self.directory.parent
                raise LogError(
                    f"{where}: its configuration is unusable: {config_error(error)}"
                ) from None
            if (need := state_bytes(self._config)) > MAX_STATE_BYTES:
                self._config = None
                raise LogError(
                    f"{self.directory.parent}: its configuration asks for a state of {need} B, "
                    f"above {MAX_STATE_BYTES}: pools.gpu_blocks, pools.host_pool_gib, "
                    "suffix.gib, policy.hot_rows or schedule.max_requests times max_model_len is "
                    "absurd"
                )
        return self._config

    @property
    def gaps(self) -> list[Gap]:
        """Events that the log lacks, by its own account."""
        return [
            Gap(info.name, info.gap_after + 1, info.first_seq, info.gap_reason)
            for info in self.segments
            if info.gap_after >= 0
        ]

    # -- reading ----------------------------------------------------------------------------------
    def frames(self, from_seq: int = 1, upto: int | None = None) -> Iterator[Frame]:
        """(seq, kind, body) of seqs in ``[from_seq, upto]``, or to `last_seq`. Raises LogDamage for
        damage before that, which `loss` then names."""
        if not self.first_seq <= from_seq <= self.last_seq + 1:
            raise self._not_there(f"seq {from_seq}")
        last = self.last_seq if upto is None else min(upto, self.last_seq)
        if from_seq > last:
            return
        walk = self._walk(from_seq)
        try:
            while found := walk.frames():
                for frame in found:
                    if frame[0] > last:
                        return
                    yield frame
                if found[-1][0] == last:
                    return
            if walk.next_seq <= self.last_seq and walk.loss is not None:
                self.loss = walk.loss
                raise LogDamage(str(walk.loss))
        except OSError as error:
            raise LogError(f"cannot read {self.directory.parent}: {error.strerror}") from error
        finally:
            walk.close()

    def read(self, from_seq: int = 1, upto: int | None = None) -> Iterator[tuple[int, LoggedEvent]]:
        """(seq, event) of seqs in ``[from_seq, upto]``, or to `last_seq`. Raises as `frames`."""
        for seq, kind, body in self.frames(from_seq, upto):
            yield seq, self._decode(seq, kind, body)

    def verify(self, upto: int | None = None) -> int:
        """Read all frames, or those up to a seq; returns how many. Raises LogDamage as `frames`."""
        return sum(1 for _ in self.frames(self.first_seq, upto))

    def check_seq(self, seq: int) -> None:
        """Raises LogError for a seq that the log does not have (0: before the first)."""
        if not 0 <= seq <= self.last_seq:
            raise self._not_there(f"seq {seq}")

    def seq_of_step(self, step: int) -> int:
        """Seq of the StepPlanned of `step`. Raises as `state_at` if the log has no such step."""
        low, high = self.first_seq, self.last_seq + 1  # it lies in [low, high)
        while low < high:
            middle = (low + high) // 2
            seq, found = self._step_from(middle)
            if found == step:
                return seq
            if seq < 0 or found > step:
                high = middle
            else:
                low = seq + 1
        raise self._not_there(f"step {step}")

    def _not_there(self, what: str) -> LogError:
        """The error for a place that the log lacks."""
        if self.loss is not None and not self.loss.torn:
            return LogDamage(f"{what} is not in the log, as far as it can be read: {self.loss}")
        return LogError(f"{what} is not in the log: seqs {self.first_seq} to {self.last_seq} are")

    def _step_from(self, seq: int) -> tuple[int, int]:
        """(seq, step) of the first StepPlanned at or after `seq`; (-1, 0) if there is none."""
        for at, kind, body in self.frames(seq):
            if kind == _STEP_KIND:
                event = self._decode(at, kind, body)
                assert isinstance(event, StepPlanned)
                return at, event.step
        return -1, 0

    # -- states -----------------------------------------------------------------------------------
    def state_at(self, seq: int) -> State:
        """The state after event `seq` (0: before the first).

        Raises LogDamage for a seq that damage or a gap hides, LogError for one that the log does
        not have and for an event that this version does not know; InvariantViolation
        ``replay_equal`` for events that contradict the state.
        """
        self.check_seq(seq)
        state = self._nearest(seq)
        if state.seq < seq:
            for at, event in self.read(state.seq + 1, seq):
                self.apply(state, at, event)
        return state

    def snapshot_behind(self, seq: int) -> State | None:
        """The state of the first intact snapshot at or after `seq`: where a fold resumes."""
        found = (self._restored(at) for at in self.snapshots.seqs() if seq <= at <= self.last_seq)
        return next((state for state in found if state is not None), None)

    def _nearest(self, seq: int) -> State:
        """The last state at or before `seq` that is known without folding."""
        found = (self._restored(at) for at in reversed(self.snapshots.seqs()) if at <= seq)
        return next((state for state in found if state is not None), None) or State(self.config)

    def _restored(self, at: int) -> State | None:
        """The state in the snapshot of `at`, None if that is damaged or of another seq."""
        data = self.snapshots.read(at)
        if data is None:
            return None
        try:
            state = restore(self.config, data)
        except LogError:
            return None
        return state if state.seq == at else None

    def apply(self, state: State, seq: int, event: LoggedEvent) -> None:
        if isinstance(event, UnknownEvent):
            raise LogError(f"event {seq} has kind {event.kind}, which this version does not know")
        if isinstance(event, LogGap):
            raise LogDamage(
                f"{lacking(event.after_seq + 1, seq, event.reason)}"
                + (f" ({event.reason})" if event.reason != SALVAGED else "")
                + ": the state is unknown from there to the next snapshot"
            )
        try:
            evolve(state, event, seq)
        except HiSparseError:
            raise
        except Exception as error:  # ids and lengths of a foreign log may be anything
            name, why = type(event).__name__, error or type(error).__name__
            text = f"{name} cannot follow the state: {why}"
            raise InvariantViolation("replay_equal", text, seq=seq) from error

    # -- seeking ----------------------------------------------------------------------------------
    def _walk(self, from_seq: int) -> FrameWalk:
        """A walk that begins shortly before `from_seq`."""
        walk = FrameWalk(self._disk, self.directory, from_seq)
        info = self.segments[max(bisect_right(self._firsts, from_seq) - 1, 0)]
        segment = Segment(self._disk, self.directory, info.number)
        segment.chunk = NEAR_BYTES
        walk.start(segment, jump(segment, info.first_seq, from_seq))
        return walk

    def _end(self) -> tuple[int, Loss | None]:
        """The last seq, and what is torn or damaged behind it."""
        walk = self._walk(1 << 62)
        try:
            walk.frames()  # [], at the end: no seq is as high as what it looks for
            return walk.next_seq - 1, walk.loss
        finally:
            walk.close()

    def _decode(self, seq: int, kind: int, body: bytes) -> LoggedEvent:
        try:
            return self._codec.decode(kind, body)
        except LogError as error:
            raise LogError(f"event {seq} of log {self.directory.name!r}: {error}") from error
