"""Pinned memory with a driver made up."""

from __future__ import annotations

import mmap
import os
import threading

from hisparse.device.cuda.host_memory import HostMemory
from hisparse.device.host_limits import HostLimits, Limit
from hisparse.errors import DeviceError

PAGE = mmap.PAGESIZE

PIECE = 4 * PAGE

LINUX = os.path.exists("/proc/self/smaps")
MEMLOCK = Limit("RLIMIT_MEMLOCK", 0, "soft limit 0 GiB", "raise it with `ulimit -l`")


class Driver:
    """Registers at most `most` intervals; `hold`: waits for `go` before each; `stuck`: addresses
    that it does not let go of."""

    def __init__(self, most=1 << 30, hold=False):
        self.most, self.registered, self.order, self.stuck = most, {}, [], set()
        self.go = threading.Semaphore(0) if hold else None

    def register(self, address, size):
        if self.go is not None:
            assert self.go.acquire(timeout=30)
        if len(self.order) >= self.most:
            raise DeviceError("cudaHostRegister: cudaErrorMemoryAllocation: out of memory")
        assert address % PAGE == 0 and size % PAGE == 0 and address not in self.registered
        self.registered[address] = size
        self.order.append(address)

    def unregister(self, address):
        if address in self.stuck:
            raise DeviceError("cudaHostUnregister: cudaErrorUnknown: unknown error")
        del self.registered[address]

    def offsets(self, memory):
        return [address - memory.address for address in self.order]


def no_limits():
    return HostLimits(None, (), (), MEMLOCK)


def pinned(size, driver, **options):
    options = {"piece_bytes": PIECE, "threads": 1, "limits": no_limits} | options
    return HostMemory(size, driver, **options)


def resident_bytes():
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * PAGE
