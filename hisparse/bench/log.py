"""`hisparse bench log`: events appended and folded, on the events of a real scheduler run.

The events are those of `bench.coordinator`'s workload (prefill of long prompts, then decode), so
that kinds and sizes are what a service writes. Appending is measured per log mode, committed every
step's worth of events; folding from memory, with no invariants.
"""

from __future__ import annotations

import time
from pathlib import Path

from hisparse.bench.coordinator import Decoding
from hisparse.bench.measure import Case, summarise
from hisparse.config import LogConfig
from hisparse.fsm.codec import Codec
from hisparse.fsm.events import EVENT_TYPES, Event
from hisparse.fsm.fold import fold
from hisparse.fsm.log_open import open_log

COMMIT_EVERY = 64


def record_run(requests: int, tokens: int, steps: int) -> tuple[Decoding, list[tuple[int, Event]]]:
    """A finished scheduler run and its events."""
    world = Decoding(
        requests, tokens, requests * (tokens // 64 + 128), LogConfig(mode="ring", ring_events=10**8)
    )
    for _ in range(steps):
        world.step()
    events = [(seq, e) for seq, e in world.log.read(1) if isinstance(e, Event)]
    return world, events


def page_transitions(events: list[tuple[int, Event]]) -> int:
    """Blocks and host pages moved by the events: what a vectorised event is counted by."""
    total = 0
    for _, event in events:
        for name in ("blocks", "pages", "transfers"):
            value = getattr(event, name, ())
            if isinstance(value, tuple):
                total += len(value)
    return total


def bench_log(
    directory: Path, *, requests: int = 64, tokens: int = 32_768, steps: int = 512, runs: int = 5
) -> list[Case]:
    """Microseconds an event appended (`off`, `ring`, `disk`) and folded, and a page transition."""
    world, events = record_run(requests, tokens, steps)
    moved = page_transitions(events)
    samples: dict[str, list[list[float]]] = {"off": [], "ring": [], "disk": [], "fold": []}
    per_transition: list[list[float]] = []
    for run in range(runs):
        for mode in ("off", "ring", "disk"):
            where = directory / f"{mode}{run}" if mode == "disk" else None
            config = LogConfig.model_validate({"mode": mode, "dir": where})
            log = open_log(config, Codec(EVENT_TYPES), stream="scheduler")
            start = time.perf_counter()
            for i, (_, event) in enumerate(events):
                log.append(event)
                if i % COMMIT_EVERY == 0:
                    log.commit()
            log.commit()
            samples[mode].append([1e6 * (time.perf_counter() - start) / len(events)])
            log.close()
        start = time.perf_counter()
        fold(world.config, events)
        seconds = time.perf_counter() - start
        samples["fold"].append([1e6 * seconds / len(events)])
        per_transition.append([1e6 * seconds / moved])
    base = summarise("ring", samples["ring"], "us/event").median
    cases = [
        summarise(
            f"append, log {mode}", samples[mode], "us/event",
            {"ring": summarise(mode, samples[mode], "us/event").median / base},
        )
        for mode in ("off", "ring", "disk")
    ]  # fmt: skip
    cases.append(summarise("fold", samples["fold"], "us/event"))
    cases.append(summarise("fold, per page transition", per_transition, "us/transition"))
    return cases
