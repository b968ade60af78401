"""Figures: what a stream of events amounts to, recorded or decided again. Pure.

Owns an `Audit`, so every figure comes with the invariants that a log can show. Peaks are those of
the ends of steps, as the serving loop has them: a step is over at the first input that is not part
of it. Host bytes are those of page copies; rows that attention reads from the host are not in a
log.
"""

from __future__ import annotations

from typing import Any

from hisparse.config import HiSparseConfig
from hisparse.fsm import events as ev
from hisparse.fsm.audit import CHECKED, Audit
from hisparse.fsm.codec import UnknownEvent
from hisparse.fsm.invariants.checker import Violation
from hisparse.fsm.metrics import Metrics
from hisparse.fsm.state import Key

_NEXT_STEP = (
    ev.RequestArrived,
    ev.RequestAborted,
    ev.RequestPreempted,
    ev.Tick,
    ev.AcknowledgementsTaken,
)


class Figures:
    """Takes events in from the first one on."""

    def __init__(self, config: HiSparseConfig) -> None:
        self.config = config
        self.audit = Audit(config)
        self.faults: list[Violation] = []  # why the events ended, where that was not the end
        self._counts = Metrics(config)
        self._refused: dict[str, int] = {}
        self._deferred: dict[str, int] = {}
        self._failed = self._blocks_evicted = 0
        self._arrived: dict[Key, int] = {}  # waiting requests, with the steps planned by then
        self._waited: list[int] = []
        self._step_open, self._folds = False, True
        self._peaks = {"concurrent_requests": 0, "gpu_blocks": 0, "host_pages": 0}

    def take(self, seq: int, event: ev.Event | UnknownEvent) -> bool:
        """Take the next event in; False if it cannot be folded: nothing can follow."""
        if self._step_open and isinstance(event, _NEXT_STEP):
            self._end_step()
        if not (self._folds and self.audit.take(seq, event)):
            self._folds = False
            return False
        assert isinstance(event, ev.Event)
        self._counts.take(event)
        match event:
            case ev.StepPlanned():
                self._step_open = True
            case ev.RequestArrived():
                self._arrived[event.request, event.epoch] = self.audit.state.step
            case ev.RequestAdmitted():
                since = self._arrived.pop((event.request, event.epoch))
                self._waited.append(self.audit.state.step - since)
            case ev.RequestRefused():
                self._refused[event.resource] = self._refused.get(event.resource, 0) + 1
            case ev.AdmissionDeferred():
                self._deferred[event.resource] = self._deferred.get(event.resource, 0) + 1
            case ev.RequestAborted():
                self._failed += event.cause != 0
            case ev.BlocksEvicted():
                self._blocks_evicted += len(event.blocks)
        return True

    def finish(self, *, torn: bool = False) -> None:
        """No event follows. `torn`: they may end inside a decision."""
        self._end_step()
        self.audit.finish(torn=torn or bool(self.faults))

    def _end_step(self) -> None:
        self._step_open = False
        state = self.audit.state
        now = {
            "concurrent_requests": int(state.rows.live.sum()),
            "gpu_blocks": len(state.blocks.state) - 1 - state.blocks.available,
            "host_pages": len(state.pages.state) - 1 - state.pages.available,
        }
        self._peaks = {name: max(most, now[name]) for name, most in self._peaks.items()}

    @property
    def violations(self) -> list[Violation]:
        return [*self.audit.violations, *self.faults]

    def report(self) -> dict[str, Any]:
        """The figures by name; `host_bytes_*` in bytes, `waited_steps_mean` in steps."""
        counts, config = self._counts.counts, self.config
        written = counts["spills_planned"] + counts["write_backs"]
        page_bytes = config.page_bytes  # of a copy: padding does not travel
        return {
            "events": self.audit.events,
            "steps": counts["steps"],
            "requests": counts["requests_arrived"] - counts["preemptions"],
            "finished": counts["requests_finished"],
            "aborted": counts["requests_aborted"] - self._failed,
            "failed": self._failed,
            "refused": dict(sorted(self._refused.items())),
            "unfinished": len(self.audit.state.requests) - len(self.audit.state.draining),
            "deferred": dict(sorted(self._deferred.items())),
            "waited_steps_mean": sum(self._waited) / len(self._waited) if self._waited else 0.0,
            "preemptions": counts["preemptions"],
            "rows_computed": counts["rows_computed"],
            "prefix_hit_tokens": counts["prefix_hit_pages"] * config.pools.page_size,
            "spills": counts["spills"],
            "write_backs": counts["write_backs"],
            "restores": counts["restores"],
            "host_bytes_written": written * page_bytes,
            "host_bytes_read": counts["restores"] * page_bytes,
            "host_pages_evicted": counts["pages_evicted"],
            "gpu_blocks_evicted": self._blocks_evicted,
            "peak_concurrent_requests": self._peaks["concurrent_requests"],
            "peak_gpu_blocks": self._peaks["gpu_blocks"],
            "peak_host_pages": self._peaks["host_pages"],
            "invariants_checked": len(CHECKED),
            "violations": [
                {"invariant": v.invariant, "seq": v.seq, "message": v.message}
                for v in self.violations
            ],
        }
