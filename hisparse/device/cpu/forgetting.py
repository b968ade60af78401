"""What a changed table entry makes stale in a leader's hot-row state. Runs inside compute ops."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hisparse.device.cpu.resolver import CpuResolver
from hisparse.fsm.wire import Table


def forget_entries(
    resolver: CpuResolver, table: Table, row: int, entries: npt.NDArray[np.int64]
) -> None:
    """`entries` of `row` named another id: hot rows that lived there, or came from there, go.

    A HOT entry gave another block to ``page_size`` slots; a HOST entry another page to
    ``page_size`` positions (after a failed copy and a rewind, the old rows are wrong).
    """
    if not resolver.slots:
        return
    size = resolver.geometry.page_size
    for entry in entries.tolist():
        if table == Table.HOT:
            last = min((entry + 1) * size, resolver.slots)
            resolver.forget_slots(row, entry * size, last)
        elif table == Table.HOST:
            resolver.forget_positions(row, entry * size, (entry + 1) * size)
