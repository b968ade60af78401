"""`TieredCache`: a model's view of a worker's tiers, on the model's device.

Keys and rows go through the worker's handles. Tensors are handed on as they are where the backend
works on a GPU; on `cpu` they share memory with the backend's arrays.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from hisparse.config import ceil_div
from hisparse.device.exchange import as_tensor
from hisparse.device.rows import StepRows
from hisparse.device.worker import HiSparseWorker
from hisparse.engine.builtin_kv import FixedKV
from hisparse.fsm.wire import Table


class Gathered(NamedTuple):
    """What one gather was asked for, and what it gave: uint8 [n, k, row_bytes]."""

    layer: int
    rows: StepRows
    top_k: torch.Tensor
    data: torch.Tensor
    plan: Any
    """a leader's plan; None of a follower"""


class TieredCache(FixedKV):
    """A model's view of a worker: every access goes through the handles that attention holds.

    Args:
        worker: owns the handles.
        device: the model's; the worker's backend works there too.
        keep: remember what was gathered, in `gathered`, until the next step.
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
        self._bound: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._rows = StepRows(np.zeros(0, np.int32), np.zeros(0, np.int64))
        self._requests = self._selection = torch.zeros((0, 1), dtype=torch.int32)

    def begin(self, rows: StepRows) -> None:
        """Set the tokens that the coming calls are about."""
        self._rows = rows
        if rows.span is not None:
            self._requests = rows.rows[:: rows.span]
            if self.device.type == "cpu":  # whose backend takes host arrays, and queues
                self._rows = StepRows(rows.rows.numpy().copy(), rows.positions.numpy().copy())

    def write(self, layer: int, data: torch.Tensor) -> None:
        self.worker.handles[layer].write(self._rows, self._given(data))

    def write_index(self, group: int, data: torch.Tensor) -> None:
        self.worker.index.write(group, self._rows, self._given(data))

    def index_keys(self, group: int, row: int, length: int) -> torch.Tensor:
        return as_tensor(self.worker.index.keys(group, row, length).result())

    def all_keys(self, group: int, positions: int) -> torch.Tensor:
        entries = ceil_div(positions, self.worker.index.views[group].span.rows_per_block)
        blocks, table = self._index(group)

        def read() -> torch.Tensor:
            named = table[self._requests.clamp(min=0).long(), :entries]
            return blocks[named.long()].flatten(1, 2)[:, :positions]

        keys = as_tensor(self.worker.device.produce(read).result())
        beyond = positions - keys.shape[1]  # drafts may lie behind the last position of the tables
        return torch.nn.functional.pad(keys, (0, 0, 0, beyond)) if beyond else keys

    def _index(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Blocks of a group, uint8 [blocks, rows, bytes], and the INDEX table: the memory itself,
        bound once, since a capture makes no such calls."""
        if group not in self._bound:
            worker = self.worker
            blocks = as_tensor(worker.index.views[group].array)
            self._bound[group] = blocks, as_tensor(worker.tables[Table.INDEX])
        return self._bound[group]

    def gather(self, layer: int, top_k: torch.Tensor | None) -> torch.Tensor:
        if top_k is not None:
            self._selection = top_k
        given = None if top_k is None else self._given(top_k)
        pending = self.worker.handles[layer].gather(self._rows, given)
        out = as_tensor(pending.result())
        if self.keep:
            group = self.worker.handles[layer].runtime.group
            plan = None if top_k is None else group.calls[-1].plan
            self.gathered.append(Gathered(layer, self._rows, self._selection, out, plan))
        return out

    def _given(self, tensor: torch.Tensor) -> Any:
        """`tensor` as the worker's backend takes it."""
        return tensor if tensor.is_cuda else tensor.numpy()
