"""A simulated accelerator: streams that fall behind and run ahead, deterministically by seed.

Owns the queues of three streams (compute, d2h, h2d), their events, and the arrays it allocates. A
queue holds units: a closure, one chunk of a copy, a record, or a wait. Nothing runs when it is
queued; units run when something drives the device (`advance`, `query`, `synchronize`, or a queue
longer than `run_ahead`), and a seeded generator decides how far the *other* streams get meanwhile.
Work therefore happens late or early exactly where no wait forbids it, and a wait that is missing
corrupts real bytes for some seed.

Makes no log events (`DeviceCalls` does). No threads: same seed, same calls, same interleaving.
"""

from __future__ import annotations

import math
import mmap
import random
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from hisparse.config import GIB
from hisparse.device import backend
from hisparse.device.backend import Op
from hisparse.device.cpu.kernels import CpuKernels
from hisparse.device.plan import Pending
from hisparse.errors import CapacityError, ConfigError, DeviceError, UsageError


class SimEvent:
    """A point of a stream. `stream` is None until it is recorded; a wait on it blocks till done."""

    __slots__ = ("done", "ident", "stream")

    def __init__(self, ident: int) -> None:
        self.ident = ident
        self.stream: SimStream | None = None
        self.done = False

    def __repr__(self) -> str:
        where = self.stream.name if self.stream else "never recorded"
        return f"event {self.ident} ({where})"


class _Wait:
    __slots__ = ("event",)

    def __init__(self, event: SimEvent) -> None:
        self.event = event


class SimStream:
    """A FIFO of units of a `SimDevice`."""

    def __init__(self, device: SimDevice, name: str) -> None:
        self.name = name
        self.ran_units = 0
        self._device = device
        self._units: deque[Op | SimEvent | _Wait] = deque()

    def enqueue(self, op: Op | Sequence[Op]) -> None:
        """Queue a closure, or the chunks of a copy, each of which runs on its own."""
        if callable(op):
            self._units.append(op)
        else:
            self._units.extend(op)
        self._device.bound(self)

    def record(self, event: backend.Event | None = None) -> SimEvent:
        """Queue a point; `event` may be one of `SimDevice.make_event` not yet recorded."""
        mine = self._device.make_event() if event is None else cast(SimEvent, event)
        assert mine.stream is None, "an event is recorded once"
        mine.stream = self
        self._units.append(mine)
        return mine

    def wait(self, event: backend.Event) -> None:
        """Nothing queued after this runs before `event` is done."""
        self._units.append(_Wait(cast(SimEvent, event)))

    @property
    def idle(self) -> bool:
        return not self._units

    @property
    def pending_units(self) -> int:
        return len(self._units)

    def blocked_on(self) -> SimEvent | None:
        """The event that the head waits for, if it is not done."""
        head = self._units[0] if self._units else None
        return head.event if isinstance(head, _Wait) and not head.event.done else None

    def run_unit(self) -> bool:
        """Run the head. False if there is none or it is blocked."""
        if not self._units:
            return False
        head = self._units[0]
        if isinstance(head, _Wait):
            if not head.event.done:
                return False
            self._units.popleft()
        elif isinstance(head, SimEvent):
            self._units.popleft()
            head.done = True
        else:
            self._units.popleft()
            head()
        self.ran_units += 1
        return True


