"""TaggedRunner: the model's place in a simulation, with rows whose bytes the oracle knows.

Every access is queued; a check runs inside the stream, when the bytes are read, and raises
`InvariantViolation` ("content") for other bytes than the oracle's (`hisparse.testing.content`).
Nothing ever waits for the device, so that the compute stream lags as far as the waits allow.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from hisparse.connector.base import KVConnectorOutput
from hisparse.connector.hisparse import HiSparseConnector
from hisparse.device.cpu.streams import SimDevice
from hisparse.device.rows import StepRows
from hisparse.engine.loop import ReferenceEngine
from hisparse.engine.verify import LiveChecks
from hisparse.errors import InvariantViolation
from hisparse.fsm.state import Key
from hisparse.testing.content import Chain, row_bytes
from hisparse.testing.worlds import EOS

INDEX_CACHE = 1000  # cache numbers of the index groups, beside those of the layers


class TaggedRunner:
    """Writes rows that the oracle knows, reads random selections, checks bytes on the device.

    Every access is queued; the checks run inside the stream, when the bytes are read.
    """

    def __init__(
        self, connector: HiSparseConnector, device: SimDevice, live: LiveChecks, rng: random.Random
    ) -> None:
        self.connector = connector
        self.worker = connector.worker
        self.device = device
        self.live = live
        self.rng = rng
        self.random = np.random.RandomState(rng.randrange(1 << 31))
        self.engine: ReferenceEngine | None = None
        self.chains: dict[str, Chain] = {}
        self.rows_checked = 0
        self.tolerates_faults = False
        self.spec = connector.worker.config.schedule.lookahead_rows
        self.guesses = random.Random(rng.random() if self.spec else 0)
        self.tainted: dict[Key, set[tuple[int, int]]] = {}  # (step, row) that read other bytes

    def execute(
        self, meta: Any, tokens: np.ndarray, rows: StepRows, sampled: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, KVConnectorOutput]:
        self.connector.start_load_kv(meta)
        self.live.probe_tables()
        if len(tokens):
            self._forward(rows)
        self.connector.wait_for_save()
        self.device.advance(self.rng.randrange(40))
        chosen = np.array([self._choose(tokens, rows, i) for i in sampled], dtype=np.int64)
        return chosen, np.zeros((len(chosen), 0), dtype=np.float32), self.connector.get_output()

    def _choose(self, tokens: np.ndarray, rows: StepRows, i: int) -> int:
        """The token after the step's `i`-th: where a draft follows it, that one, more often than
        not."""
        follows = i + 1 < len(tokens) and rows.rows[i + 1] == rows.rows[i]
        if follows and self.guesses.random() < 0.6:
            return int(tokens[i + 1])
        return self.rng.randrange(EOS)

    def drafts(self) -> dict[int, list[int]]:
        """Drafts of everybody, some of which will stand."""
        rows = range(self.worker.config.schedule.max_requests if self.spec else 0)
        return {row: [self.guesses.randrange(EOS) for _ in range(self.spec)] for row in rows}

    def _forward(self, rows: StepRows) -> None:
        layout, tags = self.worker.config.layout, self._tags(rows)
        own = np.array([tags[r][p] for r, p in zip(rows.rows, rows.positions, strict=True)])
        for group, layers in enumerate(layout.index_groups):
            cache = INDEX_CACHE + group
            self.worker.index.write(group, rows, row_bytes(own, cache, layout.index_row_bytes))
            for row in tags:
                length = int(rows.positions[rows.rows == row].max()) + 1
                want = row_bytes(tags[row][:length], cache, layout.index_row_bytes)
                keys = self.worker.index.keys(group, row, length)
                self._expect(keys, want, f"index {group}", rows, row)
            selection = self._select(rows)
            for layer in layers:
                handle = self.worker.handles[layer]
                handle.write(rows, row_bytes(own, layer, layout.row_bytes))
                picked = handle.gather(rows, selection if layer == layers[0] else None)
                want = np.zeros((*selection.shape, layout.row_bytes), dtype=np.uint8)
                for i, (row, chosen) in enumerate(zip(rows.rows, selection, strict=True)):
                    kept = chosen >= 0
                    want[i, kept] = row_bytes(tags[row][chosen[kept]], layer, layout.row_bytes)
                self._expect(picked, want, f"layer {layer}", rows)

    def _tags(self, rows: StepRows) -> dict[int, np.ndarray]:
        """Tags of every position, by request row of the step."""
        assert self.engine is not None
        state = self.engine.coordinator.state
        tags = {}
        for row in np.unique(rows.rows).tolist():
            served = self.engine.live[state.request_of(row).key]
            tags[row] = self.chains.setdefault(served.request, Chain()).tags(
                served.tokens + served.drafts
            )
        return tags

    def _select(self, rows: StepRows) -> np.ndarray:
        """int32 [n, k]: random causal positions, some padding, some duplicates, some locality."""
        k = self.worker.config.policy.top_k
        width = np.where(self.random.rand(len(rows.positions), 1) < 0.3, 6, 1 << 30)
        reach = np.minimum(rows.positions[:, None] + 1, width)
        back = (self.random.rand(len(rows.positions), k) * reach).astype(np.int64)
        chosen = rows.positions[:, None] - back
        if self.random.rand() < 0.5:
            chosen = chosen // 2
        chosen[self.random.rand(*chosen.shape) < 0.1] = -1
        return np.asarray(chosen, dtype=np.int32)

    def _expect(
        self, pending: Any, want: np.ndarray, what: str, rows: StepRows, keys_of: int | None = None
    ) -> None:
        """Check `pending` when it is read: rows gathered for each of `rows`, or the indexer rows of
        request row `keys_of`, which all its rows of the step read. With faults, rows that read the
        page of a failed copy are noted instead: they may never be confirmed."""
        assert self.engine is not None
        state = self.engine.coordinator.state
        seq, step = state.seq, state.step
        keys = {r: state.request_of(r).key for r in set(rows.rows.tolist())}

        def check(data: np.ndarray) -> None:
            self.rows_checked += want.size // want.shape[-1]
            wrong = (data != want).any(axis=-1)
            if wrong.any() and self.tolerates_faults:
                by_row = wrong.any(axis=-1) if keys_of is None else rows.rows == keys_of
                for i in np.flatnonzero(by_row).tolist():
                    key = keys[int(rows.rows[i])]
                    self.tainted.setdefault(key, set()).add((step, int(rows.positions[i])))
            elif wrong.any():
                at = np.argwhere(wrong)[0].tolist()
                raise InvariantViolation(
                    "content", f"{what} in step {step} read other bytes at {at}", seq=seq
                )

        pending.on_done(check)
