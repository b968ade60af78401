"""What of a `CudaDevice` its staging rings and its fault record need, over host memory.

One stream, a queue: nothing of it happens before `run`, or somebody who waits for an event, says
so. Memory is the allocator's as long as somebody holds it.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from types import SimpleNamespace

import numpy as np


class Pinned(bytearray):
    """Host memory; gone once nobody holds it."""


class Array(np.ndarray):
    """On the device, as CuPy's."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)

    def get(self):
        return np.array(self)


class LaggingDevice:
    def __init__(self):
        self.queue, self.passed, self.memories = deque(), 0, []
        device = self

        class Event:
            def record(self, _):
                self.at = device.queued
                device.queue.append(lambda: None)

            def query(self):
                return self.at < device.passed

            def synchronize(self):
                device.run(self.at + 1 - device.passed)

        runtime = SimpleNamespace(memcpyAsync=self.copy_later, memcpyDeviceToHost=2)
        self.event_type = Event
        self.torch = SimpleNamespace(cuda=SimpleNamespace(Event=Event))
        self.cupy = SimpleNamespace(
            int32=np.int32,
            zeros=lambda shape, dtype: np.zeros(shape, dtype).view(Array),
            cuda=SimpleNamespace(alloc_pinned_memory=self.allocate, runtime=runtime),
        )
        self.compute = SimpleNamespace(
            torch=None, cupy=SimpleNamespace(ptr=0), enqueue=lambda op: op()
        )

    @property
    def queued(self):
        """Pieces of work that the stream was ever given."""
        return self.passed + len(self.queue)

    def run(self, count=1 << 30):
        """Let the next `count` pieces of work happen."""
        for _ in range(min(count, len(self.queue))):
            self.queue.popleft()()
            self.passed += 1

    def allocate(self, size):
        memory = Pinned(size)
        first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.memories.append((first, first + size, weakref.ref(memory)))
        return memory

    def memory_at(self, address, size):
        """A weak reference to what is alive there: an address may have been used before."""
        at = (m for first, end, m in self.memories if first <= address and address + size <= end)
        return next(m for m in at if m() is not None)

    def copy_later(self, target, source, size, kind, stream):
        self.queue.append(lambda: ctypes.memmove(target, source, size))

    def wipe(self, array, value):
        self.queue.append(lambda: array.view(np.uint8).fill(value))
