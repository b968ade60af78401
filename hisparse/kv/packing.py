"""Packing of live requests: what each needs of the packed allocation, and what it holds now."""

from __future__ import annotations

from hisparse.config_packing import Footprint, footprint
from hisparse.fsm.state import State


def held_footprint(state: State, row: int) -> Footprint:
    """Of the request in `row`, as it is now."""
    rows = state.rows
    index_blocks = int(rows.index[row])
    return footprint(
        state.config,
        resident=int(rows.resident[row]),
        index_pages=min(int(rows.pages[row]), index_blocks * state.index_pages_per_block),
        index_blocks=index_blocks,
        hot_blocks=int(rows.hot[row]),
    )
