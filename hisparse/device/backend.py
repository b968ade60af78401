"""The backend boundary: what an accelerator must offer, and the one place that calls it.

Owns no memory and no policy. `Device`, `Stream`, `Event`, `Kernels`, `Copies` and `Resolver` are
the Protocols that the `cpu` and the `cuda` backend implement; another accelerator implements the
same ones, with its own host allocator, copies, hot layout and replacement policy.

`DeviceCalls` makes every record, wait and block access, and only it emits `StreamRecorded`,
`StreamWaited` and `MemoryAccessed`, at the moment of the call: what the log says was queued is what
was queued, never what a planner meant to queue.

Holds at its edges: everything that touches device memory or device tables is an op on a stream, so
the order of calls on one stream is the order of its effects; between streams only a wait orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hisparse.fsm import events

if TYPE_CHECKING:
    from hisparse.config import HiSparseConfig
    from hisparse.device.binding import BoundCache
    from hisparse.device.handle import PagedCacheView
    from hisparse.device.layout import Geometry
    from hisparse.device.plan import Pending
    from hisparse.device.rows import StepRows
    from hisparse.device.runtime import HiSparseRuntime
    from hisparse.device.tables import DeviceTables
    from hisparse.fsm.wire import IndexCopy, SparseKVOffloadCommand

Array = Any  # a numpy array on `cpu`, a CuPy array or a torch tensor on `cuda`
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


class Tiers(NamedTuple):
    """Where one layer's rows are: hot (and resident) blocks, and pages of the pinned pool."""

    hot: PagedCacheView
    host: PagedCacheView


class ResolvePlan(Protocol):
    """What a leader decided for one call; made and read inside compute-stream ops."""

    @property
    def missed(self) -> int:
        """Host rows that each layer reads for it; 0 where only the device knows."""
        ...


class Resolver(Protocol):
    """A leader's hot-row state and the fused resolve. `plan` runs inside a compute-stream op. What
    table changes make stale in the state is the business of its own `Kernels.change_tables`."""

    @property
    def state_bytes(self) -> int: ...
    def begin_step(self, step: int) -> None:
        """Calls that follow are of `step`; told between steps, not inside an op."""
        ...

    def plan(self, rows: StepRows, selection: Array, step: int) -> Any: ...
    def statistics(self) -> dict[str, int]:
        """hits, misses, resident; where the device counts them, host_rows that a layer read."""
        ...


class Copies(Protocol):
    """Page copies between the tiers of one cache. Every method returns the ops to queue on one
    stream; ids of a call are distinct, and none is null."""

    @property
    def batched(self) -> bool:
        """Whether all copies of a command in one direction are to be one call."""
        ...

    def spill(self, blocks: Sequence[int], hosts: Sequence[int]) -> Sequence[Op]:
        """Pages of all layers, GPU to host."""
        ...

    def restore(self, hosts: Sequence[int], blocks: Sequence[int]) -> Sequence[Op]: ...
    def store_index(
        self, blocks: Sequence[int], slots: Sequence[int], suffixes: Sequence[int]
    ) -> Sequence[Op]:
        """Indexer pages of all groups, slots of GPU blocks to the CPU tier."""
        ...

    def load_index(
        self, suffixes: Sequence[int], blocks: Sequence[int], slots: Sequence[int]
    ) -> Sequence[Op]: ...
    def copy_index(self, copies: Sequence[IndexCopy]) -> Sequence[Op]:
        """Indexer pages of all groups between GPU blocks, as if one after the other."""
        ...

    def close(self) -> None:
        """Nothing is queued any more: let the pools go."""
        ...


