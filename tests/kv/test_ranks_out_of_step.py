"""Ranks that lag by whole commands, answer late and in any order, and fail copies alone: every
request ends, nothing is left leased, and no invariant breaks, whatever the policy and however small
the pools."""

from __future__ import annotations

import random
from collections import deque

import msgspec
import numpy as np
import pytest
from scheduler_rig import LAYOUT, workload

from hisparse.config import (
    GIB,
    HiSparseConfig,
    PolicyConfig,
    PoolConfig,
    ScheduleConfig,
    SuffixConfig,
)
from hisparse.connector.base import KVConnectorOutput, KVConnectorRole
from hisparse.connector.hisparse import HiSparseConnector
from hisparse.engine.loop import ReferenceEngine
from hisparse.fsm.audit import Audit
from hisparse.fsm.log import MemoryLog
from hisparse.fsm.state import digest
from hisparse.fsm.wire import Ack, AckKind, Acknowledgements, SparseKVOffloadCommand, TransferKind
from hisparse.kv.coordinator import HiSparseCoordinator


class Rank:
    """One rank's stream. It forgets nothing until it is told that it was taken in."""

    def __init__(self, number: int, rng: random.Random, rate: float) -> None:
        self.number, self.rng, self.rate = number, rng, rate
        self.pace = rng.choice([0.2, 0.5, 1.0])
        self.lag = rng.choice([0, 0, 1, 4])  # commands that it is behind the others, mostly
        self.commands: deque[SparseKVOffloadCommand] = deque()
        self.acks: list[Ack] = []
        self.first = 1
        self.open: list[tuple[int, object, bool]] = []  # step, copy, whether it is enqueued
        self.steps: list[int] = []

    def take(self, command: SparseKVOffloadCommand) -> None:
        """Begin what it is due to begin: `command`, or one of long ago, or nothing."""
        self.commands.append(command)
        while len(self.commands) > self.lag or (self.commands and self.rng.random() < 0.1):
            self._begin(self.commands.popleft())

    def _begin(self, command: SparseKVOffloadCommand) -> None:
        for rank, seq in command.acked:
            if rank == self.number:
                del self.acks[: seq + 1 - self.first]
                self.first = seq + 1
        copies = (*command.transfers, *command.index_transfers)
        self.open += [(command.step, copy, False) for copy in copies]
        self.steps.append(command.step)

    def _say(self, kind: AckKind, copy) -> None:
        self.acks.append(Ack(kind, copy.transfer, copy.epoch))

    def answer(self) -> Acknowledgements | None:
        """Some of what is open ends, in any order; a step retires behind the copies it reads."""
        still = []
        for step, copy, queued in self.open:
            if not queued and self.rng.random() < 0.7:
                queued = True
                self._say(AckKind.ENQUEUED, copy)
            if not queued or self.rng.random() > self.pace:
                still.append((step, copy, queued))
                continue
            failed = self.rng.random() < self.rate
            self._say(AckKind.FAILED if failed else AckKind.COMPLETED, copy)
        self.open = still
        into_gpu = [s for s, c, _ in still if getattr(c, "kind", 0) == TransferKind.RESTORE]
        into_gpu += [s for s, c, _ in still if getattr(c, "load", False)]
        over = min(into_gpu, default=1 << 62)
        if self.rng.random() < self.pace:
            self.acks += [Ack(AckKind.RETIRED, step) for step in self.steps if step < over]
            self.steps = [step for step in self.steps if step >= over]
        told = tuple(self.acks[: self.rng.randrange(len(self.acks) + 1)])
        return Acknowledgements(self.number, 1, self.first, told) if told else None


