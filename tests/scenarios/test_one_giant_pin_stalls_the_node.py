"""G03: 700 GB pinned in one call hold locks of the driver for minutes; the whole node waits.

Here a pool is pinned in pieces of bounded size, in the background; each is told, and the first is
of use before the last is pinned.
"""

from __future__ import annotations

import mmap
import threading

import pytest

from hisparse.device.cuda.host_memory import PIECE_BYTES, HostMemory

PAGE = mmap.PAGESIZE


class Driver:
    """Notes what one call pins; waits for `go` before each."""

    def __init__(self):
        self.sizes, self.go = [], threading.Semaphore(0)

    def register(self, address, size):
        assert self.go.acquire(timeout=30)
        self.sizes.append(size)

    def unregister(self, address):
        pass


def test_no_call_pins_more_than_a_piece_and_each_is_told():
    driver, told = Driver(), []
    piece, size = 4 * PAGE, 41 * PAGE
    memory = HostMemory(size, driver, piece_bytes=piece, on_progress=told.append)
    driver.go.release(100)
    memory.wait()
    memory.release()
    assert max(driver.sizes) <= piece and sum(driver.sizes) == size
    assert [p.registered_bytes for p in told][-1] == size and len(told) == len(driver.sizes) == 11


def test_the_first_piece_is_of_use_while_the_others_are_being_pinned():
    driver = Driver()
    memory = HostMemory(9 * PAGE, driver, piece_bytes=3 * PAGE, threads=1)
    driver.go.release()
    memory.wait(0, PAGE)
    assert memory.ready(0, 3 * PAGE) and not memory.ready()
    driver.go.release(10)
    memory.wait()
    memory.release()


def test_a_piece_is_small_beside_what_holds_up_a_node():
    assert PIECE_BYTES <= 1 << 30


@pytest.mark.parametrize("pages", [1, 3, 8])
def test_a_pool_below_a_piece_is_one_call(pages):
    driver = Driver()
    driver.go.release(2)
    memory = HostMemory(pages * PAGE, driver, piece_bytes=8 * PAGE)
    memory.wait()
    memory.release()
    assert driver.sizes == [pages * PAGE]
