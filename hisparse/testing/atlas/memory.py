"""Memory: evictions in the middle of a load, and memory that is refused at a start or a wake-up."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from hisparse.fsm.cursor import LogCursor
from hisparse.fsm.events import BlocksEvicted, HostPagesEvicted, SuffixEvicted
from hisparse.fsm.wire import TransferKind
from hisparse.testing.atlas.base import Fault

if TYPE_CHECKING:
    from hisparse.testing.rank import AnyRankDevice
    from hisparse.testing.replica import SimReplica

WAITING_MAX = 4  # requests; with more, there is pressure enough
EVICTIONS = (BlocksEvicted, HostPagesEvicted, SuffixEvicted)


class EvictionInLoad(Fault):
    family = "memory"
    kind = "eviction_in_load"
    rule = "an eviction while a load is under way takes nothing that the load reads or writes"
    marks = ("eviction_in_load.restore", "eviction_in_load.suffix")
    share = 0.6
    rates = (0.1, 0.5)

    def strike(self) -> None:
        """Everything is asked for at once, while something is loaded."""
        replica, state = self.replica, self.replica.state
        restores = {i for i, t in state.transfers.items() if t.kind is TransferKind.RESTORE}
        loads = {i for i, copy in state.suffix_copies.items() if copy.load}
        if not restores | loads or len(state.waiting) > WAITING_MAX or not self.strikes():
            return
        if state.lost or replica.coordinator.is_sleeping:
            return
        before = replica.log.last_seq
        for _ in range(self.rng.choice([1, 3])):
            replica.submit(replica.workload.next(replica.now * 10.0, greedy=True))
        replica.coordinator.admit_waiting()
        with LogCursor(replica.log, before) as cursor:
            evicted = [event for _, event in cursor.take() if isinstance(event, EVICTIONS)]
        if not evicted:
            return
        for found, mark in ((restores, "restore"), (loads, "suffix")):
            if found:
                self._fire(found, mark)

    def _fire(self, loads: set[int], mark: str) -> None:
        def survived() -> bool:
            state = self.replica.state
            return not loads & (set(state.transfers) | set(state.suffix_copies))

        self.fire(f"loads {sorted(loads)}", survived, f"{self.kind}.{mark}")


class MemoryRefused(Fault):
    family = "memory"
    kind = "memory_refused"
    rule = "a rank whose memory is refused keeps none of it, is lost, and comes again"
    marks = ("memory_refused.at_start", "memory_refused.at_wake_up")
    rates = (0.01, 0.05)

    def __init__(self, replica: SimReplica, rate: float, rng: random.Random) -> None:
        super().__init__(replica, rate, rng)
        self._armed = False
        self._failing: list[tuple[int, AnyRankDevice]] = []
        replica.on_device.append(self._on_device)

    def _on_device(self, number: int, device: AnyRankDevice) -> None:
        if self._armed and not self.replica.calm:
            self._armed = False
            device.pinned_left = self.rng.choice([0, 0, 1])
            self._failing.append((number, device))

    def strike(self) -> None:
        replica = self.replica
        for number, device in self._failing:
            if device.refused:
                left = device.statistics()["allocated_bytes"]
                self.require(left == 0, f"rank {number} did not start, and holds {left} B")
                self.fire(f"start of rank {number}", self._back(number), f"{self.kind}.at_start")
        self._failing = []
        if not self.strikes():
            return
        rank = self.rng.choice(replica.ranks)
        if rank.dead or rank.worker.asleep:
            if not rank.dead and not rank.device.recommits_refused:
                rank.device.recommits_refused = True
                mark = f"{self.kind}.at_wake_up"
                self.fire(f"wake-up of rank {rank.number}", self._back(rank.number), mark)
            return
        self._armed = True
        replica.crash_rank(rank.number)

    def _back(self, number: int) -> Callable[[], bool]:
        before = self.replica.ranks[number]

        def survived() -> bool:
            replica = self.replica
            now = replica.ranks[number]
            return now is not before and not now.dead and replica.state.acked[number] > 0

        return survived

    def cease(self) -> None:
        self._armed = False
