"""What is looked at after each step: the rows that were read, and what was selected.

Owns nothing. What the step's gathers were asked for and gave is copied out once its work is done,
before the scheduler hears of the step: the content check and the recorder of selections see it
without padding. The step itself pays for none of it but the memory that holds it until then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch

from hisparse.device.backend import Resolver
from hisparse.device.exchange import as_tensor
from hisparse.device.plan import Plan
from hisparse.device.rows import StepRows
from hisparse.device.worker import HiSparseWorker
from hisparse.engine.accelerator import Fetch
from hisparse.engine.selections import Resolved, SelectionRecorder
from hisparse.engine.tiered import Gathered
from hisparse.fsm.wire import Table

RowCheck = Callable[[int, StepRows, np.ndarray, np.ndarray], None]
Missed = Callable[[], dict[int, int]]  # rows that each request row missed


class StepWatch:
    """Called with what a step gathered.

    Args:
        worker: whose caches were read.
        device: the model's.
        check: called with (layer, rows, top-k, gathered bytes) of each gather.
        recorder: gets the leaders' selections.
    """

    def __init__(
        self,
        worker: HiSparseWorker,
        device: torch.device | str = "cpu",
        *,
        check: RowCheck | None = None,
        recorder: SelectionRecorder | None = None,
    ) -> None:
        self.check, self.recorder = check, recorder
        self._worker, self._device = worker, torch.device(device)
        self._leads = {group.layers[0]: group.group for group in worker.groups}
        if recorder is not None and self._device.type == "cuda":
            requests = worker.config.schedule.max_requests
            for layer in self._leads:
                runtime = worker.handles[layer].runtime
                counting = _CountingMisses(cast(Resolver, runtime.resolver), requests, self._device)
                runtime.resolver = cast(Resolver, counting)

    def __call__(self, gathered: Sequence[Gathered]) -> None:
        sent = []
        for one in gathered:
            places = (self._tensor(one.rows.rows), self._tensor(one.rows.positions))
            kept = one.data if self.check is not None else one.data[:, :0]
            missed = self._missed(one.plan) if self.recorder is not None else dict
            sent.append((one.layer, Fetch(*places, one.top_k, kept), missed))
        resident = self._tensor(self._worker.tables[Table.RESIDENT])
        seen = Fetch(resident if self.recorder is not None else resident[:0])
        calls = []
        for layer, fetch, missed in sent:
            owners, positions, top_k, data = fetch.result()
            real = owners >= 0
            rows = StepRows(owners[real], positions[real])
            if self.check is not None:
                self.check(layer, rows, top_k[real], data[real])
            if layer in self._leads:
                calls.append(Resolved(self._leads[layer], rows, top_k[real], missed()))
        if self.recorder is not None:
            self.recorder.record(calls, seen.result()[0])

    def _tensor(self, array: Any) -> torch.Tensor:
        return as_tensor(array)

    def _missed(self, plan: Any) -> Missed:
        """Misses of a leader's plan; of a follower, which has none, nothing."""
        if plan is None:
            return dict
        if isinstance(plan, Plan):
            return lambda: self._missed_by_blocks(plan)
        fetch = Fetch(plan.misses)
        return lambda: dict(enumerate(fetch.result()[0].tolist()))

    def _missed_by_blocks(self, plan: Plan) -> dict[int, int]:
        """By whose hot blocks the plan copies to."""
        hot, size = self._worker.tables[Table.HOT], self._worker.config.pools.page_size
        rows, entries = np.nonzero(hot)
        owner = dict(zip(hot[rows, entries].tolist(), rows.tolist(), strict=True))
        found: dict[int, int] = {}
        for wave in plan.waves:
            for block in (wave.destinations // size).tolist():
                found[owner[block]] = found.get(owner[block], 0) + 1
        return found


class _CountingMisses:
    """A leader's resolver on a GPU, whose plans count the misses of each request row there."""

    def __init__(self, inner: Resolver, requests: int, device: torch.device) -> None:
        self._inner, self._requests, self._device = inner, requests, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def plan(self, rows: StepRows, top_k: Any, step: int) -> Any:
        plan = self._inner.plan(rows, top_k, step)
        plan.misses = torch.zeros(self._requests, dtype=torch.int32, device=self._device)
        return plan
