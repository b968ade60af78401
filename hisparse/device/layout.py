"""Geometry of the packed allocations: which byte of which pool belongs to whom.

Owns no memory. Computes, from a `HiSparseConfig`, where each layer and each index group lies in a
block of the GPU pool and in the host pool; scheduler and worker cannot disagree about it, because
both derive it from the same config. Makes no events.

Holds at its edges: block 0 and page 0 are null and belong to nobody; within one kind of block no
two layers or groups share a byte (`check_disjoint_views`, invariant ``disjoint_views``).

GPU pool, uint8 ``[gpu_blocks * block_bytes]``; S = page_size * row_bytes, L layers::

    block b   [b * block_bytes ........................................ (b+1) * block_bytes)
    resident  [layer 0: S bytes)[layer 1: S bytes) ... [layer L-1: S bytes)[unused tail)
    or hot      each layer: [row 0)[row 1) ... [row page_size-1), row_bytes each
    indexer   [group 0: P pages)[group 1: P pages) ... [group G-1: P pages)[unused tail)
                each group: P * page_size rows of index_row_bytes, page after page

A block holds one kind at a time; which, its lease says (the scheduler's business, not ours).
Groups are outermost in an indexer block, so that one group is one plain strided view. With
R = P * page_size, position p of a request is row ``p % R`` of block ``INDEX[row, p // R]``.

Host pool, uint8 ``[layers * host_pages * S]``, layers outermost, so that one layer's rows are
contiguous::

    layer l   [l * host_pages * S ................................. (l+1) * host_pages * S)
                [page 0: null)[page 1: S bytes) ... [page host_pages-1: S bytes)

Suffix pool (a CPU tier of indexer pages, if there is one), uint8 ``[suffix_pages * I]``; a page is
contiguous, its groups one after the other, I bytes in all::

    page p    [p * I ......................................................... (p+1) * I)
                [group 0: page_size rows of index_row_bytes)[group 1) ... [group G-1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hisparse.config import HiSparseConfig
from hisparse.errors import InvariantViolation

POISON = 0xDB  # what a freed block or page is filled with when checks are on
NULL = 0  # block id and page id that name nothing


@dataclass(frozen=True)
class Span:
    """Where a view lies: `blocks` intervals of ``rows_per_block * row_bytes`` contiguous bytes.

    Interval b is ``[offset + b * block_stride, offset + b * block_stride + length)``, bytes.
    """

    offset: int
    block_stride: int
    blocks: int
    rows_per_block: int
    row_bytes: int

    @property
    def length(self) -> int:
        return self.rows_per_block * self.row_bytes


class Spanned(Protocol):
    """A view that `check_disjoint_views` can look at; views of one `base` are compared."""

    @property
    def base(self) -> object: ...
    @property
    def span(self) -> Span: ...
    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class Geometry:
    """All sizes and spans that the worker needs, in rows, pages, blocks and bytes."""

    page_size: int
    layers: int
    groups: tuple[tuple[int, ...], ...]
    row_bytes: int
    index_row_bytes: int
    gpu_blocks: int
    block_bytes: int
    host_pages: int
    index_pages: int
    max_requests: int
    max_pages: int
    max_index_blocks: int
    hot_blocks: int
    hot_rows: int
    top_k: int
    suffix_pages: int = 0
    step_rows: int = 0
    """most rows of a step, over all requests"""
    checks: bool = False
    """whether the device looks for what cannot be: bounds, and checksums of rows"""

    @classmethod
    def of(cls, config: HiSparseConfig) -> Geometry:
        """The geometry of `config`. Without offload there is no host page and no hot row."""
        geometry = cls(
            page_size=config.pools.page_size,
            layers=config.layout.layers,
            groups=config.layout.index_groups,
            row_bytes=config.layout.row_bytes,
            index_row_bytes=config.layout.index_row_bytes,
            gpu_blocks=config.pools.gpu_blocks,
            block_bytes=config.block_bytes,
            host_pages=config.host_pages if config.offload else 1,
            index_pages=config.index_pages_per_block,
            max_requests=config.schedule.max_requests,
            max_pages=config.max_pages,
            max_index_blocks=config.max_index_blocks,
            hot_blocks=config.hot_blocks,
            hot_rows=config.policy.hot_rows if config.offload else 0,
            top_k=config.policy.top_k,
            suffix_pages=config.suffix_pages,
            step_rows=config.schedule.step_rows,
            checks=config.checks == "on",
        )
        assert geometry.page_bytes * geometry.layers <= geometry.block_bytes
        assert geometry.index_pages * geometry.index_page_bytes <= geometry.block_bytes
        assert geometry.hot_rows <= geometry.hot_blocks * geometry.page_size
        return geometry

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one layer."""
        return self.page_size * self.row_bytes

    @property
    def gpu_pool_bytes(self) -> int:
        return self.gpu_blocks * self.block_bytes

    @property
    def host_pool_bytes(self) -> int:
        return self.layers * self.host_pages * self.page_bytes

    @property
    def index_page_bytes(self) -> int:
        """Bytes of one indexer page in all groups."""
        return len(self.groups) * self.page_size * self.index_row_bytes

    @property
    def suffix_pool_bytes(self) -> int:
        return self.suffix_pages * self.index_page_bytes

    @property
    def wave_rows(self) -> int:
        """Rows of one request that are consumed together: their selections fit the hot region."""
        return max(1, self.hot_rows // self.top_k)

    def resident_span(self, layer: int) -> Span:
        """Layer `layer` of resident and of hot blocks (they have one shape)."""
        assert 0 <= layer < self.layers, layer
        offset = layer * self.page_bytes
        return Span(offset, self.block_bytes, self.gpu_blocks, self.page_size, self.row_bytes)

    def index_span(self, group: int) -> Span:
        """Index group `group` of indexer blocks."""
        assert 0 <= group < len(self.groups), group
        rows = self.index_pages * self.page_size
        offset = group * rows * self.index_row_bytes
        return Span(offset, self.block_bytes, self.gpu_blocks, rows, self.index_row_bytes)

    def host_span(self, layer: int) -> Span:
        """Layer `layer` of the host pool."""
        assert 0 <= layer < self.layers, layer
        offset = layer * self.host_pages * self.page_bytes
        return Span(offset, self.page_bytes, self.host_pages, self.page_size, self.row_bytes)

    def suffix_span(self, group: int) -> Span:
        """Index group `group` of the suffix pool."""
        assert 0 <= group < len(self.groups), group
        rows, width = self.page_size, self.index_row_bytes
        return Span(group * rows * width, self.index_page_bytes, self.suffix_pages, rows, width)


def overlap_spans(a: Span, b: Span) -> bool:
    """Whether any interval of `a` shares a byte with any interval of `b`, over all blocks.

    Intervals i of a and j of b meet iff ``-len(a) < (a0 - b0) + i*sa - j*sb < len(b)``. With equal
    strides only i - j matters, so it is one division; otherwise one division for each i.
    """
    if not (a.blocks and b.blocks and a.length and b.length):
        return False
    distance = a.offset - b.offset
    if a.block_stride == b.block_stride:
        stride = a.block_stride
        least = -((a.length - 1 + distance) // stride)
        most = (b.length - 1 - distance) // stride
        return max(least, 1 - b.blocks) <= min(most, a.blocks - 1)
    starts = distance + np.arange(a.blocks, dtype=np.int64) * a.block_stride
    least_j = -((b.length - 1 - starts) // b.block_stride)
    most_j = (starts + a.length - 1) // b.block_stride
    return bool((np.maximum(least_j, 0) <= np.minimum(most_j, b.blocks - 1)).any())


def overlap_itself(span: Span) -> bool:
    """Whether two blocks of one view share a byte."""
    return span.blocks > 1 and span.block_stride < span.length


def check_disjoint_views(views: Sequence[Spanned]) -> None:
    """Raise InvariantViolation ``disjoint_views`` if two views of one base share a byte.

    Pass the views of one kind of block (all layers, or all groups): a resident and an indexer view
    do cover the same bytes, in different blocks. Analytic in the strides, exact for all blocks.
    """
    for i, a in enumerate(views):
        if overlap_itself(a.span):
            raise InvariantViolation(
                "disjoint_views",
                f"blocks of {a.name} overlap: stride {a.span.block_stride} B is below "
                f"{a.span.length} B",
            )
        for b in views[:i]:
            if a.base is b.base and overlap_spans(a.span, b.span):
                raise InvariantViolation(
                    "disjoint_views", f"{b.name} {b.span} and {a.name} {a.span} share bytes"
                )
