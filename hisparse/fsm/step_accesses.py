"""What the rows of a step may touch on the device, from the scheduler's tables alone. Pure.

Row writes and gathers find their blocks on the device, so that no stream names them. What is known
is *all* that they may touch: every page before their end (from the resident block, else from the
host page), the blocks that the new rows go to, the index blocks, the hot blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hisparse.fsm import events as ev
from hisparse.fsm.columns import I64, ids
from hisparse.fsm.state import State
from hisparse.fsm.wire import Table

I32 = npt.NDArray[np.int32]
MASKED_MAX = 4096  # ids of a pool small enough to be looked at as a mask, however few are named


class StepAccesses(NamedTuple):
    """What the rows of a step may touch, by (pool, write)."""

    gpu_reads: I64
    gpu_writes: I64
    host_reads: I64


def step_accesses(state: State, planned: ev.StepPlanned) -> StepAccesses:
    """All that the rows of `planned` may read and write under the tables of `state`."""
    rows, starts = ids(planned.rows), ids(planned.starts)
    ends, size = starts + ids(planned.counts), state.page_size
    pages = -(-int(ends.max(initial=0)) // size)  # no row needs an entry behind these
    resident = state.table(Table.RESIDENT)[rows, :pages]
    host = state.table(Table.HOST)[rows, :pages]
    index, hot = state.table(Table.INDEX)[rows], state.table(Table.HOT)[rows]
    written = [hot.ravel()]
    for table, unit in ((Table.RESIDENT, size), (Table.INDEX, size * state.index_pages_per_block)):
        written += _between(state.table(table), rows, starts // unit, (ends - 1) // unit)
    needed = np.arange(resident.shape[1]) * size < ends[:, None]
    blocks, host_pages = len(state.blocks.state), len(state.pages.state)
    return StepAccesses(
        _ids(blocks, resident[needed], index.ravel()),
        _ids(blocks, *written),
        _ids(host_pages, host[needed & (resident == 0)]),
    )


def _between(table: I32, rows: I64, first: I64, last: I64) -> list[I32]:
    """The entries ``[first[i], last[i]]`` of each row ``rows[i]``, in parts."""
    parts = [table[rows, first]]
    for i in (first < last).nonzero()[0].tolist():
        parts.append(table[rows[i], first[i] + 1 : last[i] + 1])
    return parts


def _ids(size: int, *parts: I32) -> I64:
    """The ids in `parts` that a pool of `size` has, ascending, null left out."""
    named = parts[0] if len(parts) == 1 else np.concatenate(parts)
    named = named[named.view(np.uint32) - np.uint32(1) < size - 1]  # 0 < id < size, in one look
    if size > MASKED_MAX and 16 * len(named) < size:
        return np.unique(named).astype(np.int64)
    mask = np.zeros(size, dtype=np.bool_)  # cheaper than a sort
    mask[named] = True
    return mask.nonzero()[0]
