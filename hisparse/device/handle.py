"""What attention holds of a cache: the resident view, and the way to resolve.

`PagedCacheView` is an immutable binding into a packed allocation. `HiSparseCacheHandle` is one
layer's: it owns the path of new rows into resident blocks and hands selections to the layer's
`HiSparseRuntime`. `IndexCache` is the same for the indexer groups, which have no host tier.

None of them allocates or frees a block, and none keeps a request mapping: `StepRows` is attention
metadata, passed in each call. Every method queues on the compute stream and returns at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from hisparse.device.backend import Array, Device
from hisparse.device.layout import Span
from hisparse.device.plan import Pending
from hisparse.device.rows import StepRows
from hisparse.device.tables import DeviceTables
from hisparse.errors import UsageError
from hisparse.fsm.wire import Table

if TYPE_CHECKING:
    from hisparse.device.runtime import HiSparseRuntime


@dataclass(frozen=True, eq=False)
class PagedCacheView:
    """Blocks of one layer or group inside `base`, uint8 ``[pool bytes]``, numpy or CuPy."""

    base: Any
    span: Span
    name: str

    def __post_init__(self) -> None:
        span = self.span
        end = span.offset + (span.blocks - 1) * span.block_stride + span.length
        assert self.base.ndim == 1 and self.base.dtype == np.uint8 and self.base.flags.c_contiguous
        assert span.offset >= 0 and span.blocks > 0 and end <= self.base.size, (self.name, span)

    @cached_property
    def array(self) -> Any:
        """Strided uint8 ``[blocks, rows_per_block, row_bytes]`` over `base`; no copy."""
        s = self.span
        on_host = isinstance(self.base, np.ndarray)
        tricks = np.lib.stride_tricks if on_host else import_module("cupy").lib.stride_tricks
        return tricks.as_strided(
            self.base[s.offset :],
            shape=(s.blocks, s.rows_per_block, s.row_bytes),
            strides=(s.block_stride, s.row_bytes, 1),
        )

    @cached_property
    def address(self) -> int:
        """Of row 0 of block 0, as the device sees it."""
        on_host = isinstance(self.base, np.ndarray)
        base = self.base.ctypes.data if on_host else self.base.data.ptr
        return int(base) + self.span.offset

    @property
    def block_rows(self) -> int:
        """Block stride in rows; only a view whose stride is whole rows has one."""
        assert self.span.block_stride % self.span.row_bytes == 0, (self.name, self.span)
        return self.span.block_stride // self.span.row_bytes

    @cached_property
    def rows(self) -> Any:
        """`base` from this view on as uint8 ``[rows, row_bytes]``: row o of block b is at
        ``b * block_rows + o``. The rows between are other layers' and must not be touched."""
        s = self.span
        assert self.block_rows > 0
        whole = (self.base.size - s.offset) // s.row_bytes
        return self.base[s.offset : s.offset + whole * s.row_bytes].reshape(whole, s.row_bytes)


class HiSparseCacheHandle:
    """One layer's cache, as attention sees it."""

    def __init__(
        self,
        layer: int,
        resident: PagedCacheView,
        runtime: HiSparseRuntime,
        device: Device,
        tables: DeviceTables,
    ) -> None:
        assert runtime.layer == layer, (runtime.layer, layer)
        self.layer = layer
        self.resident = resident
        self.runtime = runtime
        self._device = device
        self._tables = tables

    def write(self, rows: StepRows, data: Array) -> None:
        """Write uint8 ``[n, row_bytes]``, as it is now, to the rows' resident blocks.

        The block is looked up when the op runs. Where RESIDENT then says 0 the op raises
        InvariantViolation ``table_truth``. Raises UsageError for a wrong shape, and for a request
        row of host arrays that there is none of (`StepRows.rows`).
        """
        row_bytes = self.resident.span.row_bytes
        data = _keep_rows(self._device, self._tables, rows, data, row_bytes)
        view, table, owner = self.resident, self._tables[Table.RESIDENT], f"layer {self.layer}"
        kernels = self._device.kernels
        self._device.compute.enqueue(lambda: kernels.write_rows(view, table, rows, data, owner))

    def gather(
        self, rows: StepRows, top_k: Array | None = None, *, out: Array | None = None
    ) -> Pending:
        """The selected rows: a `Pending` uint8 ``[n, k, row_bytes]``; on `cpu` in `out`, if given.

        A leader passes int ``[n, k]`` positions (-1: padding, gives zeros); a follower passes None
        and gets the rows of its leader's selection. See `HiSparseRuntime.gather` for the errors.
        """
        return self.runtime.gather(rows, top_k, out=out)

    def resolve(self, rows: StepRows, top_k: Array | None = None) -> Pending:
        """Like `gather` without the copy, for attention that reads the pool itself: a `Pending`
        int ``[n, k]`` of rows of ``resident.rows``, -1 for padding.

        They hold until the next call for this layer. The op raises UsageError where the selections
        of a request's rows do not fit the hot region together (see `Capabilities.wave_rows`). With
        checks the rows are compared with what was written (`device.checks`), behind the resolve.
        """
        return self.runtime.gather(rows, top_k, copy=False)

    def statistics(self) -> dict[str, int]:
        """Of this layer: calls, rows and bytes read from the host; of a leader, what its resolve
        found, and the bytes of its replacement state. On a GPU this waits for it."""
        return self.runtime.statistics()


