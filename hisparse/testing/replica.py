"""SimReplica: one replica of a simulation, and every operation that can be done to it.

Owns the production coordinator, connector, serving loop and log, one to three `SimRank` around
production workers, a virtual clock, and the tallies. Each public verb is one operation: a seeded
driver (`hisparse.testing.simulator`) and a state machine of a property test call the same ones.
After any of them `check` says whether everything still holds.

    submit  step  abort  preempt  stop  reset  sleep  wake_up        what an engine does
    crash_rank  crash_scheduler  arm                                 what happens to it
    check                                                            raises InvariantViolation

What passes between scheduler and ranks in a step is `RankRunner`'s (`hisparse.testing.runner`),
what happens when one of them dies `Restarts`' (`hisparse.testing.restarts`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from hisparse.config import HiSparseConfig
from hisparse.connector.base import KVConnectorRole
from hisparse.connector.hisparse import HiSparseConnector
from hisparse.engine.loop import ReferenceEngine
from hisparse.engine.served import Served
from hisparse.engine.trace import WorkloadRequest
from hisparse.errors import LogError
from hisparse.fsm.log import EventLog
from hisparse.fsm.log_disk import DiskLog
from hisparse.fsm.snapshot import snapshot
from hisparse.fsm.state import State
from hisparse.fsm.wire import AnyTransfer
from hisparse.kv.coordinator import HiSparseCoordinator
from hisparse.testing.atlas.base import Fault, Incident, with_hook
from hisparse.testing.cached_pages import CachedPages
from hisparse.testing.liveness import settle
from hisparse.testing.rank import AnyRankDevice, RankDevice, SimRank
from hisparse.testing.restarts import Restarts, SchedulerDied, SimLog
from hisparse.testing.runner import RankRunner
from hisparse.testing.store import Store
from hisparse.testing.tagged import Seen, TaggedModel
from hisparse.testing.watch import Watch
from hisparse.testing.worlds import EOS, Workload

STEP_MS = 10
COPY_LOSSES = ("copy_failed", "copy_partial")


class SimReplica:
    """One scheduler, `config.ranks` worker ranks, and what lies between.

    Args:
        config: sizes and policy; its `ranks` is how many workers there are.
        seed: of everything that is drawn here. Any hashable text.
        lags: how far each rank's streams hang back (`SimDevice`).
        faults: rate by kind of the atlas; kinds that are missing are off, and one whose rate is 0
            strikes where `arm` says so.
        disk: the log lies on a simulated disk, with these options of `Store`; None: in memory,
            and kinds that need a disk are off.
        tides: a few long requests among short ones (`worlds.Workload`).
        check_every: steps from one look at the whole state to the next.
    """

    device_type: ClassVar[type[Any]] = RankDevice  # made of a seed and a lag

    def __init__(
        self,
        config: HiSparseConfig,
        seed: str,
        *,
        lags: Sequence[float] = (0.5,),
        faults: Mapping[str, float] | None = None,
        check_every: int = 1,
        tides: bool = False,
        disk: Mapping[str, Any] | None = None,
    ) -> None:
        from hisparse.testing.atlas import ATLAS  # its kinds speak of replicas

        self.config = config
        self.seed = seed
        self.lags = [lags[n % len(lags)] for n in range(config.ranks)]
        self.check_every = check_every
        self.now = 0  # steps of this replica, over restarts of its scheduler
        self.calm = False  # no fault strikes any more
        self.fired: Counter[str] = Counter()
        self.sometimes: Counter[str] = Counter()
        self.incidents: list[Incident] = []
        self.seen = Seen()
        self.rows_checked_before = 0
        longest = config.schedule.max_model_len
        # What faults ask for: their own, so that it is the same whoever asks for the rest.
        self.workload = Workload(random.Random(f"{seed} workload"), longest, tides, "fault")
        self.workload.rng = random.Random(f"{seed} workload of faults")  # and the same stems
        self.model = TaggedModel(config, random.Random(f"{seed} model"))
        self.cached = CachedPages(self)
        self.store = Store(config, seed, dict(disk)) if disk is not None else None
        self.restarts = Restarts(self, seed)
        self.on_device: list[Callable[[int, AnyRankDevice], None]] = []  # called with each new one
        self.on_open: list[Callable[[], None]] = []  # called when a scheduler has begun
        self.faults: list[Fault] = [
            ATLAS[kind](self, rate, random.Random(f"{seed} fault {kind}"))
            for kind, rate in sorted((faults or {}).items())
            if disk is not None or not ATLAS[kind].needs_disk
        ]
        self.tolerates_faults = any(f.kind in COPY_LOSSES and f.rate > 0 for f in self.faults)
        self._copy_faults = with_hook(self.faults, "copy_fails")
        self._strikers = with_hook(self.faults, "strike")
        self._tenders = with_hook(self.faults, "tend")
        self.runner = RankRunner(self, seed)
        self.log: EventLog = SimLog() if self.store is None else self.store.open()[0]
        self.served = 0  # requests that came to an end of any kind
        self.ranks = [self.make_rank(n) for n in range(config.ranks)]
        self.open(HiSparseCoordinator(config, self.log))
        self.restarts.down = False

    def open(self, coordinator: HiSparseCoordinator) -> None:
        """A scheduler process begins, around `coordinator`."""
        self.rows_checked_before += self.seen.rows_checked
        self.seen = Seen(self.tolerates_faults)
        self.coordinator = coordinator
        self.connector = HiSparseConnector(KVConnectorRole.SCHEDULER, coordinator=coordinator)
        self.engine = ReferenceEngine(
            coordinator,
            self.connector,
            self.runner,
            eos=EOS,
            step_ms=STEP_MS,
            drafts=self.model.drafts,
        )
        self.watch = Watch(coordinator, self.seen)
        for hook in self.on_open:
            hook()
        self._done_before = self.served

    def make_device(self, number: int, life: int = 0) -> AnyRankDevice:
        seed = random.Random(f"{self.seed} device {number} {life}").randrange(1 << 31)
        device: AnyRankDevice = self.device_type(seed, self.lags[number])
        for hook in self.on_device:
            hook(number, device)
        return device

    def make_rank(self, number: int, device: AnyRankDevice | None = None, **more: Any) -> SimRank:
        """A worker process for rank `number` begins. Raises what its start raises."""
        if device is None:
            device = self.make_device(number, more.get("worker_epoch", 1))
        box: list[SimRank] = []

        def copy_fault(transfer: AnyTransfer) -> bool:
            return any(fault.copy_fails(box[0], transfer) for fault in self._copy_faults)

        rank = SimRank(
            self.config,
            number,
            device,
            self.seed,
            copy_fault=copy_fault if self._copy_faults else None,
            **more,
        )
        box.append(rank)
        return rank

    @property
    def rows_checked(self) -> int:
        """Rows that the content oracle has compared."""
        return self.rows_checked_before + self.seen.rows_checked

    @property
    def state(self) -> State:
        return self.coordinator.state

    # -- operations -------------------------------------------------------------------------------
    def submit(self, work: WorkloadRequest) -> Served:
        """A client asks."""
        return self.engine.submit(work)

    def abort(self, served: Served) -> None:
        """Its client goes away."""
        self.engine.abort(served)

    def preempt(self, served: Served) -> bool:
        """It leaves the GPU and comes back at the end of the queue; False where it cannot now."""
        request = self.state.requests.get(served.key)
        if request is None or not request.live or self.engine.is_ending(served):
            return False
        self.engine.preempt(served)
        return True

    def stop(self, served: Served) -> bool:
        """Its client has enough: it ends with the tokens that it has; False before the first."""
        return self.engine.stop(served)

    def reset(self) -> bool:
        return self.coordinator.reset_prefix_cache()

    def sleep(self, level: int) -> bool:
        return self.coordinator.sleep(level)

    def wake_up(self) -> None:
        self.coordinator.wake_up()

    def crash_rank(self, number: int, notice_steps: int = 0) -> None:
        """The worker process of a rank is gone; the scheduler hears of it after so many steps."""
        self.restarts.crash_rank(number, notice_steps)

    def crash_scheduler(self, **how: Any) -> None:
        """The scheduler process is gone, and another goes on with its log (`Restarts`)."""
        self.restarts.crash_scheduler(**how)

    def arm(self, kind: str) -> bool:
        """The next opportunity of this kind of fault is taken; False where the kind is off."""
        fault = next((fault for fault in self.faults if fault.kind == kind), None)
        if fault is None:
            return False
        fault.armed += 1
        if kind in COPY_LOSSES:
            self.tolerates_faults = self.seen.tolerates_faults = True
        return True

    def step(self) -> None:
        """One scheduler step and what follows from it; raises InvariantViolation."""
        self.now += 1
        for fault in self._tenders:
            fault.tend()
        if self.down:
            self.restarts.begin_again()
            return
        self.restarts.tend()
        if self.store is not None:
            self.store.clock_s = self.now / 10
        self.coordinator.tick(max(self.now * STEP_MS * 1000, self.state.now_us))
        try:
            self.engine.step()
            self._snapshot()
        except SchedulerDied as death:
            death.restart()
        except LogError:
            if self.store is None or not self.store.disk.full:
                raise
            self.restarts.crash_scheduler()  # a writer that cannot write stops
        if self.down:
            return
        self.served = self._done_before + len(self.engine.done)
        self.cached.learn()
        self.watch.after_step()
        if self.now % self.check_every == 0:
            self.check()
        for fault in self._strikers:
            if not self.down:
                fault.strike()
        self.look_at_incidents()

    @property
    def down(self) -> bool:
        """Whether there is no scheduler: its log cannot be opened. All it does is try again."""
        return self.restarts.down

    def _snapshot(self) -> None:
        store = self.store
        if store is None or not store.takes_snapshots:
            return
        if isinstance(self.log, DiskLog) and self.log.snapshot_due:
            self.log.snapshot(self.state.seq, snapshot(self.state))

    def cease(self) -> None:
        """Faults are over, from here on: what they held is let go of, ranks catch up."""
        self.calm = True
        for fault in self.faults:
            fault.cease()
        for rank in self.ranks:
            rank.behind_until = rank.channel.held_until = 0
            rank.pace_units = 2000

    def settle(self) -> None:
        """The liveness phase (`hisparse.testing.liveness`), to the end of all; raises
        InvariantViolation."""
        settle(self)

    # -- checks -----------------------------------------------------------------------------------
    def check(self) -> None:
        """Everything that can be looked at now (`hisparse.testing.watch`); raises
        InvariantViolation."""
        self.watch.everything()
        self.cached.check()

    def look_at_incidents(self) -> None:
        """Count those that are survived by now."""
        if not self.incidents:
            return
        still = []
        for incident in self.incidents:
            if incident.survived():
                self.sometimes[incident.mark] += 1
            else:
                still.append(incident)
        self.incidents = still
