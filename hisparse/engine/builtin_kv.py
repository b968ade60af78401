"""The cache as the built-in model sees it, and rows kept beside it while they are only drafts.

`KVAccess` is what any model asks of a cache; what steps of fixed shape and drafts ask beyond it
stands here. `RowsBeside` is a cache over any other: it reads what that one holds and writes nothing
to it, so that a proposal leaves no trace.

Every tensor lies on the model's device, from the embedding to the logits; nothing is read on the
host, so that a step of fixed shapes can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Protocol

import torch

from hisparse.device.access import KVAccess
from hisparse.device.rows import StepRows


class FixedKV(KVAccess, Protocol):
    """A cache that a step of fixed shape can read: no length is known on the host."""

    def all_keys(self, group: int, positions: int) -> torch.Tensor:
        """Indexer rows 0..positions-1 of each request of the step, the first of its lines naming
        it: uint8 [requests, positions, index_row_bytes]. What lies behind a request's last row,
        and all of a padding request, is anything."""
        ...


class StepCache(KVAccess, Protocol):
    """A cache that must be told which tokens the coming calls are about."""

    def begin(self, rows: StepRows) -> None: ...


class FixedCache(FixedKV, StepCache, Protocol):
    """Both."""


class RowsBeside(KVAccess):
    """One new row a request and pass, behind the rows that `kv` holds.

    Args:
        kv: the cache; of each request it holds the positions before ``rows.positions``.
        rows: one token a request, at its first position that is not in the cache.
        first: ``rows.positions`` as a tensor, int64 [m].
    """

    def __init__(self, kv: StepCache, rows: StepRows, first: torch.Tensor) -> None:
        self._kv = kv
        self._rows = rows
        self._first = first[:, None]
        self._ahead = 0
        self._latent: dict[int, list[torch.Tensor]] = {}  # layer -> uint8 [m, row_bytes] a pass
        self._index: dict[int, list[torch.Tensor]] = {}
        self._later = self._pass = first  # of the selection: whether it lies beside, and in which
        kv.begin(rows)

    def advance(self) -> None:
        """The next pass is about the next position of every request."""
        self._ahead += 1

    def write(self, layer: int, data: torch.Tensor) -> None:
        self._latent.setdefault(layer, []).append(data)

    def write_index(self, group: int, data: torch.Tensor) -> None:
        self._index.setdefault(group, []).append(data)

    def index_keys(self, group: int, row: int, length: int) -> torch.Tensor:
        held = self._kv.index_keys(group, row, length - self._ahead - 1)
        at = self._rows.rows.tolist().index(row)
        return torch.cat([held, *(data[at : at + 1] for data in self._index[group])])

    def gather(self, layer: int, top_k: torch.Tensor | None) -> torch.Tensor:
        if top_k is not None:
            self._later = top_k >= self._first
            self._pass = (top_k - self._first).clamp_(min=0)
            top_k = top_k.masked_fill(self._later, -1)
        out = self._kv.gather(layer, top_k)
        latent = torch.stack(self._latent[layer], 1)  # [m, passes, row_bytes]
        requests = torch.arange(len(latent), device=latent.device)[:, None]
        return torch.where(self._later[..., None], latent[requests, self._pass], out)


class FixedRowsBeside(RowsBeside):
    """`RowsBeside` for a step of fixed shape."""

    def __init__(self, kv: FixedCache, rows: StepRows, first: torch.Tensor) -> None:
        super().__init__(kv, rows, first)
        self._fixed = kv

    def all_keys(self, group: int, positions: int) -> torch.Tensor:
        keys = self._fixed.all_keys(group, positions)
        beside = torch.stack(self._index[group], 1)  # [m, passes, index_row_bytes]
        at = self._first + torch.arange(beside.shape[1], device=beside.device)
        return keys.scatter(1, at[..., None].expand_as(beside), beside)
