"""`CudaKernels`: the byte movers of the `cuda` backend, and the parts of a worker that it makes.

Every mover queues on the current stream and returns; results are torch tensors, so that inside of a
captured graph they come from the graph's own memory. What a step's arrays on the host say is
uploaded once a step and `StepRows`. What goes wrong on the device is noted there (faults.py), never
thrown here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hisparse.config import HiSparseConfig
from hisparse.device.backend import Op, Resolver, Tiers
from hisparse.device.binding import BoundCache
from hisparse.device.cuda.arrays import address
from hisparse.device.cuda.copies import PageCopies
from hisparse.device.cuda.gpu_demand import check_gpu, demand_bytes
from hisparse.device.cuda.group import GroupResolver
from hisparse.device.cuda.kernels import load
from hisparse.device.cuda.plan import CudaPlan
from hisparse.device.cuda.state import WorkerState, check_kernel_sizes
from hisparse.device.handle import PagedCacheView
from hisparse.device.layout import POISON, Geometry
from hisparse.device.rows import StepRows
from hisparse.device.runtime import HiSparseRuntime
from hisparse.device.tables import DeviceTables
from hisparse.errors import UsageError
from hisparse.fsm.wire import IndexCopy, SparseKVOffloadCommand

if TYPE_CHECKING:
    from hisparse.device.cuda.device import CudaDevice

THREADS = 256
_VIEW = np.dtype(
    [
        *(("base", np.uint64), ("block_stride", np.uint64)),
        *(("rows_per_block", np.int32), ("row_bytes", np.int32)),
    ],
    align=True,
)  # struct View
_TABLE = np.dtype(
    [("entry", np.uint64), ("stride", np.int32), ("entries", np.int32)], align=True
)  # struct TableOf
_CHECKS = np.dtype(
    [("sums", np.uint64), ("stride", np.uint64), ("poison", np.int32)], align=True
)  # struct Checks


class CudaKernels:
    """Implements `backend.Kernels` on `device`."""

    def __init__(self, device: CudaDevice) -> None:
        self.device = device
        module = load("rows.cu")
        names = "write_rows read_prefixes locate pack unpack gather add_misses"
        names += " check_selection check_rows fill"
        self._kernels = {name: module.get_function(f"hisparse_{name}") for name in names.split()}
        self._blocks_max = 8 * int(device.cupy.cuda.Device().attributes["MultiProcessorCount"])
        self._states: dict[DeviceTables, WorkerState] = {}
        self._uploaded: tuple[StepRows, Any, Any] | None = None

    def check(self, config: HiSparseConfig) -> None:
        sizes = check_kernel_sizes(config)
        if config.offload:
            sizes.check_block(self.device.shared_bytes)
            self.device.faults.check_groups(len(config.layout.index_groups))
        check_gpu(config, self.device.room(demand_bytes(config)))

    # -- launching -------------------------------------------------------------------------------
    def launch(self, name: str, units: int, *arguments: Any, threads_a_unit: int = 32) -> None:
        """Queue a kernel of rows.cu over `units` of work, a warp or a thread each."""
        if units:
            blocks = min(-(-units * threads_a_unit // THREADS), self._blocks_max)
            self.device.launch(self._kernels[name], (blocks,), THREADS, arguments)

    def view(self, view: PagedCacheView) -> Any:
        span = view.span
        made = (view.address, span.block_stride, span.rows_per_block, span.row_bytes)
        return np.array([made], dtype=_VIEW)[0]

    def table(self, table: Any) -> Any:
        made = (table.data.ptr, table.strides[0] // 4, table.shape[1])
        return np.array([made], dtype=_TABLE)[0]

    def checks(self, state: WorkerState | None, view: PagedCacheView) -> Any:
        """Where the checksums of the rows of `view` are, null where none are kept, and what
        poison is, -1 without checks."""
        at, stride = (0, 0) if state is None else state.sums_of(view)
        poison = POISON if state is not None and state.geometry.checks else -1
        return np.array([(at, stride, poison)], dtype=_CHECKS)[0]

    def placed(self, rows: StepRows) -> tuple[Any, Any]:
        """The step's rows int32 and positions int64 on the device.

        Raises UsageError for device arrays of other types, and with gaps.
        """
        if rows.span is not None:
            check_on_device(rows)
            return rows.rows, rows.positions
        if self._uploaded is None or self._uploaded[0] is not rows:
            n = len(rows.rows)
            both = np.empty(12 * n, dtype=np.uint8)
            both[: 8 * n].view(np.int64)[:] = rows.positions
            both[8 * n :].view(np.int32)[:] = rows.rows
            made = self.device.upload(both)
            self._uploaded = rows, made[8 * n :].view(np.int32), made[: 8 * n].view(np.int64)
        return self._uploaded[1:]

    # -- rows ------------------------------------------------------------------------------------
    def write_rows(
        self, view: PagedCacheView, table: Any, rows: StepRows, data: Any, owner: str
    ) -> None:
        device = self.device
        on_device, positions = self.placed(rows)
        data = data if data.flags.c_contiguous else device.cupy.ascontiguousarray(data)
        n = len(rows.rows)
        self.launch(
            "write_rows",
            n,
            *(self.view(view), self.table(table), address(on_device), address(positions)),
            *(np.int32(n), address(data), device.faults.code(owner), device.faults.address),
            self.checks(self._state_of(table), view),
        )

    def _state_of(self, table: Any) -> WorkerState | None:
        """Of the worker whose table it is."""
        return next((s for s in self._states.values() if s.knows(table)), None)

    def read_prefix(
        self, view: PagedCacheView, table: Any, row: int, length: int, owner: str
    ) -> Any:
        rows = self.device.upload(np.array([row], dtype=np.int32))
        return self._read_prefixes(view, table, rows, None, length, length, owner)[0]

    def read_prefixes(
        self, view: PagedCacheView, table: Any, rows: StepRows, limit: int, owner: str
    ) -> Any:
        on_device, positions = self.placed(rows)
        return self._read_prefixes(view, table, on_device, positions, -1, limit, owner)

    def _read_prefixes(
        self,
        view: PagedCacheView,
        table: Any,
        rows: Any,
        positions: Any,
        length: int,
        limit: int,
        owner: str,
    ) -> Any:
        device, n = self.device, len(rows)
        out = device.empty((n, limit, view.span.row_bytes), device.torch.uint8)
        self.launch(
            "read_prefixes",
            n * limit,
            *(self.view(view), self.table(table), address(rows), address(positions)),
            *(np.int32(n), np.int64(length), np.int64(limit), address(out)),
            *(device.faults.code(owner), device.faults.address),
        )
        return out

    def fill_blocks(self, view: PagedCacheView, blocks: Sequence[int], value: int) -> None:
        assert 0 not in blocks, "the null block is never written"
        span, stream = view.span, self.device.running
        ids = stream.staging.put(np.array(blocks, dtype=np.int32))
        self.device.launch(
            self._kernels["fill"],
            (min(len(blocks), self._blocks_max),),
            THREADS,
            (
                *(np.uint64(view.address), np.uint64(span.block_stride), np.uint64(span.length)),
                *(np.uint64(ids), np.int32(len(blocks)), np.int32(value)),
            ),
        )

    # -- resolving -------------------------------------------------------------------------------
    def replay(self, plan: CudaPlan, tiers: Sequence[Tiers], member: int) -> Any:
        return plan.group.copy_out(plan, tiers, member)

    def locate(self, plan: CudaPlan, tiers: Sequence[Tiers], member: int) -> Any:
        return plan.group.locate(plan, tiers, member)

    # -- parts of a worker -----------------------------------------------------------------------
    def state(self, tables: DeviceTables) -> WorkerState:
        if tables not in self._states:
            self._states[tables] = WorkerState(self, tables)
        return self._states[tables]

    def make_resolver(self, geometry: Geometry, tables: DeviceTables, layer: int) -> Resolver:
        return GroupResolver(self.state(tables), layer)

    def make_copies(self, geometry: Geometry, cache: BoundCache) -> CudaCopies:
        state = next(s for s in self._states.values() if s.serves(cache))
        state.bind(cache)
        return CudaCopies(geometry, cache)

    def drop(self, tables: DeviceTables) -> None:
        if (state := self._states.pop(tables, None)) is not None:
            self._uploaded = None
            for group in state.groups:
                group.close()

    def wait_host(self, tables: DeviceTables, command: SparseKVOffloadCommand) -> None:
        self.state(tables).wait_host(command)

    def change_tables(
        self,
        tables: DeviceTables,
        leaders: Sequence[HiSparseRuntime],
        command: SparseKVOffloadCommand,
    ) -> Sequence[Op]:
        """One launch a step, which sets the step's number too."""
        self._uploaded = None  # whoever made its arrays may have written the next step there
        return [partial(self.state(tables).begin, command)]


