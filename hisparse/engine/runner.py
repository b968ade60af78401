"""Runners: what turns a planned step into tokens.

`TieredCache` gives a model the tiers: keys and rows through the worker's handles, on the model's
device (on `cpu`, the tensors share memory with the backend's arrays). `TieredRunner` runs the model
over them. `RecordedRunner` replays tokens that an earlier run produced, with no forward pass: what
it serves to find out is how many requests a *scheduler* holds at once, which depends on lengths
alone.

Between a step's command and the read of its tokens nothing waits for the device: all its work is
queued by then, and torch raises where something would wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hisparse.connector.base import KVConnectorBase_V1, KVConnectorOutput
from hisparse.device.rows import StepRows
from hisparse.device.worker import HiSparseWorker
from hisparse.engine.accelerator import Fetch, as_tensor, forbid_waiting, upload
from hisparse.engine.builtin_kv import KVAccess
from hisparse.engine.reference import Model
from hisparse.engine.speculate import standing

RowCheck = Callable[[int, StepRows, np.ndarray, np.ndarray], None]


class Gathered(NamedTuple):
    """What one gather was asked for, and what it gave: uint8 [n, k, row_bytes]."""

    layer: int
    rows: StepRows
    top_k: torch.Tensor
    data: torch.Tensor


class TieredCache(KVAccess):
    """A model's view of a worker: every access goes through the handles that attention holds.

    Args:
        worker: owns the handles.
        device: the model's; the worker's backend works there too.
        keep: remember what was gathered, in `gathered`, until the next `begin_step`.
    """

    def __init__(
        self,
        worker: HiSparseWorker,
        device: torch.device | str = "cpu",
        *,
        keep: bool = False,
    ) -> None:
        self.worker = worker
        self.device = torch.device(device)
        self.keep = keep
        self.gathered: list[Gathered] = []
        self._rows = StepRows(np.zeros(0, np.int32), np.zeros(0, np.int64))
        self._selection = torch.zeros((0, 1), dtype=torch.int32)

    def begin(self, rows: StepRows) -> None:
        """Set the tokens that the coming calls are about."""
        self._rows = rows

    def write(self, layer: int, data: torch.Tensor) -> None:
        self.worker.handles[layer].write(self._rows, self._given(data))

    def write_index(self, group: int, data: torch.Tensor) -> None:
        self.worker.index.write(group, self._rows, self._given(data))

    def index_keys(self, group: int, row: int, length: int) -> torch.Tensor:
        return as_tensor(self.worker.index.keys(group, row, length).result(), self.device)

    def gather(self, layer: int, top_k: torch.Tensor | None) -> torch.Tensor:
        if top_k is not None:
            self._selection = top_k
        given = None if top_k is None else self._given(top_k)
        pending = self.worker.handles[layer].gather(self._rows, given)
        out = as_tensor(pending.result(), self.device)
        if self.keep:
            self.gathered.append(Gathered(layer, self._rows, self._selection, out))
        return out

    def _given(self, tensor: torch.Tensor) -> Any:
        """`tensor` as the worker's backend takes it."""
        return tensor if tensor.is_cuda else tensor.numpy()


class TieredRunner:
    """Runs `model` over the tiers; the connector is the worker's.

    Args:
        on_begin: called after the step's command was handed over, before its first access.
        spec: drafts that `model`, which then has a draft head, proposes for each sampling request.
        check: called with (layer, rows, top-k, gathered bytes) of each gather, when the step's
            device work is done; the cache has to `keep` them.
        logits: bring logits to the host; without, they come back as [n, 0].
    """

    def __init__(
        self,
        model: Model,
        cache: TieredCache,
        connector: KVConnectorBase_V1,
        on_begin: Callable[[], None] | None = None,
        spec: int = 0,
        *,
        check: RowCheck | None = None,
        logits: bool = True,
    ) -> None:
        self.spec = spec
        self._drafts: dict[int, list[int]] = {}
        self.model = model
        self.cache = cache
        self.connector = connector
        self.on_begin = on_begin
        self.check = check
        self.logits = logits

    def execute(
        self, meta: Any, tokens: np.ndarray, rows: StepRows, sampled: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, KVConnectorOutput]:
        self.cache.gathered.clear()
        at = np.array(sampled, dtype=np.int64)
        with forbid_waiting(self.model.device):
            self.connector.start_load_kv(meta)
            if self.on_begin is not None:
                self.on_begin()
            fetch = self._queue(tokens, rows, at)
        chosen, logits = fetch.result()
        with forbid_waiting(self.model.device):
            proposed = self._propose(tokens, rows, at, chosen)
        self._drafts = proposed()
        self._check_gathered()
        self.connector.wait_for_save()
        return chosen, logits, self.connector.get_output()

    def _queue(self, tokens: np.ndarray, rows: StepRows, sampled: np.ndarray) -> Fetch:
        """The step's forward pass; on the way to the host: chosen tokens, and their logits."""
        device = self.model.device
        if not len(tokens):
            return Fetch(torch.zeros(0, dtype=torch.int64), torch.zeros(0, self.model.vocab_size))
        self.cache.begin(rows)
        logits = self.model.forward(tokens, rows, self.cache)[upload(sampled, device)]
        chosen = self.model.choose(logits)
        return Fetch(chosen, logits if self.logits else logits[:, :0])

    def drafts(self) -> dict[int, list[int]]:
        """What the draft head proposed in the last step, by request row."""
        return self._drafts

    def _propose(
        self, tokens: np.ndarray, rows: StepRows, sampled: np.ndarray, chosen: np.ndarray
    ) -> Callable[[], dict[int, list[int]]]:
        """Queue the drafts behind each request's newest token, which is not EOS; the answer waits
        for them."""
        newest, places = newest_tokens(tokens, rows, sampled, chosen, self.model.eos)
        if not self.spec or not len(newest):
            return dict
        fetch = Fetch(self.model.propose(newest, places, self.cache, self.spec))
        owners = places.rows.tolist()
        return lambda: dict(zip(owners, fetch.result()[0].tolist(), strict=True))

    def _check_gathered(self) -> None:
        if self.check is None:
            return
        for layer, rows, top_k, data in self.cache.gathered:
            selected, read = Fetch(top_k, data).result()
            self.check(layer, rows, selected, read)


def newest_tokens(
    tokens: np.ndarray, rows: StepRows, sampled: np.ndarray, chosen: np.ndarray, eos: int
) -> tuple[np.ndarray, StepRows]:
    """The last token that stands of each sampling request, int64 [m], and its place; none for a
    request that ends in EOS."""
    owners, newest, places = rows.rows[sampled], [], []
    for row in np.unique(owners).tolist():
        mine = np.flatnonzero(owners == row)
        at = sampled[mine]
        last = standing(tokens[at[1:]].tolist(), chosen[mine].tolist(), eos) - 1
        if chosen[mine[last]] != eos:
            newest.append(int(chosen[mine[last]]))
            places.append((row, int(rows.positions[at[last]]) + 1))
    where = StepRows(
        np.array([row for row, _ in places], dtype=np.int32),
        np.array([position for _, position in places], dtype=np.int64),
    )
    return np.array(newest, dtype=np.int64), where


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
