"""`hisparse bench spill`: page copies between the tiers on a GPU.

Alone: 64 pages in all layers, random blocks and random host pages, GPU to host and back, beside
one contiguous copy of as many bytes in turns with it, by the copy engine and by the kernel. *In a
row*: the host pages are neighbours, as those of a prompt are; random ones are those that many
requests seal in one step. The copies are queued behind a held stream; *from idle* they are not, and
what the CPU takes to queue them counts. `hisparse.bench.spill_beside` has the copies beside a
decode loop and beside resolves that miss.

Needs torch for CUDA, CuPy and a GPU; raises DeviceError without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hisparse.bench.lanes import Lane, run
from hisparse.bench.measure import Case, summarise
from hisparse.device.cuda.copies import WAYS, PageCopies
from hisparse.device.cuda.kernels import ResolveSizes, require_cupy
from hisparse.device.layout import Geometry

PAGES = 64  # of a call
LISTS = 8  # a call takes the next one
_TO_HOST, _TO_GPU = 2, 1  # cudaMemcpyKind


@dataclass(frozen=True)
class Rows:
    """Which rows are copied."""

    row_bytes: int = 656
    layers: int = 8

    def geometry(self) -> Geometry:
        page = 64 * self.row_bytes
        host_pages = min(4096, (3 << 30) // (page * self.layers))
        return Geometry(
            page_size=64,
            layers=self.layers,
            groups=((0,),),
            row_bytes=self.row_bytes,
            index_row_bytes=128,
            gpu_blocks=min(1024, host_pages),
            block_bytes=page * self.layers,
            host_pages=host_pages,
            index_pages=1,
            max_requests=1,
            max_pages=1,
            max_index_blocks=1,
            hot_blocks=1,
            hot_rows=1,
            top_k=1,
        )

    @property
    def sizes(self) -> ResolveSizes:
        return ResolveSizes(64, 2048, 4096, 1024, self.row_bytes, 8 * 64)

    @property
    def moved(self) -> int:
        """Bytes of a call."""
        return PAGES * 64 * self.row_bytes * self.layers


class Tiers:
    """A GPU pool and a pinned host pool with random bytes, and lists of their pages."""

    def __init__(self, rows: Rows) -> None:
        cupy = require_cupy()
        self.rows, self.geometry, self.cupy = rows, rows.geometry(), cupy
        g, rng = self.geometry, np.random.default_rng(0)
        words = cupy.random.randint(0, 1 << 32, g.gpu_pool_bytes // 4, dtype=cupy.uint32)
        self.gpu = words.view(cupy.uint8)
        memory = cupy.cuda.alloc_pinned_memory(g.host_pool_bytes)
        self.host = np.frombuffer(memory, np.uint8, g.host_pool_bytes)
        for at in range(0, self.host.size, self.gpu.size):
            part = self.host[at : at + self.gpu.size]
            self.gpu[: part.size].get(out=part)
        blocks, hosts = g.gpu_blocks - 1, g.host_pages - 1
        runs = rng.permutation(hosts // PAGES)
        self._lists: dict[bool, list[tuple[Any, Any]]] = {False: [], True: []}
        for i in range(LISTS):
            chosen = 1 + rng.permutation(blocks)[:PAGES]
            run = 1 + PAGES * runs[i % len(runs)] + np.arange(PAGES)
            self._lists[False].append((chosen, 1 + rng.permutation(hosts)[:PAGES]))
            self._lists[True].append((chosen, run))
        self._next = 0

    def lists(self, in_a_row: bool = False) -> tuple[Any, Any]:
        """GPU blocks and host pages of a call."""
        self._next += 1
        return self._lists[in_a_row][self._next % LISTS]

    def spills(self, copies: PageCopies, count: int = 1, *, in_a_row: bool = False) -> Lane:
        return Lane(lambda: copies.spill(*self.lists(in_a_row)), count, self.rows.moved)

    def restores(self, copies: PageCopies, count: int = 1, *, in_a_row: bool = False) -> Lane:
        def restore() -> None:
            copies.restore(*reversed(self.lists(in_a_row)))

        return Lane(restore, count, self.rows.moved)

    def contiguous(self, *, to_host: bool, count: int = 1) -> Lane:
        """One copy of as many bytes as a call's."""
        ends = [self.host.ctypes.data, self.gpu.data.ptr]
        target, source = ends if to_host else reversed(ends)
        kind, size = _TO_HOST if to_host else _TO_GPU, self.rows.moved
        queue = self.cupy.cuda.runtime.memcpyAsync

        def copy() -> None:
            queue(target, source, size, kind, self.cupy.cuda.get_current_stream().ptr)

        return Lane(copy, count, size)

    def copies(self, *, by_kernel: bool) -> PageCopies:
        ways = WAYS if by_kernel else ()
        return PageCopies(self.geometry, self.gpu, self.host, by_kernel=ways)


