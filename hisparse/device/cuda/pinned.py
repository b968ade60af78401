"""Pinned memory for a GPU: near it, and within what the machine, cgroups and memlock allow."""

from __future__ import annotations

from collections.abc import Callable

from hisparse.device.cuda import host_pages
from hisparse.device.cuda.host_memory import PIECE_BYTES, HostMemory, Progress
from hisparse.device.cuda.host_register import CudaRegistrar, try_memlock
from hisparse.device.host_demand import check_pool
from hisparse.device.host_limits import read_limits


def pinned_memory(
    size_bytes: int,
    device_index: int = 0,
    *,
    fill: int = 0,
    granule_bytes: int = 1,
    on_progress: Callable[[Progress], object] | None = None,
    what: str = "host pool",
) -> HostMemory:
    """A `HostMemory` for GPU `device_index`, near it, if machine, cgroups and memlock allow it.

    Raises CapacityError that names the limit that does not, and how to raise it, and DeviceError
    without CuPy or a GPU.
    """
    registrar, limits = CudaRegistrar(device_index), read_limits()
    check_pool(limits, size_bytes, what)
    try_memlock(registrar, limits, size_bytes, PIECE_BYTES, what)
    return HostMemory(
        size_bytes,
        registrar,
        fill=fill,
        granule_bytes=granule_bytes,
        placement=host_pages.near_gpu(registrar.pci_bus_id, limits, size_bytes),
        on_progress=on_progress,
        what=what,
    )
