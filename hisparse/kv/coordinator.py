"""HiSparseCoordinator: host allocation, source prefixes, resident leases, the spill machine.

The shell around the pure core. Every public method is one input: it appends the input event, runs
the decisions that follow from it, and appends and folds each of their events. It owns the State and
the writing end of the scheduler's log, and does no I/O beyond `log.append`.

    input ──► append, evolve ──► decide ──► event ──► append, evolve ──► decide … until it returns

Work reaches the worker only as a projection of the log (`fsm.project`), never from here.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from hisparse.config import HiSparseConfig
from hisparse.config_packing import Footprint
from hisparse.errors import IllegalTransition, LogDamage, UsageError
from hisparse.fsm import events as ev
from hisparse.fsm.fold import evolve
from hisparse.fsm.history import with_history
from hisparse.fsm.invariants import Checker
from hisparse.fsm.log import EventLog
from hisparse.fsm.machines import LIVE, RequestState
from hisparse.fsm.metrics import Metrics
from hisparse.fsm.state import Key, State, digest
from hisparse.fsm.wire import Acknowledgements
from hisparse.kv import restart, validate
from hisparse.kv.acknowledgements import acknowledge, as_input
from hisparse.kv.admission import admit, local_hit, make_room, never_fits
from hisparse.kv.budget import spare
from hisparse.kv.caches import drop_all, drop_gpu, holders
from hisparse.kv.decision import Decision, T, ints
from hisparse.kv.growth import grow
from hisparse.kv.lifecycle import drain, end_request, seal_pages
from hisparse.kv.managers import HiSparseIndexManager
from hisparse.kv.packing import held_footprint
from hisparse.kv.policies import resolve
from hisparse.kv.promotion import promote
from hisparse.kv.residency import reclaim
from hisparse.kv.rewind import resume
from hisparse.kv.statistics import pool_statistics, statistics
from hisparse.kv.suffix import SuffixSource, ask, store_sealed
from hisparse.kv.suffix_cpu import open_suffix
from hisparse.kv.validate import Rows


class HiSparseCoordinator:
    """The scheduler side of one replica.

    Args:
        config: sizes and policy, shared with the worker.
        log: where events go; its next seq must be 1 (a fresh log), and nobody else's.
        suffix: asked for indexer pages that the GPU has lost (default: what the config names).

    With ``checks="on"`` every event goes through the run invariants before it is folded; what they
    find is kept in `checker.violations`.
    """

    def __init__(
        self,
        config: HiSparseConfig,
        log: EventLog,
        *,
        suffix: SuffixSource | None = None,
        _recovered: State | None = None,
    ) -> None:
        if log.next_seq != 1 and _recovered is None:
            raise UsageError(
                f"the log holds events up to {log.next_seq - 1}: use a fresh one, or `recover`"
            )
        resolve(config.policy.name)
        if _recovered is None:
            log.claim()
        self.config = config
        self.log = log
        self.state = State(config) if _recovered is None else _recovered
        self._broken: Exception | None = None
        self.recovered_seq = 0  # the last that another process wrote
        self.accepted_seq = 0  # by which it had planned the last step whose rows it accepted
        self._computed_seq = 0  # of the last rows computed: what makes decoding requests grow
        self._under_way = np.zeros(0, dtype=np.int64)  # request rows of the last step planned
        self._rewound: dict[Key, ev.RequestRewound] = {}  # not told to the engine yet
        self.suffix = suffix if suffix is not None else open_suffix(self.state)
        self._preempted: list[Key] = []
        self.metrics = Metrics(config)
        begun = self.state if self.state.seq else None
        self.checker = Checker(config, state=begun) if config.checks == "on" else None

    # -- running decisions ------------------------------------------------------------------------
    def _record(self, event: ev.Event) -> int:
        if self._broken is not None:
            raise UsageError(f"this coordinator stopped at an earlier fault: {self._broken}")
        seq = self.log.append(event)
        self._fold(event, seq)
        if isinstance(event, ev.RequestRewound):
            self._note_rewound(event)
        return seq

    def _fold(self, event: ev.Event, seq: int) -> None:
        if self.checker is not None:
            self.checker.event(seq, event)
        try:
            evolve(self.state, event, seq)
        except IllegalTransition as error:
            self._broken = error  # the log now ends in an event that cannot be folded
            raise with_history(error, self.log) from error
        except Exception as error:
            self._broken = error
            raise
        self.metrics.take(event)

    def _note_rewound(self, e: ev.RequestRewound) -> None:
        """One word a request, however often it goes back before anybody asks; `plan_step` forgets
        those that are gone."""
        before = self._rewound.get((e.request, e.epoch))
        if before is not None and before.certain > e.certain:
            e = msgspec.structs.replace(e, certain=before.certain)
        self._rewound[e.request, e.epoch] = e

    def _run(self, decision: Decision[T]) -> T:
        try:
            event = next(decision)
            while True:
                event = decision.send(self._record(event))
        except StopIteration as stop:
            result: T = stop.value
            return result

    # -- inputs -----------------------------------------------------------------------------------
    def arrive(
        self, request: str, prompt_tokens: int, max_tokens: int, page_hashes: Sequence[bytes]
    ) -> int:
        """A request arrives; returns its epoch.

        Args:
            request: id, not in use by a live or waiting request.
            prompt_tokens: length of the prompt, at least 1.
            max_tokens: most tokens it can have, prompt included.
            page_hashes: chained salted hash of each whole page of the prompt.

        Raises:
            UsageError: the id is in use, or the lengths make no sense.
        """
        validate.arrival(self.state, request, prompt_tokens, max_tokens, len(page_hashes))
        epoch = self.state.next_epoch
        seq = self._record(
            ev.RequestArrived(0, request, epoch, prompt_tokens, max_tokens, tuple(page_hashes))
        )
        binding = never_fits(self.state, prompt_tokens, max_tokens)
        if binding is not None:
            self._record(ev.RequestRefused(seq, request, epoch, *binding))
            self._run(end_request(self.state, (request, epoch), False, seq))
        return epoch

    def admit_waiting(self) -> list[Key]:
        """Admit from the head of the queue while every budget holds; returns who was admitted."""
        admitted: list[Key] = []
        while self.state.waiting and not self.state.asleep and not self.state.lost:
            key = next(iter(self.state.waiting))
            request = self.state.requests[key]
            cause = request.arrived_seq
            if not self._run(make_room(self.state, request, cause)):
                break
            if self.suffix is not None:
                local = local_hit(self.state, request)
                self._run(ask(self.state, self.suffix, request, local))
            self._run(admit(self.state, request, cause, self.suffix))
            admitted.append(key)
        return admitted

    def grow(self, rows: Rows, rows_wanted: Rows) -> list[int]:
        """Make places for the next rows of live requests, in this order.

        Args:
            rows: request rows.
            rows_wanted: how many more rows each would compute.

        Returns:
            How many each may compute now: what it wants, or less under pressure; 0 for a request
            that is being rewound.

        Raises:
            UsageError: a row is not live, or would compute more than its `max_tokens`.
        """
        at, wanted = validate.growth(self.state, rows, rows_wanted)
        if self.state.rewinding:
            wanted = np.where(validate.rewinding(self.state, at), 0, wanted)
        return self._run(grow(self.state, at, wanted, self._computed_seq))

    def plan_step(self, rows: Rows, counts: Rows) -> int:
        """Fix the rows of the next step; returns its number.

        Raises UsageError for rows that are named twice, are not live, have a step under way, or
        have no place for that many (`grow` says how many have one).
        """
        at, planned = validate.plan(self.state, rows, counts)
        step = self.state.step + 1
        starts = self.state.rows.computed[at]
        seq = self._record(ev.StepPlanned(0, step, ints(at), ints(starts), ints(planned)))
        self._under_way = at
        if self._rewound:  # the engine had the whole step before to ask
            held = self.state.requests
            self._rewound = {key: told for key, told in self._rewound.items() if key in held}
        watermark = self.config.policy.watermark_blocks
        if watermark and (short := watermark - spare(self.state)) > 0:
            self._run(reclaim(self.state, short, seq, "watermark"))
        elif self.config.offload:
            self._run(promote(self.state, seq))
        return step

    def rows_computed(
        self,
        step: int,
        rows: Rows,
        counts: Rows,
        page_hashes: Sequence[tuple[int, bytes]] = (),
    ) -> None:
        """Rows of `step` are computed and accepted.

        Args:
            step: the step's number.
            rows: request rows, as planned; those whose request ended since are passed over, and
                nothing is accepted of those that were rewound since.
            counts: accepted rows of each, at most what was planned.
            page_hashes: (request row, chain hash) of each page beyond the prompt's whole pages
                that these rows complete, in order.

        Raises:
            UsageError: another step, rows that it did not plan, or more hashes than whole pages.
        """
        under_way = self._under_way
        at, accepted = validate.computed(self.state, step, rows, counts, page_hashes, under_way)
        if not len(at):
            return
        known = page_hashes
        if self.state.rewinding or len(at) < len(rows):
            kept = set(at[~validate.rewinding(self.state, at)].tolist())
            known = [(row, page_hash) for row, page_hash in page_hashes if row in kept]
        hash_rows = tuple([row for row, _ in known])
        hashes = tuple([page_hash for _, page_hash in known])
        page_size = self.state.page_size
        before = self.state.rows.computed[at] // page_size
        seq = self._record(ev.RowsComputed(0, step, ints(at), ints(accepted), hash_rows, hashes))
        self._computed_seq = seq
        sealed = before < self.state.rows.computed[at] // page_size
        if np.count_nonzero(sealed):
            self._run(seal_pages(self.state, at[sealed], before[sealed], seq))
            if self.suffix is not None:
                self._run(store_sealed(self.state, self.suffix, at[sealed], before[sealed], seq))
        self._resume(seq)

    def _resume(self, cause: int) -> None:
        """Requests that were rewound, and that nothing holds back any more, go on."""
        for key in list(self.state.rewinding):
            self._run(resume(self.state, key, cause))

    def confirmed(self, request: str, epoch: int) -> int:
        """Leading rows of a request that are certain: no step that computed them could read a page
        whose copy may still fail. Tokens sampled from later rows are provisional."""
        row = validate.known(self.state, request, epoch).row
        return int(self.state.rows.confirmed[row]) if row >= 0 else 0

    def finish(self, request: str, epoch: int, reason: str = "stop") -> None:
        """The request generated its last token; its durable pages outlive it.

        Raises UsageError unless its whole prompt is computed and it has not ended.
        """
        validate.ends(self.state, request, epoch, "finish", (RequestState.DECODE,))
        seq = self._record(ev.RequestFinished(0, request, epoch, reason))
        self._end((request, epoch), True, seq)

    def abort(self, request: str, epoch: int, reason: str = "abort") -> None:
        """End the request, whatever its state; after an end this changes nothing."""
        before = self.state.requests.get((request, epoch))
        ended = before is None or before.state is RequestState.DRAINING
        seq = self._record(ev.RequestAborted(0, request, epoch, reason))
        if not ended:
            self._end((request, epoch), False, seq)

    def preempt(self, request: str, epoch: int, reason: str = "preempt") -> None:
        """Take the request off the GPU. It comes back by `arrive`, under a new epoch.

        Raises UsageError unless it is admitted and has not ended.
        """
        validate.ends(self.state, request, epoch, "preempt", LIVE)
        seq = self._record(ev.RequestPreempted(0, request, epoch, reason))
        self._end((request, epoch), True, seq)

    def _end(self, key: Key, keep: bool, seq: int) -> None:
        row = self.state.requests[key].row
        if self.suffix is not None and row >= 0:
            self._run(HiSparseIndexManager(self.state).seal_final(row, seq))
            self._run(self.suffix.store(row, 0, int(self.state.rows.index[row]), seq))
        self._run(end_request(self.state, key, keep, seq))

    def take_preempted(self) -> list[Key]:
        """Requests that were taken off the GPU since the last call, and not by `preempt`: indexer
        pages that they read could not be loaded, and they could not be rewound, or a rank was lost.
        Like any preempted request they come back by `arrive`, with the tokens that are certain
        (`confirmed` rows before the end; of a failed load: none)."""
        taken, self._preempted = self._preempted, []
        return taken

    def tick(self, now_us: int) -> None:
        """Tell the state what time it is, in microseconds; UsageError if it would go back."""
        if not self.state.now_us <= now_us < 1 << 63:
            raise UsageError(f"now_us={now_us} must be in {self.state.now_us}..2**63-1")
        self._record(ev.Tick(0, now_us))

    def update_acknowledgements(self, acks: Acknowledgements) -> bool:
        """Take a rank's acknowledgements in; False if all were old or another epoch's.

        Raises ProtocolError on a gap in the rank's stream.
        """
        event = as_input(self.state, acks)
        if event is None:
            return False
        seq = self._record(event)
        self._run(acknowledge(self.state, event, seq))
        if self.suffix is not None:
            self._preempted += self._run(self.suffix.result(event, seq))
        self._resume(seq)
        for key in list(self.state.draining):
            self._run(drain(self.state, key, seq))
        return True

    def take_rewound(self) -> list[ev.RequestRewound]:
        """Requests that went back since the last call, once each: how many of their rows are
        computed now, and from how many of them sampled tokens stand."""
        taken, self._rewound = list(self._rewound.values()), {}
        return taken

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
        validate.rank(self.state, rank)
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
        validate.rank(self.state, rank)
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
    ) -> HiSparseCoordinator:
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
        if level not in (1, 2):
            raise UsageError(f"sleep level {level}: use 1 (host tiers keep their memory) or 2")
        if self.state.asleep or self.state.lost or holders(self.state):
            return False
        seq = self._record(ev.MemoryReleased(0, level))
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

    def abort_all(self, reason: str) -> list[Key]:
        """Abort every request that has not ended; returns which. They drain as any other."""
        open_ = [k for k, r in self.state.requests.items() if r.live or k in self.state.waiting]
        for key in open_:
            self.abort(*key, reason)
        return open_

    # -- queries ----------------------------------------------------------------------------------
    def digest(self) -> str:
        """Hex digest of the state; equal to that of a fold of the same log."""
        return digest(self.state)

    def footprint(self, request: str, epoch: int) -> Footprint:
        """GPU bytes that a request needs, holds and pads, now; all 0 while it waits.

        Raises UsageError for one that is not there.
        """
        row = validate.known(self.state, request, epoch).row
        return held_footprint(self.state, row) if row >= 0 else Footprint(0, 0)

    def statistics(self) -> dict[str, int]:
        """Occupancy now, in blocks, pages, bytes and requests (`kv.statistics`)."""
        return statistics(self.state)

    def pool_statistics(self) -> dict[str, dict[str, int]]:
        """Of ``gpu_pool``, ``host_pool`` and ``suffix_pool``: ids by the state that they are in."""
        return pool_statistics(self.state)
