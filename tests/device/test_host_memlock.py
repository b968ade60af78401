"""A limit on locked memory is found out at the start, however wide it is, and for all pools.

The driver is made up: it counts what it pins against the limit, or does not.
"""

from __future__ import annotations

import gc
import threading

import pytest
from host_memory_rig import PAGE, PIECE

from hisparse.device.cuda import pinned
from hisparse.device.host_limits import HostLimits, Limit
from hisparse.errors import CapacityError, DeviceError


class Driver:
    """Pins `most_bytes` at most, from several threads."""

    pci_bus_id = "0000:1B:00.0"

    def __init__(self, most_bytes):
        self.most_bytes, self.registered, self._lock = most_bytes, {}, threading.Lock()

    @property
    def bytes(self):
        return sum(self.registered.values())

    def register(self, address, size):
        with self._lock:
            if self.bytes + size > self.most_bytes:
                raise DeviceError("cudaHostRegister: cudaErrorMemoryAllocation: out of memory")
            self.registered[address] = size

    def unregister(self, address):
        with self._lock:
            del self.registered[address]


@pytest.fixture
def pin(monkeypatch):
    """`pinned_memory` on a machine whose memlock is `limit`, counted by the driver or not."""

    def on_a_machine(limit, counts):
        driver = Driver(limit if counts else 1 << 60)

        def limits():
            left = limit - driver.bytes * counts  # as VmLck says
            memlock = Limit("RLIMIT_MEMLOCK", left, f"{limit} B", "raise it with `ulimit -l`")
            return HostLimits(None, (), (), memlock)

        monkeypatch.setattr(pinned, "CudaRegistrar", lambda index: driver)
        monkeypatch.setattr(pinned, "read_limits", limits)
        monkeypatch.setattr(pinned, "PIECE_BYTES", PIECE)
        return driver

    yield on_a_machine


WIDE = 5 * PIECE + PAGE  # memlock of more than a piece, which is as much as a trial pins
NARROW = 3 * PAGE  # of less


@pytest.mark.parametrize("limit", [WIDE, NARROW])
def test_a_pool_beyond_a_limit_that_counts_is_refused_at_the_start(limit, pin):
    driver = pin(limit, counts=True)
    with pytest.raises((CapacityError, DeviceError), match=r"RLIMIT_MEMLOCK .*ulimit -l"):
        pinned.pinned_memory(12 * PIECE)
    assert driver.bytes == 0, "nothing stays pinned"


@pytest.mark.parametrize("limit", [WIDE, NARROW])
def test_a_limit_that_does_not_count_is_found_out_by_pinning_more(limit, pin):
    driver = pin(limit, counts=False)
    memory = pinned.pinned_memory(12 * PIECE)
    assert driver.bytes > limit or limit == NARROW  # whose trial is unpinned again
    memory.wait()
    assert driver.bytes == 12 * PIECE
    memory.release()


@pytest.mark.parametrize("limit", [WIDE, NARROW])
def test_pools_that_fit_one_by_one_and_not_together_are_refused_at_the_start(limit, pin):
    """Whichever GPU of the process they are for: the limit is of the process."""
    driver = pin(limit, counts=True)
    host = pinned.pinned_memory(limit - PAGE)
    with pytest.raises((CapacityError, DeviceError), match="RLIMIT_MEMLOCK") as caught:
        pinned.pinned_memory(2 * PAGE, 1, what="suffix pool")
    assert "suffix pool" in str(caught.value) and not getattr(caught.value, "fixes", {})
    host.wait()
    assert driver.bytes == limit - PAGE, "the first stays"
    host.release()


@pytest.mark.parametrize("counts", [True, False])
def test_pools_that_fit_together_wait_for_nothing(counts, pin):
    driver = pin(WIDE, counts)
    host = pinned.pinned_memory(WIDE - 2 * PAGE)
    suffix = pinned.pinned_memory(2 * PAGE, 1)
    for memory in (host, suffix):
        memory.wait()
        assert memory.pinned
        memory.release()
    assert driver.bytes == 0


def test_pools_that_were_released_or_dropped_count_no_more(pin):
    driver = pin(NARROW, counts=True)
    pinned.pinned_memory(NARROW).release()
    dropped = pinned.pinned_memory(NARROW)
    for thread in dropped._threads:
        thread.join()
    del dropped, thread
    gc.collect()
    assert driver.bytes == 0
    last = pinned.pinned_memory(NARROW)
    last.wait()
    assert driver.bytes == NARROW
    last.release()
