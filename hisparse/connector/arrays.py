"""`StepArrays`: what an engine passes to a rank in a step, and what it gets back.

Owns the memory that the answers of `resolve` lie in on `cpu`, a layer each, used again by the
layer's next answer, but for steps in which all layers together answer more than
`ANSWERS_BYTES_MAX`; a GPU's comes from a caching allocator. Arrays come back in the kind in which
the last ones were given (`hisparse.device.exchange`): torch for torch, numpy for numpy; on a GPU
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hisparse.config import HiSparseConfig
from hisparse.connector.plan import StepPlan
from hisparse.errors import UsageError

if TYPE_CHECKING:
    from hisparse.device.backend import Device

ANSWERS_BYTES_MAX = 1 << 28


class StepArrays:
    """Of one `WorkerConnector`."""

    def __init__(self, config: HiSparseConfig, device: Device) -> None:
        self.config = config
        self.device = device
        self._tensors = device.name != "cpu"  # what the engine gets back
        self._empty_widths: dict[int, int] = {}  # by group, of a leader's top-k without rows
        self._answers: dict[int, np.ndarray] = {}  # by layer

    def given(
        self, array: Any, what: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = ("uint8",)
    ) -> Any:
        """`array` as the backend takes it. Raises UsageError, beginning with `what`, for one that
        it cannot take, of another dtype or shape (-1: any extent)."""
        from hisparse.device.exchange import is_tensor, taken

        made = taken(self.device, array, what, dtypes, shape)
        self._tensors = is_tensor(array) or self.device.name != "cpu"
        return made

    def selected(self, plan: StepPlan, top_k: Any, what: str) -> Any:
        """A leader's `top_k`, int32 or int64 ``[n, k]``, as the backend takes it. Raises UsageError
        as `given` does, and where it lies on the host also if something selects below -1, or what
        its request has not written."""
        chosen = self.given(top_k, what, (len(plan), -1), ("int32", "int64"))
        if isinstance(chosen, np.ndarray) and chosen.size:
            ends = np.repeat(np.add(plan.first_positions, plan.counts), plan.counts)
            wrong = (chosen < -1) | (chosen >= ends[:, None])
            if wrong.any():
                i, j = (int(x[0]) for x in np.nonzero(wrong))
                raise UsageError(
                    f"{what}[{i}, {j}] is {chosen[i, j]}: token {i} may select 0..{ends[i] - 1}, "
                    "which its request has written, or -1 for none"
                )
        return chosen

    def memory(self, layer: int, n: int, k: int | None) -> np.ndarray | None:
        """Where the layer's answer goes, uint8 ``[n, k, row_bytes]``; None: to memory of its
        own."""
        width = self.config.layout.row_bytes
        if self.device.name != "cpu" or not k:
            return None
        size = n * k * width
        if size * self.config.layout.layers > ANSWERS_BYTES_MAX:
            return None
        held = self._answers.get(layer)
        if held is None or held.size < size:
            held = self._answers[layer] = np.empty(size, dtype=np.uint8)
        return held[:size].reshape(n, k, width)

    def answer(self, array: Any) -> Any:
        """`array` of the backend, in the engine's kind."""
        if not self._tensors:
            return array
        from hisparse.device.exchange import as_tensor

        return as_tensor(array)

    def nothing(self, group: int, top_k: Any) -> Any:
        """What a step without rows reads: uint8 ``[0, k, row_bytes]``."""
        from hisparse.device.exchange import nothing

        if top_k is not None:
            self._empty_widths[group] = top_k.shape[1]
        shape = (0, self._empty_widths.get(group, 0), self.config.layout.row_bytes)
        return nothing(self.device, shape, self._tensors)
