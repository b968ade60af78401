"""`hisparse bench host-pool`: pinning host memory for a GPU, and what it does to work beside it.

Seconds a GiB: of one registration of the whole that nothing prepares (the baseline), of the host
pool until its first and its last byte may be used, and of giving it back. Then microseconds of a
tiny kernel, launched and waited for, again and again: with nothing beside it, and while a pool is
being pinned.

Needs CuPy and a GPU; raises DeviceError without, CapacityError for a size that cannot be pinned.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hisparse.bench.measure import Case, summarise
from hisparse.config import GIB
from hisparse.device.cuda.host_pieces import Progress
from hisparse.device.cuda.host_register import CudaRegistrar
from hisparse.device.cuda.kernels import require_cupy
from hisparse.device.cuda.pinned import pinned_memory

_IDLE_S = 1.0


def _one_call(registrar: CudaRegistrar, size: int) -> float:
    """Seconds of one registration of fresh memory."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
    began = time.perf_counter()
    registrar.register(address, size)
    took = time.perf_counter() - began
    registrar.unregister(address)
    return took


def _launches(cupy: Any, enough: Callable[[], bool]) -> list[float]:
    """Microseconds of a tiny kernel, launched and waited for, until `enough`."""
    stream, target = cupy.cuda.Stream(non_blocking=True), cupy.zeros(1024, cupy.uint8)
    samples = []
    with stream:
        target.fill(1)
        stream.synchronize()
        while not enough():
            began = time.perf_counter()
            target.fill(1)
            stream.synchronize()
            samples.append(1e6 * (time.perf_counter() - began))
    return samples


def _passed(moment: float) -> bool:
    return time.perf_counter() > moment


def bench_host_pool(
    gib: float, *, runs: int = 5, on_progress: Callable[[Progress], object] | None = None
) -> list[Case]:
    """Cases of a pool of `gib`; `on_progress` is told of the first run."""
    cupy, registrar, size = require_cupy(), CudaRegistrar(), int(gib * GIB)
    samples: dict[str, list[list[float]]] = {}

    def sample(name: str, value: float) -> None:
        samples.setdefault(name, []).append([value])

    idle, beside = [], []
    for run in range(runs):
        sample("one registration, unprepared", _one_call(registrar, size) / gib)
        began = time.perf_counter()
        memory = pinned_memory(size, on_progress=None if run else on_progress)
        sample("host pool, call returns", (time.perf_counter() - began) * 1e3)
        memory.wait(0, 1)
        sample("host pool, first byte ready", (time.perf_counter() - began) * 1e3)
        memory.wait()
        sample("host pool, all ready", (time.perf_counter() - began) / gib)
        began = time.perf_counter()
        memory.release()
        sample("host pool, released", (time.perf_counter() - began) / gib)
        idle.append(_launches(cupy, partial(_passed, time.perf_counter() + _IDLE_S)))
        memory = pinned_memory(size)
        beside.append(_launches(cupy, memory.ready))
        sample("host pool, all ready, beside launches", memory.progress().elapsed_s / gib)
        memory.release()
    baseline = summarise("", samples["one registration, unprepared"], "s/GiB").median
    cases = []
    for name, values in samples.items():
        unit = "ms" if "returns" in name or "first" in name else "s/GiB"
        median = summarise("", values, unit).median
        ratios = {"one registration": median / baseline} if "all ready" in name else {}
        cases.append(summarise(name, values, unit, ratios))
    alone = summarise("launch and wait, nothing beside it", idle, "us")
    ratios = {"idle": summarise("", beside, "us").median / alone.median}
    worst = [[max(run)] for run in beside]
    return [
        *cases,
        alone,
        summarise("launch and wait, while pinning", beside, "us", ratios),
        summarise("launch and wait, while pinning, worst of a run", worst, "us"),
    ]
