"""Checksums of the rows of one layer, on the `cpu` backend (``checks="on"``).

Owns uint32 ``[max_requests, positions]``; read and written inside compute-stream ops. Rows that are
copied out are not looked at here: what simulates reads them all, and says more about a wrong one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hisparse.device.checks import checksum_bytes, checksums, find_wrong
from hisparse.device.handle import PagedCacheView
from hisparse.device.layout import Geometry
from hisparse.device.plan import I64, U8, Plan
from hisparse.errors import InvariantViolation


class LayerChecks:
    """What was written to one layer, as far as it is known."""

    def __init__(self, geometry: Geometry, layer: int) -> None:
        self._layer = layer
        reach = geometry.max_pages * geometry.page_size if checksum_bytes(geometry).taken else 0
        self._sums = np.zeros((geometry.max_requests, reach), dtype=np.uint32)

    def note(self, requests: I64, positions: I64, data: U8) -> None:
        """`data` uint8 ``[n, row_bytes]`` was written there."""
        if self._sums.size:
            self._sums[requests, positions] = checksums(data)

    def forget(self, requests: Sequence[int]) -> None:
        """The request rows are handed on: their rows are others', which may come with a prefix."""
        self._sums[list(requests)] = 0

    def check(self, plan: Plan, packed: I64, view: PagedCacheView) -> None:
        """Raise InvariantViolation ``content`` for a row of the plan, at `packed` in ``view.rows``,
        that is not what was written."""
        assert plan.chosen is not None, "a plan without checks"
        requests, positions = plan.chosen
        real = np.ones(positions.shape, np.bool_) if plan.padding is None else ~plan.padding
        i, j = np.nonzero(real)
        row, position = requests[i], positions[i, j]
        sums = self._sums
        known = sums[row, position] if sums.size else np.zeros(len(row), dtype=np.uint32)
        wrong = find_wrong(view.rows.take(packed[i, j], axis=0), known)
        if wrong is not None:
            first, why = wrong
            raise InvariantViolation(
                "content",
                f"row {row[first]}, position {position[first]}, layer {self._layer}: {why}",
            )