def bench_alone(rows: Rows, runs: int) -> list[Case]:
    """Spill and restore beside one contiguous copy."""
    tiers = Tiers(rows)
    engine, kernel = (tiers.copies(by_kernel=kernel) for kernel in (False, True))
    ways: dict[str, Callable[[], Lane]] = {
        "contiguous to host": lambda: tiers.contiguous(to_host=True),
        "spill by engine": lambda: tiers.spills(engine),
        "spill by engine, in a row": lambda: tiers.spills(engine, in_a_row=True),
        "spill by kernel": lambda: tiers.spills(kernel),
        "contiguous to GPU": lambda: tiers.contiguous(to_host=False),
        "restore by engine": lambda: tiers.restores(engine),
        "restore by kernel": lambda: tiers.restores(kernel),
        "restore by kernel, in a row": lambda: tiers.restores(kernel, in_a_row=True),
    }
    starts = {"": True, ", from idle": False}
    taken: dict[tuple[str, str], list[list[float]]] = {
        (name, what): [] for name in ways for what in ("", "CPU", ", from idle")
    }
    each, rng = [(name, start) for name in ways for start in starts], np.random.default_rng(1)
    for turn in range(runs + 1):  # the first one warms up
        # In another order each time: a spill behind a kernel that read host memory is slower.
        for at in rng.permutation(len(each)).tolist():
            name, start = each[at]
            lane = ways[name]()
            rate = run([lane], held=starts[start])[0]
            if turn:
                taken[name, start].append([rate])
                taken[name, "CPU"].append([lane.cpu_us])
    middle = {key: summarise("", samples, "").median for key, samples in taken.items()}
    cases, base, size = [], "", f"{rows.row_bytes} B x {rows.layers} layers"
    for (name, what), samples in taken.items():
        base = name if name.startswith("contiguous") else base
        if what == "CPU" and name != base:
            cases.append(summarise(f"{name}, CPU, {size}", samples, "us/call"))
        elif what != "CPU":
            ratios = {} if name == base else {base: middle[name, what] / middle[base, what]}
            cases.append(summarise(f"{name}{what}, {size}", samples, "GB/s", ratios))
    return cases


def bench_spill(*, runs: int = 9) -> list[Case]:
    """All cases: alone for three shapes, then beside decode for rows of 656 and 1152 bytes."""
    from hisparse.bench.spill_beside import bench_beside_decode, bench_beside_misses

    cupy = require_cupy()
    cases = []
    for measure, rows in (
        (bench_alone, Rows(656)),
        (bench_alone, Rows(1152)),
        (bench_alone, Rows(656, 78)),
        (bench_beside_decode, Rows(656)),
        (bench_beside_misses, Rows(656)),
        (bench_beside_misses, Rows(1152)),
    ):
        cases += measure(rows, runs)
        cupy.get_default_memory_pool().free_all_blocks()
    return cases
