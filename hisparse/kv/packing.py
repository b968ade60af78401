"""Packing: what a request needs of the packed GPU allocation, what it holds, and what is padding.

Pure arithmetic on a config. A block is one resident page of all latent layers, to the byte; a hot
block is as many hot rows; an index block is as many whole pages of all index groups as fit. Padding
is what a block holds beyond what its group can use, the unused part of a last block included.

    resident   P pages                     P blocks, none of it padding
    hot        hot_rows rows of a layer    ceil(hot_rows / page_size) blocks
    index      P pages                     ceil(P / index_pages_per_block) blocks
"""

from __future__ import annotations

from dataclasses import dataclass

from hisparse.config import HiSparseConfig, ceil_div
from hisparse.fsm.state import State


@dataclass(frozen=True)
class Footprint:
    """GPU bytes of a request: those that its pages and rows need, and those of its blocks."""

    needed_bytes: int
    held_bytes: int

    @property
    def padded_bytes(self) -> int:
        return self.held_bytes - self.needed_bytes

    @property
    def padded_share(self) -> float:
        """Padding as a share of what is held; 0.0 where nothing is."""
        return self.padded_bytes / self.held_bytes if self.held_bytes else 0.0

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(self.needed_bytes + other.needed_bytes, self.held_bytes + other.held_bytes)


def footprint(
    config: HiSparseConfig, *, resident: int, index_pages: int, index_blocks: int, hot_blocks: int
) -> Footprint:
    """Of `resident` pages in blocks, `index_pages` pages of indexer rows in `index_blocks` blocks,
    and a hot region of `hot_blocks` blocks (0: none)."""
    row = config.layout.layers * config.layout.row_bytes
    needed = resident * config.pools.page_size * row + index_pages * config.index_page_bytes
    needed += config.policy.hot_rows * row if hot_blocks else 0
    return Footprint(needed, (resident + index_blocks + hot_blocks) * config.block_bytes)


def planned_footprint(config: HiSparseConfig, tokens: int, *, host_backed: bool) -> Footprint:
    """Of a request of `tokens` tokens, all-resident or with all but its window on the host."""
    pages = ceil_div(tokens, config.pools.page_size)
    return footprint(
        config,
        resident=min(pages, config.window_pages) if host_backed else pages,
        index_pages=pages,
        index_blocks=ceil_div(pages, config.index_pages_per_block),
        hot_blocks=config.hot_blocks if host_backed else 0,
    )


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
