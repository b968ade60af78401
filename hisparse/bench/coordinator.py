"""`hisparse bench coordinator`: the scheduler's part of a decode step, events and logging included.

Steady decode of many long requests. A step takes acknowledgements in, grows every request by a row
(*allocation*), plans, projects the command and accepts the rows; a page is sealed a request every
`page_size` steps, staggered, or all in one step (*lockstep*). The worker is a loopback that keeps a
real acknowledgement stream: a copy is enqueued in the step that brings its command, complete and
its step retired one later. Only the scheduler is timed; rows are passed as lists, as an engine has
them.

    step          acknowledgements + planning + command + acceptance
    beside it     allocation, and hashing with token append (an engine's part, by `kv.prefix`)

With HiSparse off (policy `resident`) there is no command and no copy to answer: the plain pool.

The worlds of all cases take turns, so that drift of the machine hits all alike. Tenfold worlds have
ten times the tokens and the blocks, at the same number of requests.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from hisparse.bench.measure import Case, summarise
from hisparse.config import (
    GIB,
    HiSparseConfig,
    LogConfig,
    ModelLayout,
    PolicyConfig,
    PoolConfig,
    ScheduleConfig,
)
from hisparse.connector.base import KVConnectorOutput, KVConnectorRole
from hisparse.connector.hisparse import HiSparseConnector
from hisparse.device.acks import AckStream
from hisparse.errors import ConfigError
from hisparse.fsm.codec import Codec
from hisparse.fsm.events import EVENT_TYPES
from hisparse.fsm.log_open import open_log
from hisparse.fsm.wire import Ack, AckKind, SparseKVOffloadCommand
from hisparse.kv.coordinator import HiSparseCoordinator
from hisparse.kv.prefix import PageHasher

LAYOUT = ModelLayout(row_bytes=656, index_row_bytes=132, index_groups=((0, 1, 2, 3), (4, 5, 6, 7)))
PAGE_SIZE = 64
HOST_SLACK = 1.2
DECODED = 4096  # rows that a request can decode before its world is used up
STEP_PARTS = ("acknowledgements", "planning", "command", "acceptance")
PARTS = (*STEP_PARTS, "allocation", "hashing")


class Loopback:
    """A rank that does nothing but acknowledge."""

    def __init__(self) -> None:
        self._acks = AckStream(0, 1)
        self._late: list[Ack] = []
        self._decode = msgspec.msgpack.Decoder(SparseKVOffloadCommand).decode

    def answer(self, meta: bytes) -> KVConnectorOutput:
        command = self._decode(meta)
        self._acks.trim(dict(command.acked).get(0, 0))
        now = [Ack(AckKind.ENQUEUED, t.transfer, t.epoch) for t in command.transfers]
        for ack in now + self._late:
            self._acks.append(ack)
        self._late = [Ack(AckKind.COMPLETED, t.transfer, t.epoch) for t in command.transfers]
        self._late.append(Ack(AckKind.RETIRED, command.step))
        acks = self._acks.pending()
        return KVConnectorOutput(None if acks is None else msgspec.msgpack.encode((acks,)))


class Laps:
    """Microseconds that each part of a step took, by the clock and of the CPU.

    with laps.part("planning"): ...
    """

    def __init__(self) -> None:
        self.wall_us = dict.fromkeys(PARTS, 0.0)
        self.cpu_us = dict.fromkeys(PARTS, 0.0)

    def part(self, name: str) -> Laps:
        self._name = name
        return self

    def __enter__(self) -> None:
        self._cpu, self._start = time.thread_time_ns(), time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        end, cpu = time.perf_counter_ns(), time.thread_time_ns()
        self.wall_us[self._name] += (end - self._start) / 1000
        self.cpu_us[self._name] += (cpu - self._cpu) / 1000

    def part_us(self, part: str) -> float:
        return self.wall_us[part]

    def step_us(self) -> float:
        """The coordinator's part of the step."""
        return sum(self.wall_us[part] for part in STEP_PARTS)

    def step_cpu_us(self) -> float:
        return sum(self.cpu_us[part] for part in STEP_PARTS)


