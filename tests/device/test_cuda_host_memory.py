"""Pinned memory with the real driver: read and written across borders, given back, errors named."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hisparse.config import GIB
from hisparse.device.cuda.host_memory import HostMemory
from hisparse.device.cuda.host_register import CudaRegistrar
from hisparse.device.cuda.pinned import pinned_memory
from hisparse.device.host_limits import read_limits
from hisparse.errors import DeviceError

pytestmark = pytest.mark.gpu

SIZE = int(3.3 * GIB)
MIB = 1 << 20
PIECE = 64 * MIB
MOVE = r"""
extern "C" __global__ void move(const unsigned char* from, unsigned char* to, size_t bytes) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < bytes;
       i += (size_t)gridDim.x * blockDim.x)
    to[i] = from[i];
}
"""


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


def move(cupy, source, target, size):
    """A kernel's copy of `size` bytes between two addresses."""
    kernel = cupy.RawKernel(MOVE, "move")
    kernel((64,), (256,), (np.uint64(source), np.uint64(target), np.uint64(size)))
    cupy.cuda.Device().synchronize()


def registered(cupy, address):
    kind = cupy.cuda.runtime.pointerGetAttributes(address).type
    return kind == cupy.cuda.runtime.memoryTypeHost


def available_bytes():
    with open("/proc/meminfo") as lines:
        found = dict(line.split(":", 1) for line in lines)
    return 1024 * int(found["MemAvailable"].split()[0])


def locked_kib():
    """What the kernel counts as locked or pinned in this process."""
    with open("/proc/self/status") as lines:
        found = dict(line.split(":", 1) for line in lines)
    return [found.get(name, "0 kB").strip() for name in ("VmLck", "VmPin")]


def settles(reached, seconds=10.0):
    """Freed pages take a moment to be counted."""
    end = time.monotonic() + seconds
    while not reached() and time.monotonic() < end:
        time.sleep(0.05)
    return reached()


def pattern(offset, size):
    return ((np.arange(offset, offset + size, dtype=np.uint64) * 2654435761) >> 13).astype(np.uint8)


def test_a_kernel_reads_and_writes_across_the_borders_of_pieces(cupy):
    memory = pinned_memory(SIZE)
    memory.wait()
    reach = 3 * MIB
    for border in (1 * GIB, 2 * GIB, 3 * GIB):
        start = border - reach // 2
        memory.array[start : start + reach] = pattern(start, reach)
        seen = cupy.zeros(reach, cupy.uint8)
        move(cupy, memory.address + start, seen.data.ptr, reach)
        assert (seen.get() == pattern(start, reach)).all(), border
        move(cupy, (seen ^ 0x5A).data.ptr, memory.address + start, reach)
        assert (memory.array[start : start + reach] == pattern(start, reach) ^ 0x5A).all(), border
    last = np.frombuffer(b"the very last bytes", np.uint8)
    memory.array[-len(last) :] = last
    seen = cupy.zeros(len(last), cupy.uint8)
    move(cupy, memory.address + SIZE - len(last), seen.data.ptr, len(last))
    assert bytes(seen.get()) == bytes(last)
    memory.release()


def test_teardown_gives_back_what_was_pinned_and_the_driver_forgets_it(cupy):
    cupy.zeros(1)
    before, locked = available_bytes(), locked_kib()
    memory = pinned_memory(SIZE)
    memory.wait()
    view, address = memory.array, memory.address
    assert registered(cupy, address) and registered(cupy, address + SIZE - 1)
    assert before - available_bytes() > 0.8 * SIZE
    memory.release()
    assert settles(lambda: before - available_bytes() < 0.1 * SIZE), available_bytes() - before
    assert locked_kib() == locked
    assert not registered(cupy, address) and not registered(cupy, address + SIZE - 1)
    assert not view[::GIB].any()


def test_asleep_nothing_is_held_and_awake_the_gpu_reads_the_same_addresses(cupy):
    before = available_bytes()
    memory = pinned_memory(SIZE, fill=0xDB)
    memory.wait()
    memory.discard()
    assert settles(lambda: before - available_bytes() < 0.1 * SIZE)
    assert not registered(cupy, memory.address)
    memory.recommit(fill=0x11)
    memory.wait(2 * GIB - MIB, 2 * MIB)
    seen = cupy.zeros(2 * MIB, cupy.uint8)
    move(cupy, memory.address + 2 * GIB - MIB, seen.data.ptr, 2 * MIB)
    assert (seen == 0x11).all()
    memory.release()


def test_copy_engine_copies_cut_at_the_borders_move_the_bytes(cupy):
    memory = HostMemory(4 * PIECE, CudaRegistrar(), piece_bytes=PIECE)
    memory.wait()
    start, size = PIECE - 100, PIECE + 200  # into the third piece
    source = cupy.asarray(pattern(start, size))
    cupy.cuda.Device().synchronize()  # the stream below does not wait for the default one
    stream = cupy.cuda.Stream(non_blocking=True)
    for offset, part in memory.pieces(start, size):
        cupy.cuda.runtime.memcpyAsync(
            memory.address + offset, source.data.ptr + offset - start, part, 2, stream.ptr
        )
    stream.synchronize()
    assert (memory.array[start : start + size] == pattern(start, size)).all()
    memory.release()


def test_the_gpu_works_on_a_piece_that_is_ready_while_others_are_being_pinned(cupy):
    memory = pinned_memory(SIZE, fill=3)
    memory.wait(SIZE - MIB, MIB)
    early = memory.progress().registered_bytes < SIZE
    seen = cupy.zeros(MIB, cupy.uint8)
    for _ in range(50):
        seen.fill(0)
        move(cupy, memory.address + SIZE - MIB, seen.data.ptr, MIB)
        assert (seen == 3).all()
    memory.wait()
    memory.release()
    assert early, "the last piece was asked for first"


class Twice(CudaRegistrar):
    """Registers the third interval beforehand, so that the driver refuses it."""

    def __init__(self):
        super().__init__()
        self.calls, self.extra = 0, 0

    def register(self, address, size):
        self.calls += 1
        if self.calls == 3:
            self.extra = address
            super().register(address, size)
        super().register(address, size)


def test_what_the_driver_refuses_is_named_unwound_and_leaves_no_error_behind(cupy):
    registrar = Twice()
    memory = HostMemory(5 * PIECE, registrar, piece_bytes=PIECE, threads=1)
    with pytest.raises(DeviceError, match=r"piece 3 of 5 .*cudaErrorHostMemoryAlreadyRegistered"):
        memory.wait()
    assert not registered(cupy, memory.address) and not registered(cupy, memory.address + PIECE)
    registrar.unregister(registrar.extra)
    assert int(cupy.arange(4).sum()) == 6, "the error does not come up at a later launch"
    memory.release()


def test_unregistering_twice_is_named(cupy):
    registrar = CudaRegistrar()
    memory = HostMemory(PIECE, registrar)
    memory.wait()
    registrar.unregister(memory.address)
    with pytest.raises(DeviceError, match=r"piece 1 of 1 .*cudaErrorHostMemoryNotRegistered"):
        memory.release()
    registrar.register(memory.address, PIECE)
    memory.release()


def test_a_pool_beyond_the_machine_is_refused_before_anything_is_mapped():
    from hisparse.errors import CapacityError

    before, total = available_bytes(), read_limits().total_bytes
    with pytest.raises(CapacityError, match="MemAvailable"):
        pinned_memory(2 * total)
    assert abs(before - available_bytes()) < GIB
