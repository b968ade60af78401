"""The ring of pinned memory that small arrays pass through, over a stream that a test drives.

The stream is a queue; nothing of it happens before the test, or somebody who waits, says so. A
reader that was queued finds what was put for it, however far behind the device is.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
from backends import stall
from device_rig import Rig
from hypothesis import example, given
from hypothesis import strategies as st

from hisparse.device.cuda.streams import ALIGNMENT, QUARTERS, Staging

QUARTER = 8 * ALIGNMENT
RING = QUARTERS * QUARTER


class Pinned(bytearray):
    """Host memory; gone once nobody holds it."""


class LaggingStream:
    """A FIFO of readers and events. `put` puts bytes of a number, and queues who reads them."""

    def __init__(self):
        self.queue, self.passed, self.numbers = deque(), 0, 0
        self.memories = []  # (first address, end, weak reference)
        stream = self

        class Event:
            def record(self, _):
                self.at = stream.queued
                stream.queue.append(lambda: None)

            def query(self):
                return self.at < stream.passed

            def synchronize(self):
                stream.run(self.at + 1 - stream.passed)

        self.events = Event
        device = SimpleNamespace(
            cupy=SimpleNamespace(cuda=SimpleNamespace(alloc_pinned_memory=self.allocate)),
            torch=SimpleNamespace(cuda=SimpleNamespace(Event=Event)),
        )
        self.ring = Staging(device, SimpleNamespace(torch=None), RING)

    @property
    def queued(self):
        return self.passed + len(self.queue)

    def allocate(self, size):
        memory = Pinned(size)
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.memories.append((first, first + size, weakref.ref(memory)))
        return memory

    def memory_at(self, address, size):
        """What is alive there; the allocator may have used an address before."""
        at = (m for first, end, m in self.memories if first <= address and address + size <= end)
        return next(m for m in at if m() is not None)

    def put(self, size):
        self.numbers += 1
        array = np.full(size, self.numbers % 251 + 1, np.uint8)
        address = self.ring.put(array)
        memory, content = self.memory_at(address, size), array.tobytes()
        assert (address - self.memories[0][0]) % ALIGNMENT == 0 or size > QUARTER

        def read():
            assert memory() is not None, "its memory was given back before it was read"
            assert ctypes.string_at(address, size) == content, f"{size} bytes, written over"

        self.queue.append(read)
        return address

    def run(self, count):
        for _ in range(min(count, len(self.queue))):
            self.queue.popleft()()
            self.passed += 1


edges = [n * QUARTER + d for n in (1, 4) for d in (-ALIGNMENT - 1, -ALIGNMENT, -1, 0, 1)]
sizes = st.sampled_from([0, 1, ALIGNMENT, QUARTER // 2, *edges]) | st.integers(0, QUARTER)
puts = st.lists(st.tuples(sizes, st.integers(0, 3)), min_size=1, max_size=24)


@given(puts)
@example([(1, 0)])
@example([(ALIGNMENT, 0)])
@example([(QUARTER // 2, 0)])
@example([(QUARTER, 0)])
@example([(QUARTER - ALIGNMENT, 0), (ALIGNMENT, 0)])
@example([(QUARTER + 1, 0), (QUARTER, 0)])
def test_no_byte_is_written_over_before_its_reader_has_read_it(rounds):
    """Any sizes, again and again until the ring has come round three times."""
    stream, put = LaggingStream(), 0
    while put < 3 * RING:
        for size, happens in rounds:
            stream.put(size)
            stream.run(happens)
            put += ALIGNMENT if size > QUARTER else max(size, ALIGNMENT)
    stream.run(stream.queued)


@given(puts)
def test_a_stream_that_keeps_up_is_never_waited_for(rounds):
    stream = LaggingStream()
    for size, _ in 8 * rounds:
        stream.put(size)
        stream.run(3)
    assert stream.ring.waits == 0


def test_three_quarters_are_put_before_anything_waits():
    stream = LaggingStream()
    for _ in range(RING // ALIGNMENT):
        stream.put(ALIGNMENT)
    assert stream.ring.waits == 0 and stream.passed == 0
    stream.put(ALIGNMENT)  # back in the first: whose readers are waited for, and no others
    assert stream.ring.waits == 1 and stream.passed == QUARTER // ALIGNMENT + 1


def test_after_a_wait_that_failed_the_next_put_waits(monkeypatch):
    stream = LaggingStream()
    for _ in range(RING // ALIGNMENT):
        stream.put(ALIGNMENT)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(stream.events, "synchronize", lambda _: 1 / 0)
        stream.put(ALIGNMENT)
    stream.put(ALIGNMENT)
    stream.run(stream.queued)


@pytest.mark.parametrize("size", [QUARTER + 1, 3 * RING])
def test_memory_of_a_large_array_is_given_back_once_it_was_read(size):
    stream = LaggingStream()
    for _ in range(12):
        stream.put(size)
        stream.run(2)
    alive = [end - first for first, end, memory in stream.memories[1:] if memory() is not None]
    assert len(alive) <= 2


@pytest.mark.gpu
def test_a_ring_that_comes_round_keeps_what_the_gpu_has_not_read(cuda):
    """Uploads of many rounds of a small ring, the first of them behind a held stream."""
    device = Rig().device
    device.synchronize()
    device.compute.staging = Staging(device, device.compute, RING)
    stall(device, "compute", 20)
    wanted = [np.full(1 + i % 40, i, np.int32) for i in range(400)]
    made = [device.upload(array) for array in wanted]
    device.synchronize()
    assert device.compute.staging.waits > 0
    for found, array in zip(made, wanted, strict=True):
        assert (found.get() == array).all()
