"""The cache as the built-in model sees it, and rows kept beside it while they are only drafts.

`KVAccess` is what a model asks of a cache during one step; tiers and the dense oracle are two of
them. `RowsBeside` is a third, over any of them: it reads what the cache holds and writes nothing
to it, so that a proposal leaves no trace.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hisparse.device.rows import StepRows


class KVAccess(Protocol):
    """The cache as the model sees it, during one step. All arrays are host numpy, uint8."""

    def write(self, layer: int, data: np.ndarray) -> None:
        """Store the step's rows of `layer`: uint8 [n, row_bytes], in `StepRows` order."""

    def write_index(self, group: int, data: np.ndarray) -> None:
        """Store the step's indexer rows of `group`: uint8 [n, index_row_bytes]."""

    def index_keys(self, group: int, row: int, length: int) -> np.ndarray:
        """Indexer rows 0..length-1 of request row `row`: uint8 [length, index_row_bytes]."""
        ...

    def gather(self, layer: int, top_k: np.ndarray | None) -> np.ndarray:
        """Selected rows: uint8 [n, k, row_bytes], zeros where the selection is -1.

        A leader passes its selection, int32 [n, k]; a follower passes None and gets the rows of
        its own layer under its leader's selection.
        """
        ...


class StepCache(KVAccess, Protocol):
    """A cache that must be told which tokens the coming calls are about."""

    def begin(self, rows: StepRows) -> None: ...


class RowsBeside(KVAccess):
    """One new row a request and pass, behind the rows that `kv` holds.

    Args:
        kv: the cache; of each request it holds the positions before ``rows.positions``.
        rows: one token a request, at its first position that is not in the cache.
    """

    def __init__(self, kv: StepCache, rows: StepRows) -> None:
        self._kv = kv
        self._rows = rows
        self._at = {int(row): i for i, row in enumerate(rows.rows)}
        self._ahead = 0
        self._latent: dict[int, list[np.ndarray]] = {}  # layer -> uint8 [m, row_bytes] a pass
        self._index: dict[int, list[np.ndarray]] = {}
        self._top_k = np.zeros((0, 1), dtype=np.int32)
        kv.begin(rows)

    def advance(self) -> None:
        """The next pass is about the next position of every request."""
        self._ahead += 1

    def write(self, layer: int, data: np.ndarray) -> None:
        self._latent.setdefault(layer, []).append(data)

    def write_index(self, group: int, data: np.ndarray) -> None:
        self._index.setdefault(group, []).append(data)

    def index_keys(self, group: int, row: int, length: int) -> np.ndarray:
        held = self._kv.index_keys(group, row, length - self._ahead - 1)
        mine = [data[self._at[row]] for data in self._index[group]]
        return np.concatenate([held, np.stack(mine)])

    def gather(self, layer: int, top_k: np.ndarray | None) -> np.ndarray:
        first = self._rows.positions[:, None]
        if top_k is not None:
            self._top_k = top_k
            top_k = np.where(top_k < first, top_k, -1).astype(np.int32)
        out = self._kv.gather(layer, top_k)
        for i, j in np.argwhere(self._top_k >= first).tolist():
            out[i, j] = self._latent[layer][self._top_k[i, j] - first[i, 0]][i]
        return out
