"""The record of what the device found wrong, and its way to the host.

Kernels note the first fault (``kernels/faults.cuh``) and go on. After each step the record is
copied to pinned memory behind the step's work, and read once an event says that it is there: a step
or more later, and without waiting. It says what the `cpu` backend says, by the same invariants'
names.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from hisparse.device.checks import BEYOND, NO_COPY, OTHER_BYTES, POISONED, UNWRITTEN
from hisparse.errors import ConfigError, InvariantViolation

if TYPE_CHECKING:
    from hisparse.device.cuda.device import CudaDevice

_WORDS = 16  # struct Faults, and behind it four words a group
GROUPS_MAX = 256
_SLOTS = 16  # copies under way; a step that finds none leaves it to the next
_KINDS = {  # enum Fault
    1: ("always_readable", NO_COPY),
    2: ("table_truth", "the table has no block to write to"),
    3: ("always_readable", "no block holds it"),
    4: ("table_truth", BEYOND),
    5: ("always_readable", UNWRITTEN),
    6: ("content", OTHER_BYTES),
    7: ("content", POISONED),
}


class FaultRecord:
    """The first fault of a device, and counts of each kind; what resolves count as lost."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        cupy = device.cupy
        self._record = cupy.zeros((_WORDS + 4 * GROUPS_MAX,), cupy.int32)
        size = self._record.nbytes
        self._memory = cupy.cuda.alloc_pinned_memory(_SLOTS * size)
        words = np.frombuffer(self._memory, np.int32, _SLOTS * size // 4)
        self._copies = words.reshape(_SLOTS, -1)
        self._under_way: deque[tuple[Any, int]] = deque()
        self._next = self._groups = 0
        self._owners: list[str] = []
        self._told = False

    @property
    def address(self) -> np.uint64:
        return np.uint64(self._record.data.ptr)

    def code(self, owner: str) -> np.int32:
        """A number by which a kernel names `owner`."""
        if owner not in self._owners:
            self._owners.append(owner)
        return np.int32(self._owners.index(owner))

    def counters(self) -> Any:
        """uint64 ``[2]`` for another group's resolver: its misses, and entries without any copy."""
        first = _WORDS + 4 * self._groups
        self._groups += 1
        if self._groups > GROUPS_MAX:
            raise ConfigError(f"more than {GROUPS_MAX} index groups on a device")
        return self._record[first : first + 4].view(np.uint64)

    def copy_out(self) -> None:
        """Queue a copy of the record as it will be here, on the current (compute) stream."""
        if len(self._under_way) == _SLOTS:
            return
        runtime, slot = self._device.cupy.cuda.runtime, self._copies[self._next]
        stream = self._device.compute
        kind = runtime.memcpyDeviceToHost
        size = self._record.nbytes
        runtime.memcpyAsync(slot.ctypes.data, self._record.data.ptr, size, kind, stream.cupy.ptr)
        event = self._device.torch.cuda.Event()
        event.record(stream.torch)
        self._under_way.append((event, self._next))
        self._next = (self._next + 1) % _SLOTS

    def check(self) -> None:
        """Raise what has arrived, once. Never blocks."""
        while self._under_way and self._under_way[0][0].query():
            _, slot = self._under_way.popleft()
            self._tell(self._copies[slot])

    def check_now(self) -> None:
        """Raise what is there. The device has to be idle."""
        self.check()
        self._tell(self._record.get())

    def counts(self) -> dict[str, int]:
        """How many of each kind, by invariant and reason. Synchronises."""
        record = self._record.get().view(np.uint32)
        return {
            f"{name}: {why}": int(record[5 + kind])
            for kind, (name, why) in _KINDS.items()
            if record[5 + kind]
        }

    def _tell(self, record: np.ndarray) -> None:
        if self._told:
            return
        _, kind, row, owner, position = (int(x) for x in record[:5])
        lost = int(record[_WORDS:].view(np.uint64)[1::2].sum())
        self._told = bool(kind or lost)
        if kind:
            name, why = _KINDS[kind]
            raise InvariantViolation(
                name, f"row {row}, position {position}, {self._owners[owner]}: {why}"
            )
        if lost:  # by who asks where rows are and does not copy them, without checks
            name, why = _KINDS[1]
            raise InvariantViolation(
                name, f'{lost} selected entries: {why}; checks="on" names the first'
            )
