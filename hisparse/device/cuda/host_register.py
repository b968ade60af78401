"""What pins host memory: the driver's registration of an interval, and whether memlock counts.

Owns nothing: who registers, unregisters. Errors carry CUDA's own names. CuPy is imported where it
is used.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hisparse.config import ceil_div
from hisparse.device.cuda.host_pieces import Piece, Pieces
from hisparse.device.cuda.kernels import require_cupy
from hisparse.device.host_demand import refused
from hisparse.device.host_limits import HostLimits, gib
from hisparse.errors import DeviceError

_PORTABLE_MAPPED = 1 | 2  # cudaHostRegisterPortable: pinned for every context; Mapped: addressable
_CAN_USE_HOST_POINTER = 91  # cudaDevAttrCanUseHostPointerForRegisteredMem


class Registrar(Protocol):
    """What pins: both raise DeviceError with the driver's name for what went wrong."""

    def register(self, address: int, size: int) -> None: ...
    def unregister(self, address: int) -> None: ...


class CudaRegistrar:
    """Registers host memory with GPU `device_index`, which then reads it at its host address.

    Raises DeviceError without CuPy or a GPU, or if that GPU needs other addresses.
    """

    def __init__(self, device_index: int = 0) -> None:
        self._cupy = cupy = require_cupy()
        self._runtime = cupy.cuda.runtime
        self._device = cupy.cuda.Device(device_index)
        self.pci_bus_id: str = self._device.pci_bus_id
        if not self._runtime.deviceGetAttribute(_CAN_USE_HOST_POINTER, device_index):
            raise DeviceError(
                f"GPU {self.pci_bus_id} cannot read registered memory at its host address "
                "(cudaDevAttrCanUseHostPointerForRegisteredMem is 0): the cuda backend needs that"
            )

    def register(self, address: int, size: int) -> None:
        with self._device:  # of this thread
            try:
                self._runtime.hostRegister(address, size, _PORTABLE_MAPPED)
            except self._runtime.CUDARuntimeError as error:
                raise DeviceError(f"cudaHostRegister: {error}") from error

    def unregister(self, address: int) -> None:
        with self._device:
            try:
                self._runtime.hostUnregister(address)
            except self._runtime.CUDARuntimeError as error:
                raise DeviceError(f"cudaHostUnregister: {error}") from error


def unpin(
    registrar: Registrar, whole: Pieces, pieces: Sequence[Piece], address: int, memory: mmap.mmap
) -> None:
    """End the registrations of `pieces` of `whole`, which lies at `address` in `memory`, and give
    their pages back. Raises DeviceError that names those that the driver would not end: they stay.
    """
    errors = []
    for piece in pieces:
        try:
            if piece.state == "registered":
                registrar.unregister(address + piece.offset)
        except DeviceError as error:
            errors.append(f"{whole.told(piece)}: {error}")
            continue
        piece.state, piece.told = "absent", False
        memory.madvise(mmap.MADV_DONTNEED, piece.offset, piece.size)
    if errors:
        raise DeviceError(f"{whole.what}: not unpinned, so kept mapped: {'; '.join(errors)}")


def try_memlock(
    registrar: Registrar,
    limits: HostLimits,
    size_bytes: int,
    most_bytes: int,
    what: str,
    *,
    beside_bytes: int | None = None,
) -> int:
    """Find out whether the driver counts pinned memory against RLIMIT_MEMLOCK, if that matters.

    Pins one page more than the limit leaves, for a moment, unless that is above `most_bytes`: then
    returns how many bytes of the pool tell as much, once they are pinned; 0: nothing is left to
    find out. `beside_bytes`: of other pools of this process, what is still to be pinned; None:
    there is none. Raises CapacityError if the driver refuses it.
    """
    limit, others = limits.memlock, beside_bytes or 0
    if limit is None or limit.left_bytes >= others + size_bytes:
        return 0
    trial = (ceil_div(limit.left_bytes, mmap.PAGESIZE) + 1) * mmap.PAGESIZE
    if trial > most_bytes:
        return min(size_bytes, max(trial - others, mmap.PAGESIZE))
    memory = mmap.mmap(-1, trial, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
    try:
        registrar.register(address, trial)
    except DeviceError as error:
        more = f" beside {gib(others)} of other pools" if others else ""
        start = f"{what}: {gib(size_bytes)}{more} cannot be pinned, {gib(trial)} were refused "
        fits = limit.left_bytes if beside_bytes is None else 0  # which of several pools gives way?
        raise refused(f"{start}({error}): ", [f"{limit}: {limit.raise_it}"], fits) from error
    registrar.unregister(address)
    return 0
