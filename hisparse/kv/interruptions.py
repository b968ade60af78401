"""Interruptions: what comes over a scheduler as a whole. Ranks and processes go and come again,
caches are forgotten, memory is given up.

Inputs, as those of `kv.coordinator`; what they lead to is decided in `kv.restart` and `kv.caches`.
"""

from __future__ import annotations

from typing import Self

from hisparse.config import HiSparseConfig
from hisparse.errors import LogDamage, UsageError
from hisparse.fsm import events as ev
from hisparse.fsm.log import EventLog
from hisparse.fsm.state import Key, State
from hisparse.kv import restart, validate
from hisparse.kv.caches import drop_all, drop_gpu, holders
from hisparse.kv.recorder import Recorder
from hisparse.kv.suffix import SuffixSource
from hisparse.kv.suffix_cpu import open_suffix


class Interruptions(Recorder):
    """A recorder with a source of indexer pages, that can be interrupted and go on."""

    def __init__(
        self,
        config: HiSparseConfig,
        log: EventLog,
        *,
        suffix: SuffixSource | None = None,
        _recovered: State | None = None,
    ) -> None:
        super().__init__(config, log, _recovered)
        self.recovered_seq = 0  # the last that another process wrote
        self.accepted_seq = 0  # by which it had planned the last step whose rows it accepted
        self.suffix = suffix if suffix is not None else open_suffix(self.state)
        self._preempted: list[Key] = []

    # -- ranks and processes that go, and come again ----------------------------------------------
    def lose_rank(self, rank: int, reason: str = "lost", *, seen_epoch: int = 0) -> int:
        """The worker of `rank` is gone, with its pools (`kv.restart`); what it says from here on is
        inert. Live requests are preempted (`take_preempted`), and nobody is admitted before
        `join_rank`.

        Args:
            rank: the rank's number.
            reason: for the log.
            seen_epoch: the highest worker epoch that anybody knows of, where a log may have lost
                the one that it gave out.

        Returns:
            The worker epoch of the worker that follows. Raises UsageError for a rank that is not.
        """
        rank, reason = validate.rank(self.state, rank), validate.text(reason, "lose_rank: reason")
        seen_epoch = validate.count(seen_epoch, "lose_rank: seen_epoch", most=validate.INT_MAX - 1)
        epoch = max(self.state.worker_epoch[rank], seen_epoch) + 1
        seq = self._record(ev.RankLost(0, rank, epoch, reason))
        self._preempted += self._run(restart.lose(self.state, rank, self.suffix, seq))
        return epoch

    def join_rank(self, rank: int, at_seq: int) -> bool:
        """The worker that follows a lost one begins, its cursor at `at_seq`: no command before that
        will reach it. Both caches are empty afterwards.

        False, with nothing changed and nothing logged, while anybody holds something (see
        `reset_prefix_cache`), or asleep. Raises UsageError for a rank that is not lost.
        """
        rank = validate.rank(self.state, rank)
        at_seq = validate.count(at_seq, "join_rank: at_seq", most=self.state.seq)
        if not self.state.lost >> rank & 1:
            raise UsageError(f"rank {rank} was not lost: there is nothing to join")
        if self.state.asleep or holders(self.state):
            return False
        seq = self._record(ev.RankJoined(0, rank, self.state.worker_epoch[rank], at_seq))
        self._run(drop_all(self.state, self.suffix, seq))
        return True

    @classmethod
    def recover(
        cls,
        config: HiSparseConfig,
        log: EventLog,
        *,
        state: State | None = None,
        suffix: SuffixSource | None = None,
        reason: str = "restarted",
    ) -> Self:
        """Go on with a log that another process wrote: its state, with every request aborted that
        had not ended. What was cached stays; a rank that is not there any more, or not where the
        log is, has to be lost (`HiSparseConnector.attach`).

        Args:
            state: of a snapshot of this log (`DiskLog.stored_snapshots`): where to begin.
                It becomes the coordinator's.
            reason: for the log.

        Raises LogError for a log that does not begin at its first event or behind `state`,
        LogDamage for one that dropped events behind that: such a pool is not restartable, begin an
        empty log.
        """
        reason = validate.text(reason, "recover: reason")
        made = cls(config, log, suffix=suffix, _recovered=state or State(config))
        last: ev.Event | None = None
        planned = made.accepted_seq = made.state.seq
        for seq, event in log.read(made.state.seq + 1):
            if isinstance(event, ev.LogGap):
                raise LogDamage(
                    f"the log dropped events {event.after_seq + 1} to {seq}: its state is unknown; "
                    "begin at a snapshot behind that, or with an empty log"
                )
            assert isinstance(event, ev.Event)
            made._fold(event, seq)
            match event:
                case ev.StepPlanned():
                    planned = seq
                case ev.RowsComputed():
                    made.accepted_seq = planned
            if event.is_input and not event.cause and not isinstance(event, ev.SchedulerRecovered):
                last = event
        made.recovered_seq = made.state.seq
        if made.state.seq:
            cause = made._record(ev.SchedulerRecovered(0, reason))
            made._run(restart.complete(made.state, last, made.suffix, cause))
        return made

    # -- the caches as a whole -------------------------------------------------------------------
    def reset_prefix_cache(self) -> bool:
        """Forget every page that a prefix could find, in both tiers.

        False, with nothing changed and nothing logged, while anybody holds something: a request
        that is live or draining, a copy in flight. Requests that wait hold nothing. Afterwards both
        pools are wholly free.
        """
        if holders(self.state):
            return False
        seq = self._record(ev.PrefixCacheReset(0))
        self._run(drop_all(self.state, self.suffix, seq))
        return True

    def sleep(self, level: int = 1) -> bool:
        """Give the GPU pool's memory up, with all that is cached in it; at level 2 also that of the
        host tiers, which at level 1 keep what they hold. The next command tells the workers.

        False, with nothing changed and nothing logged, while anybody holds something (see
        `reset_prefix_cache`), while a rank is lost, or asleep. Requests may arrive and wait; none
        is admitted. Raises UsageError for another level.
        """
        if not validate.is_count(level) or level not in (1, 2):
            raise UsageError(f"sleep level {level!r}: use 1 (host tiers keep their memory) or 2")
        if self.state.asleep or self.state.lost or holders(self.state):
            return False
        seq = self._record(ev.MemoryReleased(0, int(level)))
        if level == 2:
            self._run(drop_all(self.state, self.suffix, seq))
        else:
            self._run(drop_gpu(self.state, seq))
        return True

    def wake_up(self) -> None:
        """Take the memory again that `sleep` gave up; awake, this changes nothing."""
        if self.state.asleep:
            self._record(ev.MemoryRestored(0))

    @property
    def is_sleeping(self) -> bool:
        return self.state.asleep > 0
