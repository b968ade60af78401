"""GPU memory whose addresses outlive it: what sleep gives back is free for others, and what graphs
and views hold stays true.

Owns a reserved range of addresses and, unless discarded, the physical memory mapped behind it. That
is the driver's virtual memory management, by ctypes; torch's allocator has no such thing. Who
profiles GPU memory sees the pool in what the device reports (`cudaMemGetInfo`), not in torch's
counts.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from hisparse.errors import DeviceError, UsageError

_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3  # CU_MEM_ALLOCATION_TYPE, _LOCATION_TYPE, _ACCESS_FLAGS


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    """Raises DeviceError with the driver's name for what went wrong."""
    result = getattr(_driver(), name)(*arguments)
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(result, ctypes.byref(text))
        raise DeviceError(f"{name}: {(text.value or b'unknown error').decode()} ({result})")


class GpuMemory:
    """`size_bytes` on device `index`; content is whatever is there.

    Raises DeviceError if addresses or memory are refused.
    """

    def __init__(self, size_bytes: int, index: int) -> None:
        self.size_bytes = size_bytes
        self._properties = _Properties(type=_PINNED, location=_Location(_DEVICE, index))
        unit = ctypes.c_size_t()
        _call(
            "cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self._properties), 0
        )
        self.mapped_bytes = -(-max(size_bytes, 1) // unit.value) * unit.value
        reserved = ctypes.c_uint64()
        nothing = (ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0))
        _call(
            "cuMemAddressReserve",
            ctypes.byref(reserved),
            ctypes.c_size_t(self.mapped_bytes),
            *nothing,
        )
        self.address = reserved.value
        self._mapped = self._released = False
        try:
            self.recommit()
        except DeviceError:
            self.release()
            raise

    def recommit(self) -> None:
        """Memory behind the addresses again."""
        if self._mapped or self._released:
            raise UsageError("recommit of GPU memory that is mapped, or was released")
        size, handle = ctypes.c_size_t(self.mapped_bytes), ctypes.c_uint64()
        properties = ctypes.byref(self._properties)
        _call("cuMemCreate", ctypes.byref(handle), size, properties, ctypes.c_uint64(0))
        at = ctypes.c_uint64(self.address)
        try:
            _call("cuMemMap", at, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        finally:
            _call("cuMemRelease", handle)  # the mapping holds it now, or nobody
        self._mapped = True
        access = _Access(self._properties.location, _READ_WRITE)
        _call("cuMemSetAccess", at, size, ctypes.byref(access), ctypes.c_size_t(1))

    def discard(self) -> None:
        """Give the memory back. Nothing queued may touch it any more."""
        if not self._mapped:
            raise UsageError("discard of GPU memory that is not mapped")
        _call("cuMemUnmap", ctypes.c_uint64(self.address), ctypes.c_size_t(self.mapped_bytes))
        self._mapped = False

    def release(self) -> None:
        """The end, addresses too. A second call does nothing."""
        if self._mapped:
            self.discard()
        if not self._released:
            self._released = True
            size = ctypes.c_size_t(self.mapped_bytes)
            _call("cuMemAddressFree", ctypes.c_uint64(self.address), size)
