"""Restarts: what happens around a replica whose ranks and scheduler die and come again.

Owns, of each rank that is gone: when the scheduler will hear of it, and whether another worker
waits to begin. A rank that died takes no command and says nothing; what it had said is still on its
way. The scheduler hears of it later (`lose_rank`), and a new worker begins once that may be
(`join_rank`); a start that fails is another loss.

A scheduler that dies leaves its log, as far as that was written, and its ranks with what lies in
their inboxes. The next one goes on with the log (`HiSparseCoordinator.recover`), and with those
ranks that are where the log is (`HiSparseConnector.attach`). Its clients ask again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hisparse.engine.served import Served
from hisparse.engine.trace import WorkloadRequest
from hisparse.errors import DeviceError, LogDamage, LogError
from hisparse.fsm.log import EventLog, MemoryLog
from hisparse.fsm.state import State
from hisparse.kv.coordinator import HiSparseCoordinator
from hisparse.testing.rank import SimRank

if TYPE_CHECKING:
    from hisparse.testing.replica import SimReplica


class SchedulerDied(Exception):
    """The scheduler process ends here, in the middle of a step; `restart` begins the next one."""

    def __init__(self, restart: Callable[[], None]) -> None:
        self.restart = restart
        super().__init__("the scheduler died")


class SimLog(MemoryLog):
    """All events, in memory; `before_commit` is called when a batch is about to be written."""

    __slots__ = ("before_commit",)

    def __init__(self) -> None:
        super().__init__(None)
        self.before_commit: Callable[[], None] | None = None

    def commit(self) -> None:
        if self.before_commit is not None:
            self.before_commit()
        super().commit()


class Restarts:
    """The deaths and starts of one replica's processes."""

    def __init__(self, replica: SimReplica, seed: str) -> None:
        self.replica = replica
        self.rng = random.Random(f"{seed} restarts")
        self.notices: dict[int, int] = {}  # rank that died -> step in which the scheduler hears
        self.starts_failed = 0
        self.down = True  # no scheduler: its log was not opened yet
        self.acted_on = 0  # seq up to which commands had been built when the last one died
        self._lost: list[Served] = []
        self._open: Callable[[], tuple[EventLog, State | None]] = lambda: (SimLog(), None)

    # -- ranks ------------------------------------------------------------------------------------
    def crash_rank(self, number: int, notice_steps: int = 0) -> None:
        """The worker process of a rank is gone, with all that it held."""
        rank = self.replica.ranks[number]
        if not rank.dead:
            rank.die()
        self.notices.setdefault(number, self.replica.now + notice_steps)

    def tend(self) -> None:
        """Before a step: the scheduler hears of deaths, and new workers begin."""
        replica = self.replica
        for number, due in list(self.notices.items()):
            if replica.now >= due:
                del self.notices[number]
                replica.connector.lose_rank(number, "died")
        for rank in list(replica.ranks):
            if replica.state.lost >> rank.number & 1 and rank.number not in self.notices:
                self._join(rank)

    def _join(self, gone: SimRank) -> None:
        joined = self.replica.connector.join_rank(gone.number)
        if joined is None:
            return
        epoch, at_seq = joined
        try:
            rank = self.replica.make_rank(gone.number, worker_epoch=epoch, at_seq=at_seq)
        except DeviceError:
            self.starts_failed += 1
            self.replica.connector.lose_rank(gone.number, "did not start")
            return
        rank.channel = gone.channel  # what the old one said is still under way
        self.replica.ranks[gone.number] = rank

    # -- the scheduler ----------------------------------------------------------------------------
    def crash_scheduler(
        self,
        *,
        keep_inboxes: bool = True,
        cut: int | None = None,
        power: bool = False,
        spoil: Callable[[], None] = lambda: None,
    ) -> None:
        """The scheduler process is gone; another goes on with its log. Ranks stay as they are.

        Args:
            keep_inboxes: whether commands that no rank has begun still reach them.
            cut: last seq that a log in memory still has (default: all), not below the last
                command's.
            power: the machine is gone, ranks and all.
            spoil: called when the process is gone, before another begins.
        """
        replica = self.replica
        self._lost = list(replica.engine.live.values())
        replica.engine.live.clear()
        for served in self._lost:
            served.outcome = "failed"
        for rank in replica.ranks:
            if not keep_inboxes:
                rank.inbox.clear()
            while rank.inbox and not rank.dead and not power:
                replica.runner.attempt(rank, rank.run_one)
            if power and not rank.dead:
                rank.die()
        self.acted_on = replica.connector.position  # write-ahead: ranks may have, up to here
        log = replica.log
        if isinstance(log, SimLog):
            self._store_memory(log, log.last_seq if cut is None else cut, power)
        else:
            assert replica.store is not None
            replica.store.crash(log, power=power)
        spoil()
        self.down = True
        self.begin_again()

    def _store_memory(self, log: SimLog, cut: int, power: bool) -> None:
        assert cut >= self.acted_on, "write-ahead: a rank has acted on this"
        kept = SimLog() if power else shortened(log, cut)
        self._open = lambda: (kept, None)

    def begin_again(self) -> None:
        """Another scheduler process begins, if its log can be opened by now."""
        replica = self.replica
        store = replica.store
        try:
            log, state = self._open() if store is None else store.open()
            self.reopen(log, state)
        except LogDamage as error:
            assert store is not None
            store.abandon(str(error))
            return
        except SchedulerDied:
            assert store is not None
            store.disk.kill()
            return
        except LogError:
            if store is None or not store.disk.full:
                raise
            store.disk.kill()  # this process dies of it too
            return
        self.down = False
        self._ask_again(self._lost)

    def reopen(self, log: EventLog, state: State | None = None) -> list[int]:
        """Another scheduler goes on with `log`; returns the ranks that it had to lose."""
        replica = self.replica
        coordinator = HiSparseCoordinator.recover(replica.config, log, state=state)
        replica.log = log
        self.notices.clear()
        replica.open(coordinator)
        there = {
            rank.number: (rank.worker.worker_epoch, -1 if rank.dead else rank.worker.to_seq)
            for rank in replica.ranks
        }
        lost = replica.connector.attach(there)
        for number in lost:
            if not replica.ranks[number].dead:
                replica.ranks[number].die()
        return lost

    def _ask_again(self, lost: list[Served]) -> None:
        """Some clients come again, with what they had been told by then."""
        replica = self.replica
        for served in lost:
            if self.rng.random() < 0.5:
                prompt = np.array(served.tokens[: served.prompt_tokens], dtype=np.int64)
                work = WorkloadRequest(served.request, 0.0, prompt, served.max_new)
                replica.submit(work)


def shortened(log: MemoryLog, last: int) -> SimLog:
    """A log that ends at seq `last`: what a process left that died while it wrote."""
    kept = SimLog()
    for _, event in log.since(0, last):
        kept.append(event)
    kept.commit()
    return kept
