"""The four tables on the device, as attention and the resolver read them.

Owns int32 ``[max_requests, entries]`` for each `wire.Table`. They change only inside
compute-stream ops (`Kernels.change_tables`), so a kernel queued earlier still sees the old entry.
Nobody keeps a second copy: the scheduler holds the truth, these follow its commands.

Holds at its edges: every id is a block (host page for HOST) of its pool; 0 means none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hisparse.device.backend import Array, Device
from hisparse.device.layout import Geometry
from hisparse.errors import ProtocolError
from hisparse.fsm.wire import Table, TableUpdate

_PAGED = (Table.RESIDENT, Table.HOST)


class DeviceTables:
    """RESIDENT and HOST have an entry a page, INDEX an entry a block, HOT an entry a hot block."""

    def __init__(self, geometry: Geometry, device: Device) -> None:
        self.geometry = geometry
        self.entries = {
            Table.RESIDENT: geometry.max_pages,
            Table.HOST: geometry.max_pages,
            Table.INDEX: geometry.max_index_blocks,
            Table.HOT: geometry.hot_blocks,
        }
        self.arrays: dict[Table, Array] = {
            table: device.allocate_table(geometry.max_requests, entries, guard=int(table in _PAGED))
            for table, entries in self.entries.items()
        }

    def __getitem__(self, table: Table) -> Array:
        return self.arrays[table]

    def check(self, update: TableUpdate) -> None:
        """Raise ProtocolError if `update` names a row, entry or id that does not exist."""
        limit = self.geometry.host_pages if update.table == Table.HOST else self.geometry.gpu_blocks
        end = update.entry + len(update.ids)
        if not 0 <= update.row < self.geometry.max_requests:
            raise ProtocolError(f"{update}: row is not in 0..{self.geometry.max_requests - 1}")
        if update.entry < 0 or end > self.entries[update.table]:
            raise ProtocolError(
                f"{update}: entries [{update.entry}, {end}) leave the table of "
                f"{self.entries[update.table]}"
            )
        if update.ids and (min(update.ids) < 0 or max(update.ids) >= limit):
            raise ProtocolError(f"{update}: an id is not in 0..{limit - 1}")

    def reset(self, rows: Sequence[int]) -> None:
        """Clear all four tables of `rows` (an op of a backend whose tables are numpy)."""
        for array in self.arrays.values():
            array[list(rows)] = 0

    def apply(self, update: TableUpdate) -> npt.NDArray[np.int64]:
        """Replace the entries; returns those that named another id (like `reset`)."""
        array = self.arrays[update.table]
        here = slice(update.entry, update.entry + len(update.ids))
        new = np.asarray(update.ids, dtype=np.int32)
        old = array[update.row, here]
        gone = np.flatnonzero((old != new) & (old != 0)) + update.entry
        array[update.row, here] = new
        return gone
