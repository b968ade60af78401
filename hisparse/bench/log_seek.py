"""Seeking in a long log: the state at any seq, from the files on, with a snapshot every N events.

The log begins with what short requests write (shape *narrow* of `log_shapes`). Ticks make up the
rest: ten million events of requests would take an hour to write. Half of the seqs asked for lie
in the first part, whose snapshots and events are those of a service; the other half anywhere. A
sample opens the log anew, as a verb does.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

from hisparse.bench.log_shapes import Serving
from hisparse.bench.measure import Case, summarise
from hisparse.fsm.events import Tick
from hisparse.fsm.fold import evolve
from hisparse.fsm.log_disk import DiskLog
from hisparse.fsm.log_history import LogHistory
from hisparse.fsm.snapshot import snapshot

EVERY = 10_000  # events from one snapshot to the next
SEEKS = 20  # a run
BATCH = 4096


def write_long(directory: Path, served: int, events: int, *, compress: bool = False) -> None:
    """A log of `events`, the first `served` of them of requests, with a snapshot each `EVERY`."""
    world = Serving(
        directory,
        ranks=1,
        gpu_blocks=400,
        host_pages=2000,
        snapshot_events=EVERY,
        compress=compress,
    )
    log, state = world.log, world.coordinator.state
    assert isinstance(log, DiskLog)
    while log.last_seq < served:
        world.step()
        if log.snapshot_due:
            log.snapshot(state.seq, snapshot(state))
    while log.last_seq < events:
        for _ in range(min(BATCH, events - log.last_seq)):
            event = Tick(0, state.now_us + 1)
            evolve(state, event, log.append(event))
        log.commit()
        if log.snapshot_due:
            log.snapshot(state.seq, snapshot(state))
    log.close()


def bench_seek(directory: Path, *, served: int, events: int, runs: int) -> list[Case]:
    """Milliseconds from a closed log to the state at a seq, segments as written and compressed."""
    cases = []
    for name, compress in (("", False), (", compressed", True)):
        where = directory / f"seek{name[2:]}"
        write_long(where, served, events, compress=compress)
        pick, clock, cpu = random.Random(0), [], []
        for _ in range(runs):
            seqs = [pick.randint(1, (served, events)[i % 2]) for i in range(SEEKS)]
            both = [_seek(where, seq) for seq in seqs]
            clock.append([took for took, _ in both])
            cpu.append([took for _, took in both])
        cases.append(summarise(f"seek{name}, {events} events", clock, "ms/seek"))
        cases.append(summarise(f"its CPU time, seek{name}, {events} events", cpu, "ms/seek"))
    return cases


def _seek(directory: Path, seq: int) -> tuple[float, float]:
    """Milliseconds by the clock, and of the CPU."""
    started, burnt = time.perf_counter(), time.process_time()
    state = LogHistory.open(directory).state_at(seq)
    assert state.seq == seq
    return 1000 * (time.perf_counter() - started), 1000 * (time.process_time() - burnt)
