"""Budget: how many GPU blocks are promised, and how many are to spare. Pure arithmetic on State.

Every live request is promised its steady-state need: its index blocks to the end, its hot region,
and a window of resident pages wide enough to advance. Where all its pages are no more than region
and window, it is promised these instead: it *stays*, without a hot region, and nobody takes a page
of it. What it lacks of its promise is *unmet*. The rule that keeps the scheduler free of deadlock:

    available blocks  >=  sum of unmet promises          (spare >= 0, always)

An allocation within a promise lowers both sides; anything beyond promises needs spare blocks, and
those can be made by spilling pages that exceed their request's window.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hisparse.config import ceil_div
from hisparse.fsm.state import Request, State

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def stays(state: State) -> Bools:
    """bool [rows]: requests that stay resident to their end (so says a row that is not in use)."""
    stay: Bools = state.rows.pages_max <= state.backed_pages
    return stay


def window_need(state: State) -> I64:
    """int64 [rows]: resident pages promised to each live row, 0 for the others."""
    rows = state.rows
    owed: I64 = np.where(stays(state), rows.pages_max, state.window_pages) * rows.live
    return owed


def window_unmet(state: State) -> I64:
    """int64 [rows]: resident pages still owed to each row."""
    unmet: I64 = np.maximum(window_need(state) - state.rows.resident, 0)
    return unmet


def promised(state: State) -> int:
    """GPU blocks owed to live requests and not yet given."""
    rows, per_block = state.rows, state.index_pages_per_block
    index = (rows.pages_max + (per_block - 1)) // per_block - rows.index
    hot = np.where(stays(state), 0, state.hot_blocks) - rows.hot
    assert not np.count_nonzero((np.minimum(index, hot) < 0) & rows.live), (
        "a row holds more than it was promised"
    )
    return int((window_unmet(state) + (index + hot) * rows.live).sum())


def spare(state: State) -> int:
    """GPU blocks that are neither in use nor promised."""
    return state.blocks.available - promised(state)


def passing_pages(state: State, request: Request, hit: int) -> int:
    """Blocks for what prompts fill in a step and do not keep, once `request` is added to those that
    live, of which `hit` pages are found: a chunk of each prompt, and no more than it would have
    all-resident, so that nobody waits who would be held then."""
    config, rows = state.config, state.rows
    most = ceil_div(config.schedule.prefill_chunk, state.page_size)
    left = -(-rows.prompt // state.page_size) - rows.pages
    passing = np.clip(np.minimum(left, rows.pages_max - state.backed_pages), 0, most)
    own = ceil_div(request.prompt_tokens, state.page_size) - hit
    beyond = ceil_div(request.max_tokens, state.page_size) - state.backed_pages
    total = int(passing[rows.live].sum()) + max(min(own, beyond, most), 0)
    return min(total, config.step_pages)


def excess_pages(state: State) -> I64:
    """int64 [rows]: resident pages above the window that no spill is freeing yet."""
    rows = state.rows
    excess = rows.resident - rows.spilling - np.minimum(window_need(state), rows.resident)
    return np.where(rows.live, np.maximum(excess, 0), 0)
