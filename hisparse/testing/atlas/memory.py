"""Memory: evictions in the middle of a load."""

from __future__ import annotations

from hisparse.fsm.cursor import LogCursor
from hisparse.fsm.events import BlocksEvicted, HostPagesEvicted, SuffixEvicted
from hisparse.fsm.wire import TransferKind
from hisparse.testing.atlas.base import Fault

WAITING_MAX = 4  # requests; with more, there is pressure enough
EVICTIONS = (BlocksEvicted, HostPagesEvicted, SuffixEvicted)


class EvictionInLoad(Fault):
    family = "memory"
    kind = "eviction_in_load"
    rule = "an eviction while a load is under way takes nothing that the load reads or writes"
    marks = ("eviction_in_load.restore", "eviction_in_load.suffix")

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
