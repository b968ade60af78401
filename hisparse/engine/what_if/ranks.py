"""RecordedRanks: worker ranks that copy nothing and acknowledge when the recorded ones did.

A copy is known by its request, life, kind and page: where the log has the same one, it is
acknowledged as many steps after its command as it was there, and fails if it failed there; any
other one takes the median of its kind. A step is retired as late as the step of that number was.
What the worker's streams guarantee is kept: copies of one direction complete in order, and a step
is retired after its restores and after the copies that it was fenced behind.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

from hisparse.engine.what_if.inputs import CopyKey, CopyKind, IndexPages
from hisparse.engine.what_if.recording import Recording
from hisparse.fsm.wire import (
    Ack,
    AckKind,
    Acknowledgements,
    AnyTransfer,
    SparseKVOffloadCommand,
    TransferKind,
)

INTO_GPU = (TransferKind.RESTORE, IndexPages.LOAD)


class Delay(NamedTuple):
    """Steps from a copy's command to its acknowledgements."""

    enqueued: int
    done: int
    failed: bool


class Delays:
    """What `recording` says of one rank."""

    def __init__(self, recording: Recording, rank: int) -> None:
        enqueued: dict[int, int] = {}
        done: dict[int, tuple[int, bool]] = {}
        self.retired: dict[int, int] = {}
        mine = [message for message in recording.messages if message.rank == rank]
        slots = [message.slot for message in mine]
        for message in mine:
            enqueued |= dict.fromkeys(message.enqueued, message.slot)
            done |= dict.fromkeys(message.completed, (message.slot, False))
            done |= dict.fromkeys(message.failed, (message.slot, True))
            for step in range(message.after_step + 1, message.retired_step + 1):
                self.retired[step] = message.slot - step
        self.copies: dict[CopyKey, list[Delay]] = defaultdict(list)
        kinds: dict[CopyKind, list[Delay]] = defaultdict(list)
        for ident in sorted(done):
            if ident not in recording.copies:
                continue
            key, command = recording.copies[ident]
            slot, failed = done[ident]
            delay = Delay(enqueued.get(ident, slot) - command, slot - command, failed)
            self.copies[key].append(delay)
            kinds[key[2]].append(delay)
        self.typical = {
            kind: Delay(
                median_low(d.enqueued for d in all_), median_low(d.done for d in all_), False
            )
            for kind, all_ in kinds.items()
        }
        self.typical_retired = median_low(self.retired.values()) if self.retired else 0
        self._unanswered(recording, done, enqueued, 1 + max(slots, default=0))

    def _unanswered(
        self,
        recording: Recording,
        done: dict[int, tuple[int, bool]],
        enqueued: dict[int, int],
        after: int,
    ) -> None:
        """What was under way when the log ended took longer than to its end."""
        for ident, (key, command) in recording.copies.items():
            if ident not in done:
                slot = max(after, command)
                here = Delay(enqueued.get(ident, slot) - command, slot - command, False)
                self.copies[key].append(here)
        for step in range(len(self.retired) + 1, recording.steps + 1):
            self.retired.setdefault(step, max(after - step, self.typical_retired))

    def of(self, key: CopyKey, nth: int) -> Delay:
        """The delay of the `nth` copy with that key (from 0)."""
        known = self.copies.get(key, [])
        return known[nth] if nth < len(known) else self.typical.get(key[2], Delay(0, 0, False))


@dataclass
class _Rank:
    delays: Delays
    sent: int = 0
    seen: dict[CopyKey, int] = field(default_factory=lambda: defaultdict(int))
    enqueued: deque[tuple[int, AnyTransfer]] = field(default_factory=deque)
    copies: deque[tuple[int, bool, AnyTransfer]] = field(default_factory=deque)
    due: dict[int, int] = field(default_factory=dict)  # of copies not acknowledged, by transfer
    last: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})  # by direction
    steps: deque[tuple[int, int]] = field(default_factory=deque)
    last_retired: int = 0


class RecordedRanks:
    """All ranks of a replica."""

    def __init__(self, recording: Recording, ranks: int) -> None:
        self._ranks = [_Rank(Delays(recording, rank)) for rank in range(ranks)]

    def answer(
        self, command: SparseKVOffloadCommand, keys: Iterable[CopyKey]
    ) -> tuple[Acknowledgements, ...]:
        """What the ranks hand back at the end of the command's step.

        `keys`: of its page transfers, then of its index transfers.
        """
        keys = list(keys)
        for rank in self._ranks:
            _queue(rank, command, keys)
        messages = []
        for number, rank in enumerate(self._ranks):
            acks = _due(rank, command.step)
            if acks:
                first = rank.sent + 1
                rank.sent += len(acks)
                messages.append(Acknowledgements(number, command.worker_epoch, first, tuple(acks)))
        return tuple(messages)


def _queue(rank: _Rank, command: SparseKVOffloadCommand, keys: list[CopyKey]) -> None:
    step = command.step
    retired = step + rank.delays.retired.get(step, rank.delays.typical_retired)
    retired = max([retired, rank.last_retired, *(rank.due.get(t, 0) for t in command.fences)])
    transfers: list[AnyTransfer] = [*command.transfers, *command.index_transfers]
    for transfer, key in zip(transfers, keys, strict=True):
        delay = rank.delays.of(key, rank.seen[key])
        rank.seen[key] += 1
        into_gpu = key[2] in INTO_GPU
        rank.enqueued.append((step + delay.enqueued, transfer))
        due = max(step + delay.done, rank.last[into_gpu])
        rank.copies.append((due, delay.failed, transfer))
        rank.due[transfer.transfer] = rank.last[into_gpu] = due
        retired = max(retired, due if into_gpu else 0)
    rank.steps.append((retired, step))
    rank.last_retired = retired


def _due(rank: _Rank, now: int) -> list[Ack]:
    """In the worker's order: enqueued, completed or failed, retired."""
    acks, later = [], deque[tuple[int, AnyTransfer]]()
    for due, transfer in rank.enqueued:
        if due > now:
            later.append((due, transfer))
            continue
        acks.append(Ack(AckKind.ENQUEUED, transfer.transfer, transfer.epoch))
    rank.enqueued = later
    waiting = {transfer.transfer for _, transfer in later}
    still = deque[tuple[int, bool, AnyTransfer]]()
    for due, failed, transfer in rank.copies:
        if due > now or transfer.transfer in waiting:
            still.append((due, failed, transfer))
            continue
        del rank.due[transfer.transfer]
        kind = AckKind.FAILED if failed else AckKind.COMPLETED
        acks.append(Ack(kind, transfer.transfer, transfer.epoch))
    rank.copies = still
    while rank.steps and rank.steps[0][0] <= now:
        acks.append(Ack(AckKind.RETIRED, rank.steps.popleft()[1]))
    return acks
