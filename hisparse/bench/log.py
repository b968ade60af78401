"""`hisparse bench log`: events appended, folded and checked, and what a state takes.

    append    beside the `eventsourcing` library and a plain file: `log_append`
    fold      from memory, no invariants: the events of `bench.coordinator`'s workload (prefill of
              long prompts, then decode), so that kinds and sizes are what a service writes
    state     bytes of the arrays that a block takes, counted, not timed
    check     the whole verb on logs of several shapes: `log_check`
    seek      the state at any seq of a long log: `log_seek`

A sample is a batch of 64 events, for `seek` a seek, but for the fold a page transition and for
`check` a run: their p99 is the slowest run.
"""

from __future__ import annotations

import time
from pathlib import Path

from hisparse.bench.coordinator import DECODED, LAYOUT, PAGE_SIZE, Decoding
from hisparse.bench.log_append import bench_append
from hisparse.bench.log_check import bench_check, page_transitions
from hisparse.bench.log_seek import bench_seek
from hisparse.bench.measure import Case, summarise
from hisparse.config import HiSparseConfig, LogConfig, PolicyConfig, PoolConfig, ScheduleConfig
from hisparse.errors import ConfigError
from hisparse.fsm.events import Event
from hisparse.fsm.fold import evolve
from hisparse.fsm.state import State
from hisparse.fsm.wire import Table

FOLDED = 64  # events a sample
STATE_BLOCKS = 100_000


def bench_log(
    directory: Path,
    *,
    requests: int = 64,
    tokens: int = 32_768,
    steps: int = 512,
    checked: int = 20_000,
    sought: int = 1_000_000,
    runs: int = 5,
) -> list[Case]:
    """All cases. `requests`, `tokens`, `steps`: the folded workload; `checked`: events of each log
    that is checked; `sought`: of the one that is sought in. Raises ConfigError for more steps than
    a world has."""
    if steps > DECODED - PAGE_SIZE:
        raise ConfigError(f"steps={steps}: a world has {DECODED - PAGE_SIZE}, use fewer")
    return [
        *bench_append(directory, runs=runs),
        *bench_fold(requests, tokens, steps, runs),
        *state_bytes(),
        *bench_check(directory, events=checked, runs=runs),
        *bench_seek(directory, served=min(checked, sought), events=sought, runs=runs),
    ]


# -- fold -----------------------------------------------------------------------------------------


def bench_fold(requests: int, tokens: int, steps: int, runs: int) -> list[Case]:
    """Microseconds an event, and a page transition."""
    log = LogConfig(mode="ring", ring_events=10**8)
    world = Decoding(requests, tokens, requests * (tokens // PAGE_SIZE + 128), log)
    for _ in range(steps):
        world.step()
    events = [(seq, e) for seq, e in world.log.read(1) if isinstance(e, Event)]
    moved = sum(page_transitions(event) for _, event in events)
    an_event, a_transition, of_cpu = [], [], []
    for _ in range(runs):
        samples, state, total = [], State(world.config), 0.0
        burnt = time.process_time()
        for at in range(0, len(events), FOLDED):
            batch = events[at : at + FOLDED]
            start = time.perf_counter()
            for seq, event in batch:
                evolve(state, event, seq)
            elapsed = 1e6 * (time.perf_counter() - start)
            samples.append(elapsed / len(batch))
            total += elapsed
        an_event.append(samples)
        a_transition.append([total / moved])
        of_cpu.append([1e6 * (time.process_time() - burnt) / moved])
    return [
        summarise("fold", an_event, "us/event"),
        summarise("fold, per page transition", a_transition, "us/transition"),
        summarise("its CPU time, fold, per page transition", of_cpu, "us/transition"),
    ]


# -- state ----------------------------------------------------------------------------------------


def state_bytes(blocks: int = STATE_BLOCKS, tokens: int = 32_768) -> list[Case]:
    """Bytes a block of a pool of `blocks`, with as many rows of `tokens` as it holds resident.

    Counted are the arrays whose length is the number of blocks (state, epoch, role, references,
    partner, the two queues), and with them the request tables that name blocks (resident, index,
    hot). Not counted are host pages, and the dicts of prefixes, an entry a findable page.
    """
    pages = -(-tokens // PAGE_SIZE)
    config = HiSparseConfig(
        layout=LAYOUT,
        pools=PoolConfig(page_size=PAGE_SIZE, gpu_blocks=blocks, host_pool_gib=0.1),
        policy=PolicyConfig(top_k=2048, hot_rows=4096),
        schedule=ScheduleConfig(max_requests=max(blocks // pages, 1), max_model_len=tokens),
    )
    state = State(config)
    columns = sum(value.nbytes for value in vars(state.blocks).values())
    tables = sum(state.table(t).nbytes for t in (Table.RESIDENT, Table.INDEX, Table.HOT))
    return [
        summarise(name, [[size / blocks]], "B/block")
        for name, size in (
            ("state, columns and queues", columns),
            ("state, with the tables that name blocks", columns + tables),
        )
    ]
