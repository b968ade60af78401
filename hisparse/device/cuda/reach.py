"""How far into the pinned pools the device may reach: what commands have named, and no further.

A kernel or a copy finds a host page by a number that some command gave it, in a table entry or in a
list of pages; 0 names nothing, and nobody follows it. So it is enough that the parts that a named
page has in every layer are pinned before the command's work is queued, and a step waits for nothing
else while pools are pinned in the background. Sleep loses what was named: it is refused while a
request has a row of the tables, and a row is cleared when it is handed out. Owns nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hisparse.device.cuda.host_memory import HostMemory
from hisparse.device.layout import NULL, Geometry
from hisparse.fsm.wire import SparseKVOffloadCommand, Table

I64 = npt.NDArray[np.int64]


class HostReach:
    """Waits for what the commands of one worker name of its host pool and its suffix pool."""

    def __init__(self, geometry: Geometry, host: HostMemory, suffix: HostMemory | None) -> None:
        self._geometry = g = geometry
        self._host, self._suffix = host, suffix
        spans = [g.host_span(layer) for layer in range(g.layers)]
        self._layers = np.array([span.offset for span in spans], dtype=np.int64)

    def wait(self, command: SparseKVOffloadCommand) -> None:
        """Block until all that `command` names is pinned: those pieces come next.

        Raises DeviceError where pinning failed and the command names something.
        """
        if not self._host.pinned:
            pages = host_pages(command)
            if pages.size:
                size = self._geometry.page_bytes
                self._host.wait_each(np.add.outer(self._layers, pages * size), size)
        if self._suffix is not None and not self._suffix.pinned:
            pages = suffix_pages(command)
            if pages.size:
                size = self._geometry.index_page_bytes
                self._suffix.wait_each(pages * size, size)


def host_pages(command: SparseKVOffloadCommand) -> I64:
    """int64 ``[n]``: the host pages that tables, copies and poison of `command` name."""
    named = [i for update in command.tables if update.table == Table.HOST for i in update.ids]
    named += [transfer.host for transfer in command.transfers]
    return _distinct([*named, *command.poison_hosts])


def suffix_pages(command: SparseKVOffloadCommand) -> I64:
    """int64 ``[n]``: the pages of the suffix pool that copies and poison of `command` name."""
    named = [transfer.suffix for transfer in command.index_transfers]
    return _distinct([*named, *command.poison_suffixes])


def _distinct(named: list[int]) -> I64:
    return np.setdiff1d(np.array(named, dtype=np.int64), [NULL])