class Runner:
    """The model side of `ReferenceEngine`: token 1 to everything, drafts that mostly stand."""

    def __init__(self, ranks: list[Rank], rng: random.Random) -> None:
        self.ranks, self.rng = ranks, rng

    def execute(self, meta, tokens, rows, sampled):
        command = msgspec.msgpack.decode(meta, type=SparseKVOffloadCommand)
        messages = []
        for rank in self.rng.sample(self.ranks, len(self.ranks)):
            rank.take(command)
            told = rank.answer()
            if told is not None and self.rng.random() < 0.7:
                messages += [told] * self.rng.choice([1, 1, 2])
        chosen = np.ones(len(sampled), dtype=np.int64)
        output = KVConnectorOutput(msgspec.msgpack.encode(tuple(messages)))
        return chosen, np.zeros((len(chosen), 2), dtype=np.float32), output


def world(seed: int) -> tuple[ReferenceEngine, random.Random]:
    rng = random.Random(f"ranks out of step {seed}")
    spec, ranks = rng.choice([0, 0, 2]), rng.choice([2, 3])
    suffix = SuffixConfig(name="cpu", gib=rng.choice([6, 60]) * 512 / GIB)
    config = HiSparseConfig(
        layout=LAYOUT,
        pools=PoolConfig(
            page_size=4,
            gpu_blocks=rng.choice([16, 20, 30]),
            host_pool_gib=rng.choice([14, 30, 64]) * 1024 / GIB,
            index_pages_per_block=rng.choice([0, 0, 3, 9]),
        ),
        policy=PolicyConfig(
            top_k=4,
            hot_rows=8,
            name=rng.choice(["hybrid", "lru", "even", "host_first"]),
            write_back=rng.choice(["eager", "on_pressure"]),
            on_copy_failure=rng.choice(["rewind", "rewind", "fail"]),
            promote_after_steps=rng.choice([1, 4]),
        ),
        schedule=ScheduleConfig(
            max_requests=4,
            max_model_len=48,
            prefill_chunk=rng.choice([3, 8]),
            step_rows=16,
            lookahead_rows=spec,
        ),
        suffix=suffix if rng.random() < 0.6 else SuffixConfig(),
        ranks=ranks,
        checks="on",
    )
    rates = [rng.choice([0.0, 0.05, 0.3]) for _ in range(ranks)]
    sides = [Rank(n, rng, rate) for n, rate in enumerate(rates)]
    coordinator = HiSparseCoordinator(config, MemoryLog(None))
    connector = HiSparseConnector(KVConnectorRole.SCHEDULER, coordinator=coordinator)
    proposed = {row: [rng.choice([1, 1, 1, 2]) for _ in range(spec)] for row in range(4)}
    made = ReferenceEngine(
        coordinator, connector, Runner(sides, rng), eos=0, drafts=lambda: proposed
    )
    return made, rng


def disturb(engine: ReferenceEngine, rng: random.Random) -> None:
    coordinator = engine.coordinator
    assert coordinator.checker is not None
    coordinator.checker.state(coordinator.state)
    coordinator.checker.raise_first()
    for served in list(engine.live.values()):
        if rng.random() < 0.01 and served.key not in engine._ending:
            if coordinator.state.requests[served.key].live:
                engine.preempt(served)
            else:
                engine.abort(served)
    if coordinator.is_sleeping:
        coordinator.wake_up()
    elif rng.random() < 0.05:
        coordinator.sleep(rng.choice([1, 2]))


@pytest.mark.parametrize("seeds", [range(i, i + 10) for i in range(0, 40, 10)], ids=str)
def test_ranks_out_of_step_leave_nothing_behind(seeds):
    for seed in seeds:
        engine, rng = world(seed)
        engine.run(workload(seed), after_step=lambda engine, rng=rng: disturb(engine, rng))
        coordinator, state = engine.coordinator, engine.coordinator.state
        assert not state.requests and not state.transfers and not state.suffix_copies, seed
        assert coordinator.reset_prefix_cache(), seed
        audit = Audit(coordinator.config)
        assert all(audit.take(seq, event) for seq, event in coordinator.log.read(1)), seed
        audit.finish()
        assert audit.violations == [] and digest(audit.state) == coordinator.digest(), seed
