"""`HiSparseBackend`: the KV backend of an engine that lives in one process.

Owns what passes between a scheduler half and one worker rank (`backend_halves` opens and closes
them); the halves can also be had apart (`SchedulerConnector`, `WorkerConnector`), with a process
boundary between them. Per step::

    changes = backend.acknowledge()              who came in, went back, or lost its place
    plan = backend.plan_step({request: rows})    places for the next rows; fewer under pressure
    backend.begin_step(plan)
      write_index, index_keys                    at the leader of each index group
      write, resolve                             at each layer
    backend.end_step()

Every call is checked before anything is logged or queued: UsageError and StaleEpoch say the fix,
and nothing was changed. Not for several threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hisparse.backend_halves import Halves
from hisparse.config import HiSparseConfig
from hisparse.connector.checks import Wanted
from hisparse.connector.plan import Admitted, Changes, Refused, StepPlan, Waiting
from hisparse.connector.sessions import RequestRef
from hisparse.errors import DeviceError, HiSparseError, InvariantViolation, UsageError
from hisparse.fsm.log import EventLog

if TYPE_CHECKING:
    from hisparse.device.backend import Device, Sink
    from hisparse.device.transfers import CopyFault
    from hisparse.device.worker import HiSparseWorker
    from hisparse.kv.coordinator import HiSparseCoordinator

DRAIN_STEPS_MAX = 10_000


class HiSparseBackend:
    """Both halves of one replica, for one process.

    Args:
        config: sizes and policy, as `HiSparseConfig` or nested mappings of its fields.
        device: a backend, or the name of one: ``cpu``, ``cuda``.
        log: a directory that the events are written to, or a log (default: ``config.log``).
        sink: gets the rank's own events (default: the log's directory, if it has one).
        copy_fault: see `HiSparseWorker`; for tests of what a failing copy costs.

    Raises:
        ConfigError: field, value and fix; CapacityError where one request, or on a GPU the pinned
            pools of this node or what the GPU is to hold, could not fit.
        DeviceError: the backend is not there.
        LogError, UsageError: the log is another's.
    """

    def __init__(
        self,
        config: HiSparseConfig | Mapping[str, Any],
        *,
        device: Device | str = "cpu",
        log: EventLog | Path | str | None = None,
        sink: Sink | None = None,
        copy_fault: CopyFault | None = None,
    ) -> None:
        self._halves = Halves(config, device, log=log, sink=sink, copy_fault=copy_fault)
        self.config, self.scheduler = self._halves.config, self._halves.scheduler
        self.rank = self._halves.rank
        self._plan: StepPlan | None = None
        self._changes = Changes()  # not told yet
        self._ending = False  # of the requests nothing more is to be done

    # -- parts ------------------------------------------------------------------------------------
    @property
    def coordinator(self) -> HiSparseCoordinator:
        return self.scheduler.coordinator

    @property
    def worker(self) -> HiSparseWorker:
        return self.rank.worker

    @property
    def device(self) -> Device:
        return self.rank.device

    @property
    def requests(self) -> tuple[str, ...]:
        """Ids of those that wait or live, in order of arrival."""
        return self.scheduler.requests

    # -- requests: see `SchedulerConnector` -------------------------------------------------------
    def admit(
        self, request: str, prompt: Sequence[int] | Any, max_new: int, *, salt: bytes = b""
    ) -> Admitted | Waiting | Refused:
        """A request arrives: see `SchedulerConnector.admit`."""
        self._open("admit")
        return self.scheduler.admit(request, prompt, max_new, salt=salt)

    def finish(self, request: RequestRef, reason: str = "stop") -> None:
        """It generated its last token: see `SchedulerConnector.finish`."""
        self.scheduler.finish(request, reason)

    def abort(self, request: RequestRef, reason: str = "abort") -> None:
        """End it, whatever it does."""
        self.scheduler.abort(request, reason)

    def preempt(self, request: RequestRef, reason: str = "preempt") -> None:
        """Take it off the GPU; `admit` it again, with the tokens that are certain, to go on."""
        self.scheduler.preempt(request, reason)

    def confirmed(self, request: RequestRef) -> int:
        """Leading rows that no failing copy can take back any more."""
        return self.scheduler.confirmed(request)

    # -- a step -----------------------------------------------------------------------------------
    def acknowledge(self) -> Changes:
        """Take in what the rank says by now, admit who waits as far as there is room, and tell what
        changed. `plan_step` does it too (`StepPlan.changes`)."""
        self._open("acknowledge")
        self.scheduler.check_between("acknowledge")
        news = self.scheduler.acknowledge(self.rank.acknowledgements())  # it may tell a fault
        told, self._changes = self._changes, Changes()
        return told + news

    def plan_step(self, wanted: Mapping[Any, Wanted]) -> StepPlan:
        """Fix the rows of the next step: see `SchedulerConnector.plan_step`.

        Takes in first what the rank says; a request that this changed gets no row in this step.
        """
        self._open("plan_step")
        asked = self.scheduler.check_wanted(wanted)
        self._changes = self.acknowledge()  # not told, if this cannot be planned
        self._plan = self.scheduler.plan_checked(asked, self._changes)
        self._changes = Changes()
        return self._plan

    def begin_step(self, plan: StepPlan) -> None:
        """Queue the plan's copies and table changes; from here on its rows are written and read.

        Raises UsageError for anything but the plan that `plan_step` made last, once.
        """
        if self._plan is None:
            raise UsageError("begin_step: no step is planned: plan_step comes first")
        if plan is not self._plan:
            raise UsageError(
                f"begin_step: this is not the plan of step {self._plan.step}: pass what plan_step "
                "returned last"
            )
        self.rank.begin_step(plan)

    def write(self, layer: int, data: Any) -> None:
        """New rows of `layer`, uint8 ``[n, row_bytes]``: see `WorkerConnector.write`."""
        self.rank.write(layer, data)

    def write_index(self, group: int, data: Any) -> None:
        """New indexer rows of `group`, uint8 ``[n, index_row_bytes]``."""
        self.rank.write_index(group, data)

    def index_keys(self, group: int, request: str) -> Any:
        """All indexer rows of a request, uint8 ``[length, index_row_bytes]``, those of this step
        included: see `WorkerConnector.index_keys`."""
        return self.rank.index_keys(group, request)

    def resolve(self, layer: int, top_k: Any = None) -> Any:
        """Rows that attention reads, uint8 ``[n, k, row_bytes]``: see `WorkerConnector.resolve`."""
        return self.rank.resolve(layer, top_k)

    def end_step(self, accepted: Mapping[Any, int] | None = None) -> None:
        """The step's rows are computed: all, or of the requests that `accepted` names so many.

        Raises UsageError outside a step, where something was not written or not resolved by a
        follower, or for numbers that `SchedulerConnector.end_step` refuses.
        """
        self._open("end_step")
        if not self.rank.in_step:
            raise UsageError(
                "end_step: no step has begun: plan_step and begin_step come first"
                if self._plan is None
                else f"end_step: step {self._plan.step} is planned and has not begun: begin_step "
                "comes first; abandon_step withdraws it"
            )
        self.scheduler.check_accepted(accepted)
        self.rank.end_step()
        self._ended(accepted)

    def abandon_step(self) -> None:
        """End the step where it is, since the model failed in it or it shall not run: none of its
        rows count. A plan that has not begun is withdrawn: its copies go on, its requests may be
        planned anew. Raises UsageError where no step is planned."""
        self._open("abandon_step")
        if self._plan is None:
            raise UsageError("abandon_step: no step is planned: plan_step comes first")
        if not self.rank.in_step:  # its command is decided, and the worker has to hear of it
            self.rank.begin_step(self._plan)
        self.rank.abandon_step()
        self._ended(dict.fromkeys(self._plan.requests, 0))

    def _ended(self, accepted: Mapping[Any, int] | None) -> None:
        self._plan = None
        self.scheduler.end_step(accepted)
        self._halves.commit_rank_log()

    def _empty_step(self) -> None:
        """A step without rows: tells the worker what was decided."""
        plan = self.plan_step({})
        self._changes += plan.changes
        self.begin_step(plan)
        self.end_step()

    # -- the whole --------------------------------------------------------------------------------
    def drain(self) -> None:
        """Step until ended requests have let go of everything. Raises UsageError if one is live."""
        self._open("drain")
        self.scheduler.check_between("drain")
        for _ in range(DRAIN_STEPS_MAX):
            self._changes = self.acknowledge()
            state = self.coordinator.state
            if not state.requests:
                return
            if state.waiting or state.rows.live.any():
                break
            self._empty_step()
        held = list(self.coordinator.state.requests)
        raise UsageError(f"drain: requests {held} do not end: finish or abort them first")

    def reset_prefix_cache(self) -> bool:
        """Forget what prefixes could find, in both tiers; False, with nothing changed, while
        anybody holds something (`drain` first)."""
        self._open("reset_prefix_cache")
        self.scheduler.check_between("reset_prefix_cache")
        return self.scheduler.reset_cache()

    def sleep(self, level: int = 1) -> bool:
        """Give the GPU pool's memory up; at level 2 that of the host tiers too. False, with nothing
        changed, while anybody holds something (`drain` first)."""
        self._open("sleep")
        self.scheduler.check_between("sleep")
        if not self.coordinator.sleep(level):
            return False
        self._empty_step()
        return True

    def wake_up(self) -> None:
        """Take the memory again; the worker hears of it with the next step."""
        self._open("wake_up")
        self.coordinator.wake_up()

    def shutdown(self) -> None:
        """Abort what has not ended, drain, take in how every copy ended, and free all memory.

        Idempotent. What a device error leaves unfinished keeps its memory, and is raised. Faults
        that the device tells only now, and a step that cannot begin, keep nothing open: the first
        error is raised at the end.
        """
        told: list[HiSparseError] = []
        while not self._halves.closed:
            try:
                if not self._ending:
                    self._end_requests()
                self._ending = True
                self._end()
            except InvariantViolation as fault:  # each is told once
                told.append(fault)
            except (DeviceError, UsageError) as error:  # the latter: of one that began in part
                if self._ending:
                    for earlier in told:
                        error.add_note(str(earlier))
                    raise
                self._ending = True  # no step will begin any more
                told.append(error)
        if told:
            raise told[0]

    def _end_requests(self) -> None:
        if self._plan is not None:
            self.abandon_step()
        for request in self.requests:
            self.abort(request, "shutdown")
        self.scheduler.shutdown()
        self.drain()

    def _end(self) -> None:
        self.scheduler.update_connector_output(self.rank.shutdown())
        self.coordinator.log.commit()
        self._halves.close()

    def __enter__(self) -> HiSparseBackend:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _open(self, verb: str) -> None:
        if self._halves.closed:
            raise UsageError(f"{verb}: the backend is shut down: make another one")

    def statistics(self) -> dict[str, Any]:
        """Of each part, by its name, counters and occupancy; docs/embedding.md says what they are.
        On a GPU this waits for it. After a shutdown those of the worker are gone."""
        return self._halves.statistics()
