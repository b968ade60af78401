"""`CudaResolver`: a leader's hot-row state on the GPU, and the launches of the fused resolve.

Owns, for one index group: the kept hot-row map, its inverse, the replacement order and the tickets
of its layers' fetches (``kernels/order.cuh`` says what each array holds). Reads the device tables,
writes none of them; what their changes make stale `tables.TableWriter` forgets. `ResolveCall` owns
what one call answers with; its addresses stay the same, so a call can be captured in a CUDA graph
once and replayed for every step.

Promises what `hisparse.device.cpu.resolver` promises, and the same reference tests both, for calls
whose rows of one request fit the hot region together (one wave).

    resolve    one launch: plans every request, fetches the leader's missed rows     [compute]
    replay     one launch: a follower fetches its own bytes of the same plan         [any stream
               that waited for the resolve, and is joined before the layer reads]
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from hisparse.device.cuda.kernels import CALLS_MAX, THREADS, ResolveSizes, load, require_cupy
from hisparse.errors import DeviceError, UsageError

FETCH_BLOCKS = 8  # keeps the link full, and leaves the other SMs to attention
CLUSTER_CAPABILITY = 90  # from which on eight blocks can share their memory
_STATE = "map positions order group group_step step"
_ARGUMENTS = np.dtype(
    [(name, np.uint64) for name in f"rows top_k resident host hot {_STATE}".split()]
    + [(name, np.int32) for name in ("call", "requests", "span", "layers")]
    + [(name, np.uint64) for name in ["out", "misses", "count", "tickets", "counters"]]
    + [(name, np.uint64) for name in ("host_rows", "pool_rows")]
)  # struct Resolve of resolve.cu


@dataclass(frozen=True)
class CudaTables:
    """The tables that the kernels read, int32: resident and host ``[requests, pages + 1]``, whose
    last entry stays 0, and hot ``[requests, hot_blocks]``."""

    resident: Any
    host: Any
    hot: Any


class ResolveCall:
    """What one resolve call of a step reads and answers with; addresses never change.

    Args:
        sizes: the kernels' sizes.
        rows: rows in the call.
        span: rows of one request, adjacent; `rows` is a multiple of it.
        ordinal: which call of its group in a step this is, from 0.
        memory: uint8 ``[call_bytes(rows)]`` on the device, for what the call holds, as it is; None:
            arrays of its own, whose words are of no epoch.
    """

    def __init__(
        self, sizes: ResolveSizes, rows: int, span: int = 1, ordinal: int = 0, memory: Any = None
    ) -> None:
        if rows % span or not 0 < span * sizes.top_k <= sizes.hot_rows:
            raise UsageError(
                f"ResolveCall(rows={rows}, span={span}): rows are a multiple of span, and span * "
                f"top_k ({sizes.top_k}) at most hot_rows ({sizes.hot_rows})"
            )
        if not 0 <= ordinal < CALLS_MAX:
            raise UsageError(f"ordinal={ordinal} must be in 0..{CALLS_MAX - 1}")
        cupy = require_cupy()
        self.span, self.ordinal, self.lines = span, ordinal, rows
        at = 0

        def make(dtype: Any, *shape: int) -> Any:
            nonlocal at
            first, at = at, at + prod(shape) * np.dtype(dtype).itemsize
            if memory is not None:
                return memory[first:at].view(dtype).reshape(shape)
            # -1, and words of no epoch: nothing in them may be taken for the first call's.
            return cupy.full((at - first,), 0xFF, cupy.uint8).view(dtype).reshape(shape)

        self.misses = make(np.uint64, rows, sizes.top_k, 2)  # what moves in larger pieces first
        self.top_k = make(np.int32, rows, sizes.top_k)
        self.out = make(np.int32, rows, sizes.top_k)
        self.count = make(np.uint64, rows)
        self.rows = make(np.int32, rows)


def fetch_blocks(places: int) -> int:
    """Blocks that fetch on a device of `places` multiprocessors. A fetching block waits for
    planning blocks: these must always find a place beside them. Raises DeviceError."""
    if places < 2:
        raise DeviceError(
            f"{places} multiprocessor cannot plan and fetch at once: the cuda backend needs 2, use "
            "a larger GPU, or a larger part of one (MIG)"
        )
    return min(FETCH_BLOCKS, places - 1)


class CudaResolver:
    """Hot-row state of one leader.

    Args:
        sizes: what the kernels are compiled for.
        tables: the device tables.
        requests: rows of those tables.
        layers: layers of the index group, the leader included.
        step: int32 ``[1]`` on the device, the step under way; shared by all groups, and changed by
            work on the compute stream only. Steps rise.

    Raises DeviceError without CuPy or a GPU, or for a device of one multiprocessor.
    """

    def __init__(
        self, sizes: ResolveSizes, tables: CudaTables, requests: int, layers: int, step: Any
    ) -> None:
        cupy = require_cupy()
        self.sizes, self.tables, self.layers, self.step = sizes, tables, layers, step
        self._resolve = load("resolve.cu", sizes).get_function("hisparse_resolve")
        self._replay = load("fetch.cu", sizes).get_function("hisparse_replay")
        self._reopen = load("fetch.cu", sizes).get_function("hisparse_reopen")
        self._resolve.max_dynamic_shared_size_bytes = sizes.shared_bytes
        self.map = cupy.full((requests, sizes.map_stride), -1, cupy.int16)
        self.positions = cupy.full((requests, sizes.stride), -1, cupy.int32)
        slots = cupy.arange(sizes.stride, dtype=cupy.uint16)
        self.order = cupy.tile(slots, (requests, 1))
        self.group = cupy.zeros((requests, sizes.stride), cupy.uint8)
        self.group_step = cupy.full((requests,), -1, cupy.int32)
        self.tickets = cupy.zeros((layers,), cupy.uint64)
        self.counters = cupy.zeros((2,), cupy.uint64)
        device = cupy.cuda.Device()
        self.fetch_blocks = fetch_blocks(int(device.attributes["MultiProcessorCount"]))
        self._resolve_one = self._cluster_kernel(device)

    def _cluster_kernel(self, device: Any) -> Any:
        """The kernel for calls of one row, whose look-ups the blocks of a cluster share; None below
        compute capability 9.0, which has no clusters, on a device of no more multiprocessors than a
        cluster has blocks, and where a block has less memory than it takes. Eight is the size that
        every other device takes; whether it has a place for one is not asked. On one that has been
        divided (MIG) and has none, the launch fails, by the driver's error."""
        if int(device.compute_capability) < CLUSTER_CAPABILITY or self.fetch_blocks < FETCH_BLOCKS:
            return None
        kernel = load("resolve_one.cu", self.sizes).get_function("hisparse_resolve_one")
        shared = kernel.shared_size_bytes + self.sizes.shared_bytes
        if shared > device.attributes["MaxSharedMemoryPerBlockOptin"]:
            return None
        kernel.max_dynamic_shared_size_bytes = self.sizes.shared_bytes
        return kernel

    @property
    def state_bytes(self) -> int:
        """Bytes of replacement state; charge them to the memory budget."""
        arrays = (self.map, self.positions, self.order, self.group, self.group_step, self.tickets)
        return sum(int(array.nbytes) for array in arrays)

    def arguments(self, call: ResolveCall, host_rows: int, pool_rows: int) -> Any:
        """The kernel's parameters for `call`; addresses of the leader's layer in both tiers."""
        made = np.zeros(1, _ARGUMENTS)
        owners = {
            "rows top_k out misses count": call,
            "resident host hot": self.tables,
            f"{_STATE} tickets counters": self,
        }
        for names, owner in owners.items():
            for name in names.split():
                made[name] = getattr(owner, name).data.ptr
        made["call"], made["span"] = call.ordinal, call.span
        made["requests"], made["layers"] = call.lines // call.span, self.layers
        made["host_rows"], made["pool_rows"] = host_rows, pool_rows
        return made[0]

    def resolve(self, call: ResolveCall, arguments: Any) -> None:
        """Queue the resolve of `call` on the current stream: one launch.

        Afterwards ``call.out`` int32 ``[rows, top_k]`` are rows of the packed pool (block *
        block_rows + offset) and hold the selected bytes; -1 for padding, and for a position that
        has no copy, which `lost` counts.
        """
        kernel, blocks = self._resolve, self.fetch_blocks + call.lines // call.span
        if call.lines == 1 and self._resolve_one is not None:
            kernel, blocks = self._resolve_one, FETCH_BLOCKS  # of which seven fetch
        kernel((blocks,), (THREADS,), (arguments,), shared_mem=self.sizes.shared_bytes)

    def replay(self, call: ResolveCall, member: int, host_rows: int, pool_rows: int) -> None:
        """Queue follower `member`'s (1..layers-1) fetch of the plan of `call`: one launch."""
        if not 0 < member < self.layers:
            raise UsageError(f"member={member} must be in 1..{self.layers - 1}: 0 is the leader")
        self._replay(
            (self.fetch_blocks,),
            (THREADS,),
            (
                *(call.misses, call.count, self.tickets[member:], np.int32(call.lines)),
                *(self.step, np.int32(call.ordinal), np.uint64(host_rows), np.uint64(pool_rows)),
            ),
        )

    def reopen(self, call: ResolveCall, member: int) -> None:
        """Queue what lets `member` replay `call` though later calls were resolved: one launch."""
        ordinal, blocks = np.int32(call.ordinal), np.int32(self.fetch_blocks)
        self._reopen((1,), (1,), (self.tickets[member:], self.step, ordinal, blocks))

    # -- reading back ------------------------------------------------------------------------------
    def statistics(self) -> dict[str, int]:
        """Misses, and entries without any copy, so far. Synchronises: not for the decode path."""
        misses, lost = (int(x) for x in self.counters.get())
        return {"misses": misses, "lost": lost}
