"""The backend boundary: what an accelerator must offer, and the one place that calls it.

Owns no memory and no policy. `Device`, `Stream`, `Event`, `Kernels` and `Resolver` are the
Protocols that the `cpu` backend implements and that `cuda` will; another accelerator implements the
same ones, with its own host allocator, copies, hot layout and replacement policy.

`DeviceCalls` makes every record, wait and block access, and only it emits `StreamRecorded`,
`StreamWaited` and `MemoryAccessed`, at the moment of the call: what the log says was queued is what
was queued, never what a planner meant to queue.

Holds at its edges: everything that touches device memory or device tables is an op on a stream, so
the order of calls on one stream is the order of its effects; between streams only a wait orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hisparse.fsm import events

if TYPE_CHECKING:
    from hisparse.device.handle import PagedCacheView
    from hisparse.device.layout import Geometry
    from hisparse.device.plan import Plan
    from hisparse.device.rows import StepRows
    from hisparse.device.tables import DeviceTables

Array = Any  # numpy array on `cpu`, a device tensor on another backend
Op = Callable[[], None]
Sink = Callable[[events.Event], object]


class Event(Protocol):
    """A point of a stream; done once the device has passed it."""

    @property
    def ident(self) -> int: ...


class Stream(Protocol):
    """A FIFO of device work. Every call returns at once."""

    @property
    def name(self) -> str: ...
    def enqueue(self, op: Op | Sequence[Op]) -> None: ...
    def record(self) -> Event: ...
    def wait(self, event: Event) -> None: ...


class Resolver(Protocol):
    """A leader's hot-row state and the fused resolve. Methods run inside compute-stream ops."""

    @property
    def state_bytes(self) -> int: ...
    def plan(self, rows: StepRows, top_k: Array, step: int) -> Plan: ...
    def forget_rows(self, rows: Sequence[int]) -> None: ...
    def forget_slots(self, row: int, first: int, last: int) -> None: ...
    def forget_positions(self, row: int, first: int, last: int) -> None: ...
    def statistics(self) -> dict[str, int]: ...


class Kernels(Protocol):
    """The byte movers. Every method runs inside a stream op and sees memory as it is then."""

    def write_rows(
        self, view: PagedCacheView, table: Array, rows: StepRows, data: Array, owner: str
    ) -> None: ...
    def read_prefix(
        self, view: PagedCacheView, table: Array, row: int, length: int, owner: str
    ) -> Array: ...
    def replay(self, plan: Plan, hot: PagedCacheView, host: PagedCacheView) -> Array: ...
    def copy_block(
        self, source: PagedCacheView, block: int, target: PagedCacheView, to: int
    ) -> None: ...
    def copy_slots(
        self,
        source: PagedCacheView,
        block: int,
        first: int,
        target: PagedCacheView,
        to_block: int,
        to: int,
        rows: int,
    ) -> None: ...
    def fill_blocks(self, view: PagedCacheView, blocks: Sequence[int], value: int) -> None: ...
    def make_resolver(self, geometry: Geometry, tables: DeviceTables, layer: int) -> Resolver: ...


class Device(Protocol):
    """One accelerator: three streams, its allocators and its kernels."""

    @property
    def name(self) -> str: ...
    @property
    def compute(self) -> Stream: ...
    @property
    def d2h(self) -> Stream: ...
    @property
    def h2d(self) -> Stream: ...
    @property
    def kernels(self) -> Kernels: ...
    def allocate(self, size_bytes: int, fill: int = 0) -> Array:
        """uint8 ``[size_bytes]`` on the device."""
        ...

    def allocate_table(self, rows: int, entries: int) -> Array:
        """int32 ``[rows, entries]`` of zeros on the device."""
        ...

    def allocate_pinned(self, size_bytes: int, fill: int = 0) -> Array:
        """uint8 ``[size_bytes]`` of pinned host memory that the device can read."""
        ...

    def discard(self, array: Array) -> None:
        """Give up the memory behind an allocation, and its pinning; its addresses stay reserved.
        The content is lost. Nothing queued may touch it any more."""
        ...

    def recommit(self, array: Array, fill: int = 0) -> None:
        """Memory, pinned as it was, behind the addresses of a discarded allocation."""
        ...

    def release(self, array: Array) -> None:
        """The end of an allocation: unpinned, unmapped once no view of it is left."""
        ...

    def query(self, event: Event) -> bool:
        """Whether the device has passed `event`; never blocks."""
        ...

    def synchronize(self, target: Stream | Event | None = None) -> None:
        """Block until the event, all work queued on the stream, or everything is done."""
        ...

    def statistics(self) -> dict[str, int]: ...


class DeviceCalls:
    """Makes device calls and tells `sink` about each one.

    `cause` is the seq of the scheduler's log that the calls being made follow from.
    """

    def __init__(self, device: Device, sink: Sink | None = None) -> None:
        self.device = device
        self.sink = sink
        self.cause = 0

    def emit(self, event: events.Event) -> None:
        if self.sink is not None:
            self.sink(event)

    def record(self, stream: Stream) -> Event:
        event = stream.record()
        if self.sink is not None:
            self.sink(events.StreamRecorded(self.cause, stream.name, event.ident))
        return event

    def wait(self, stream: Stream, event: Event, why: str) -> None:
        stream.wait(event)
        if self.sink is not None:
            self.sink(events.StreamWaited(self.cause, stream.name, event.ident, why))

    def enqueue(
        self,
        stream: Stream,
        op: Op | Sequence[Op],
        accesses: Sequence[tuple[str, bool, tuple[int, ...]]],
        transfer: int = 0,
    ) -> None:
        """Queue `op`; `accesses` are (pool, write, block or page ids) of it. Pools: "gpu", "host",
        and "suffix", the CPU tier of indexer pages."""
        stream.enqueue(op)
        if self.sink is not None:
            for pool, write, ids in accesses:
                self.sink(
                    events.MemoryAccessed(self.cause, stream.name, pool, write, ids, transfer)
                )