class IndexCache:
    """The indexer rows of all groups: written with the tokens, read whole by the indexer."""

    def __init__(
        self, views: Sequence[PagedCacheView], device: Device, tables: DeviceTables
    ) -> None:
        self.views = tuple(views)
        self._device = device
        self._tables = tables
        self._writes = self._reads = 0

    def write(self, group: int, rows: StepRows, data: Array) -> None:
        """Write uint8 ``[n, index_row_bytes]`` of `group`; like `HiSparseCacheHandle.write`."""
        view = self._view(group)
        data = _keep_rows(self._device, self._tables, rows, data, view.span.row_bytes)
        table, kernels = self._tables[Table.INDEX], self._device.kernels
        owner = f"index group {group}"
        self._writes += 1
        self._device.compute.enqueue(lambda: kernels.write_rows(view, table, rows, data, owner))

    def keys(self, group: int, row: int, length: int) -> Pending:
        """Indexer rows of positions ``[0, length)`` of request `row`: uint8 ``[length, bytes]``."""
        view = self._view(group)
        limit = self._tables.entries[Table.INDEX] * view.span.rows_per_block
        requests = self._tables.geometry.max_requests
        if not 0 <= row < requests:
            raise UsageError(
                f"keys(row={row}) must be a request row in 0..{requests - 1} "
                "(schedule.max_requests)"
            )
        if not 0 <= length <= limit:
            raise UsageError(f"keys(length={length}): at most {limit} positions a row")
        table, kernels, owner = self._tables[Table.INDEX], self._device.kernels, f"group {group}"
        self._reads += 1
        return self._device.produce(lambda: kernels.read_prefix(view, table, row, length, owner))

    def prefixes(self, group: int, rows: StepRows, limit: int) -> Pending:
        """Indexer rows of positions ``[0, limit)`` for each token of `rows`, zeros behind its own
        position: uint8 ``[n, limit, bytes]``. Its shape does not depend on what is cached."""
        view = self._view(group)
        most = self._tables.entries[Table.INDEX] * view.span.rows_per_block
        check_step_rows(rows, self._tables.geometry.max_requests)
        if not 0 <= limit <= most:
            raise UsageError(f"prefixes(limit={limit}): at most {most} positions a row")
        table, kernels, owner = self._tables[Table.INDEX], self._device.kernels, f"group {group}"
        self._reads += 1
        return self._device.produce(lambda: kernels.read_prefixes(view, table, rows, limit, owner))

    def counted(self) -> tuple[int, int]:
        """The counters, for who has to put them back."""
        return self._writes, self._reads

    def set_counted(self, counts: tuple[int, int]) -> None:
        self._writes, self._reads = counts

    def statistics(self) -> dict[str, int]:
        """Over all groups, calls that wrote rows, and that read a prefix; calls that a graph
        captured count once, however often it is replayed."""
        return {"writes": self._writes, "reads": self._reads}

    def _view(self, group: int) -> PagedCacheView:
        if not 0 <= group < len(self.views):
            raise UsageError(f"group={group} must be in 0..{len(self.views) - 1}")
        return self.views[group]


def check_step_rows(rows: StepRows, max_requests: int) -> int:
    """The number of rows. Raises UsageError unless int ``[n]`` and int64 ``[n]``, and for a request
    row that there is none of; what lies on a device is not looked at, which would wait for it."""
    n = rows.rows.shape[0] if rows.rows.ndim == 1 else -1
    if n < 0 or rows.positions.shape != (n,):
        raise UsageError(f"StepRows of shapes {rows.rows.shape} and {rows.positions.shape}")
    if n and isinstance(rows.rows, np.ndarray) and rows.rows.max() >= max_requests:
        at = int(np.flatnonzero(rows.rows >= max_requests)[0])
        raise UsageError(
            f"rows[{at}]={rows.rows[at]} must be a request row in 0..{max_requests - 1} "
            "(schedule.max_requests), or -1 for padding"
        )
    return n


def _keep_rows(
    device: Device, tables: DeviceTables, rows: StepRows, data: Array, row_bytes: int
) -> Array:
    n = check_step_rows(rows, tables.geometry.max_requests)
    data = device.adopt(data)
    if data.dtype != np.uint8 or data.shape != (n, row_bytes):
        raise UsageError(f"data is {data.dtype}{list(data.shape)}, must be uint8[{n}, {row_bytes}]")
    return device.keep(data)
