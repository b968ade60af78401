"""`KVAccess`: what a model asks of a cache during one step, whatever stands behind it.

The tiers, the dense oracle and rows kept beside either are such caches; the models on the other
side know none of them. Every tensor lies on the model's device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class KVAccess(Protocol):
    """The cache as the model sees it, during one step. Rows are uint8 tensors."""

    def write(self, layer: int, data: torch.Tensor) -> None:
        """Store the step's rows of `layer`: uint8 [n, row_bytes], in `StepRows` order."""

    def write_index(self, group: int, data: torch.Tensor) -> None:
        """Store the step's indexer rows of `group`: uint8 [n, index_row_bytes]."""

    def index_keys(self, group: int, row: int, length: int) -> torch.Tensor:
        """Indexer rows 0..length-1 of request row `row`: uint8 [length, index_row_bytes]."""
        ...

    def gather(self, layer: int, top_k: torch.Tensor | None) -> torch.Tensor:
        """Selected rows: uint8 [n, k, row_bytes], zeros where the selection is -1.

        A leader passes its selection, int32 [n, k]; a follower passes None and gets the rows of
        its own layer under its leader's selection.
        """
        ...
