"""Verification of a served workload against the dense oracle: tokens, logits, rows, tables.

No tolerance anywhere: the model is batch-invariant, so every bit has to be equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hisparse.device.exchange import as_tensor
from hisparse.device.rows import StepRows
from hisparse.device.worker import HiSparseWorker
from hisparse.engine.accelerator import Fetch
from hisparse.engine.loop import ReferenceEngine
from hisparse.engine.reference import ReferenceResult
from hisparse.engine.served import Served
from hisparse.fsm.codec import Codec
from hisparse.fsm.cursor import LogCursor
from hisparse.fsm.events import EVENT_TYPES
from hisparse.fsm.fold import evolve
from hisparse.fsm.invariants.checker import Violation
from hisparse.fsm.state import State, digest
from hisparse.fsm.wire import Table
from hisparse.kv.coordinator import HiSparseCoordinator


def differing_requests(served: Sequence[Served], expected: dict[str, ReferenceResult]) -> list[str]:
    """Requests whose tokens or logits differ from the oracle's in any bit.

    An aborted request is compared as far as it came; one that was refused, failed or never served
    differs.
    """
    wrong = sorted(set(expected) - {request.request for request in served})
    for request in served:
        want, n = expected[request.request], len(request.generated)
        finished = request.outcome == "finished"
        same = request.generated == want.tokens[:n] and (
            n == len(want.tokens) if finished else request.outcome == "aborted"
        )
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
            chosen, written = top_k[span], self.expected[request].rows[layer]
            ours = chosen < self._rows_of_the_oracle(state.request_of(row).key)
            want = written[np.where(ours, chosen, 0)]
            want[chosen < 0] = 0
            want[~ours] = data[span][~ours]
            self.rows_checked += chosen.size
            wrong = (want != data[span]).any(axis=-1)
            if wrong.any() and len(self.violations) < 100:
                at = np.argwhere(wrong)[0]
                text = (
                    f"layer {layer} of request {request} read other bytes than were written for "
                    f"position {chosen[tuple(at)]} (query position {rows.positions[span][at[0]]})"
                )
                self.violations.append(Violation("content", state.seq, text))

    def _rows_of_the_oracle(self, key: tuple[str, int]) -> int:
        """Positions before this one hold the oracle's tokens: drafts that will not stand do not."""
        assert self.engine is not None
        served = self.engine.live[key]
        tokens, same = self.expected[served.request].tokens, 0
        for token, want in zip(served.generated + served.drafts, tokens, strict=False):
            if token != want:
                break
            same += 1
        return served.prompt_tokens + same


Wanted = list[tuple[int, Table, np.ndarray]]  # request row, table, its entries


class LiveChecks:
    """`table_truth` inside every step; the state invariants and `replay_equal` after it.

    Args:
        coordinator: the scheduler side.
        worker: the rank whose tables are compared.
    """

    def __init__(self, coordinator: HiSparseCoordinator, worker: HiSparseWorker) -> None:
        self.coordinator = coordinator
        self.worker = worker
        self.violations: list[Violation] = []
        self.checked = {"table_truth": 0, "replay_equal": 0}
        self._looked: list[tuple[int, Wanted, Fetch]] = []  # on their way from the device
        self._codec = Codec(EVENT_TYPES)
        self._shadow = State(coordinator.config)
        self._cursor = LogCursor(coordinator.log, 0)
        self._drifted = False

    def probe_tables(self) -> None:
        """Compare the tables of the step's requests, on the compute stream, as the step sees them.

        Call between the step's command and its first access: later the scheduler moves on.
        """
        state = self.coordinator.state
        rows = np.flatnonzero(state.rows.live & (state.rows.last_step == state.step)).tolist()
        wanted = [(row, t, state.table(t)[row].copy()) for row in rows for t in Table]
        step = state.step
        self.worker.device.compute.enqueue(lambda: self._look(step, wanted))

    def _look(self, step: int, wanted: Wanted) -> None:
        """Inside the op: take the tables as they are now, to be compared once they are here."""
        tables = (as_tensor(self.worker.tables[t]) for t in Table)
        fetch = Fetch(*tables)
        if fetch.ready:
            self._compare(step, wanted, fetch)
        else:
            self._looked.append((step, wanted, fetch))

    def _compare(self, step: int, wanted: Wanted, fetch: Fetch) -> None:
        self.checked["table_truth"] += 1
        tables = dict(zip(Table, fetch.result(), strict=True))
        for row, table, want in wanted:
            have = tables[table][row]
            width = min(len(want), len(have))
            if (want[:width] != have[:width]).any():
                entry = int(np.argmax(want[:width] != have[:width]))
                text = (
                    f"step {step}, table {table.name} row {row} entry {entry}: the scheduler has "
                    f"{want[entry]}, the worker {have[entry]}"
                )
                self.violations.append(Violation("table_truth", self.coordinator.state.seq, text))

    def after_step(self) -> None:
        """State invariants, and `replay_equal`: every event since the last step, written and read
        back, folded into a second state that must equal the live one byte for byte."""
        coordinator, codec = self.coordinator, self._codec
        for looked in self._looked:
            self._compare(*looked)
        self._looked.clear()
        if coordinator.checker is not None:
            coordinator.checker.state(coordinator.state)
        for seq, event in self._cursor.take():
            evolve(self._shadow, codec.decode(*codec.encode(event)), seq)  # type: ignore[arg-type]
        self.checked["replay_equal"] += 1
        replayed, live = digest(self._shadow), coordinator.digest()
        if replayed != live and not self._drifted:
            self._drifted = True
            text = f"step {coordinator.state.step}: the fold gives {replayed}, live is {live}"
            self.violations.append(Violation("replay_equal", coordinator.state.seq, text))
