"""Pinned memory in pieces, with a driver made up: order, borders, failures, sleep and teardown."""

from __future__ import annotations

import gc
import mmap
import os
import threading
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hisparse.device.cuda import host_memory, host_pages
from hisparse.device.cuda.host_memory import HostMemory
from hisparse.device.cuda.host_pages import Placement
from hisparse.device.cuda.host_pieces import Pieces
from hisparse.device.host_limits import HostLimits, Limit, gib
from hisparse.errors import DeviceError, UsageError

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


# -- pieces ----------------------------------------------------------------------------------------
@settings(max_examples=60)
@given(
    st.integers(1, 40 * PAGE),
    st.integers(1, 9 * PAGE),
    st.sampled_from([1, 96, 656 * 4, 576, 3 * PAGE]),
)
@example(2 * PIECE + 1, PIECE, 1)
def test_pieces_tile_the_request_and_no_border_cuts_a_granule(size, piece_bytes, granule):
    pieces = list(Pieces(size, piece_bytes, granule, "pool"))
    assert pieces[0].offset == 0 and 0 <= pieces[-1].end - size < PAGE, "no rounding but to a page"
    for piece, after in pairwise(pieces):
        assert piece.end == after.offset and piece.end % PAGE == 0 and piece.end % granule == 0


def test_an_interval_is_cut_at_the_borders_of_registrations():
    pieces = Pieces(10 * PAGE + 5, PIECE, 1, "pool")
    assert pieces.cut(PIECE - 1, PIECE + 2) == [
        (PIECE - 1, 1),
        (PIECE, PIECE),
        (2 * PIECE, 1),
    ]
    assert pieces.cut(10, 20) == [(10, 20)]
    with pytest.raises(UsageError, match="not within"):
        pieces.cut(10 * PAGE, 6)


# -- pinning in the background ---------------------------------------------------------------------
@pytest.mark.parametrize("threads", [1, 3])
def test_the_whole_is_registered_once_and_filled(threads):
    driver, size = Driver(), 10 * PAGE + 7
    memory = pinned(size, driver, threads=threads, fill=0xDB)
    memory.wait()
    assert memory.ready() and memory.array.shape == (size,) and (memory.array == 0xDB).all()
    assert sorted(driver.registered.items()) == [
        (memory.address, PIECE),
        (memory.address + PIECE, PIECE),
        (memory.address + 2 * PIECE, 3 * PAGE),
    ]
    memory.release()
    assert driver.registered == {}


def test_a_byte_is_not_ready_before_its_piece_is():
    driver = Driver(hold=True)
    memory = pinned(3 * PIECE, driver)
    assert not memory.ready(0, 1)
    driver.go.release()
    memory.wait(0, PIECE)
    assert memory.ready(PIECE - 1, 1) and not memory.ready(PIECE - 1, 2) and not memory.ready()
    driver.go.release(2)
    memory.wait()
    assert memory.ready()
    memory.release()


def test_what_somebody_waits_for_comes_next():
    driver = Driver(hold=True)
    memory = pinned(5 * PIECE, driver)
    waiter = threading.Thread(target=memory.wait, args=(4 * PIECE, 1))
    waiter.start()
    while not memory._pieces._wanted:  # until it has asked
        waiter.join(0.001)
    driver.go.release(5)
    waiter.join()
    memory.wait()
    assert driver.offsets(memory) == [0, 4 * PIECE, PIECE, 2 * PIECE, 3 * PIECE]
    memory.release()


def test_progress_is_told_after_each_piece_and_ends_with_the_whole():
    told = []
    memory = pinned(2 * PIECE + 1, Driver(), on_progress=told.append)
    memory.wait()
    for thread in memory._threads:
        thread.join()
    assert [p.registered_bytes for p in told] == [PIECE, 2 * PIECE, 2 * PIECE + 1]
    now = memory.progress()
    assert (now.state, now.total_bytes, now.local_share) == ("pinned", 2 * PIECE + 1, None)
    assert now.elapsed_s > 0 and now.placement == "anywhere"
    memory.release()


@pytest.mark.parametrize("sizes", [(0, 1), (5, 0), (-1, 1)])
def test_sizes_that_make_no_sense_are_refused(sizes):
    with pytest.raises(UsageError, match="at least 1"):
        pinned(sizes[0], Driver(), piece_bytes=sizes[1])


