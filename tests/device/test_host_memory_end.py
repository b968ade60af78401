"""Pinned memory asleep, at its end, and what its pages are to the kernel."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from types import SimpleNamespace

import pytest
from host_memory_rig import LINUX, PIECE, Driver, pinned, resident_bytes

from hisparse.device.cuda import host_memory, host_pages
from hisparse.device.cuda.device import CudaDevice
from hisparse.device.cuda.host_pages import Placement
from hisparse.errors import DeviceError, UsageError


# -- sleep and the end -----------------------------------------------------------------------------
def test_sleep_loses_pins_and_content_and_waking_pins_the_same_addresses_again():
    driver = Driver()
    memory = pinned(3 * PIECE, driver, fill=1)
    memory.wait()
    array, address = memory.array, memory.address
    memory.discard()
    assert driver.registered == {} and not array.any()
    with pytest.raises(UsageError, match="asleep"):
        memory.ready()
    memory.recommit(fill=2)
    memory.wait()
    assert memory.array.ctypes.data == address and (array == 2).all()
    assert len(driver.registered) == 3
    with pytest.raises(UsageError, match="recommit of memory that is pinned"):
        memory.recommit()
    memory.release()


def test_memory_that_is_dropped_is_unpinned_and_what_stays_pinned_stays_mapped():
    driver, kept = Driver(), len(host_memory._kept)
    memory, other = pinned(3 * PIECE, driver), pinned(PIECE, driver)
    memory.wait()
    other.wait()
    driver.stuck = {other.address}
    del memory
    gc.collect()
    assert list(driver.registered) == [other.address]
    del other
    gc.collect()
    assert driver.registered and len(host_memory._kept) == kept + 1
    host_memory._kept.pop()


def test_release_in_the_middle_of_pinning_ends_after_the_piece_under_way():
    driver = Driver(hold=True)
    memory = pinned(5 * PIECE, driver)
    driver.go.release()
    memory.wait(0, 1)
    ending = threading.Thread(target=memory.release)
    ending.start()
    while not memory._stopping:
        ending.join(0.001)
    driver.go.release(10)
    ending.join()
    assert len(driver.order) <= 2 and driver.registered == {}
    memory.release()
    for call in (memory.ready, memory.discard, memory.recommit):
        with pytest.raises(UsageError, match="released"):
            call()


def test_a_device_tells_its_bytes_in_every_state_of_a_pool_until_it_forgets_it():
    """Where pinning failed, release raises once and the pool is forgotten by the next."""
    device, driver = object.__new__(CudaDevice), Driver(hold=True)  # of no GPU
    memory = pinned(2 * PIECE, driver)
    array, device._pinned = memory.array, {memory.address: memory}
    device._allocated, device._streams = {}, ()
    device._events = device._synchronizes = device.launches = device.copies = 0
    device.faults = SimpleNamespace(counts={}, lost=0)

    def told():
        said = device.statistics()
        return said["allocated_bytes"], *(place.split(":")[0] for place in said["pinned_places"])

    assert told() == (2 * PIECE, "pinning")
    driver.go.release(100)
    memory.wait()
    assert told() == (2 * PIECE, "pinned")
    device.discard(array)
    assert told() == (2 * PIECE, "asleep")
    driver.most = 0
    memory.recommit()
    for thread in memory._threads:
        thread.join()
    assert told() == (2 * PIECE, "failed")
    with pytest.raises(DeviceError, match="out of memory"):
        device.release(array)
    assert told() == (2 * PIECE, "released")
    device.release(array)
    assert told() == (0,)


@pytest.mark.skipif(not LINUX, reason="nothing says what is resident")
def test_the_pages_go_back_at_release_though_a_view_is_left():
    before, size = resident_bytes(), 64 << 20
    memory = pinned(size, Driver(), piece_bytes=16 << 20)
    memory.wait()
    view = memory.array[100:200]
    assert resident_bytes() - before > 0.9 * size
    memory.release()
    assert resident_bytes() - before < 0.1 * size and not view.any()


def mapping_flags(address):
    """VmFlags of the mapping that holds `address`."""
    mine = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first, _, last = line.split()[0].partition("-")
            if last:
                mine = int(first, 16) <= address < int(last, 16)
            elif mine and line.startswith("VmFlags:"):
                return line.split()[1:]
    raise AssertionError(f"{address:#x} is not mapped")


@pytest.mark.skipif(not LINUX, reason="nothing tells a mapping's flags")
def test_a_forked_child_and_a_core_dump_do_not_get_the_memory():
    """A child's copy-on-write would give us other pages than those that the GPU has pinned."""
    memory = pinned(PIECE, Driver())
    memory.wait()
    assert {"dc", "dd"} <= set(mapping_flags(memory.address))
    memory.release()


# -- pages -----------------------------------------------------------------------------------------
@pytest.mark.skipif(not LINUX, reason="nothing says what is resident")
def test_a_kernel_that_does_not_know_the_advice_gets_the_pages_touched(monkeypatch):
    monkeypatch.setattr(host_pages, "_POPULATE_WRITE", 9999)
    before, size = resident_bytes(), 64 << 20
    memory = pinned(size, Driver(), piece_bytes=16 << 20)
    memory.wait()
    assert resident_bytes() - before > 0.9 * size and not memory.array.any()
    memory.release()


@pytest.mark.skipif(not os.path.exists("/sys/devices/system/node/node0"), reason="no NUMA node 0")
def test_pages_are_bound_to_the_node_and_the_share_that_lies_there_is_told():
    near = Placement(0, frozenset(os.sched_getaffinity(0)), "node 0, next to the GPU")
    memory = pinned(8 * PIECE, Driver(), placement=near)
    memory.wait()
    for thread in memory._threads:
        thread.join()
    now = memory.progress()
    if "mbind" in now.placement:
        pytest.skip(f"the kernel does not let us: {now.placement}")
    share = now.local_share
    if os.path.exists("/sys/devices/system/node/node1"):
        assert share is None or 0 <= share <= 1
    else:
        assert share in (None, 1.0)
    assert host_pages.share_on(memory.address, 8 * PIECE, 63) in (None, 0.0)
    memory.release()


def test_a_kernel_without_huge_pages_is_no_error(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)
    memory = pinned(PIECE, Driver())
    memory.wait()
    memory.release()


def test_a_node_that_does_not_exist_is_told_and_memory_is_pinned_anyway():
    memory = pinned(PIECE, Driver(), placement=Placement(1000, frozenset(), "node 1000"))
    memory.wait()
    assert "mbind: EINVAL" in memory.progress().placement or "EPERM" in memory.progress().placement
    memory.release()
