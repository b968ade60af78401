"""Logs of several shapes on disk, written by the scheduler itself over ranks that acknowledge.

wide        long prompts, then steady decode: events of many pages, steps of many rows
narrow      short requests that come and go: an event moves a page or two
pressure    the same over pools that hold a few of them: one id an event, spills, restores,
            evictions, a deferred admission every step; of those here the dearest to check
ranks       narrow, with eight ranks: each acknowledges each copy
streamed    pressure, with a worker on the simulated device in the place of the rank, whose own
            stream lies beside the log: every wait, record, access and acknowledgement of it
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from hisparse.bench.coordinator import LAYOUT, Decoding
from hisparse.config import (
    GIB,
    HiSparseConfig,
    LogConfig,
    PolicyConfig,
    PoolConfig,
    ScheduleConfig,
)
from hisparse.connector.base import KVConnectorOutput, KVConnectorRole
from hisparse.connector.hisparse import HiSparseConnector
from hisparse.device import open_device
from hisparse.device.worker import HiSparseWorker
from hisparse.fsm.codec import Codec
from hisparse.fsm.events import EVENT_TYPES
from hisparse.fsm.log import EventLog
from hisparse.fsm.log_open import open_log
from hisparse.fsm.wire import Ack, AckKind, Acknowledgements, SparseKVOffloadCommand
from hisparse.kv.coordinator import HiSparseCoordinator

PAGE, LONGEST, ROWS = 4, 64, 16  # tokens, tokens, requests of the narrow shapes
WAITING = 2  # requests that wait at any time


class Serving:
    """Short requests of random lengths, one after another, each decoded to its end."""

    def __init__(
        self,
        directory: Path,
        *,
        ranks: int,
        gpu_blocks: int,
        host_pages: int,
        snapshot_events: int = 0,
        compress: bool = False,
    ) -> None:
        log = LogConfig(
            mode="disk", dir=directory, snapshot_events=snapshot_events, compress=compress
        )
        probe = self._config(gpu_blocks, 1.0, ranks, log)
        self.config = self._config(gpu_blocks, host_pages * probe.host_page_bytes / GIB, ranks, log)
        self.log = self._open("scheduler")
        self.coordinator = HiSparseCoordinator(self.config, self.log)
        self.connector = HiSparseConnector(KVConnectorRole.SCHEDULER, coordinator=self.coordinator)
        self._decode = msgspec.msgpack.Decoder(SparseKVOffloadCommand).decode
        self._random, self._output = random.Random(0), KVConnectorOutput()
        self._sent = [0] * ranks
        self._late: list[Ack] = []
        self._hashes = self._arrived = 0

    def _open(self, stream: str) -> EventLog:
        return open_log(
            self.config.log,
            Codec(EVENT_TYPES),
            stream=stream,
            config_json=self.config.model_dump_json(),
        )

    def _config(
        self, gpu_blocks: int, host_gib: float, ranks: int, log: LogConfig
    ) -> HiSparseConfig:
        return HiSparseConfig(
            layout=LAYOUT,
            pools=PoolConfig(page_size=PAGE, gpu_blocks=gpu_blocks, host_pool_gib=host_gib),
            policy=PolicyConfig(top_k=4, hot_rows=8),
            schedule=ScheduleConfig(
                max_requests=ROWS,
                max_model_len=LONGEST,
                prefill_chunk=LONGEST,
                step_rows=ROWS * LONGEST,
            ),
            ranks=ranks,
            log=log,
        )

    def _hash(self) -> bytes:
        self._hashes += 1
        return self._hashes.to_bytes(16, "big")

    def _arrive(self) -> None:
        prompt = self._random.randrange(1, LONGEST // 2)
        longest = self._random.randrange(prompt + 1, LONGEST + 1)
        hashes = [self._hash() for _ in range(prompt // PAGE)]
        self.coordinator.arrive(f"r{self._arrived}", prompt, longest, hashes)
        self._arrived += 1

    def step(self) -> None:
        """A scheduler step: copies are enqueued at once, complete a step later."""
        coordinator, columns = self.coordinator, self.coordinator.state.rows
        self.connector.update_connector_output(self._output)
        while len(coordinator.state.waiting) < WAITING:
            self._arrive()
        coordinator.admit_waiting()
        live = np.flatnonzero(columns.live)
        left = np.maximum(columns.prompt[live] - columns.computed[live], 1)
        granted = np.array(coordinator.grow(live.tolist(), left.tolist()))
        rows, counts = live[granted > 0].tolist(), granted[granted > 0].tolist()
        step = coordinator.plan_step(rows, counts)
        meta = self.connector.build_connector_meta()
        assert meta is not None
        self._output = self._execute(meta)
        hashes = []
        for row, count in zip(rows, counts, strict=True):
            start, prompt = int(columns.computed[row]), int(columns.prompt[row])
            whole = range(max(start, prompt) // PAGE, (start + count) // PAGE)
            hashes += [(row, self._hash()) for _ in whole]
        coordinator.rows_computed(step, rows, counts, hashes)
        for row in rows:
            if columns.computed[row] >= columns.limit[row]:
                request = coordinator.state.request_of(row)
                coordinator.finish(request.request, request.epoch)

    def _execute(self, meta: bytes) -> KVConnectorOutput:
        command = self._decode(meta)
        acks = self._late + [Ack(AckKind.ENQUEUED, t.transfer, t.epoch) for t in command.transfers]
        acks.append(Ack(AckKind.RETIRED, command.step))
        self._late = [Ack(AckKind.COMPLETED, t.transfer, t.epoch) for t in command.transfers]
        said = []
        for rank, sent in enumerate(self._sent):
            said.append(Acknowledgements(rank, 1, sent + 1, tuple(acks)))
            self._sent[rank] += len(acks)
        return KVConnectorOutput(msgspec.msgpack.encode(tuple(said)))

    def close(self) -> None:
        self.log.close()


class Streamed(Serving):
    """The same, executed by a worker on the simulated device, without a model: `rank-0` is its
    stream."""

    def __init__(self, directory: Path, *, ranks: int, gpu_blocks: int, host_pages: int) -> None:
        super().__init__(directory, ranks=ranks, gpu_blocks=gpu_blocks, host_pages=host_pages)
        self.rank_log = self._open("rank-0")
        self._worker = HiSparseWorker(self.config, open_device("cpu"), sink=self.rank_log.append)
        self._rank = HiSparseConnector(KVConnectorRole.WORKER, worker=self._worker)

    def _execute(self, meta: bytes) -> KVConnectorOutput:
        self._rank.start_load_kv(meta)
        self._rank.wait_for_save()
        self.rank_log.commit()
        return self._rank.get_output()

    def close(self) -> None:
        self._rank.shutdown()
        self.rank_log.close()
        super().close()


def _serve(
    directory: Path, events: int, ranks: int, gpu_blocks: int, host_pages: int, of: type = Serving
) -> None:
    world = of(directory, ranks=ranks, gpu_blocks=gpu_blocks, host_pages=host_pages)
    while world.log.last_seq < events:
        world.step()
    world.close()


def _decode(directory: Path, events: int) -> None:
    requests = 16
    tokens = 16_384 if events > 1000 else 1024
    log = LogConfig(mode="disk", dir=directory)
    world = Decoding(requests, tokens, requests * (tokens // 64 + 128), log)
    while world.log.last_seq < events // 10:  # each of its events moves tens of pages
        world.step()
    world.log.close()


SHAPES: dict[str, Callable[[Path, int], None]] = {
    "wide": _decode,
    "narrow": lambda where, events: _serve(where, events, 1, 400, 2000),
    "pressure": lambda where, events: _serve(where, events, 1, 16, 400),
    "ranks": lambda where, events: _serve(where, events, 8, 400, 2000),
    "streamed": lambda where, events: _serve(where, events, 1, 16, 400, Streamed),
}
