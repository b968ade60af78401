"""Capabilities of a rank, and dummy steps for an engine's profiling and warm-up, which obey them.

A dummy step is made of padding rows (request row -1), which every kernel passes over: it queues the
work of a real step of that many rows, reads and writes no block, page or hot row, and leaves no
trace in the replacement state, the tables, the cursor, the acknowledgements or the counters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from hisparse.config import HiSparseConfig
from hisparse.device.backend import Device
from hisparse.device.handle import IndexCache
from hisparse.device.layout import Geometry
from hisparse.device.rows import StepRows
from hisparse.device.runtime import HiSparseRuntime, IndexGroup
from hisparse.errors import InvariantViolation, UsageError


@dataclass(frozen=True)
class Capabilities:
    """The most that a rank takes. Rows of one request beyond `wave_rows` in a step are no error:
    they are consumed in waves, since their selections do not fit the hot region at once."""

    rows: int
    """rows in a step, over all requests"""
    requests: int
    """requests that have a row of the tables"""
    positions: int
    """tokens of a request"""
    top_k: int
    """positions that a row selects"""
    wave_rows: int
    """rows of one request whose selections the hot region holds together; 0: no host tier"""

    @classmethod
    def of(cls, config: HiSparseConfig) -> Capabilities:
        geometry = Geometry.of(config)
        return cls(
            rows=config.schedule.step_rows,
            requests=geometry.max_requests,
            positions=config.schedule.max_model_len,
            top_k=geometry.top_k,
            wave_rows=geometry.wave_rows if config.offload else 0,
        )


@contextmanager
def dummy_step(
    limits: Capabilities,
    device: Device,
    groups: Sequence[IndexGroup],
    counters: Sequence[HiSparseRuntime | IndexCache],
    rows: int,
) -> Iterator[StepRows]:
    """Inside the `with`, caches take a step of `rows` padding rows. Waits for the device at its
    end. Raises UsageError if there are more rows than the rank takes; InvariantViolation at the
    end for a fault of an earlier step, with all put back as ever."""
    if not 1 <= rows <= limits.rows:
        raise UsageError(f"warm_up({rows}): this rank takes 1..{limits.rows} rows in a step")
    found = [counter.counted() for counter in counters]
    under_way = [(group.step, group.calls, group.replayed) for group in groups]
    for group in groups:
        group.begin_step(max(group.step, 0))
    try:
        yield StepRows(np.full(rows, -1, dtype=np.int32), np.zeros(rows, dtype=np.int64))
        for group in groups:
            group.check_replayed()
    finally:
        try:
            _settle(device)
        finally:
            for group, (step, calls, replayed) in zip(groups, under_way, strict=True):
                group.step, group.calls, group.replayed = step, calls, replayed
            for counter, counts in zip(counters, found, strict=True):
                counter.set_counted(counts)


def _settle(device: Device) -> None:
    """Wait for all of compute, whatever it tells; then raise the first of that."""
    told = []
    while True:
        try:
            device.synchronize(device.compute)
            break
        except InvariantViolation as fault:  # each is told once; work may be queued behind it
            told.append(fault)
    if told:
        raise told[0]
