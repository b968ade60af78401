"""RankRunner: what a replica's engine runs a step by (`hisparse.engine.loop.Runner`).

Owns what passes between scheduler and ranks in a step. The command goes into every rank's inbox;
ranks run when they are not behind, in any order; what they say goes through their channels, and
reaches the scheduler in a later step. Faults of commands and messages strike here. A rank whose
device refuses it something is lost, as an engine does with a rank that raises.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from hisparse.connector.base import KVConnectorOutput
from hisparse.device.rows import StepRows
from hisparse.errors import DeviceError
from hisparse.fsm.wire import Acknowledgements
from hisparse.testing.atlas.base import with_hook
from hisparse.testing.rank import SimRank, Task

if TYPE_CHECKING:
    from hisparse.testing.replica import SimReplica


class RankRunner:
    """Of one replica, over restarts of its scheduler; `seed` is of the order in which ranks run."""

    def __init__(self, replica: SimReplica, seed: str) -> None:
        self.replica = replica
        self.rng = random.Random(f"{seed} replica")
        self.last_words: dict[int, Acknowledgements] = {}  # by rank: the last message of all
        self._message_faults = with_hook(replica.faults, "message")
        self._command_faults = with_hook(replica.faults, "command")

    def execute(
        self, meta: Any, tokens: np.ndarray, rows: StepRows, sampled: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray, KVConnectorOutput]:
        replica = self.replica
        work = replica.model.prepare(replica.engine, rows, replica.seen)
        task = Task(meta, work, replica.connector.position)
        order = replica.ranks
        if len(order) > 1:
            order = self.rng.sample(order, len(order))
        messages: list[bytes] = []
        for rank in order:
            if not rank.dead:
                self._run(rank, task)
            messages += map(msgspec.msgpack.encode, rank.channel.take(replica.now))
        chosen = replica.model.choose(tokens, rows, sampled)
        logits = np.zeros((len(chosen), 0), dtype=np.float32)
        if not messages:
            return chosen, logits, KVConnectorOutput()
        packed = msgspec.msgpack.encode(tuple(map(msgspec.Raw, messages)))
        return chosen, logits, KVConnectorOutput(packed)

    def _run(self, rank: SimRank, task: Task) -> None:
        rank.inbox.append(task)
        for fault in self._command_faults:
            self.attempt(rank, partial(fault.command, rank))
        self.attempt(rank, lambda: rank.run(self.replica.now))
        message = None if rank.dead else rank.worker.poll()
        if message is not None:
            self.last_words[rank.number] = message
            self._send(rank, message)

    def attempt(self, rank: SimRank, work: Callable[[], object]) -> None:
        """Let a rank that is alive do `work`, or lose it to what its device refuses."""
        if rank.dead:
            return
        try:
            work()
        except DeviceError:
            if not rank.device.refused:
                raise
            self.replica.crash_rank(rank.number)

    def _send(self, rank: SimRank, message: Acknowledgements) -> None:
        now = self.replica.now
        for fault in self._message_faults:
            instead = fault.message(rank, message)
            if instead is not None:
                for delay, part in instead:
                    rank.channel.send(part, now + delay)
                return
        rank.channel.send(message, now)