# -- failures --------------------------------------------------------------------------------------
def test_a_piece_that_cannot_be_pinned_unwinds_the_others_and_says_which_and_which_limit():
    driver = Driver(most=2)
    memory = pinned(4 * PIECE, driver, what="suffix pool")
    with pytest.raises(DeviceError) as caught:
        memory.wait()
    for said in (
        f"suffix pool: piece 3 of 4 (bytes {2 * PIECE}..{3 * PIECE}) not pinned",
        "cudaErrorMemoryAllocation",
        f"{gib(2 * PIECE)} of {gib(4 * PIECE)} had been pinned",
        "RLIMIT_MEMLOCK leaves 0 GiB",
        "ulimit -l",
    ):
        assert said in str(caught.value)
    assert driver.registered == {} and memory.progress().state == "failed"
    with pytest.raises(DeviceError, match="piece 3 of 4"):
        memory.ready(0, 1)
    memory.release()


def test_what_somebody_was_told_to_be_ready_stays_pinned_until_release():
    driver = Driver(most=2, hold=True)
    memory = pinned(4 * PIECE, driver)
    driver.go.release()
    memory.wait(0, 1)
    driver.go.release(2)
    with pytest.raises(DeviceError):
        memory.wait()
    assert list(driver.registered) == [memory.address]
    memory.release()
    assert driver.registered == {}


def test_who_waits_hears_of_a_failure_when_the_unwinding_is_over():
    class Slow(Driver):
        let = threading.Semaphore(0)

        def unregister(self, address):
            assert self.let.acquire(timeout=30)
            super().unregister(address)

    driver, heard = Slow(most=2), []

    def waits():
        with pytest.raises(DeviceError):
            memory.wait()
        heard.append(dict(driver.registered))

    memory = pinned(3 * PIECE, driver)
    waiter = threading.Thread(target=waits)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive() and not memory.ready(0, 1)
    driver.let.release(2)
    waiter.join()
    assert heard == [{}]
    memory.release()


@pytest.mark.skipif(not LINUX, reason="nothing says what is resident")
def test_unwinding_gives_the_pages_back():
    before, size = resident_bytes(), 64 << 20
    memory = pinned(size, Driver(most=3), piece_bytes=16 << 20)
    with pytest.raises(DeviceError):
        memory.wait()
    assert resident_bytes() - before < size // 8
    memory.release()


def test_pages_that_cannot_be_had_fail_with_the_kernels_reason(monkeypatch):
    def refuse(address, size, array):
        raise DeviceError("madvise(MADV_POPULATE_WRITE): Cannot allocate memory")

    monkeypatch.setattr(host_pages, "populate", refuse)
    driver = Driver()
    memory = pinned(PIECE, driver)
    with pytest.raises(DeviceError, match=r"piece 1 of 1 .* Cannot allocate memory"):
        memory.wait()
    assert driver.order == []
    memory.release()


def test_a_progress_callback_that_raises_fails_the_pinning_and_is_named():
    def broken(progress):
        raise ValueError("no terminal")

    driver = Driver()
    memory = pinned(2 * PIECE, driver, on_progress=broken)
    with pytest.raises(DeviceError, match=r"pinning stopped: ValueError.*no terminal"):
        memory.wait(PIECE, 1)
    memory.release()
    assert driver.registered == {}


def test_a_registration_that_does_not_end_is_named_and_its_memory_is_never_given_up():
    driver = Driver()
    memory = pinned(3 * PIECE, driver, fill=7)
    memory.wait()
    stuck = memory.address + PIECE
    driver.stuck.add(stuck)
    array = memory.array
    for _ in range(2):
        with pytest.raises(DeviceError, match=r"piece 2 of 3 .*: cudaHostUnregister: cudaErrorU"):
            memory.release()
        assert list(driver.registered) == [stuck] and len(host_memory._kept) == 1
        assert (array[PIECE : 2 * PIECE] == 7).all() and not array[:PIECE].any()
        with pytest.raises(DeviceError, match="piece 2 of 3"):
            memory.ready(0, 1)
    driver.stuck.clear()
    memory.release()
    assert driver.registered == {} and host_memory._kept == []


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
