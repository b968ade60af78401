"""Page copies beside a decode loop: what they cost it, and what the link carries with both.

A decode loop that misses nothing: resolve and an attention-like read of the rows that it found,
call after call in a replayed graph, with spills all the while and without, in turns. Attention is
launched as persistent kernels are (a block has a multiprocessor) and as many small blocks.

Link-bound decode: resolves that replace a tenth of every top-k, replayed again and again, beside
spills all the while. The ceiling is copy engines both ways at once. Beside it stand each side
alone, and the resolves beside one contiguous copy after the other: what a spill without scattered
pages would leave them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hisparse.bench.lanes import Lane, run
from hisparse.bench.measure import Case, summarise
from hisparse.bench.resolver import STEPS, Shape, World, selections
from hisparse.bench.spill import Rows, Tiers
from hisparse.device.cuda.kernels import load, require_cupy

REQUESTS = 64
REPLAYS = 8  # of the graph, in a run
_SPILL_US = 380.0  # at least, of one call's spills
_PERSISTENT_BYTES = 200 * 1024  # of shared memory: no second block fits a multiprocessor


def _world(rows: Rows, share: float) -> World:
    """Requests whose pages are all on the host, and whose calls are given their selections."""
    shape = Shape(row_bytes=rows.row_bytes)
    needed = (REQUESTS * shape.context + 2 * shape.page_size) * shape.row_bytes
    slab = require_cupy().cuda.alloc_pinned_memory(needed)
    world = World(shape, REQUESTS, slab, False)
    steps = selections(shape, REQUESTS, share, np.random.default_rng(0))
    for call, chosen in zip(world.calls, steps, strict=True):
        call.rows.set(np.arange(REQUESTS, dtype=np.int32))
        call.top_k.set(chosen)
    return world


def _replays(world: World, after: Callable[[Any], None] | None = None) -> Lane:
    """The resolves after the cold one, each with `after`; a piece is a replay of them all."""
    cupy = require_cupy()
    launches: list[Callable[[], None]] = []
    for call in world.calls[1:]:
        launches.append(partial(world.resolver.resolve, call, world.arguments(call)))
        if after is not None:
            launches.append(partial(after, call))
    graph = world.graph(launches)
    steps = {"now": int(world.step.get()[0]) + 1, "piece": 0}  # steps rise
    with world.stream:
        world.step.fill(steps["now"])
        world.resolver.resolve(world.calls[0], world.arguments(world.calls[0]))
    world.stream.synchronize()
    counted = cupy.zeros((REPLAYS + 1, 2), cupy.uint64)

    def replay() -> None:
        piece = steps["piece"] % REPLAYS
        if piece == 0:
            counted[0] = world.resolver.counters
        steps["now"] += 1
        steps["piece"] += 1
        world.step.fill(steps["now"])
        graph.launch(cupy.cuda.get_current_stream())
        counted[piece + 1] = world.resolver.counters

    def moved() -> list[float]:
        misses = counted[:, 0].get().astype(np.int64)
        return [float(rows * world.sizes.row_bytes) for rows in np.diff(misses)]

    return Lane(replay, REPLAYS, moved)


def bench_beside_decode(rows: Rows, runs: int) -> list[Case]:
    """Microseconds a call (resolve and attention) with spills beside it and without."""
    cupy, tiers, world = require_cupy(), Tiers(rows), _world(rows, 0.0)
    attend = load("attend.cu", world.sizes).get_function("hisparse_attend")
    attend.max_dynamic_shared_size_bytes = _PERSISTENT_BYTES
    places = int(cupy.cuda.Device().attributes["MultiProcessorCount"])
    nowhere, cases = cupy.zeros((16,), cupy.uint8), []
    for name, blocks, shared in (
        ("persistent", places, _PERSISTENT_BYTES),
        ("many blocks", 8 * places, 0),
    ):

        def read(call: Any, blocks: int = blocks, shared: int = shared) -> None:
            arguments = (call.out, np.int32(call.out.size), world.pool, nowhere)
            attend((blocks,), (512,), arguments, shared_mem=shared)

        loop, longest_us = _replays(world, read), 0.0
        beside = {"alone": None, "beside spills": tiers.copies(by_kernel=False)}
        beside["beside spills by kernel"] = tiers.copies(by_kernel=True)
        us: dict[str, list[float]] = {key: [] for key in beside}
        rate: dict[str, list[float]] = {key: [] for key in beside}
        for turn in range(runs + 1):
            for key, copies in beside.items():
                lanes = [loop]
                if copies is not None:  # enough of them to outlast the slowest loop
                    lanes.append(tiers.spills(copies, 20 + int(1.5 * longest_us / _SPILL_US)))
                rates = run(lanes)
                longest_us = max(longest_us, loop.duration_us)
                if turn:
                    ends = [lane.times(loop.marks[0])[-1] for lane in lanes]
                    assert min(ends) == ends[0], f"the spills ended before the loop: {ends} ms"
                    us[key].append(loop.duration_us / STEPS / REPLAYS)
                    rate[key].append(rates[-1])
        alone = summarise("", [[x] for x in us["alone"]], "").median
        for key in beside:
            samples = [[x] for x in us[key]]
            ratios = {} if key == "alone" else {"alone": summarise("", samples, "").median / alone}
            cases.append(summarise(f"decode, {name}, {key}", samples, "us/call", ratios))
            if key != "alone":
                cases.append(summarise(f"  {key[7:]}", [[x] for x in rate[key]], "GB/s"))
    return cases


def bench_beside_misses(rows: Rows, runs: int) -> list[Case]:
    """GB/s of link-bound resolves and of spills, alone and together, against both ceilings."""
    tiers, world = Tiers(rows), _world(rows, 0.1)
    resolves, count = _replays(world), 60
    engine, kernel = (tiers.copies(by_kernel=kernel) for kernel in (False, True))
    spills, restores = tiers.spills(engine, count), tiers.restores(engine, count)
    down, up = (tiers.contiguous(to_host=way, count=count) for way in (False, True))
    pairs = {
        "copy engines both ways": [down, up],
        "resolves alone": [resolves],
        "spills alone": [spills],
        "resolves beside spills": [resolves, spills],
        "resolves beside contiguous copies": [resolves, up],
        "restores by engine beside spills": [restores, spills],
        "restores by kernel beside spills": [tiers.restores(kernel, count), spills],
    }
    samples: dict[str, list[list[float]]] = {name: [] for name in pairs}
    for turn in range(runs + 1):
        for name, lanes in pairs.items():
            rates = run(lanes)
            if turn:
                samples[name].append(rates)
    totals = {name: [[sum(rates)] for rates in taken] for name, taken in samples.items()}
    middle = {name: summarise("", taken, "").median for name, taken in totals.items()}
    cases = []
    for name, taken in samples.items():
        ratios = {}
        if len(pairs[name]) == 2:
            shares = [rates[0] / sum(rates) for rates in taken]
            ratios["of it to the GPU"] = summarise("", [shares], "").median
            ratios["copy engines"] = middle[name] / middle["copy engines both ways"]
        if name == "resolves beside spills":
            ratios["contiguous"] = middle[name] / middle["resolves beside contiguous copies"]
        title = f"link, {rows.row_bytes} B, {name}"
        cases.append(summarise(title, totals[name], "GB/s", ratios))
    return cases