class SimDevice:
    """The `cpu` backend.

    Args:
        seed: decides every interleaving.
        lag: 0: streams run as far as their waits allow whenever anything is driven; 1: they hang
            back until something has to wait for them. In between, a stream gets j more units with
            probability ``(1 - lag) ** j`` for each unit driven elsewhere.
        run_ahead: most units a stream may have queued; queueing more drives it.
    """

    name = "cpu"

    def __init__(self, seed: int = 0, lag: float = 0.5, run_ahead: int = 4096) -> None:
        if not 0.0 <= lag <= 1.0:
            raise ConfigError(f"lag={lag} must be in 0..1")
        if run_ahead < 1:
            raise ConfigError(f"run_ahead={run_ahead} must be at least 1")
        self.lag = lag
        self.run_ahead = run_ahead
        self.kernels = CpuKernels()
        self.compute = SimStream(self, "compute")
        self.d2h = SimStream(self, "d2h")
        self.h2d = SimStream(self, "h2d")
        self.streams = (self.compute, self.d2h, self.h2d)
        self._random = random.Random(seed)
        self._log_keep = math.log1p(-lag) if 0.0 < lag < 1.0 else 0.0
        self._events = 0
        self._synchronizes = 0
        self._driving = False
        self._memory: dict[int, mmap.mmap] = {}  # of each allocation, by its address
        self._discarded: set[int] = set()

    # -- memory ----------------------------------------------------------------------------------
    def allocate(self, size_bytes: int, fill: int = 0) -> npt.NDArray[np.uint8]:
        try:
            memory = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, MemoryError, OverflowError) as error:
            raise CapacityError(
                f"cpu: a pool of {size_bytes / GIB:.4g} GiB is more than this machine gives "
                f"({error}): lower pools.gpu_blocks, pools.index_pages_per_block, "
                "pools.host_pool_gib or suffix.gib, whichever asks for it"
            ) from None
        array = np.frombuffer(memory, dtype=np.uint8, count=size_bytes)
        if fill:
            array[:] = fill
        self._memory[array.ctypes.data] = memory
        return array

    def discard(self, array: npt.NDArray[np.uint8]) -> None:
        address = array.ctypes.data
        if address in self._discarded:
            raise UsageError("discard of memory that is discarded")
        self._memory[address].madvise(mmap.MADV_DONTNEED)
        self._discarded.add(address)

    def recommit(self, array: npt.NDArray[np.uint8], fill: int = 0) -> None:
        if array.ctypes.data not in self._discarded:
            raise UsageError("recommit of memory that was not discarded")
        self._discarded.remove(array.ctypes.data)
        if fill:  # discarded pages read as zeros
            array[:] = fill

    def release(self, array: npt.NDArray[np.uint8]) -> None:
        del self._memory[array.ctypes.data]
        self._discarded.discard(array.ctypes.data)

    def allocate_pinned(
        self, size_bytes: int, fill: int = 0, granule: int = 1, layer: int = 0
    ) -> npt.NDArray[np.uint8]:
        return self.allocate(size_bytes, fill)

    def allocate_table(self, rows: int, entries: int, guard: int = 0) -> npt.NDArray[np.int32]:
        return np.zeros((rows, entries), dtype=np.int32)

    # -- arrays ----------------------------------------------------------------------------------
    def adopt(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array

    def keep(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array.copy()

    def produce(self, op: Callable[[], Any]) -> Pending:
        pending = Pending(lambda: self.synchronize(event))
        self.compute.enqueue(lambda: pending.produce(op))
        event = self.compute.record()
        return pending

    def on_compute(self) -> AbstractContextManager[None]:
        """Ops of the simulated streams are closures: nothing to direct there."""
        return nullcontext()

    def close_step(self) -> None:
        """Faults are raised by the op that finds them."""

    def check(self) -> None:
        """See `close_step`."""

    # -- driving ---------------------------------------------------------------------------------
    def make_event(self) -> SimEvent:
        """An event that is recorded later; until then it blocks whoever waits for it."""
        self._events += 1
        return SimEvent(self._events)

    def advance(self, units: int) -> int:
        """Let time pass: run up to `units` units of randomly chosen streams; returns how many."""
        ran = 0
        for _ in range(units):
            ready = [s for s in self.streams if not s.idle and s.blocked_on() is None]
            if not ready:
                break
            ran += self._random.choice(ready).run_unit()
        return ran

    def query(self, event: backend.Event) -> bool:
        """Whether `event` is done, after a random moment in which the streams go on."""
        mine = cast(SimEvent, event)
        if not mine.done:
            self._drift(None)
        return mine.done

    def synchronize(self, target: backend.Stream | backend.Event | None = None) -> None:
        """Drive until `target` is done: an event, all work of a stream, or (None) everything.

        Raises DeviceError, naming streams and events, if that cannot happen.
        """
        self._synchronizes += 1
        if target is None:
            for stream in self.streams:
                self.synchronize(stream)
        elif isinstance(target, SimEvent):
            while not target.done:
                if target.stream is None:
                    raise DeviceError(f"deadlock: synchronising {target}")
                self._drive(target.stream)
        else:
            stream = cast(SimStream, target)
            while not stream.idle:
                self._drive(stream)

    def bound(self, stream: SimStream) -> None:
        """Hold `stream` to `run_ahead`; work that a callback queues from inside an op waits."""
        while stream.pending_units > self.run_ahead and not self._driving:
            self._drive(stream)

    def _drive(self, stream: SimStream) -> None:
        """Run one unit of `stream`, or of what it is waiting for; the others drift."""
        chain: list[tuple[SimStream, SimEvent]] = []
        while (event := stream.blocked_on()) is not None:
            chain.append((stream, event))
            if event.stream is None or any(event.stream is seen for seen, _ in chain):
                raise DeviceError(
                    "deadlock: " + ", ".join(f"{s.name} waits for {e!r}" for s, e in chain)
                )
            stream = event.stream
        outer, self._driving = self._driving, True
        try:
            ran = stream.run_unit()
            assert ran, f"{stream.name} has nothing to run, and something waits for it"
            self._drift(stream)
        finally:
            self._driving = outer

    def _drift(self, driven: SimStream | None) -> None:
        if self.lag == 1.0:
            return
        others = [s for s in self.streams if s is not driven and not s.idle]
        if len(others) > 1:
            self._random.shuffle(others)
        for stream in others:
            if self.lag == 0.0:
                while stream.run_unit():
                    pass
            else:
                units = int(math.log(1.0 - self._random.random()) / self._log_keep)
                while units > 0 and stream.run_unit():
                    units -= 1

    def statistics(self) -> dict[str, int]:
        """Units run and pending on each stream, events made, synchronize calls."""
        counts = {"events": self._events, "synchronizes": self._synchronizes}
        for stream in self.streams:
            counts[f"{stream.name}_ran"] = stream.ran_units
            counts[f"{stream.name}_pending"] = stream.pending_units
        counts["allocated_bytes"] = sum(len(memory) for memory in self._memory.values())
        return counts