class Kernels(Protocol):
    """The byte movers. Methods run inside a stream op and see memory as it is then, but for those
    that make something."""

    def check(self, config: HiSparseConfig) -> None:
        """Before memory is taken: raise ConfigError for sizes that the kernels cannot hold, and for
        more workers than they serve, CapacityError for what the accelerator has no room for."""
        ...

    def write_rows(
        self, view: PagedCacheView, table: Array, rows: StepRows, data: Array, owner: str
    ) -> None: ...
    def read_prefix(
        self, view: PagedCacheView, table: Array, row: int, length: int, owner: str
    ) -> Array: ...
    def read_prefixes(
        self, view: PagedCacheView, table: Array, rows: StepRows, limit: int, owner: str
    ) -> Array: ...
    def replay(self, plan: Any, tiers: Sequence[Tiers], member: int) -> Array:
        """Bring the plan's missed rows of layer `member` of the group in and copy its selection
        out: uint8 ``[n, k, row_bytes]``, zeros for padding. Where memory is not a caching
        allocator's, it takes a fourth argument: None, or the array to copy it to."""
        ...

    def locate(self, plan: Any, tiers: Sequence[Tiers], member: int) -> Array:
        """Bring them in and say where the selection is: ``[n, k]`` rows of ``view.rows``, -1 for
        padding. Raises UsageError for a plan of several waves. With checks, rows are looked at:
        nobody else sees them here."""
        ...

    def fill_blocks(self, view: PagedCacheView, blocks: Sequence[int], value: int) -> None: ...
    def wait_host(self, tables: DeviceTables, command: SparseKVOffloadCommand) -> None:
        """Return when what `command` names of pinned pools may be touched. Raises DeviceError
        where its pinning failed."""
        ...

    def change_tables(
        self,
        tables: DeviceTables,
        leaders: Sequence[HiSparseRuntime],
        command: SparseKVOffloadCommand,
    ) -> Sequence[Op]:
        """Ops for the command's resets and table updates, hot rows forgotten with them."""
        ...

    def make_resolver(self, geometry: Geometry, tables: DeviceTables, layer: int) -> Resolver: ...
    def make_copies(self, geometry: Geometry, cache: BoundCache) -> Copies: ...
    def drop(self, tables: DeviceTables) -> None:
        """The end of the worker whose tables these are, or of one that was not made: let go of what
        was made for it. No step of it is queued, or will be. A second call does nothing."""
        ...


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
    def kernels(self) -> Any:
        """`Kernels`; plans and states are of its own kinds."""
        ...

    def allocate(self, size_bytes: int, fill: int = 0) -> Array:
        """uint8 ``[size_bytes]`` on the device."""
        ...

    def allocate_table(self, rows: int, entries: int, guard: int = 0) -> Array:
        """int32 ``[rows, entries]`` of zeros on the device. For kernels that clamp what they look
        up there are at least `guard` more zeros behind each row in memory, or none at all."""
        ...

    def allocate_pinned(
        self, size_bytes: int, fill: int = 0, granule: int = 1, layer: int = 0
    ) -> Array:
        """uint8 ``[size_bytes]`` of pinned host memory that the device can read. One copy moves
        some of `granule` bytes, counted from the start, and never more. It may be pinned later
        than this returns: nothing touches what no command has named (`Kernels.wait_host`).
        Of each `layer` bytes (0: of all) the beginning is used first."""
        ...

    def discard(self, array: Array) -> None:
        """Give up the memory behind an allocation, and its pinning; its addresses stay reserved.
        The content is lost. Nothing queued may touch it any more."""
        ...

    def recommit(self, array: Array, fill: int = 0) -> None:
        """Memory, pinned as it was, behind the addresses of a discarded allocation."""
        ...

    def release(self, array: Array) -> None:
        """The end of an allocation, and of its pinning: nobody may use a view of it any more."""
        ...

    def query(self, event: Event) -> bool:
        """Whether the device has passed `event`; never blocks."""
        ...

    def synchronize(self, target: Stream | Event | None = None) -> None:
        """Block until the event, all work queued on the stream, or everything is done."""
        ...

    def adopt(self, array: Array) -> Array:
        """`array`, of any kind that this backend takes, as its own kind; no copy."""
        ...

    def keep(self, array: Array) -> Array:
        """`array` as it is now, in the order of the compute stream, whatever becomes of it."""
        ...

    def produce(self, op: Callable[[], Array]) -> Pending:
        """Queue an op on compute that makes an array; its `result` waits for just that much."""
        ...

    def on_compute(self) -> AbstractContextManager[object]:
        """Where the work of a model that runs on this accelerator is queued on compute too."""
        ...

    def close_step(self) -> None:
        """All work of a step is queued: queue what tells of its faults."""
        ...

    def check(self) -> None:
        """Raise InvariantViolation for a fault that the device has told of by now; never blocks."""
        ...

    def statistics(self) -> dict[str, Any]: ...


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
