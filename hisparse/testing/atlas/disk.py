"""The disk under the scheduler's log: torn, flipped, lying, full; and the power that goes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from hisparse.fsm.log_disk import DiskLog
from hisparse.testing.atlas.base import Fault
from hisparse.testing.restarts import SchedulerDied
from hisparse.testing.store import Store

if TYPE_CHECKING:
    from hisparse.testing.replica import SimReplica


class LogFault(Fault):
    family = "log"
    rates: ClassVar[tuple[float, ...]] = (0.002, 0.01, 0.03)
    needs_disk = True
    share = 0.7  # of those with a log on disk

    @property
    def store(self) -> Store:
        assert self.replica.store is not None, f"{self.kind} needs a log on disk"
        return self.replica.store

    def goes_on(self) -> Callable[[], bool]:
        """Whether a scheduler has planned steps since, with all ranks."""
        life, step = self.replica.coordinator, self.replica.state.step

        def survived() -> bool:
            now = self.replica.coordinator
            later = now is not life or now.state.step > step + 1
            return later and not self.replica.restarts.down and not now.state.lost

        return survived

    def crash(self, **how: object) -> None:
        self.replica.crash_scheduler(keep_inboxes=self.rng.random() < 0.5, **how)

    def require_acted_on(self) -> None:
        """Write-ahead: what a rank could act on is in the log that was recovered, unless the writer
        was told to drop what the disk refuses."""
        recovered = self.replica.coordinator.recovered_seq
        acted_on = self.replica.restarts.acted_on
        held = self.replica.down or self.store.dropped or recovered >= acted_on
        self.require(held, f"the log ends at {recovered}, commands went out up to {acted_on}")


class LogTorn(LogFault):
    kind = "log_torn"
    rule = "a write that the process died in is set aside, everything before it is there"
    marks = ("log_torn.commit", "log_torn.recovery")

    def __init__(self, replica: SimReplica, rate: float, rng: random.Random) -> None:
        super().__init__(replica, rate, rng)
        self.begun = False
        self.store.disk.on_write = self._death
        replica.on_open.append(self._begin)

    def _begin(self) -> None:
        self.begun = True

    def _death(self, size_bytes: int) -> Exception | None:
        replica = self.replica
        if not self.begun or not self.strikes():
            return None
        if replica.down:
            self.fire("the process died when it began", self.goes_on(), "log_torn.recovery")
        return SchedulerDied(self._after)

    def _after(self) -> None:
        lives = self.store.lives
        self.crash()
        if self.store.lives == lives:
            self.require_acted_on()
        self.fire("the process died in a write", self.goes_on(), "log_torn.commit")


class LogFlipped(LogFault):
    kind = "log_flipped"
    rule = "events that a flipped bit lies in or before are never given back as others"
    marks = ("log_flipped.recovered", "log_flipped.refused")

    def strike(self) -> None:
        if not self.strikes():
            return
        refused = len(self.store.refused)
        self.crash(spoil=self._flip)
        mark = "refused" if len(self.store.refused) > refused else "recovered"
        self.fire("a bit turned round", self.goes_on(), f"{self.kind}.{mark}")

    def _flip(self) -> None:
        self.store.excuse = "a bit was turned round"
        paths = self.store.disk.paths(".seg")
        paths = [path for path in paths if path.parent == self.store.directory]
        if paths and self.rng.random() < 0.5:
            self.store.disk.flip_bit(self.rng.choice(paths))
        elif paths:
            self.store.disk.flip_bit(paths[-1], last_bytes=60)


class FsyncLost(LogFault):
    kind = "fsync_lost"
    rule = "after a sync that did nothing and a loss of power, the log is a prefix of what it was"

    def strike(self) -> None:
        replica, disk = self.replica, self.store.disk
        if disk.lying:
            if self.rng.random() < 0.3 and not replica.calm:
                disk.lying = False
                self.crash(power=True)
                self.fire("syncs did nothing, then the power went", self.goes_on())
        elif self.strikes():
            disk.lying = True

    def cease(self) -> None:
        self.store.disk.lying = False


class PowerLoss(LogFault):
    kind = "power_loss"
    rule = "with fsync at every commit, all that a rank could act on is in the log afterwards"
    marks = ("power_loss.synced", "power_loss.unsynced")

    def strike(self) -> None:
        disk = self.store.disk
        if disk.lying or not self.strikes():
            return
        synced = self.store.fsync == "commit" and not disk.lied
        lives = self.store.lives
        self.crash(power=True)
        if synced and self.store.lives == lives:
            self.require_acted_on()
        mark = f"{self.kind}.{'synced' if synced else 'unsynced'}"
        self.fire("the power went", self.goes_on(), mark)


class DiskFull(LogFault):
    kind = "disk_full"
    rule = (
        "the writer stops, and goes on once there is room; or it drops what the disk refuses, and "
        "says so"
    )
    marks = ("disk_full.stopped", "disk_full.dropped")
    rates = (0.01, 0.03)

    def __init__(self, replica: SimReplica, rate: float, rng: random.Random) -> None:
        super().__init__(replica, rate, rng)
        self._until = 0

    def strike(self) -> None:
        disk = self.store.disk
        if disk.full or not self.strikes():
            return
        disk.full = True
        self._until = self.replica.now + self.rng.choice([1, 2, 6])
        dropped = self.store.options["on_error"] == "continue"
        mark = f"{self.kind}.{'dropped' if dropped else 'stopped'}"
        told = f"full until step {self._until}"
        self.fire(told, self._told_of(self.goes_on()) if dropped else self.goes_on(), mark)

    def _told_of(self, goes_on: Callable[[], bool]) -> Callable[[], bool]:
        """Events were dropped: the log says where, or it is another one by now."""
        log = self.replica.log

        def survived() -> bool:
            if not goes_on():
                return False
            if self.replica.log is not log:
                return True
            assert isinstance(log, DiskLog)
            counts = log.statistics()
            return not counts.dropped_events or counts.gaps > 0

        return survived

    def tend(self) -> None:
        if self.store.disk.full and self.replica.now >= self._until:
            self.store.disk.full = False

    def cease(self) -> None:
        self.store.disk.full = False


class GapRestart(LogFault):
    kind = "log_gap"
    rule = "a log that dropped events is gone on with from a snapshot behind the gap, or not at all"
    marks = ("log_gap.snapshot", "log_gap.refused")
    rates = (0.2, 0.5)

    def strike(self) -> None:
        log = self.replica.log
        if not isinstance(log, DiskLog) or not log.statistics().gaps or not self.strikes():
            return
        refused = len(self.store.refused)
        self.crash()
        mark = "refused" if len(self.store.refused) > refused else "snapshot"
        self.fire("restarted behind a gap", self.goes_on(), f"{self.kind}.{mark}")
