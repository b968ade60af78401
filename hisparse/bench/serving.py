"""A long log, made in minutes: chat requests through the whole scheduler, with no device behind it.

The reference loop serves them; in the place of the worker is a rank that acknowledges copies a step
later, and in the place of the model one that always says token 1. A request makes about 100 events.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hisparse.bench.coordinator import Loopback
from hisparse.config import (
    GIB,
    HiSparseConfig,
    ModelLayout,
    PolicyConfig,
    PoolConfig,
    ScheduleConfig,
)
from hisparse.connector.base import KVConnectorOutput, KVConnectorRole
from hisparse.connector.hisparse import HiSparseConnector
from hisparse.device.rows import StepRows
from hisparse.engine.loop import ReferenceEngine
from hisparse.engine.trace import WorkloadRequest
from hisparse.fsm.codec import Codec
from hisparse.fsm.events import EVENT_TYPES
from hisparse.fsm.log_disk import DiskLog
from hisparse.kv.coordinator import HiSparseCoordinator

HEADS, HEAD_TOKENS = 20, 512  # prompts that begin alike
ARRIVAL_MS = 60.0  # mean time from one request to the next
HOST_PAGES = 8000
LAYOUT = ModelLayout(row_bytes=64, index_row_bytes=64, index_groups=((0, 1), (2, 3)))


class NoDevice:
    """The model side of `ReferenceEngine`: token 1 to everything."""

    def __init__(self) -> None:
        self._rank = Loopback()

    def execute(
        self, meta: Any, tokens: np.ndarray, rows: StepRows, sampled: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, KVConnectorOutput]:
        chosen = np.ones(len(sampled), dtype=np.int64)
        return chosen, np.zeros((len(chosen), 2), dtype=np.float32), self._rank.answer(meta)


def serve_to_log(requests: int, directory: Path) -> int:
    """Serve `requests` generated requests with the log below `directory`; returns the last seq."""
    host_pool_gib = HOST_PAGES * 16 * LAYOUT.row_bytes * 4 / GIB
    config = HiSparseConfig(
        layout=LAYOUT,
        pools=PoolConfig(page_size=16, gpu_blocks=1000, host_pool_gib=host_pool_gib),
        policy=PolicyConfig(top_k=16, hot_rows=64),
        schedule=ScheduleConfig(
            max_requests=64, max_model_len=4096, prefill_chunk=256, step_rows=512
        ),
    )
    log = DiskLog(
        directory / "scheduler",
        Codec(EVENT_TYPES),
        clock=time.monotonic,
        config_json=config.model_dump_json(),
    )
    coordinator = HiSparseCoordinator(config, log)
    connector = HiSparseConnector(KVConnectorRole.SCHEDULER, coordinator=coordinator)
    engine = ReferenceEngine(coordinator, connector, NoDevice(), eos=0, salt=b"bench")
    engine.run(generated(requests))
    log.close()
    return log.last_seq


def generated(requests: int, seed: int = 1) -> list[WorkloadRequest]:
    """Requests of 16 to 2,011 prompt tokens and 4 to 119 new ones, some with a common head."""
    rng = np.random.default_rng(seed)
    heads = [rng.integers(2, 100, HEAD_TOKENS) for _ in range(HEADS)]
    found, at_ms = [], 0.0
    for number in range(requests):
        at_ms += rng.exponential(ARRIVAL_MS)
        head = heads[rng.integers(HEADS)][: int(rng.integers(HEAD_TOKENS + 1))]
        prompt = np.concatenate([head, rng.integers(2, 100, int(rng.integers(16, 1500)))])
        found.append(WorkloadRequest(f"r{number}", at_ms, prompt, int(rng.integers(4, 120))))
    return found
