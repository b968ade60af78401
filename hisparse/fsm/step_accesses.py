"""What the rows of a step may touch on the device, from the scheduler's tables alone. Pure.

Row writes and gathers find their blocks on the device, so that no stream names them. What is known
is *all* that they may touch: every page before their end (from the resident block, else from the
host page), the blocks that the new rows go to, the index blocks, the hot blocks.
"""

from __future__ import annotations

from operator import add
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hisparse.fsm import events as ev
from hisparse.fsm.columns import I64, ids, some
from hisparse.fsm.state import State
from hisparse.fsm.wire import Table

I32 = npt.NDArray[np.int32]
FEW = 256  # resident entries of a step up to which plain numbers are faster than arrays
MASKED_MAX = 4096  # ids of a pool small enough to be looked at as a mask, however few are named


class StepAccesses(NamedTuple):
    """What the rows of a step may touch, by (pool, write)."""

    gpu_reads: I64
    gpu_writes: I64
    host_reads: I64


NOTHING = StepAccesses(*(np.zeros(0, dtype=np.int64) for _ in range(3)))


def step_accesses(state: State, planned: ev.StepPlanned) -> StepAccesses:
    """All that the rows of `planned` may read and write under the tables of `state`."""
    if not planned.rows:
        return NOTHING
    size = state.page_size
    longest = max(map(add, planned.starts, planned.counts))
    pages = -(-longest // size)  # no row needs an entry behind these
    if pages * len(planned.rows) <= FEW:
        return _of_few(state, planned)
    rows, starts = ids(planned.rows), ids(planned.starts)
    ends = starts + ids(planned.counts)
    resident = state.table(Table.RESIDENT)[rows, :pages]
    index, hot = state.table(Table.INDEX)[rows], state.table(Table.HOT)[rows]
    written = [hot.ravel()]
    for table, unit in ((Table.RESIDENT, size), (Table.INDEX, size * state.index_pages_per_block)):
        written += _between(state.table(table), rows, starts // unit, (ends - 1) // unit)
    needed = np.arange(resident.shape[1]) * size < ends[:, None]
    gone = needed & (resident == 0)
    blocks, host = len(state.blocks.state), NOTHING.host_reads
    if some(gone):
        host = _ids(len(state.pages.state), state.table(Table.HOST)[rows, :pages][gone])
    return StepAccesses(_ids(blocks, resident[needed], index.ravel()), _ids(blocks, *written), host)


def _of_few(state: State, planned: ev.StepPlanned) -> StepAccesses:
    """The same for few entries, for which plain numbers are faster than arrays."""
    size, index_size = state.page_size, state.page_size * state.index_pages_per_block
    resident, host, index, hot = (state.table(table) for table in Table)
    reads: set[int] = set()
    writes: set[int] = set()
    hosts: set[int] = set()
    for row, start, count in zip(planned.rows, planned.starts, planned.counts, strict=True):
        end = start + count
        blocks, indexed = resident[row, : -(-end // size)].tolist(), index[row].tolist()
        reads.update(blocks, indexed)
        writes.update(
            blocks[start // size :],
            indexed[start // index_size : (end - 1) // index_size + 1],
            hot[row].tolist(),
        )
        if 0 in blocks:
            paged = host[row, : len(blocks)].tolist()
            hosts.update(page for block, page in zip(blocks, paged, strict=True) if not block)
    pool, host_pool = len(state.blocks.state), len(state.pages.state)
    return StepAccesses(_column(pool, reads), _column(pool, writes), _column(host_pool, hosts))


def _column(size: int, named: set[int]) -> I64:
    return np.array(sorted(i for i in named if 0 < i < size), dtype=np.int64)


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
