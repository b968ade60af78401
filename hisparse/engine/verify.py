"""Verification of a served workload against the dense oracle: tokens, logits, rows, tables.

No tolerance anywhere: the model is batch-invariant, so every bit has to be equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hisparse.device.rows import StepRows
from hisparse.device.worker import HiSparseWorker
from hisparse.engine.loop import ReferenceEngine, Served
from hisparse.engine.reference import ReferenceResult
from hisparse.fsm.events import Event
from hisparse.fsm.fold import fold
from hisparse.fsm.invariants.checker import Violation
from hisparse.fsm.state import digest
from hisparse.fsm.wire import Table
from hisparse.kv.coordinator import HiSparseCoordinator


def tokens_identical(served: Sequence[Served], expected: dict[str, ReferenceResult]) -> list[str]:
    """Requests whose tokens or logits differ from the oracle's in any bit."""
    wrong = []
    for request in served:
        want, n = expected[request.request], len(request.generated)
        finished = request.outcome == "finished"
        same = request.generated == want.tokens[:n] and (not finished or n == len(want.tokens))
        if same and n:
            got = np.stack(request.logits)
            same = got.tobytes() == np.ascontiguousarray(want.logits[:n]).tobytes()
        if not same:
            wrong.append(request.request)
    return wrong


class ContentOracle:
    """Invariant `content`: every gathered row equals the row that the oracle computed there."""

    def __init__(self, expected: dict[str, ReferenceResult]) -> None:
        self.expected = expected
        self.engine: ReferenceEngine | None = None
        self.violations: list[Violation] = []
        self.rows_checked = 0

    def __call__(self, layer: int, rows: StepRows, top_k: np.ndarray, data: np.ndarray) -> None:
        assert self.engine is not None
        state = self.engine.coordinator.state
        cuts = np.flatnonzero(np.diff(rows.rows)) + 1
        for span in np.split(np.arange(len(rows.rows)), cuts):
            row = int(rows.rows[span[0]])
            request = state.request_of(row).request
            chosen = top_k[span]
            want = self.expected[request].rows[layer][chosen]
            want[chosen < 0] = 0
            self.rows_checked += chosen.size
            wrong = (want != data[span]).any(axis=-1)
            if wrong.any() and len(self.violations) < 100:
                at = np.argwhere(wrong)[0]
                text = (
                    f"layer {layer} of request {request} read other bytes than were written for "
                    f"position {chosen[tuple(at)]} (query position {rows.positions[span][at[0]]})"
                )
                self.violations.append(Violation("content", state.seq, text))


class LiveChecks:
    """`table_truth` inside every step, the state invariants after it, `replay_equal` at the end.

    Args:
        coordinator: the scheduler side.
        worker: the rank whose tables are compared.
    """

    def __init__(self, coordinator: HiSparseCoordinator, worker: HiSparseWorker) -> None:
        self.coordinator = coordinator
        self.worker = worker
        self.violations: list[Violation] = []
        self.checked = {"table_truth": 0, "replay_equal": 0}

    def probe_tables(self) -> None:
        """Compare the tables of the step's requests, on the compute stream, as the step sees them.

        Call between the step's command and its first access: later the scheduler moves on.
        """
        state = self.coordinator.state
        rows = np.flatnonzero(state.rows.live & (state.rows.last_step == state.step)).tolist()
        wanted = [(row, t, state.table(t)[row].copy()) for row in rows for t in Table]
        step = state.step
        self.worker.device.compute.enqueue(lambda: self._compare(step, wanted))

    def _compare(self, step: int, wanted: list[tuple[int, Table, np.ndarray]]) -> None:
        self.checked["table_truth"] += 1
        for row, table, want in wanted:
            have = self.worker.tables[table][row]
            width = min(len(want), len(have))
            if (want[:width] != have[:width]).any():
                entry = int(np.argmax(want[:width] != have[:width]))
                text = (
                    f"step {step}, table {table.name} row {row} entry {entry}: the scheduler has "
                    f"{want[entry]}, the worker {have[entry]}"
                )
                self.violations.append(Violation("table_truth", self.coordinator.state.seq, text))

    def after_step(self) -> None:
        """State invariants, once a step."""
        if self.coordinator.checker is not None:
            self.coordinator.checker.state(self.coordinator.state)

    def at_end(self) -> None:
        """Fold the whole log again, if all of it was kept, and compare digests."""
        coordinator = self.coordinator
        log = coordinator.log
        if log.oldest_seq != 1:
            return
        self.checked["replay_equal"] += 1
        events = ((seq, event) for seq, event in log.read(1) if isinstance(event, Event))
        replayed = digest(fold(coordinator.config, events))
        if replayed != coordinator.digest():
            text = f"the fold gives {replayed}, live is {coordinator.digest()}"
            self.violations.append(Violation("replay_equal", coordinator.state.seq, text))
