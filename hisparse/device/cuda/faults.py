"""The record of what the device found wrong, and its way to the host.

Kernels note the first fault (``kernels/faults.cuh``) and go on. After each step the record is
copied to pinned memory behind the step's work, and read once an event says that it is there: a step
or more later, and without waiting. It says what the `cpu` backend says, by the same invariants'
names.

Whoever was told of a fault is told of the next one too: telling queues a wipe of it on compute,
where all work that notes faults is, so nothing can be noted while it is wiped. Copies that were
queued before the wipe are of what was told. What was noted between a fault and its wipe is counted
and not named; counts are never wiped.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hisparse.device.checks import BEYOND, NO_COPY, OTHER_BYTES, POISONED, UNWRITTEN
from hisparse.errors import ConfigError, InvariantViolation

if TYPE_CHECKING:
    from hisparse.device.cuda.device import CudaDevice

_WORDS = 16  # struct Faults, and behind it what groups count
_WORDS_OF_GROUP = 8
_FIRST = 5  # of these, the first fault; the others count
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
_I32 = npt.NDArray[np.int32]


class FaultRecord:
    """The first fault that was not told, and counts of each kind; what resolves count as lost.

    `counts` and `lost` are those of all workers of the device so far, by the last copy that was
    read: entries by invariant and reason, and selected entries that a resolve found no copy of.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        cupy = device.cupy
        self._record = cupy.zeros((_WORDS + _WORDS_OF_GROUP * GROUPS_MAX,), cupy.int32)
        self._first = self._record[:_FIRST]
        size = self._record.nbytes
        self._memory = cupy.cuda.alloc_pinned_memory(_SLOTS * size)
        words = np.frombuffer(self._memory, np.int32, _SLOTS * size // 4)
        self._copies = words.reshape(_SLOTS, -1)
        self._under_way: deque[tuple[Any, int, int]] = deque()  # event, slot, number
        self._next = 0
        self._free = list(range(GROUPS_MAX))  # places of counters
        self._since = np.zeros(GROUPS_MAX, np.int64)  # the first copy that is of who has the place
        self._told = np.zeros(GROUPS_MAX, np.uint64)  # lost entries, of these
        self._copied = 0  # copies queued so far, which is the number of the next
        self._wiped = 0  # the first copy that was queued behind the last wipe
        self._owners: list[str] = []
        self.counts: dict[str, int] = {}
        self.lost = 0

    @property
    def address(self) -> np.uint64:
        return np.uint64(self._record.data.ptr)

    def code(self, owner: str) -> np.int32:
        """A number by which a kernel names `owner`."""
        if owner not in self._owners:
            self._owners.append(owner)
        return np.int32(self._owners.index(owner))

    def counters(self) -> Any:
        """uint64 ``[4]`` for another group's resolver, wiped on the current (compute) stream:
        misses and entries without any copy, of calls whose rows are copied out and of the others.
        Raises ConfigError as `check_groups`."""
        self.check_groups(1)
        place = self._free.pop(0)
        first = _WORDS + _WORDS_OF_GROUP * place
        made = self._record[first : first + _WORDS_OF_GROUP].view(np.uint64)
        self._device.wipe(made, 0)
        self._since[place], self._told[place] = self._copied, 0
        return made

    def give_back(self, counters: Any) -> None:
        """Nothing that counts there is queued after this."""
        first = (counters.data.ptr - self._record.data.ptr) // self._record.itemsize
        self._free.append((first - _WORDS) // _WORDS_OF_GROUP)

    def check_groups(self, count: int) -> None:
        """Raise ConfigError where there is no room for the counters of so many groups more."""
        if count > len(self._free):
            others = GROUPS_MAX - len(self._free)
            raise ConfigError(
                f"layout.index_groups: {count} groups, with {others} of workers that this device "
                f"has; it counts for {GROUPS_MAX}: put more layers in a group or shut a worker down"
            )

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
        self._under_way.append((event, self._next, self._copied))
        self._next = (self._next + 1) % _SLOTS
        self._copied += 1

    def check(self) -> None:
        """Raise what has arrived, each fault once. Never blocks."""
        while self._under_way and self._under_way[0][0].query():
            _, slot, number = self._under_way.popleft()
            self._tell(self._copies[slot], number)

    def check_now(self) -> None:
        """Raise what is there, each fault once. Compute has to be idle: the record says all that
        copies under way do."""
        self._under_way.clear()
        self._tell(self._record.get(), self._copied)

    def _tell(self, record: _I32, number: int) -> None:
        """Raise what copy `number` says and none before it did."""
        _, kind, row, owner, position = (int(x) for x in record[:_FIRST])
        words = record[_FIRST:_WORDS].view(np.uint32)
        self.counts = {": ".join(what): int(words[k]) for k, what in _KINDS.items() if words[k]}
        newly_lost = self._newly_lost(record, number)
        if kind and number >= self._wiped:
            self._wiped = self._copied
            self._device.compute.enqueue(lambda: self._device.wipe(self._first, 0))
            name, why = _KINDS[kind]
            raise InvariantViolation(
                name, f"row {row}, position {position}, {self._owners[owner]}: {why}"
            )
        if newly_lost:  # by who asks where rows are and does not copy them, without checks
            name, why = _KINDS[1]
            raise InvariantViolation(
                name, f'{newly_lost} selected entries: {why}; checks="on" names the first'
            )

    def _newly_lost(self, record: _I32, number: int) -> int:
        lost = record[_WORDS:].view(np.uint64).reshape(-1, 4)[:, 1::2].sum(axis=1)
        new = np.where(self._since <= number, lost - self._told, np.uint64(0))
        self._told += new
        self.lost += (total := int(new.sum()))
        return total
