"""Byte movers of the `cpu` backend, in numpy.

Own nothing but, with checks, what is known of each layer's rows. Each function runs inside one
stream op and reads its source at that moment, so a missing wait shows as wrong bytes. Nothing here
reads or writes the null block or the null page.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from hisparse.config import HiSparseConfig
from hisparse.device.backend import Op, Resolver, Tiers
from hisparse.device.binding import BoundCache
from hisparse.device.cpu.checks import LayerChecks
from hisparse.device.cpu.forgetting import forget_entries
from hisparse.device.cpu.resolver import CpuResolver
from hisparse.device.handle import PagedCacheView
from hisparse.device.layout import NULL, Geometry
from hisparse.device.plan import U8, Plan, Wave
from hisparse.device.rows import StepRows
from hisparse.device.runtime import HiSparseRuntime
from hisparse.device.tables import DeviceTables
from hisparse.errors import InvariantViolation, UsageError
from hisparse.fsm.wire import IndexCopy, SparseKVOffloadCommand, TableUpdate

I32 = npt.NDArray[np.int32]
_FETCHED_ROWS = 1024  # copied at a time


class CpuKernels:
    """Implements `backend.Kernels`."""

    def __init__(self) -> None:
        self._rows = np.empty((0, 0), dtype=np.uint8)  # fetched ones, on their way
        self._checks: WeakKeyDictionary[PagedCacheView, LayerChecks] = WeakKeyDictionary()

    def check(self, config: HiSparseConfig) -> None:
        """numpy holds what memory holds."""

    def drop(self, tables: DeviceTables) -> None:
        """Nothing is kept for a worker that its own parts do not hold."""

    def write_rows(
        self, view: PagedCacheView, table: I32, rows: StepRows, data: U8, owner: str
    ) -> None:
        """Write `data` uint8 ``[n, row_bytes]`` where `table` places each row's position.

        Raises InvariantViolation ``table_truth`` where the table has no block. Rows of request
        index below 0 (graph padding) are not written.
        """
        requests, positions = rows.rows.astype(np.int64), rows.positions
        if requests.size and requests.min() < 0:
            real = requests >= 0
            requests, positions, data = requests[real], positions[real], data[real]
        size = view.span.rows_per_block
        entry = positions // size
        if entry.size and not 0 <= int(entry.min()) <= int(entry.max()) < table.shape[1]:
            raise InvariantViolation("table_truth", f"write at a position beyond {owner}'s table")
        blocks = table[requests, entry].astype(np.int64)
        if not blocks.all():
            i = int(np.flatnonzero(blocks == NULL)[0])
            raise InvariantViolation(
                "table_truth",
                f"row {requests[i]}, position {positions[i]}, {owner}: the table has no block to "
                "write to",
            )
        view.array[blocks, positions - entry * size] = data
        if (checks := self._checks.get(view)) is not None:
            checks.note(requests, positions, data)

    def read_prefix(
        self, view: PagedCacheView, table: I32, row: int, length: int, owner: str
    ) -> U8:
        """Positions ``[0, length)`` of request `row`: uint8 ``[length, row_bytes]``, a copy."""
        size = view.span.rows_per_block
        blocks = table[row, : -(-length // size)]
        if not blocks.all():
            lost = int(np.flatnonzero(blocks == NULL)[0]) * size
            raise InvariantViolation(
                "always_readable", f"row {row}, position {lost}, {owner}: no block holds it"
            )
        out: U8 = view.array[blocks].reshape(-1, view.span.row_bytes)[:length]
        return out

    def read_prefixes(
        self, view: PagedCacheView, table: I32, rows: StepRows, limit: int, owner: str
    ) -> U8:
        """Positions ``[0, limit)`` for each row, zeros behind its own: uint8 [n, limit, bytes]."""
        out = np.zeros((len(rows.rows), limit, view.span.row_bytes), dtype=np.uint8)
        for i, (row, position) in enumerate(zip(rows.rows, rows.positions, strict=True)):
            if row >= 0:
                length = min(int(position) + 1, limit)
                out[i, :length] = self.read_prefix(view, table, int(row), length, owner)
        return out

    def replay(self, plan: Plan, tiers: Sequence[Tiers], member: int, out: U8 | None = None) -> U8:
        """Bring the plan's missed rows in and gather: uint8 ``[n, k, row_bytes]``, in `out` if it
        is given.

        Wave by wave, for one layer's bytes; leader and followers run exactly this.
        """
        hot, host = tiers[member]
        if out is None:
            out = np.empty((*plan.physical.shape, hot.span.row_bytes), dtype=np.uint8)
        if plan.all_padding:
            out[:] = 0
            return out
        size = hot.span.rows_per_block
        packed = plan.pack(size, hot.block_rows)
        if plan.physical.size:
            assert plan.physical.min() >= size, "a read of the null block"
            assert packed.max() < len(hot.rows), "a read beyond the pool"
        for wave in plan.waves:
            self._fetch(wave, hot, host)
            if wave.rows is None:  # "clip": in the other mode numpy would copy `out`
                hot.rows.take(packed, axis=0, out=out, mode="clip")
            else:
                out[wave.rows] = hot.rows.take(packed[wave.rows], axis=0)
        if plan.padding is not None:
            out[plan.padding] = 0
        return out

    def locate(self, plan: Plan, tiers: Sequence[Tiers], member: int) -> npt.NDArray[np.int64]:
        """Bring them in and say where the selection is: rows of ``hot.rows``, -1 for padding.
        With checks, raises InvariantViolation ``content`` for rows that nobody wrote there."""
        hot, host = tiers[member]
        if plan.all_padding:
            return np.full_like(plan.physical, -1)
        for wave in plan.waves:  # of a refused one too: later calls take these rows for hot
            self._fetch(wave, hot, host)
        if len(plan.waves) > 1:
            raise UsageError(
                f"resolve: the selections of a request's rows need {len(plan.waves)} waves: gather"
            )
        packed = plan.pack(hot.span.rows_per_block, hot.block_rows)
        if (checks := self._checks.get(hot)) is not None:
            checks.check(plan, packed, hot)
        return packed.copy() if plan.padding is None else np.where(plan.padding, -1, packed)

    def _fetch(self, wave: Wave, hot: PagedCacheView, host: PagedCacheView) -> None:
        """Copy a wave's missed rows of one layer, some at a time, through memory that is kept."""
        if not wave.sources.size:
            return
        size, width = hot.span.rows_per_block, hot.span.row_bytes
        assert wave.sources.min() >= host.span.rows_per_block, "a read of the null page"
        assert wave.sources.max() < len(host.rows), "a read beyond the pool"
        to = wave.destinations + (wave.destinations // size) * (hot.block_rows - size)
        if self._rows.shape[1] != width:
            self._rows = np.empty((_FETCHED_ROWS, width), dtype=np.uint8)
        for first in range(0, len(to), _FETCHED_ROWS):
            sources = wave.sources[first : first + _FETCHED_ROWS]
            rows = self._rows[: len(sources)]
            host.rows.take(sources, axis=0, out=rows, mode="clip")
            hot.rows[to[first : first + _FETCHED_ROWS]] = rows

    def fill_blocks(self, view: PagedCacheView, blocks: Sequence[int], value: int) -> None:
        assert NULL not in blocks, "the null block is never written"
        view.array[list(blocks)] = value

    def wait_host(self, tables: DeviceTables, command: SparseKVOffloadCommand) -> None:
        """Memory of this backend may be touched at once."""

    def change_tables(
        self,
        tables: DeviceTables,
        leaders: Sequence[HiSparseRuntime],
        command: SparseKVOffloadCommand,
    ) -> Sequence[Op]:
        """An op for the resets, and one for the updates."""

        def resolver_of(leader: HiSparseRuntime) -> CpuResolver:
            assert isinstance(leader.resolver, CpuResolver), leader.resolver
            return leader.resolver

        def reset(rows: tuple[int, ...]) -> None:
            for leader in leaders:
                resolver_of(leader).forget_rows(rows)
                for hot, _ in leader.group.tiers:
                    if (checks := self._checks.get(hot)) is not None:
                        checks.forget(rows)
            tables.reset(rows)

        def update(updates: tuple[TableUpdate, ...]) -> None:
            for update in updates:
                gone = tables.apply(update)
                if gone.size:
                    for leader in leaders:
                        forget_entries(resolver_of(leader), update.table, update.row, gone)

        ops: list[Op] = [partial(reset, command.resets)] if command.resets else []
        return [*ops, partial(update, command.tables)] if command.tables else ops

    def make_resolver(self, geometry: Geometry, tables: DeviceTables, layer: int) -> Resolver:
        return CpuResolver(geometry, tables, layer)

    def make_copies(self, geometry: Geometry, cache: BoundCache) -> CpuCopies:
        if geometry.checks:
            for handle in cache.handles:
                self._checks[handle.resident] = LayerChecks(geometry, handle.layer)
        return CpuCopies(geometry.page_size, cache)


class CpuCopies:
    """Implements `backend.Copies`: a chunk a layer or group, so that others run between them."""

    batched = False

    def __init__(self, page_size: int, cache: BoundCache) -> None:
        self._size = page_size
        self._layers = [(handle.resident, handle.runtime.host) for handle in cache.handles]
        self._groups = list(zip(cache.index.views, cache.suffix, strict=False))
        self._index = cache.index.views

    def spill(self, blocks: Sequence[int], hosts: Sequence[int]) -> list[Op]:
        return [
            partial(copy_block, gpu, block, host, page)
            for block, page in zip(blocks, hosts, strict=True)
            for gpu, host in self._layers
        ]

    def restore(self, hosts: Sequence[int], blocks: Sequence[int]) -> list[Op]:
        return [
            partial(copy_block, host, page, gpu, block)
            for page, block in zip(hosts, blocks, strict=True)
            for gpu, host in self._layers
        ]

    def store_index(
        self, blocks: Sequence[int], slots: Sequence[int], suffixes: Sequence[int]
    ) -> list[Op]:
        size = self._size
        return [
            partial(copy_slots, gpu, block, slot * size, tier, page, 0, size)
            for block, slot, page in zip(blocks, slots, suffixes, strict=True)
            for gpu, tier in self._groups
        ]

    def load_index(
        self, suffixes: Sequence[int], blocks: Sequence[int], slots: Sequence[int]
    ) -> list[Op]:
        size = self._size
        return [
            partial(copy_slots, tier, page, 0, gpu, block, slot * size, size)
            for page, block, slot in zip(suffixes, blocks, slots, strict=True)
            for gpu, tier in self._groups
        ]

    def copy_index(self, copies: Sequence[IndexCopy]) -> list[Op]:
        size = self._size
        return [
            partial(copy_slots, view, c.source, first, view, c.block, to, c.pages * size)
            for c in copies
            for first, to in [(c.source_slot * size, c.slot * size)]
            for view in self._index
        ]

    def close(self) -> None:
        self._layers, self._groups, self._index = [], [], ()


def copy_block(source: PagedCacheView, block: int, target: PagedCacheView, to: int) -> None:
    """One page of one layer, between the tiers."""
    assert block != NULL and to != NULL, (block, to)
    target.array[to] = source.array[block]


def copy_slots(
    source: PagedCacheView,
    block: int,
    first: int,
    target: PagedCacheView,
    to_block: int,
    to: int,
    rows: int,
) -> None:
    """Rows ``[first, first + rows)`` of `block` in `source` to row `to` of `to_block` in
    `target`, which may be the same view."""
    assert block != NULL and to_block != NULL, (block, to_block)
    target.array[to_block, to : to + rows] = source.array[block, first : first + rows].copy()
