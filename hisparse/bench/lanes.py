"""Work on several GPU streams at once, and what each of them moved while all were at it.

A `Lane` is a stream with pieces of work one after the other and an event after each. `run` holds
all lanes until everything is queued, lets them go together, and waits. Rates are those of the
interval in which every lane was at work, interpolated between its events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hisparse.device.cuda.kernels import load, require_cupy

HOLD_MAX_NS = 100_000_000


class Lane:
    """`count` times `work`, which moves `moved` bytes each time, on a stream of its own.

    `moved` may be a function of no arguments, asked after a run: a float for each piece.
    """

    def __init__(
        self, work: Callable[[], Any], count: int, moved: float | Callable[[], Sequence[float]]
    ) -> None:
        self.work, self.count, self.moved = work, count, moved
        self.stream = require_cupy().cuda.Stream(non_blocking=True)
        self.marks: list[Any] = []
        self.cpu_us = 0.0  # of a piece of work, on the thread that queues it

    def queue(self, after: Any) -> None:
        cupy = require_cupy()
        self.marks = [cupy.cuda.Event() for _ in range(self.count + 1)]
        self.stream.wait_event(after)
        spent = 0.0
        with self.stream:
            self.marks[0].record(self.stream)
            for mark in self.marks[1:]:
                began = time.perf_counter()
                self.work()
                spent += time.perf_counter() - began
                mark.record(self.stream)
        self.cpu_us = 1e6 * spent / self.count

    def times(self, origin: Any) -> Any:
        """Milliseconds of each mark after `origin`."""
        elapsed = require_cupy().cuda.get_elapsed_time
        return np.array([elapsed(origin, mark) for mark in self.marks])

    @property
    def duration_us(self) -> float:
        """From the first piece's start to the last one's end."""
        return float(1000 * self.times(self.marks[0])[-1])


def run(lanes: Sequence[Lane], *, held: bool = True) -> list[float]:
    """GB/s of each lane while all were at work.

    Held, the lanes start together when all is queued (or after `HOLD_MAX_NS`, should the driver
    take no more before); otherwise each starts as it is queued.
    """
    cupy = require_cupy()
    hold = load("hold.cu").get_function("hisparse_hold")
    go = np.frombuffer(cupy.cuda.alloc_pinned_memory(4), np.int32, 1)
    go[0] = not held
    cupy.cuda.runtime.deviceSynchronize()
    gate, opened = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event()
    with gate:
        hold((1,), (1,), (np.uint64(go.ctypes.data), np.uint64(HOLD_MAX_NS)))
        opened.record(gate)
    for lane in lanes:
        lane.queue(opened)
    go[0] = 1
    cupy.cuda.runtime.deviceSynchronize()
    times = [lane.times(opened) for lane in lanes]
    first, last = max(t[0] for t in times), min(t[-1] for t in times)
    assert first < last, f"one lane had ended {first - last} ms before another began"
    rates = []
    for lane, marks in zip(lanes, times, strict=True):
        each = lane.moved() if callable(lane.moved) else [lane.moved] * lane.count
        upto = np.concatenate([[0.0], np.cumsum(each)])
        low, high = np.interp([first, last], marks, upto)
        rates.append(float((high - low) / (last - first) / 1e6))
    return rates