class Decoding:
    """`requests` requests of `tokens` tokens in steady decode.

    Args:
        requests: how many decode.
        tokens: context length at the start.
        gpu_blocks: size of the pool.
        log: where events go.
        lockstep: all requests seal their pages in the same step, else evenly over the steps.
        policy: `resident` for the plain pool, HiSparse off.
    """

    def __init__(
        self,
        requests: int,
        tokens: int,
        gpu_blocks: int,
        log: LogConfig,
        lockstep: bool = False,
        policy: str = "hybrid",
    ) -> None:
        self.policy = PolicyConfig(name=policy, top_k=2048, hot_rows=4096)
        self.chunk = min(8192, tokens + PAGE_SIZE)
        probe = self._config(requests, tokens + DECODED, gpu_blocks, 1.0, log)
        pages = requests * probe.max_pages * HOST_SLACK
        host_gib = pages * probe.host_page_bytes / GIB
        self.config = self._config(requests, tokens + DECODED, gpu_blocks, host_gib, log)
        self.log = open_log(
            log, Codec(EVENT_TYPES), stream="scheduler", config_json=self.config.model_dump_json()
        )
        self.coordinator = HiSparseCoordinator(self.config, self.log)
        self.connector = HiSparseConnector(KVConnectorRole.SCHEDULER, coordinator=self.coordinator)
        self.worker = Loopback()
        self.output = KVConnectorOutput()
        self.hasher = PageHasher(PAGE_SIZE)
        self._hash = 0
        self._tails: list[list[int]] = [[] for _ in range(requests)]  # tokens of the open page
        self._prefill(requests, tokens, tokens + DECODED, lockstep)

    def _config(
        self, requests: int, tokens: int, gpu_blocks: int, host_gib: float, log: LogConfig
    ) -> HiSparseConfig:
        return HiSparseConfig(
            layout=LAYOUT,
            pools=PoolConfig(page_size=PAGE_SIZE, gpu_blocks=gpu_blocks, host_pool_gib=host_gib),
            policy=self.policy,
            schedule=ScheduleConfig(
                max_requests=requests,
                max_model_len=tokens,
                prefill_chunk=self.chunk,
                step_rows=requests * self.chunk,
            ),
            log=log,
        )

    def _next_hash(self) -> bytes:
        self._hash += 1
        return self._hash.to_bytes(16, "big")

    def _prefill(self, requests: int, tokens: int, longest: int, lockstep: bool) -> None:
        for i in range(requests):
            length = tokens + (0 if lockstep else i % PAGE_SIZE)
            hashes = [self._next_hash() for _ in range(length // PAGE_SIZE)]
            self.coordinator.arrive(f"r{i}", length, longest, hashes)
        rows = self.coordinator.state.rows
        while (rows.computed < tokens).any():
            self.step()
            if int(rows.live.sum()) < requests:
                raise ConfigError(
                    f"gpu_blocks={self.config.pools.gpu_blocks} cannot hold {requests} requests of "
                    f"{longest} tokens at once: use more"
                )

    def step(self) -> Laps:
        """One scheduler step, and what its parts took."""
        coordinator, columns, laps = self.coordinator, self.coordinator.state.rows, Laps()
        with laps.part("acknowledgements"):
            self.connector.update_connector_output(self.output)
        with laps.part("planning"):
            coordinator.admit_waiting()
        live = np.flatnonzero(columns.live)
        left = columns.prompt[live] - columns.computed[live]
        rows, wanted = live.tolist(), np.clip(left, 1, self.chunk).tolist()
        with laps.part("allocation"):
            granted = coordinator.grow(rows, wanted)
        batch = [(row, count) for row, count in zip(rows, granted, strict=True) if count]
        rows, counts = [row for row, _ in batch], [count for _, count in batch]
        with laps.part("planning"):
            step = coordinator.plan_step(rows, counts)
        with laps.part("command"):
            meta = self.connector.build_connector_meta()
        self.output = KVConnectorOutput() if meta is None else self.worker.answer(meta)
        with laps.part("hashing"):
            hashes = self._append_tokens(rows, counts)
        with laps.part("acceptance"):
            coordinator.rows_computed(step, rows, counts, hashes)
        return laps

    def _append_tokens(self, rows: list[int], counts: list[int]) -> list[tuple[int, bytes]]:
        """A token for each decoded row; the hashes of the pages that these complete."""
        computed, hashes = self.coordinator.state.rows.computed[rows].tolist(), []
        for row, count, start in zip(rows, counts, computed, strict=True):
            if count > 1:
                continue  # a prompt's tokens and hashes came with the request
            tail = self._tails[row]
            tail.append(start)
            if (start + 1) % PAGE_SIZE == 0:
                parent = self.coordinator.state.request_of(row).hashes[-1]
                page = ([0] * PAGE_SIZE + tail)[-PAGE_SIZE:]
                hashes.append((row, self.hasher.extend(parent, page)[0]))
                tail.clear()
        return hashes


def bench_coordinator(
    directory: Path,
    *,
    requests: int = 256,
    tokens: int = 32_768,
    gpu_blocks: int = 200_000,
    steps: int = 256,
    runs: int = 5,
    tenfold: bool = True,
) -> list[Case]:
    """Microseconds a step, and of its parts; ratios are against the step with the log `ring`."""
    if steps * runs > DECODED - 2 * PAGE_SIZE:
        raise ConfigError(
            f"steps={steps} in each of runs={runs}: a world has {DECODED - 2 * PAGE_SIZE} steps, "
            "use fewer"
        )
    least = _blocks_of_all(requests, tokens + DECODED)
    if gpu_blocks < least:
        raise ConfigError(
            f"gpu_blocks={gpu_blocks} cannot hold requests={requests} of {tokens + DECODED} tokens "
            f"all-resident, as they are with HiSparse off: use at least {least}"
        )
    ring, disk = LogConfig(mode="ring"), LogConfig(mode="disk", dir=directory)
    size = (requests, tokens, gpu_blocks)
    worlds = {
        "log ring": Decoding(*size, ring),
        "log off": Decoding(*size, LogConfig(mode="off")),
        "log disk": Decoding(*size, disk),
        "lockstep": Decoding(*size, ring, lockstep=True),
        "HiSparse off": Decoding(*size, ring, policy="resident"),
    }
    if tenfold:
        worlds["tenfold blocks"] = Decoding(requests, tokens, 10 * gpu_blocks, ring)
        worlds["tenfold both"] = Decoding(requests, 10 * tokens, 10 * gpu_blocks, ring)
    for world in worlds.values():
        for _ in range(PAGE_SIZE):  # the copies of the prefill settle
            world.step()
    gc.collect()
    gc.freeze()  # as serving engines do once they are up: what is long-lived is not scanned again
    laps: dict[str, list[list[Laps]]] = {name: [] for name in worlds}
    for _ in range(runs):
        for name, world in worlds.items():
            laps[name].append([world.step() for _ in range(steps)])
    for world in worlds.values():
        world.log.close()
    return _cases(f"{requests} x {tokens} tokens", laps)


def _blocks_of_all(requests: int, longest: int) -> int:
    """The smallest pool in which all requests stay resident."""
    config = HiSparseConfig(
        layout=LAYOUT,
        pools=PoolConfig(page_size=PAGE_SIZE, gpu_blocks=2, host_pool_gib=1.0),
        policy=PolicyConfig(name="resident"),
        schedule=ScheduleConfig(max_model_len=longest),
    )
    return requests * config.steady_blocks(longest) + 1


def _cases(size: str, laps: dict[str, list[list[Laps]]]) -> list[Case]:
    def case(name: str, world: str, figure: Callable[[Laps], float], base: float = 0.0) -> Case:
        samples = [[figure(lap) for lap in run] for run in laps[world]]
        made = summarise(f"{name}, {size}", samples, "us/step")
        return msgspec.structs.replace(made, ratios={"ring": made.median / (base or made.median)})

    ring = case("", "log ring", Laps.step_us).median
    cpu_ring = case("", "log ring", Laps.step_cpu_us).median
    cases = [case(f"coordinator step, {world}", world, Laps.step_us, ring) for world in laps]
    cases += [case(f"its CPU time, {world}", world, Laps.step_cpu_us, cpu_ring) for world in laps]
    for part in PARTS:
        cases.append(case(f"part: {part}", "log ring", partial(Laps.part_us, part=part), ring))
    return cases
