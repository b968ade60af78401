"""`hisparse bench resolver`: the fused resolve on a GPU, by batch and share of top-k replaced.

Every page is host-backed unless said otherwise. Each step replaces the given share of every
request's top-k, at random places, by positions drawn uniformly from those not selected. After one
cold step, whose command hands every request row on, a CUDA graph of the steps after it is
replayed, several times from the same state; a sample is its time over its calls, on a stream that
was held until the graph was submitted. The floor is a raw gather of the very rows that a call
misses, request after request, by as many thread blocks, in a graph of its own in the same run.

Needs torch for CUDA, CuPy and a GPU; raises DeviceError without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hisparse.bench.lanes import Lane, run
from hisparse.bench.measure import Case, summarise
from hisparse.device.cuda.device import CudaDevice
from hisparse.device.cuda.kernels import THREADS, ResolveSizes, load, require_cupy
from hisparse.device.cuda.resolver import CudaResolver, CudaTables, ResolveCall
from hisparse.device.cuda.tables import TableWriter, pack_changes
from hisparse.fsm.wire import SparseKVOffloadCommand, Table, TableUpdate

STEPS = 23
CASES = ((1, 0.0), (64, 0.0), (1, 0.02), (1, 0.1), (8, 0.1), (64, 0.02), (64, 0.1), (64, 0.3))
RESIDENT = 64  # the batch of the all-resident case
LAYERS = 8  # of the packed pool: a page of 64 rows is followed by those of the other layers
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Shape:
    """Sizes of one measurement."""

    row_bytes: int = 656
    hot_rows: int = 4096
    top_k: int = 2048
    context: int = 65_536
    page_size: int = 64
    slab_gib: float = 0.0  # at least; what the largest batch needs where that is more

    @property
    def sizes(self) -> ResolveSizes:
        return ResolveSizes(
            page_size=self.page_size,
            top_k=self.top_k,
            hot_rows=self.hot_rows,
            pages=self.context // self.page_size,
            row_bytes=self.row_bytes,
            block_rows=LAYERS * self.page_size,
        )


def selections(shape: Shape, requests: int, share: float, rng: np.random.Generator) -> list[I32]:
    """int32 ``[requests, top_k]`` of the cold step and of each step after it."""
    chosen = np.stack([rng.permutation(shape.context)[: shape.top_k] for _ in range(requests)])
    steps = [chosen.astype(np.int32)]
    replaced = round(shape.top_k * share)
    for _ in range(STEPS):
        for row in chosen if replaced else ():
            others = np.ones(shape.context, dtype=np.bool_)
            others[row] = False
            fresh = rng.choice(np.flatnonzero(others), replaced, replace=False)
            row[rng.permutation(shape.top_k)[:replaced]] = fresh
        steps.append(chosen.astype(np.int32))
    return steps


class World:
    """`requests` requests on the device, their pages in extents at random places of the slab."""

    def __init__(self, shape: Shape, requests: int, slab: Any, resident: bool) -> None:
        cupy = require_cupy()
        self.cupy, self.sizes, self.requests = cupy, shape.sizes, requests
        pages, hot_blocks = self.sizes.pages, self.sizes.hot_blocks
        rng = np.random.default_rng(1)
        extents = (slab.mem.size // (shape.page_size * shape.row_bytes) - 1) // pages
        firsts = 1 + rng.permutation(extents)[:requests, None] * pages
        host = firsts + np.arange(pages)
        hot = 1 + np.arange(requests * hot_blocks).reshape(requests, hot_blocks)
        blocks = 1 + hot.size
        on_gpu = np.zeros((requests, pages), dtype=np.int64)
        if resident:
            on_gpu = blocks + np.arange(on_gpu.size).reshape(on_gpu.shape)
            blocks, hot = blocks + on_gpu.size, np.zeros_like(hot)
        ids = {Table.RESIDENT: on_gpu, Table.HOST: host, Table.HOT: hot}
        updates = tuple(
            TableUpdate(table, row, 0, tuple(ids[table][row].tolist()))
            for row in range(requests)
            for table in ids
            if ids[table][row].any()
        )
        handed_on = SparseKVOffloadCommand(0, 0, 0, 0, tuple(range(requests)), updates)
        # Packed once: it takes the CPU 60 ms for 64 requests, for which the GPU would stand idle.
        self.cold = pack_changes(handed_on)
        self.warm = pack_changes(SparseKVOffloadCommand(0, 0, 0, 0))
        self.device = device = CudaDevice()
        tables = {
            table: device.allocate_table(requests, entries, guard)
            for table, entries, guard in (
                *((Table.RESIDENT, pages, 1), (Table.HOST, pages, 1)),
                *((Table.INDEX, 1, 0), (Table.HOT, hot_blocks, 0)),
            )
        }
        self.step = cupy.zeros((1,), cupy.int32)
        read = CudaTables(*(tables[table] for table in ids))
        self.resolver = r = CudaResolver(self.sizes, read, requests, 1, self.step)
        state = (r.map, r.positions, r.order, r.group)
        self.writer = TableWriter(device, self.sizes, tables, [state], self.step)
        self.pool = cupy.zeros((blocks * self.sizes.block_rows * shape.row_bytes,), cupy.uint8)
        self.slab = slab
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.calls = [ResolveCall(self.sizes, requests, ordinal=i) for i in range(STEPS + 1)]
        self.begin(0, cold=True)

    def begin(self, step: int, *, cold: bool = False) -> None:
        """A step, begun as a worker begins it, and waited for. Where it is cold, its command hands
        every request row on, to a request of the same pages."""
        self.cupy.cuda.runtime.deviceSynchronize()
        with self.device.on_compute():
            self.writer.queue(self.cold if cold else self.warm, step)
        self.cupy.cuda.runtime.deviceSynchronize()

    def arguments(self, call: ResolveCall) -> Any:
        return self.resolver.arguments(call, self.slab.ptr, self.pool.data.ptr)

    def graph(self, launches: list[Any]) -> Any:
        with self.stream:
            self.stream.begin_capture()
            for launch in launches:
                launch()
            return self.stream.end_capture()

    def replayed(self, graph: Any) -> Lane:
        """All warm calls of `graph`, again each time that it is run."""
        return Lane(lambda: graph.launch(self.cupy.cuda.get_current_stream()), 1, 0.0)

    def resolve(self, runs: int) -> list[list[float]]:
        """Samples of the warm calls, each run from a cold start."""
        arguments = [self.arguments(call) for call in self.calls]
        graph = self.graph(
            [
                lambda c=c, a=a: self.resolver.resolve(c, a)
                for c, a in zip(self.calls[1:], arguments[1:], strict=True)
            ]
        )
        lane, samples = self.replayed(graph), []
        for turn in range(runs + 1):  # the first one warms up
            self.begin(2 * turn + 1, cold=True)
            with self.stream:
                self.resolver.resolve(self.calls[0], arguments[0])
            self.begin(2 * turn + 2)
            samples.append([microseconds(lane)])
        return samples[1:]

    def missed(self) -> list[Any]:
        """The misses of each warm call as one list, request after request."""
        lists = []
        for call in self.calls[1:]:
            counts = (call.count.get() & 0xFFFFFFFF).astype(np.int64)
            lines = call.misses.get()
            flat = [line[:count] for line, count in zip(lines, counts, strict=True)]
            lists.append(self.cupy.asarray(np.concatenate(flat)))
        return lists

    def floor(self, runs: int, lists: list[Any]) -> list[list[float]]:
        raw = load("fetch.cu", self.sizes).get_function("hisparse_raw")

        def launch(misses: Any) -> None:
            addresses = (np.uint64(self.slab.ptr), np.uint64(self.pool.data.ptr))
            count = np.int32(len(misses))
            blocks = (self.resolver.fetch_blocks,)
            raw(blocks, (THREADS,), (misses, count, *addresses))

        graph = self.graph([lambda misses=misses: launch(misses) for misses in lists])
        lane = self.replayed(graph)
        return [[microseconds(lane)] for _ in range(runs + 1)][1:]


def microseconds(lane: Lane) -> float:
    """A call's share of a replay. The stream is held until all is queued: how long the CPU takes to
    submit a graph, which is longer after other work, is no part of it."""
    run([lane])
    return lane.duration_us / STEPS


def bench_resolver(shape: Shape, *, runs: int = 15) -> list[Case]:
    """Microseconds a layer call, and the floor beside it where there is one."""
    cupy = require_cupy()
    largest = max(requests for requests, _ in CASES)
    needed = (largest * shape.context + 2 * shape.page_size) * shape.row_bytes
    slab = cupy.cuda.alloc_pinned_memory(max(needed, int(shape.slab_gib * (1 << 30))))
    cases = []
    for requests, share, resident in [(*case, False) for case in CASES] + [(RESIDENT, 0.1, True)]:
        rng = np.random.default_rng(0)
        world = World(shape, requests, slab, resident)
        steps = selections(shape, requests, share, rng)
        for call, chosen in zip(world.calls, steps, strict=True):
            call.rows.set(np.arange(requests, dtype=np.int32))
            call.top_k.set(chosen)
        samples = world.resolve(runs)
        name = f"{requests} requests, " + ("all resident" if resident else f"{share:.0%} replaced")
        lists = world.missed()
        rows = sum(len(misses) for misses in lists) / STEPS
        floor = summarise("", world.floor(runs, lists), "us").median if rows else 0.0
        median = summarise("", samples, "us").median
        ratios = {"floor": median / floor} if rows else {}
        cases.append(summarise(name, samples, "us/call", ratios))
        if rows:
            bytes_missed = rows * shape.row_bytes / 1e6
            cases.append(summarise(f"  floor ({bytes_missed:.2f} MB)", [[floor]], "us/call"))
        del world
        cupy.get_default_memory_pool().free_all_blocks()
    return cases
