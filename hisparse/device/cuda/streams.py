"""Streams, events and the way of small host arrays to the device.

A `CudaStream` is one stream, known to torch and to CuPy. An op that is enqueued runs at once, in
Python, with both frameworks' current stream set to it: it queues device work and may wait for none
of it. So program order is stream order, and an op that would synchronise is a fault of its author.

`Staging` is a ring of pinned memory. What is put there is read by work of one stream, which is
queued before anything else is put. A quarter that has no room for the next put is left: an event
closes it, behind the work that reads its last put, since that is queued by then; and no quarter is
written again before its event has happened (which costs nothing unless the device is three quarters
of a ring behind).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from hisparse.device import backend
from hisparse.device.backend import Op

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hisparse.device.cuda.device import CudaDevice

STAGING_BYTES = 4 << 20
QUARTERS = 4
ALIGNMENT = 16


class CudaEvent:
    """A point of a stream."""

    __slots__ = ("ident", "made")

    def __init__(self, ident: int, made: Any) -> None:
        self.ident = ident
        self.made = made  # torch.cuda.Event


class CudaStream:
    """A FIFO of device work."""

    def __init__(self, device: CudaDevice, name: str) -> None:
        self.name = name
        self._device = device
        with device.torch.cuda.device(device.index):
            self.torch = device.torch.cuda.Stream()
        self.cupy = _known_to_cupy(device.cupy, self.torch, device.index)
        self.staging = Staging(device, self, STAGING_BYTES)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Torch's and CuPy's current stream."""
        device = self._device
        outer, device.running = getattr(device, "running", self), self
        try:
            with device.torch.cuda.stream(self.torch), self.cupy:
                yield
        finally:
            device.running = outer

    def enqueue(self, op: Op | Sequence[Op]) -> None:
        ops = (op,) if callable(op) else op
        if ops:
            with self.current():
                for each in ops:
                    each()

    def record(self) -> CudaEvent:
        made = self._device.torch.cuda.Event()
        made.record(self.torch)
        return CudaEvent(self._device.next_event(), made)

    def wait(self, event: backend.Event) -> None:
        self.torch.wait_event(cast(CudaEvent, event).made)


def _known_to_cupy(cupy: Any, stream: Any, index: int) -> Any:
    """Torch's stream as CuPy's: by the stream protocol, or by number where either lacks it."""
    if hasattr(cupy.cuda.Stream, "from_external") and hasattr(stream, "__cuda_stream__"):
        return cupy.cuda.Stream.from_external(stream)
    return cupy.cuda.ExternalStream(stream.cuda_stream, index)


class Staging:
    """A ring of pinned memory for one stream.

    Args:
        device: whose stream.
        stream: reads what is put here.
        size_bytes: of the ring; one array takes a quarter of it at most.
    """

    def __init__(self, device: CudaDevice, stream: CudaStream, size_bytes: int) -> None:
        self._device = device
        self._stream = stream
        self._memory = device.cupy.cuda.alloc_pinned_memory(size_bytes)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8, size_bytes)
        self._quarter = size_bytes // QUARTERS
        self._closed: list[Any] = [None] * QUARTERS
        self._filling = 0  # the quarter that takes what is put
        self._at = 0  # a byte of it, or its end
        self._large: list[tuple[Any, Any]] = []  # event, memory
        self.waits = 0

    def put(self, array: npt.NDArray[Any]) -> int:
        """Copy `array` now; returns its address, a multiple of `ALIGNMENT`, for work that is queued
        on the stream next: before the next put."""
        size = -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if size > self._quarter:
            return self._put_large(array)
        if self._at + size > (self._filling + 1) * self._quarter:
            self._turn()
        here = self._bytes[self._at : self._at + array.nbytes]
        here[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._at += size
        return int(here.ctypes.data) if array.nbytes else int(self._bytes.ctypes.data)

    def _turn(self) -> None:
        """Close the quarter, and fill the next once the stream has passed what reads it."""
        self._closed[self._filling] = self._device.torch.cuda.Event()
        self._closed[self._filling].record(self._stream.torch)
        following = (self._filling + 1) % QUARTERS
        if (event := self._closed[following]) is not None and not event.query():
            self.waits += 1
            event.synchronize()
        self._filling, self._at = following, following * self._quarter

    def _put_large(self, array: npt.NDArray[Any]) -> int:
        """What no quarter holds has memory of its own, until the stream has passed what follows."""
        self._large = [(e, memory) for e, memory in self._large if e is None or not e.query()]
        for i, (event, memory) in enumerate(self._large):
            if event is None:
                closed = self._device.torch.cuda.Event()
                closed.record(self._stream.torch)
                self._large[i] = (closed, memory)
        memory = self._device.cupy.cuda.alloc_pinned_memory(array.nbytes)
        held = np.frombuffer(memory, np.uint8, array.nbytes)
        held[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._large.append((None, memory))
        return int(held.ctypes.data)
