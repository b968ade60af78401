"""Growth: places for the next rows of live requests, by block.

Two ways to the same places. The steady one extends all rows that are short at once, where nothing
but decoding rows that filled their pages is short and there are blocks to spare. Otherwise each row
grows by itself, in order, within what it may have and what can be spilled for it.
"""

from __future__ import annotations

import numpy as np

from hisparse.fsm.state import State
from hisparse.kv.decision import I64, Decision
from hisparse.kv.managers import HiSparseIndexManager, HiSparseResidentManager


def grow(state: State, rows: I64, wanted: I64, cause: int) -> Decision[list[int]]:
    """Make places for `wanted[i]` more rows of request row `rows[i]`; returns how many each has.

    `cause` is the seq of the rows last computed: what makes decoding requests grow. A row that
    grows by itself does so because its request arrived.
    """
    held = state.rows
    room = held.pages[rows] * state.page_size - held.computed[rows]
    granted: list[int] = np.minimum(room, wanted).tolist()
    short = np.flatnonzero(room < wanted)
    if not len(short):
        return granted
    if (yield from _extend(state, rows[short], wanted[short], cause)):
        return list(wanted.tolist())
    resident, index = HiSparseResidentManager(state), HiSparseIndexManager(state)
    for i in short.tolist():
        row, arrived = int(rows[i]), state.request_of(rows[i]).arrived_seq
        granted[i] = yield from resident.grow(row, int(wanted[i]), arrived)
        yield from index.grow(row, arrived)
    return granted


def _extend(state: State, rows: I64, wanted: I64, cause: int) -> Decision[bool]:
    """The steady case: decoding rows that filled their pages, and blocks to spare."""
    if np.count_nonzero(state.rows.computed[rows] < state.rows.prompt[rows]):
        return False
    extended = yield from HiSparseResidentManager(state).extend(rows, wanted, cause)
    if extended:
        yield from HiSparseIndexManager(state).extend(rows, cause)
    return extended