def check_on_device(rows: StepRows) -> None:
    """Raise UsageError unless its arrays are what kernels take their addresses for."""
    for name, array, kind in (
        ("rows", rows.rows, "int32"),
        ("positions", rows.positions, "int64"),
    ):
        told = getattr(array, "__cuda_array_interface__", None)
        if told is None or str(array.dtype).removeprefix("torch.") != kind:
            raise UsageError(
                f"StepRows with span={rows.span}: {name} must be {kind} on the device, is "
                f"{array.dtype}"
            )
        stride, size = (told.get("strides") or (None,))[0], np.dtype(kind).itemsize
        if stride not in (None, size) and len(array) > 1:
            raise UsageError(
                f"StepRows with span={rows.span}: {name} must be contiguous, has one in {stride} "
                f"bytes: pass a copy"
            )


class CudaCopies:
    """`PageCopies` as ops; all copies of a command in one direction are one call."""

    batched = True

    def __init__(self, geometry: Geometry, cache: BoundCache) -> None:
        suffix = cache.suffix[0].base if cache.suffix else None
        self._pools: tuple[Any, ...] = (cache.blocks.base, cache.host[0].base, suffix)
        self._copies = PageCopies(geometry, *self._pools)

    def spill(self, blocks: Sequence[int], hosts: Sequence[int]) -> list[Op]:
        return [partial(self._copies.spill, blocks, hosts)]

    def restore(self, hosts: Sequence[int], blocks: Sequence[int]) -> list[Op]:
        return [partial(self._copies.restore, hosts, blocks)]

    def store_index(
        self, blocks: Sequence[int], slots: Sequence[int], suffixes: Sequence[int]
    ) -> list[Op]:
        return [partial(self._copies.store_index, blocks, slots, suffixes)]

    def load_index(
        self, suffixes: Sequence[int], blocks: Sequence[int], slots: Sequence[int]
    ) -> list[Op]:
        return [partial(self._copies.load_index, suffixes, blocks, slots)]

    def copy_index(self, copies: Sequence[IndexCopy]) -> list[Op]:
        """As few calls as keep a copy that reads what another wrote behind it."""
        batches: list[list[IndexCopy]] = [[]]
        written: set[int] = set()
        read: set[int] = set()
        for copy in copies:
            if copy.source in written or copy.block in written or copy.block in read:
                batches.append([])
                written, read = set(), set()
            batches[-1].append(copy)
            written.add(copy.block)
            read.add(copy.source)
        return [partial(self._copy_index, batch) for batch in batches if batch]

    def _copy_index(self, copies: Sequence[IndexCopy]) -> None:
        """An entry a page."""
        pages = [(c, i) for c in copies for i in range(c.pages)]
        self._copies.copy_index(
            [c.source for c, _ in pages],
            [c.source_slot + i for c, i in pages],
            [c.block for c, _ in pages],
            [c.slot + i for c, i in pages],
        )

    def close(self) -> None:
        self._pools = ()
