"""A simulation whose ranks are on a GPU: production workers, real copies, streams held at random.

Operations, faults, oracle and checks are those of any other (`SimReplica`); only the devices below
the ranks are real. So a seed says what is done, and the GPU says how far its streams get meanwhile:
a kernel holds one of them now and then, the more often the rank's `lag`, and for as long as the
fault ``stream_held`` says. Nothing waits for the device but what would in production.

What the oracle compares is copied out, or kept, in the order of the compute stream, and looked at
once an event says that it is there: steps later, and at the latest when all work has ended.

Needs torch for CUDA, CuPy and a GPU; a device raises DeviceError without.
"""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hisparse.device import backend
from hisparse.device.cuda.device import CudaDevice
from hisparse.device.cuda.kernels import load
from hisparse.device.cuda.streams import CudaStream
from hisparse.testing.program import Program
from hisparse.testing.rank import Place, Refusals
from hisparse.testing.replica import SimReplica
from hisparse.testing.simulator import Simulation, SimulationResult, play
from hisparse.testing.swarm import Swarm

HELD_MAX_NS = 300_000_000  # by a fault; whatever waits in the driver for a held stream comes back
STALLS_NS = (100_000, 1_000_000, 5_000_000)
_FLAGS = 1024  # holds that are told apart


class GpuHold:
    """A kernel that holds a stream; ``done = True`` ends it."""

    def __init__(self, flags: Any, at: int) -> None:
        self._flags, self._at = flags, at
        flags[at] = 0

    @property
    def done(self) -> bool:
        return bool(self._flags[self._at])

    @done.setter
    def done(self, value: bool) -> None:
        self._flags[self._at] = value


class CudaRankDevice(Refusals, CudaDevice):
    """A `CudaDevice` that does what a `RankDevice` does.

    Args:
        seed: of when which stream is held, and for how long.
        lag: chance that one is, each time that the rank has run.
    """

    def __init__(self, seed: int, lag: float) -> None:
        # Streams that share a queue of the device would be held together.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        self._holds: list[GpuHold] = []
        self._unread: deque[tuple[Any, Callable[..., None], list[Any]]] = deque()
        super().__init__()
        self._rng, self._lag, self._count = random.Random(seed), lag, 0
        self._hold = load("hold.cu").get_function("hisparse_hold")
        memory = self.cupy.cuda.alloc_pinned_memory(4 * _FLAGS)
        self._flags = np.frombuffer(memory, np.int32, _FLAGS)

    # -- what is refused -------------------------------------------------------------------------
    def allocate_pinned(
        self, size_bytes: int, fill: int = 0, granule: int = 1, layer: int = 0
    ) -> Any:
        self.grant_pinned(size_bytes)
        return super().allocate_pinned(size_bytes, fill, granule, layer)

    def recommit(self, array: Any, fill: int = 0) -> None:
        self.grant_recommit()
        super().recommit(array, fill)

    # -- streams ---------------------------------------------------------------------------------
    def hold(self, stream: backend.Stream, most_ns: int = HELD_MAX_NS) -> GpuHold:
        """Hold `stream` until what is returned is done, or the device has to end its work."""
        held = GpuHold(self._flags, self._count % _FLAGS)
        address = np.uint64(self._flags[self._count % _FLAGS :].ctypes.data)
        self._count += 1
        stream.enqueue(lambda: self._hold((1,), (1,), (address, np.uint64(most_ns))))
        self._holds.append(held)
        return held

    def advance(self, units: int) -> int:
        """Time passes by itself: look at what is there, and hold some stream now and then."""
        self._read()
        if self._rng.random() < self._lag:
            stream = self._rng.choice([self.compute, self.d2h, self.h2d])
            self.hold(stream, self._rng.choice(STALLS_NS))
        return 0

    def synchronize(self, target: backend.Stream | backend.Event | None = None) -> None:
        self._let_go()
        super().synchronize(target)
        self._read()

    def _let_go(self) -> None:
        for held in self._holds:
            held.done = True
        self._holds.clear()

    # -- looking ---------------------------------------------------------------------------------
    def look(self, check: Callable[..., None], *arrays: Any) -> None:
        """Inside an op of compute: `check` gets `arrays`, as they are now, once they are there.
        Results of gathers (torch tensors) are nobody else's; device tables are copied."""
        kept = [a.copy() if isinstance(a, self.cupy.ndarray) else a for a in arrays]
        event = self.torch.cuda.Event()
        event.record(self.compute.torch)
        self._unread.append((event, check, kept))

    def _read(self) -> None:
        while self._unread and self._unread[0][0].query():
            _, check, arrays = self._unread.popleft()
            check(*map(self._on_host, arrays))

    def _on_host(self, array: Any) -> Any:
        return array.get() if isinstance(array, self.cupy.ndarray) else array.cpu().numpy()

    def copy_rows(self, stream: CudaStream, source: Place, target: Place, rows: int) -> None:
        """Queue a copy of adjacent rows."""
        size = rows * source[0].span.row_bytes
        stream.enqueue(lambda: self.copy(_address(*target), _address(*source), size))

    def fingerprint(self, tables: Sequence[Any]) -> tuple[object, ...]:
        """Equal to an earlier one only if nothing was queued since: who asks waits for nothing."""
        return self.launches, self.copies

    def end(self) -> None:
        """The process that had it is gone, and so is its memory, once the device is through."""
        self._let_go()
        self._unread.clear()
        self.give_back()


def _address(view: Any, block: int, row: int) -> int:
    return int(view.address + block * view.span.block_stride + row * view.span.row_bytes)


class CudaReplica(SimReplica):
    """A `SimReplica` on a GPU; all its ranks share it."""

    device_type = CudaRankDevice


def simulate_on_gpu(
    seed: int, swarm: Swarm, replica: type[CudaReplica] = CudaReplica
) -> SimulationResult:
    """`Simulation.run` with ranks on a GPU."""
    simulation = Simulation(seed, swarm, replica=replica)
    try:
        return simulation.run()
    finally:
        _end(simulation.replica)


def play_on_gpu(program: Program) -> SimulationResult:
    """`play` with ranks on a GPU."""
    made: list[CudaReplica] = []

    def replica(*arguments: Any, **more: Any) -> CudaReplica:
        made.append(CudaReplica(*arguments, **more))
        return made[0]

    try:
        return play(program, replica)
    finally:
        for each in made:
            _end(each)


def _end(replica: SimReplica) -> None:
    """Give all memory back, whatever state a violation left it in."""
    for rank in replica.ranks:
        rank.device.end()
