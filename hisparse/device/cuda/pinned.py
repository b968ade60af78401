"""Pinned memory for a GPU: near it, and within what the machine, cgroups and memlock allow."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

from hisparse.device.cuda import host_pages
from hisparse.device.cuda.host_memory import PIECE_BYTES, HostMemory
from hisparse.device.cuda.host_pieces import Progress
from hisparse.device.cuda.host_register import CudaRegistrar, try_memlock
from hisparse.device.host_demand import check_pool
from hisparse.device.host_limits import read_limits
from hisparse.errors import DeviceError, UsageError

PIECE_BYTES_MIN = 32 << 20  # work beside pinning slows down as they get smaller
_PIECES_OF_A_LAYER = 8  # of which the first step waits for one
_pools: WeakSet[HostMemory] = WeakSet()  # of this process
_pools_change = threading.Lock()


def piece_bytes(layer_bytes: int) -> int:
    """Of a registration in a pool whose layers are so long; 0: it has none."""
    if not layer_bytes:
        return PIECE_BYTES
    return min(max(layer_bytes // _PIECES_OF_A_LAYER, PIECE_BYTES_MIN), PIECE_BYTES)


def pinned_memory(
    size_bytes: int,
    device_index: int = 0,
    *,
    fill: int = 0,
    granule_bytes: int = 1,
    layer_bytes: int = 0,
    on_progress: Callable[[Progress], object] | None = None,
    what: str = "host pool",
) -> HostMemory:
    """A `HostMemory` for GPU `device_index`, near it, if machine, cgroups and memlock allow it.

    What is still to be pinned of the pools that this process has already, whichever GPU they are
    for, counts against memlock too. Where a limit on locked memory is wider than a trial, returns
    when more than it leaves is pinned.

    Raises CapacityError that names the limit that does not, and how to raise it; DeviceError that
    does if the driver finds it out on the way, and without CuPy or a GPU.
    """
    with _pools_change:
        pools = list(_pools)
    beside = [(pool, told) for pool in pools if (told := pool.progress()).state != "released"]
    on_the_way = [(pool, told) for pool, told in beside if told.state == "pinning"]
    left = sum(told.total_bytes - told.registered_bytes for _, told in on_the_way)
    others = left if beside else None
    registrar, limits = CudaRegistrar(device_index), read_limits()  # of which no piece lacks now
    check_pool(limits, size_bytes, what)
    tells = try_memlock(registrar, limits, size_bytes, PIECE_BYTES, what, beside_bytes=others)
    memory = HostMemory(
        size_bytes,
        registrar,
        fill=fill,
        granule_bytes=granule_bytes,
        layer_bytes=layer_bytes,
        piece_bytes=piece_bytes(layer_bytes),
        placement=host_pages.near_gpu(registrar.pci_bus_id, limits, size_bytes),
        on_progress=on_progress,
        limits=read_limits,
        what=what,
    )
    with _pools_change:
        _pools.add(memory)
    if tells:
        try:
            for pool, told in on_the_way:
                with suppress(UsageError):  # given up meanwhile by another thread
                    pool.wait_pinned(told.total_bytes)
            memory.wait_pinned(tells)
        except DeviceError:
            memory.release()
            raise
    return memory


def pinning(pools: Iterable[HostMemory]) -> dict[str, Any]:
    """How far the pinning of `pools` is, for statistics: bytes pinned, of how many, and of each
    pool its state, where its pages should lie, and what share of them does, once that is known."""
    told = [pool.progress() for pool in pools]
    return {
        "pinned_bytes": sum(progress.registered_bytes for progress in told),
        "pinned_total_bytes": sum(progress.total_bytes for progress in told),
        "pinned_places": [_placed(progress) for progress in told],
    }


def _placed(progress: Progress) -> str:
    share = progress.local_share
    there = "" if share is None else f", {share:.0%} of its pages there"
    return f"{progress.state}: {progress.placement}{there}"
