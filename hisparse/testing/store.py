"""Store: where a simulated replica's log lies, on a disk that fails, and how it is opened again.

Owns the `SimDisk`, the options of the log, the directory that is in use, and the events as they
were appended: whatever a crash, a lie or a flipped bit left of them, what a log gives back is
compared with these. A log that cannot be gone on with is abandoned for an empty one, as an
operator would.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hisparse.config import HiSparseConfig
from hisparse.errors import InvariantViolation, LogDamage, LogError
from hisparse.fsm.codec import Codec, LoggedEvent
from hisparse.fsm.events import EVENT_TYPES, LogGap
from hisparse.fsm.log import EventLog
from hisparse.fsm.log_disk import DiskLog
from hisparse.fsm.snapshot import restore
from hisparse.fsm.state import State
from hisparse.testing.disk import SimDisk

RING = 1_000_000  # events of one life that stay in memory: all


class Store:
    """The log of `config`'s replica, with `options` of `DiskLog`, and `takes_snapshots`: whether
    the scheduler stores one when the log asks for it."""

    def __init__(self, config: HiSparseConfig, seed: str, options: dict[str, Any]) -> None:
        self.config = config
        self.disk = SimDisk(seed)
        self.options = dict(options)
        self.takes_snapshots = bool(self.options.pop("takes_snapshots", True))
        self.lives = 1
        self.refused: list[str] = []  # why logs were abandoned
        # By seq, what was appended: by several processes, where one died before all was written. A
        # batch that was refused and cut off may be there again once the power was gone.
        self.truth: list[list[LoggedEvent]] = []
        self.excuse = ""  # why this log may be damaged; "" where nothing that it does may damage it
        self.dropped = False  # events, by the last process, as on_error "continue" says
        self._begun = 0  # of which the disk gave back so many when the log was opened
        self.clock_s = 0.0

    @property
    def directory(self) -> Path:
        return Path(f"/sim/{self.lives}/scheduler")

    @property
    def fsync(self) -> str:
        return str(self.options["fsync"])

    def open(self) -> tuple[EventLog, State | None]:
        """The log, and the newest state in a snapshot of it. Raises LogDamage for one that cannot
        be gone on with, InvariantViolation ``durable`` for one that gives other events back."""
        try:
            log = DiskLog(
                self.directory,
                Codec(EVENT_TYPES),
                clock=lambda: self.clock_s,
                config_json=self.config.model_dump_json(),
                salt=b"simulated",
                ring=RING,
                disk=self.disk,
                **self.options,
            )
        except LogError as error:
            self.disk.kill()
            if self.disk.full:
                raise
            raise LogDamage(str(error)) from error
        self._compare(log)
        return log, self._state(log)

    def _state(self, log: DiskLog) -> State | None:
        for data in log.stored_snapshots():
            try:
                return restore(self.config, data)
            except LogError:
                continue
        return None

    def _compare(self, log: DiskLog) -> None:
        last = 0
        for last, event in log.read(1):  # behind a gap it goes on at a later seq
            if last > len(self.truth):
                text = f"the log gives back seq {last}, {len(self.truth)} events were appended"
                raise InvariantViolation("durable", text, seq=last)
            wanted = self.truth[last - 1]
            if event not in wanted and not isinstance(event, LogGap):
                text = f"the log gives back {event}, appended was {wanted}"
                raise InvariantViolation("durable", text, seq=last)
        self._begun = last

    def crash(self, log: EventLog, *, power: bool) -> None:
        """The process ends, or the machine."""
        for seq, event in log.since(self._begun):
            if seq > len(self.truth):
                self.truth.append([])
            self.truth[seq - 1].append(event)
        counts = log.statistics()
        self.dropped = counts.dropped_events > 0
        if self.dropped or counts.gaps:
            self.excuse = "events were dropped"
        if power:
            if self.fsync != "commit" or self.disk.lied:
                self.excuse = "what was not synced is lost"
            self.disk.power_off()
        else:
            self.disk.kill()

    def abandon(self, why: str) -> None:
        """The log stays as it is, for whoever asks what happened; an empty one begins. Raises
        InvariantViolation ``durable`` where nothing explains that it cannot be gone on with."""
        if not self.excuse:
            text = f"nothing was lost but a process, and the log cannot be gone on with: {why}"
            raise InvariantViolation("durable", text, seq=self._begun)
        self.disk.kill()
        self.refused.append(why)
        self.lives += 1
        self.truth, self._begun, self.excuse = [], 0, ""
