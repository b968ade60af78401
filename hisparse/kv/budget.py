"""Budget: how many GPU blocks are promised, and how many are to spare. Pure arithmetic on State.

Every live request is promised its steady-state need: its hot region, its index blocks to the end,
and a window of resident pages wide enough to advance. What it lacks of that is *unmet*. The rule
that keeps the scheduler free of deadlock is

    available blocks  >=  sum of unmet promises          (spare >= 0, always)

An allocation within a promise lowers both sides; anything beyond promises needs spare blocks, and
those can be made by spilling pages that exceed their request's window.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hisparse.fsm.state import State

I64 = npt.NDArray[np.int64]


def window_need(state: State) -> I64:
    """int64 [rows]: resident pages promised to each live row, 0 for the others."""
    rows = state.rows
    window = np.minimum(rows.pages_max, state.window_pages)
    owed: I64 = (window if state.config.offload else rows.pages_max) * rows.live
    return owed


def window_unmet(state: State) -> I64:
    """int64 [rows]: resident pages still owed to each row."""
    unmet: I64 = np.maximum(window_need(state) - state.rows.resident, 0)
    return unmet


def promised(state: State) -> int:
    """GPU blocks owed to live requests and not yet given."""
    rows, per_block = state.rows, state.index_pages_per_block
    index = (rows.pages_max + (per_block - 1)) // per_block - rows.index
    hot = state.hot_blocks - rows.hot
    assert not np.count_nonzero((np.minimum(index, hot) < 0) & rows.live), (
        "a row holds more than it was promised"
    )
    return int((window_unmet(state) + (index + hot) * rows.live).sum())


def spare(state: State) -> int:
    """GPU blocks that are neither in use nor promised."""
    return state.blocks.available - promised(state)


def excess_pages(state: State) -> I64:
    """int64 [rows]: resident pages above the window that no spill is freeing yet."""
    rows = state.rows
    excess = rows.resident - rows.spilling - np.minimum(window_need(state), rows.resident)
    return np.where(rows.live, np.maximum(excess, 0), 0)
