"""`hisparse check` timed on logs of several shapes: what its verb does, from the files on.

A log's transitions are the blocks, host pages and transfers that its events name, or its events,
where those are more. Times are of the whole check, per million transitions: by the clock, and of
the CPU, which says more on a machine that is shared.
"""

from __future__ import annotations

import time
from pathlib import Path

from hisparse.bench.log_shapes import SHAPES
from hisparse.bench.measure import Case, summarise
from hisparse.cli.check import audit
from hisparse.cli.opening import open_history
from hisparse.errors import InvariantViolation


def page_transitions(event: object) -> int:
    """Blocks, host pages and transfers that an event names: what a vectorised one is counted by."""
    named = (getattr(event, name, ()) for name in ("blocks", "pages", "transfers"))
    return sum(len(ids) for ids in named if isinstance(ids, tuple))


def bench_check(directory: Path, *, events: int, runs: int) -> list[Case]:
    """Seconds a million transitions, shape by shape. Raises InvariantViolation if one is found."""
    cases = []
    for shape, write in SHAPES.items():
        where = directory / shape
        write(where, events)
        told = [page_transitions(event) for _, event in open_history(where)]
        millions = max(sum(told), len(told)) / 1e6
        clock, cpu = [], []
        for _ in range(runs):
            started, burnt = time.perf_counter(), time.process_time()
            report = audit(open_history(where))
            cpu.append([(time.process_time() - burnt) / millions])
            clock.append([(time.perf_counter() - started) / millions])
            for found in report["violations"]:
                raise InvariantViolation(found["invariant"], found["message"], seq=found["seq"])
        cases.append(summarise(f"check, {shape}", clock, "s/M transitions"))
        cases.append(summarise(f"its CPU time, {shape}", cpu, "s/M transitions"))
    return cases
