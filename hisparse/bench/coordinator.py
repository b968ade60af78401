"""`hisparse bench coordinator`: the scheduler's part of a decode step, events and logging included.

Steady decode of many long requests: every step takes acknowledgements in, grows every request by a
row, plans, projects the command and accepts the rows; a page is sealed a request every `page_size`
steps, staggered. The worker is a loopback that acknowledges what it is sent one step later, so that
only the scheduler is timed. The same steps are run with the log `off`, `ring` and `disk`.
"""

from __future__ import annotations

import time
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
from hisparse.errors import ConfigError
from hisparse.fsm.codec import Codec
from hisparse.fsm.events import EVENT_TYPES
from hisparse.fsm.log_open import open_log
from hisparse.fsm.wire import Ack, AckKind, Acknowledgements, SparseKVOffloadCommand
from hisparse.kv.coordinator import HiSparseCoordinator

LAYOUT = ModelLayout(row_bytes=656, index_row_bytes=132, index_groups=((0, 1, 2, 3), (4, 5, 6, 7)))
PAGE_SIZE = 64
HOST_SLACK = 1.2


class Loopback:
    """Acknowledges every transfer as enqueued at once and completed a step later."""

    def __init__(self) -> None:
        self._seq = 0
        self._queued: list[Ack] = []
        self._decoder = msgspec.msgpack.Decoder(SparseKVOffloadCommand)

    def answer(self, meta: bytes) -> KVConnectorOutput:
        command = self._decoder.decode(meta)
        acks = self._queued
        acks += [Ack(AckKind.ENQUEUED, t.transfer, t.epoch) for t in command.transfers]
        acks.append(Ack(AckKind.RETIRED, command.step))
        message = Acknowledgements(0, 1, self._seq + 1, tuple(acks))
        self._seq = message.last_seq
        self._queued = [Ack(AckKind.COMPLETED, t.transfer, t.epoch) for t in command.transfers]
        return KVConnectorOutput(msgspec.msgpack.encode((message,)))


class Decoding:
    """`requests` requests of `tokens` tokens in steady decode.

    Args:
        requests: how many decode.
        tokens: context length at the start.
        gpu_blocks: size of the pool.
        log: where events go.
    """

    def __init__(self, requests: int, tokens: int, gpu_blocks: int, log: LogConfig) -> None:
        decoded = 4096
        self.chunk = min(8192, tokens + PAGE_SIZE)
        probe = self._config(requests, tokens + decoded, gpu_blocks, 1.0, log)
        pages = requests * probe.max_pages * HOST_SLACK
        self.config = self._config(
            requests, tokens + decoded, gpu_blocks, pages * probe.host_page_bytes / GIB, log
        )
        self.log = open_log(
            log, Codec(EVENT_TYPES), stream="scheduler", config_json=self.config.model_dump_json()
        )
        self.coordinator = HiSparseCoordinator(self.config, self.log)
        self.connector = HiSparseConnector(KVConnectorRole.SCHEDULER, coordinator=self.coordinator)
        self.worker = Loopback()
        self.output = KVConnectorOutput()
        self._hash = 0
        self._prefill(requests, tokens, tokens + decoded)

    def _config(
        self, requests: int, tokens: int, gpu_blocks: int, host_gib: float, log: LogConfig
    ) -> HiSparseConfig:
        return HiSparseConfig(
            layout=LAYOUT,
            pools=PoolConfig(page_size=PAGE_SIZE, gpu_blocks=gpu_blocks, host_pool_gib=host_gib),
            policy=PolicyConfig(top_k=2048, hot_rows=4096),
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

    def _prefill(self, requests: int, tokens: int, longest: int) -> None:
        for i in range(requests):
            # Staggered, so that pages are sealed evenly over the steps.
            length = tokens + i % PAGE_SIZE
            hashes = [self._next_hash() for _ in range(length // PAGE_SIZE)]
            self.coordinator.arrive(f"r{i}", length, longest, hashes)
        rows = self.coordinator.state.rows
        while (rows.computed < tokens).any():
            self.step(prefill=True)
            if self.coordinator.state.waiting:
                raise ConfigError(
                    f"gpu_blocks={self.config.pools.gpu_blocks} cannot hold {requests} requests of "
                    f"{longest} tokens at once: use more"
                )

    def step(self, prefill: bool = False) -> float:
        """One scheduler step; returns the seconds of the scheduler's part."""
        start = time.perf_counter()
        coordinator = self.coordinator
        self.connector.update_connector_output(self.output)
        coordinator.admit_waiting()
        columns = coordinator.state.rows
        live = np.flatnonzero(columns.live)
        left = columns.prompt[live] - columns.computed[live]
        wanted = np.where(left > 0, np.minimum(left, self.chunk), 1)
        granted = np.array(coordinator.grow(live.tolist(), wanted.tolist()))
        rows, counts = live[granted > 0].tolist(), granted[granted > 0].tolist()
        step = coordinator.plan_step(rows, counts)
        meta = self.connector.build_connector_meta()
        middle = time.perf_counter()
        assert meta is not None
        self.output = self.worker.answer(meta)
        hashes = [
            (row, self._next_hash())
            for row, count in zip(rows, counts, strict=True)
            if not prefill and (int(columns.computed[row]) + count) % PAGE_SIZE == 0
        ]
        resumed = time.perf_counter()
        coordinator.rows_computed(step, rows, counts, hashes)
        return middle - start + time.perf_counter() - resumed


def bench_coordinator(
    directory: Path,
    *,
    requests: int = 256,
    tokens: int = 32_768,
    gpu_blocks: int = 200_000,
    steps: int = 256,
    runs: int = 5,
) -> list[Case]:
    """Microseconds a step with the log `off`, `ring` and `disk`; ratios are against `off`."""
    modes = {
        "off": LogConfig(mode="off"),
        "ring": LogConfig(mode="ring"),
        "disk": LogConfig(mode="disk", dir=directory),
    }
    worlds = {mode: Decoding(requests, tokens, gpu_blocks, log) for mode, log in modes.items()}
    samples: dict[str, list[list[float]]] = {mode: [] for mode in modes}
    for _ in range(runs):
        for mode, world in worlds.items():  # interleaved: drift of the machine hits all alike
            samples[mode].append([1e6 * world.step() for _ in range(steps)])
    base = summarise("off", samples["off"], "us/step").median
    for world in worlds.values():
        world.log.close()
    name = f"coordinator step, {requests} x {tokens} tokens"
    return [
        summarise(
            f"{name}, log {mode}",
            samples[mode],
            "us/step",
            {"off": summarise(mode, samples[mode], "us/step").median / base},
        )
        for mode in modes
    ]
