"""G01: an allocator rounds pinned tensors up to a power of two: 1.92 times what was asked for, in
memory that nobody can reclaim.

Here the pool is one mapping of the bytes asked for, rounded up to a page of the machine, and what
is pinned is what is told.
"""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.device.cuda.host_pieces import Pieces
from hisparse.device.cuda.pinned import pinned_memory

GIB = 1 << 30


@given(
    st.integers(0, 40),
    st.integers(-3, 3),
    st.sampled_from([1, 656 * 64, 1152 * 64]),
    st.sampled_from([64 << 20, 256 << 20]),
)
def test_what_is_committed_is_what_was_asked_for_and_less_than_a_page(power, off, granule, piece):
    size = max((1 << power) + off, 1)
    pieces = Pieces(size, piece, granule, "host pool")
    assert 0 <= pieces.mapped_bytes - size < mmap.PAGESIZE
    assert sum(piece.size for piece in pieces) == pieces.mapped_bytes


def test_the_reported_tensor_takes_2_0832_gib_and_not_4():
    assert Pieces(int(2.0832 * GIB), 256 << 20, 1, "host pool").mapped_bytes < 2.084 * GIB


@pytest.mark.gpu
def test_the_machine_locks_no_more_than_that():
    size = (64 << 20) + 4097
    before = locked_bytes()
    memory = pinned_memory(size, 0)
    memory.wait()
    try:
        assert memory.progress().registered_bytes == size
        if before is not None:
            assert 0 <= locked_bytes() - before <= size + mmap.PAGESIZE
    finally:
        memory.release()


def locked_bytes():
    """VmPin of this process, or None where the kernel does not count what a driver pins there."""
    with open("/proc/self/status") as lines:
        found = [line.split()[1] for line in lines if line.startswith("VmPin:")]
    return int(found[0]) * 1024 if found else None
