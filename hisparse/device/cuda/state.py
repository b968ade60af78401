"""What the groups of one worker share on the GPU: sizes, the step's number, checksums, arenas.

Owns what calls of steps without a fixed shape are cut from: arenas, made when the worker is, as
many as groups are open at once, which any group takes and gives back. `backed` is the
one thing of the tables that the host keeps: which requests have a hot region, in the order in which
their changes were queued. Only `waves.lay_out` asks it, so as not to take turns for nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hisparse.config import GIB, HiSparseConfig
from hisparse.device.binding import BoundCache
from hisparse.device.checks import checksum_bytes
from hisparse.device.cuda.calls import CallArena
from hisparse.device.cuda.kernels import ResolveSizes, open_at_once
from hisparse.device.cuda.reach import HostReach
from hisparse.device.cuda.resolver import ResolveCall
from hisparse.device.cuda.tables import TableWriter
from hisparse.device.handle import PagedCacheView
from hisparse.device.layout import Geometry
from hisparse.device.tables import DeviceTables
from hisparse.errors import ConfigError
from hisparse.fsm.wire import SparseKVOffloadCommand, Table

if TYPE_CHECKING:
    from hisparse.device.cuda.group import GroupResolver
    from hisparse.device.cuda.movers import CudaKernels

ROWS_MAX = (1 << 31) - 1
WIPED = 0xFF  # a byte of no epoch


def sizes_of(geometry: Geometry) -> ResolveSizes:
    """What kernels are compiled for. Raises ConfigError for what they cannot hold."""
    g = geometry
    return ResolveSizes(
        page_size=g.page_size,
        top_k=g.top_k,
        hot_rows=g.hot_rows or g.top_k,
        pages=g.max_pages,
        row_bytes=g.row_bytes,
        block_rows=g.block_bytes // g.row_bytes,
    )


def check_kernel_sizes(config: HiSparseConfig) -> ResolveSizes:
    """`sizes_of` a configuration whose rows have numbers: they are named by 32 bits, while every
    offset in bytes has 64. Raises ConfigError for what the kernels cannot hold."""
    g, pools = Geometry.of(config), config.pools
    sizes = sizes_of(g)
    pages = ROWS_MAX // g.page_size
    gib = math.floor(pages * config.host_page_bytes / GIB * 1000) / 1000
    tokens = config.schedule.max_model_len
    for field, value, rows, most in (
        ("pools.gpu_blocks", g.gpu_blocks, g.gpu_blocks * sizes.block_rows,
         ROWS_MAX // sizes.block_rows),
        ("pools.host_pool_gib", pools.host_pool_gib, g.host_pages * g.page_size, gib),
        ("schedule.max_model_len", tokens, sizes.reach, pages * g.page_size),
    ):  # fmt: skip
        if rows > ROWS_MAX:
            raise ConfigError(
                f"{field}={value:.15g}: {rows} rows, the cuda backend names at most {ROWS_MAX} "
                f"(int32), use at most {most:.15g}",
                {field: most},
            )
    return sizes


class WorkerState:
    """One worker's share of a `CudaDevice`."""

    def __init__(self, kernels: CudaKernels, tables: DeviceTables) -> None:
        self.kernels, self.device, self.tables = kernels, kernels.device, tables
        self.geometry = g = tables.geometry
        self.offload = g.hot_rows > 0
        self.sizes = sizes_of(g)
        self.groups: list[GroupResolver] = []
        self.backed = np.zeros(g.max_requests, dtype=np.bool_)  # has a hot region, as queued
        self._layers: dict[PagedCacheView, int] = {}
        self._arenas: list[CallArena] = []  # that no group has
        self._writer: TableWriter | None = None
        self._sums: Any = None
        self._reach: HostReach | None = None
        with self.device.compute.current():
            self.step = self.device.cupy.zeros((1,), self.device.cupy.int32)

    def knows(self, table: Any) -> bool:
        return any(table is mine for mine in self.tables.arrays.values())

    def serves(self, cache: BoundCache) -> bool:
        leader: Any = cache.groups[0].leader
        return leader in self.groups

    def bind(self, cache: BoundCache) -> None:
        """The worker's cache stands: nothing is added any more."""
        g, device = self.geometry, self.device
        self._layers = {handle.resident: handle.layer for handle in cache.handles}
        suffix = device.memory_of(cache.suffix[0].base) if cache.suffix else None
        self._reach = HostReach(g, device.memory_of(cache.host[0].base), suffix)
        shape = (g.max_requests, g.layers, self.sizes.reach)
        with device.compute.current():
            if taken := checksum_bytes(g).taken:
                self._sums = device.cupy.zeros(shape, device.cupy.uint32)
                assert self._sums.nbytes == taken, (self._sums.nbytes, taken)
            self._arenas = [CallArena(memory) for memory in self._call_memory()]
            states = [group.state for group in self.groups if self.offload]
            self._writer = TableWriter(
                device, self.sizes, self.tables.arrays, states, self.step, self._sums
            )

    def sums_of(self, view: PagedCacheView) -> tuple[int, int]:
        """(address, elements from request to request) of the checksums of a layer's rows."""
        layer = self._layers.get(view)
        if self._sums is None or layer is None:
            return 0, 0
        return self._sums[0, layer].data.ptr, self._sums[0].size

    def wait_host(self, command: SparseKVOffloadCommand) -> None:
        """Before anything of it is queued: see `HostReach.wait`."""
        assert self._reach is not None, "a cache that was not bound"
        self._reach.wait(command)

    def begin(self, command: SparseKVOffloadCommand) -> None:
        """Queue the command's table work and its step number."""
        assert self._writer is not None, "a cache that was not bound"
        self.backed[list(command.resets)] = False
        for update in command.tables:
            if update.table == Table.HOT and update.ids and update.entry == 0:
                self.backed[update.row] = update.ids[0] != 0
        self._writer.begin(command)

    # -- calls -----------------------------------------------------------------------------------
    def _call_memory(self) -> list[Any]:
        """What `kernels.resolve_memory` says, an array an arena."""
        g, cupy = self.geometry, self.device.cupy
        if not self.offload:
            return []
        size = self.sizes.arena_bytes(g.step_rows, g.max_requests)
        return [cupy.full((size,), WIPED, cupy.uint8) for _ in range(open_at_once(g.groups))]

    def take_arena(self) -> CallArena | None:
        """An empty one, for who has no call open; None where more groups are open than usual."""
        return self._arenas.pop() if self._arenas else None

    def cut_call(self, arena: CallArena | None, lines: int, span: int, ordinal: int) -> ResolveCall:
        """A call for once: wiped, so that nothing of what was there is taken for words of its
        epoch. Of memory of its own where `arena` has no room."""
        memory = arena.cut(self.sizes.call_bytes(lines)) if arena is not None else None
        call = ResolveCall(self.sizes, lines, span, ordinal, memory)
        if memory is not None:
            for array in (call.count, call.misses):
                self.device.wipe(array, WIPED)
        return call

    def give_arena(self, arena: CallArena) -> None:
        """All that reads what was cut is queued, and compute waits for what of it is on side."""
        arena.clear()
        self._arenas.append(arena)
