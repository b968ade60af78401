"""Pinned memory in pieces, with a driver made up: order, borders, failures."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
from host_memory_rig import LINUX, PAGE, PIECE, Driver, pinned, resident_bytes
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hisparse.device.cuda import host_memory, host_pages
from hisparse.device.cuda.host_pieces import Pieces
from hisparse.device.host_limits import gib
from hisparse.errors import DeviceError, UsageError


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
