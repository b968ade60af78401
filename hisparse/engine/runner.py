"""Runners: the model side of the reference engine.

`TieredRunner` runs a model over a worker's tiers. `RecordedRunner` replays tokens that an earlier
run produced, with no forward pass: what it serves to find out is how many requests a *scheduler*
holds at once, which depends on lengths alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hisparse.connector.base import KVConnectorBase_V1, KVConnectorOutput
from hisparse.device.rows import StepRows
from hisparse.device.worker import HiSparseWorker
from hisparse.engine.builtin_kv import KVAccess
from hisparse.engine.reference import Model
from hisparse.engine.speculate import standing

RowCheck = Callable[[int, StepRows, np.ndarray, np.ndarray], None]


class TieredCache(KVAccess):
    """A model's view of a worker: every access goes through the handles that attention holds.

    Args:
        worker: owns the handles.
        check: called with (layer, rows, top-k, gathered bytes) after each gather.
    """

    def __init__(self, worker: HiSparseWorker, check: RowCheck | None = None) -> None:
        self.worker = worker
        self.check = check
        self._rows = StepRows(np.zeros(0, np.int32), np.zeros(0, np.int64))
        self._selection = np.zeros((0, 1), dtype=np.int32)

    def begin(self, rows: StepRows) -> None:
        """Set the tokens that the coming calls are about."""
        self._rows = rows

    def write(self, layer: int, data: np.ndarray) -> None:
        self.worker.handles[layer].write(self._rows, data)

    def write_index(self, group: int, data: np.ndarray) -> None:
        self.worker.index.write(group, self._rows, data)

    def index_keys(self, group: int, row: int, length: int) -> np.ndarray:
        keys: np.ndarray = self.worker.index.keys(group, row, length).result()
        return keys

    def gather(self, layer: int, top_k: np.ndarray | None) -> np.ndarray:
        if top_k is not None:
            self._selection = top_k
        out: np.ndarray = self.worker.handles[layer].gather(self._rows, top_k).result()
        if self.check is not None:
            self.check(layer, self._rows, self._selection, out)
        return out


class TieredRunner:
    """Runs `model` over the tiers; the connector is the worker's.

    Args:
        on_begin: called after the step's command was handed over, before its first access.
        spec: drafts that `model`, which then has a draft head, proposes for each sampling request.
    """

    def __init__(
        self,
        model: Model,
        cache: TieredCache,
        connector: KVConnectorBase_V1,
        on_begin: Callable[[], None] | None = None,
        spec: int = 0,
    ) -> None:
        self.spec = spec
        self._drafts: dict[int, list[int]] = {}
        self.model = model
        self.cache = cache
        self.connector = connector
        self.on_begin = on_begin

    def execute(
        self, meta: Any, tokens: np.ndarray, rows: StepRows, sampled: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, KVConnectorOutput]:
        self.connector.start_load_kv(meta)
        if self.on_begin is not None:
            self.on_begin()
        logits = np.zeros((0, self.model.vocab_size), dtype=np.float32)
        if len(tokens):
            self.cache.begin(rows)
            logits = self.model.forward(tokens, rows, self.cache)
        wanted = logits[list(sampled)]
        chosen = self.model.choose(wanted) if len(sampled) else np.zeros(0, dtype=np.int64)
        self._drafts = self._propose(tokens, rows, np.array(sampled, dtype=np.int64), chosen)
        self.connector.wait_for_save()
        return chosen, wanted, self.connector.get_output()

    def drafts(self) -> dict[int, list[int]]:
        """What the draft head proposed in the last step, by request row."""
        return self._drafts

    def _propose(
        self, tokens: np.ndarray, rows: StepRows, sampled: np.ndarray, chosen: np.ndarray
    ) -> dict[int, list[int]]:
        """Drafts behind each request's newest token, which is not EOS."""
        if not self.spec or not len(sampled):
            return {}
        owners, newest, places = rows.rows[sampled], [], []
        for row in np.unique(owners).tolist():
            mine = np.flatnonzero(owners == row)
            at = sampled[mine]
            last = standing(tokens[at[1:]].tolist(), chosen[mine].tolist(), self.model.eos) - 1
            if chosen[mine[last]] != self.model.eos:
                newest.append(int(chosen[mine[last]]))
                places.append((row, int(rows.positions[at[last]]) + 1))
        if not newest:
            return {}
        where = StepRows(
            np.array([row for row, _ in places], dtype=np.int32),
            np.array([position for _, position in places], dtype=np.int64),
        )
        found = self.model.propose(np.array(newest), where, self.cache, self.spec)
        return {row: drafts for (row, _), drafts in zip(places, found.tolist(), strict=True)}


class RecordedRunner:
    """Answers with recorded tokens.

    Args:
        next_token: (request row, position of the token just computed) -> next token.
    """

    def __init__(self, next_token: Callable[[int, int], int]) -> None:
        self.next_token = next_token

    def execute(
        self, meta: Any, tokens: np.ndarray, rows: StepRows, sampled: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, KVConnectorOutput]:
        assert meta is None, "a recorded run has no worker: its scheduler must have nothing to send"
        chosen = [self.next_token(int(rows.rows[i]), int(rows.positions[i])) for i in sampled]
        empty = np.zeros((len(chosen), 0), dtype=np.float32)
        return np.array(chosen, dtype=np.int64), empty, KVConnectorOutput()
