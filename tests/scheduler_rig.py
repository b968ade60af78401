"""A scheduler with no device: small pools, and ranks that acknowledge every step at once."""

from __future__ import annotations

import msgspec
import numpy as np

from hisparse.config import (
    GIB,
    HiSparseConfig,
    LogConfig,
    ModelLayout,
    PolicyConfig,
    PoolConfig,
    ScheduleConfig,
    SuffixConfig,
)
from hisparse.connector.base import KVConnectorOutput, KVConnectorRole
from hisparse.connector.hisparse import HiSparseConnector
from hisparse.engine.loop import ReferenceEngine
from hisparse.engine.trace import WorkloadRequest
from hisparse.fsm.log import MemoryLog
from hisparse.fsm.wire import Ack, AckKind, Acknowledgements, SparseKVOffloadCommand
from hisparse.kv.coordinator import HiSparseCoordinator

PAGE = 4
LAYOUT = ModelLayout(row_bytes=64, index_row_bytes=64, index_groups=((0, 1), (2, 3)))


def small_config(
    *,
    gpu_blocks=24,
    host_pages=64,
    ranks=1,
    log=None,
    write_back="eager",
    checks="on",
    suffix_pages=0,
):
    """4-token pages of 1 KiB, two index pages a block."""
    return HiSparseConfig(
        layout=LAYOUT,
        pools=PoolConfig(
            page_size=PAGE, gpu_blocks=gpu_blocks, host_pool_gib=host_pages * 1024 / GIB
        ),
        policy=PolicyConfig(top_k=4, hot_rows=8, write_back=write_back),
        schedule=ScheduleConfig(max_requests=4, max_model_len=64, prefill_chunk=8, step_rows=16),
        log=log or LogConfig(),
        suffix=SuffixConfig(name="cpu", gib=suffix_pages * 512 / GIB)
        if suffix_pages
        else SuffixConfig(),
        ranks=ranks,
        checks=checks,
    )


class Ranks:
    """Worker ranks that have done everything by the time they are asked."""

    def __init__(self, ranks=1):
        self.sent = [0] * ranks
        self.commands: list[SparseKVOffloadCommand] = []

    def answer(self, command):
        self.commands.append(command)
        acks = [
            Ack(kind, t.transfer, t.epoch)
            for kind in (AckKind.ENQUEUED, AckKind.COMPLETED)
            for t in (*command.transfers, *command.index_transfers)
        ]
        acks.append(Ack(AckKind.RETIRED, command.step))
        messages = []
        for rank, sent in enumerate(self.sent):
            messages.append(Acknowledgements(rank, 1, sent + 1, tuple(acks)))
            self.sent[rank] += len(acks)
        return tuple(messages)

    def execute(self, meta, tokens, rows, sampled):
        """The model side of `ReferenceEngine`: token 1 to everything."""
        messages = self.answer(msgspec.msgpack.decode(meta, type=SparseKVOffloadCommand))
        chosen = np.ones(len(sampled), dtype=np.int64)
        output = KVConnectorOutput(msgspec.msgpack.encode(messages))
        return chosen, np.zeros((len(chosen), 2), dtype=np.float32), output


def workload(seed=0, requests=8, shared=16):
    """Requests that share up to `shared` prompt tokens and more or less overlap in time."""
    rng = np.random.default_rng(seed)
    head = rng.integers(2, 100, shared)
    found = []
    for i in range(requests):
        tail = rng.integers(2, 100, int(rng.integers(1, 20)))
        prompt = np.concatenate([head[: int(rng.integers(0, shared + 1))], tail])
        new = int(rng.integers(1, 20))
        found.append(WorkloadRequest(f"req-{i}", float(i * rng.integers(0, 100)), prompt, new))
    return found


def engine(config, log=None):
    """A reference engine on a fresh coordinator, and the ranks that it drives."""
    coordinator = HiSparseCoordinator(config, log if log is not None else MemoryLog(None))
    connector = HiSparseConnector(KVConnectorRole.SCHEDULER, coordinator=coordinator)
    ranks = Ranks(config.ranks)
    return ReferenceEngine(coordinator, connector, ranks, eos=0, salt=b"rig"), ranks


def served(config=None, *, seed=0, log=None, after_step=None):
    """A whole workload served; returns the coordinator."""
    made, _ = engine(config or small_config(), log)
    made.run(workload(seed), abort_at={"req-3": 2}, after_step=after_step)
    return made.coordinator


def events_of(coordinator):
    return list(coordinator.log.read(1))
