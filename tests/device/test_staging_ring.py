"""The ring of pinned memory that small arrays pass through: a reader that was queued finds what was
put for it, however far behind the device is."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from backends import stall
from device_rig import Rig
from hypothesis import example, given
from hypothesis import strategies as st
from lagging_device import LaggingDevice

from hisparse.device.cuda.streams import ALIGNMENT, QUARTERS, Staging

QUARTER = 8 * ALIGNMENT
RING = QUARTERS * QUARTER


class Numbered:
    """A ring; `put` puts bytes of a number, and queues who reads them."""

    def __init__(self):
        self.device, self.numbers = LaggingDevice(), 0
        self.ring = Staging(self.device, SimpleNamespace(torch=None), RING)
        self.first = self.device.memories[0][0]

    def put(self, size):
        self.numbers += 1
        array = np.full(size, self.numbers % 251 + 1, np.uint8)
        address = self.ring.put(array)
        memory, content = self.device.memory_at(address, size), array.tobytes()
        assert (address - self.first) % ALIGNMENT == 0 or size > QUARTER

        def read():
            assert memory() is not None, "its memory was given back before it was read"
            assert ctypes.string_at(address, size) == content, f"{size} bytes, written over"

        self.device.queue.append(read)


def filled():
    """A ring of the smallest puts, of which nothing has happened."""
    made = Numbered()
    for _ in range(RING // ALIGNMENT):
        made.put(ALIGNMENT)
    return made


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
    made, put = Numbered(), 0
    while put < 3 * RING:
        for size, happens in rounds:
            made.put(size)
            made.device.run(happens)
            put += ALIGNMENT if size > QUARTER else max(size, ALIGNMENT)
    made.device.run()


@given(puts)
def test_a_stream_that_keeps_up_is_never_waited_for(rounds):
    made = Numbered()
    for size, _ in 8 * rounds:
        made.put(size)
        made.device.run()
    assert made.ring.waits == 0


def test_back_in_the_first_quarter_its_readers_are_waited_for_and_no_others():
    made = filled()
    assert made.ring.waits == 0 and made.device.passed == 0
    made.put(ALIGNMENT)
    assert made.ring.waits == 1 and made.device.passed == QUARTER // ALIGNMENT + 1  # and the event


def test_after_a_wait_that_failed_the_next_put_waits(monkeypatch):
    made = filled()
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(made.device.event_type, "synchronize", lambda _: 1 / 0)
        made.put(ALIGNMENT)
    made.put(ALIGNMENT)
    made.device.run()


@pytest.mark.parametrize("size", [QUARTER + 1, 3 * RING])
def test_memory_of_a_large_array_is_given_back_once_it_was_read(size):
    made = Numbered()
    for _ in range(12):
        made.put(size)
        made.device.run()
    assert sum(memory() is not None for _, _, memory in made.device.memories[1:]) <= 2


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
