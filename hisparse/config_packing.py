"""Packing: how the pages of all cache groups share blocks, chosen at start to waste least.

Pure arithmetic on a config. A block is a fixed number of bytes. A resident block holds one page of
all latent layers, a hot block as many hot rows, an index block whole pages of all index groups; it
is as large as the larger of the two makes it. Padding is what blocks hold beyond what is needed,
the unused part of a last block included.

    resident   P pages                     P blocks
    hot        hot_rows rows of a layer    ceil(hot_rows / page_size) blocks
    index      P pages                     ceil(P / index_pages_per_block) blocks

With r = KV bytes over indexer bytes of a token, one of two is best: the block is a resident page,
and floor(r) indexer pages go in (index blocks are padded); or it is ceil(r) indexer pages (resident
and hot blocks are). GLM FP8 has r = 16.2 or 18.5 and takes the first; DeepSeek-V3.2, an indexer in
each layer, r = 4.97, takes the second: the first would pad a sixth. docs/planning.md has figures,
and those of shapes that were not built.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hisparse.config import HiSparseConfig, ceil_div


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


@dataclass(frozen=True)
class Packing:
    """A shape of the blocks, and its padding as shares of the bytes held, over the lengths up to
    `max_model_len` that are worth a hot region (all, where none is), in whole pages."""

    index_pages_per_block: int
    block_bytes: int
    resident_mean: float
    resident_worst: float
    host_backed_mean: float
    host_backed_worst: float

    @property
    def mean(self) -> float:
        """Both states weigh the same."""
        return (self.resident_mean + self.host_backed_mean) / 2

    @property
    def worst(self) -> float:
        return max(self.resident_worst, self.host_backed_worst)


def footprint(
    config: HiSparseConfig, *, resident: int, index_pages: int, index_blocks: int, hot_blocks: int
) -> Footprint:
    """Of `resident` pages in blocks, `index_pages` pages of indexer rows in `index_blocks` blocks,
    and a hot region of `hot_blocks` blocks (0: none)."""
    needed = resident * config.page_bytes + index_pages * config.index_page_bytes
    if hot_blocks:
        needed += config.policy.hot_rows * config.layout.layers * config.layout.row_bytes
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


def packing_of(config: HiSparseConfig) -> Packing:
    """The shape that `config` has, with its padding."""
    first = config.window_pages + config.hot_blocks + 1  # shorter ones are smaller all-resident
    worth_it = config.offload and first <= config.max_pages
    pages = np.arange(first if worth_it else 1, config.max_pages + 1)
    resident = backed = _padded_shares(config, pages, pages, 0)
    if worth_it:
        window = np.full_like(pages, config.window_pages)
        backed = _padded_shares(config, pages, window, config.hot_blocks)
    return Packing(
        config.index_pages_per_block,
        config.block_bytes,
        float(resident.mean()),
        float(resident.max()),
        float(backed.mean()),
        float(backed.max()),
    )


def _padded_shares(
    config: HiSparseConfig, pages: npt.NDArray[np.int64], resident: npt.NDArray[np.int64], hot: int
) -> npt.NDArray[np.float64]:
    """`planned_footprint(...).padded_share` of requests of that many pages each."""
    needed = resident * config.page_bytes + pages * config.index_page_bytes
    if hot:
        needed = needed + config.policy.hot_rows * config.layout.layers * config.layout.row_bytes
    blocks = resident + hot + -(-pages // config.index_pages_per_block)
    shares: npt.NDArray[np.float64] = 1.0 - needed / (blocks * config.block_bytes)
    return shares


def candidates(config: HiSparseConfig) -> list[Packing]:
    """The shapes that can be best, that which wastes least (by `mean`) first."""
    fit = config.page_bytes // config.index_page_bytes
    shapes = [packing_of(_with(config, pages)) for pages in (fit, fit + 1)]
    return sorted(shapes, key=lambda shape: (shape.mean, shape.block_bytes))


def packed(config: HiSparseConfig) -> HiSparseConfig:
    """`config` with `pools.index_pages_per_block` chosen; unchanged where it was given."""
    if "index_pages_per_block" in config.pools.model_fields_set:
        return config
    return _with(config, candidates(config)[0].index_pages_per_block)


def _with(config: HiSparseConfig, pages: int) -> HiSparseConfig:
    pools = config.pools.model_copy(update={"index_pages_per_block": pages})
    return config.model_copy(update={"pools": pools})
