"""The scheduler process dies; another goes on with its log."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from hisparse.testing.atlas.base import Fault
from hisparse.testing.restarts import SchedulerDied, SimLog

if TYPE_CHECKING:
    from hisparse.testing.replica import SimReplica


class SchedulerCrash(Fault):
    """Between two steps, or while a step's events are written: then any part of them is there."""

    family = "scheduler"
    kind = "scheduler_crash"
    rule = (
        "what the log ends in the middle of is completed, open requests end, ranks that are where "
        "the log is go on, what was cached is still found"
    )
    marks = (
        "scheduler_crash.whole",
        "scheduler_crash.torn",
        "scheduler_crash.copying",
        "scheduler_crash.rank_behind",
        "scheduler_crash.cached",
    )
    rates = (0.002, 0.01, 0.03)

    def __init__(self, replica: SimReplica, rate: float, rng: random.Random) -> None:
        super().__init__(replica, rate, rng)
        replica.on_open.append(self._watch)

    def _watch(self) -> None:
        log = self.replica.log
        if isinstance(log, SimLog):
            log.before_commit = self._in_commit

    def _in_commit(self) -> None:
        if self.strikes():
            raise SchedulerDied(self.crash)

    def strike(self) -> None:
        if self.strikes():
            self.crash()

    def crash(self) -> None:
        replica, state = self.replica, self.replica.state
        end, position = replica.log.last_seq, replica.connector.position
        cut = self.rng.randrange(position, end + 1) if self.rng.random() < 0.8 else end
        behind = any(rank.inbox for rank in replica.ranks if not rank.dead)
        keep = self.rng.random() < 0.5
        copying, cached = bool(state.transfers), bool(state.prefix)
        replica.restarts.crash_scheduler(keep_inboxes=keep, cut=cut)
        moments = ["torn" if cut < end else "whole"]
        if replica.state.lost and behind and not keep:
            moments = ["rank_behind"]
        else:
            moments += ["copying"] * copying + ["cached"] * (cached and bool(replica.state.prefix))
        moment = self.rng.choice(moments)
        life, step = replica.coordinator, replica.state.step

        def survived() -> bool:
            now = replica.coordinator
            return now is not life or (not now.state.lost and now.state.step > step + 1)

        told = f"log up to {cut} of {end}, {moment}"
        self.fire(told, survived, f"{self.kind}.{moment}")
