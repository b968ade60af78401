"""G06: "cannot allocate" while memory is free, and a hint at GPU memory: the limit on locked memory
was 64 MiB.

Here what the driver refuses is told as host memory, with the pool's size, the limit that is short,
and how to raise it.
"""

from __future__ import annotations

import pytest

from hisparse.device.cuda.host_memory import HostMemory
from hisparse.device.cuda.host_register import try_memlock
from hisparse.device.host_limits import HostLimits, Limit
from hisparse.errors import CapacityError, DeviceError

MIB, GIB = 1 << 20, 1 << 30


class Driver:
    """Counts what it pins against 64 MiB."""

    def __init__(self):
        self.pinned = {}

    def register(self, address, size):
        if sum(self.pinned.values()) + size > 64 * MIB:
            raise DeviceError("cudaHostRegister: cudaErrorMemoryAllocation: out of memory")
        self.pinned[address] = size

    def unregister(self, address):
        del self.pinned[address]


def limits(left=64 * MIB):
    memlock = Limit("RLIMIT_MEMLOCK", left, "soft limit 64 MiB", "raise it with `ulimit -l`")
    return HostLimits(None, (), (), memlock)


def test_a_pool_of_a_gib_is_refused_before_it_is_taken_with_limit_and_setting():
    with pytest.raises(CapacityError) as caught:
        try_memlock(Driver(), limits(), GIB, GIB, "host pool")
    for said in ("host pool", "1 GiB", "RLIMIT_MEMLOCK", "ulimit -l"):
        assert said in str(caught.value)
    assert "GPU" not in str(caught.value)


def test_what_is_refused_on_the_way_is_told_with_the_same():
    driver = Driver()
    memory = HostMemory(96 * MIB, driver, piece_bytes=32 * MIB, threads=1, limits=lambda: limits(0))
    with pytest.raises(DeviceError) as caught:
        memory.wait()
    for said in ("host pool: piece 3 of 3", "RLIMIT_MEMLOCK", "ulimit -l"):
        assert said in str(caught.value)
    memory.release()
    assert driver.pinned == {}
