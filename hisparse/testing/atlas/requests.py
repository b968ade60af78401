"""Requests that end, or come again, at an awkward moment."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from hisparse.engine.served import Served
from hisparse.engine.trace import WorkloadRequest
from hisparse.errors import UsageError
from hisparse.fsm.machines import TransferState
from hisparse.fsm.state import Key, Transfer
from hisparse.testing.atlas.base import Fault
from hisparse.testing.worlds import EOS

POINTS = ("planned", "handed_over", "enqueued_partly", "enqueued", "completed_partly", "failing")


class EndInTransfer(Fault):
    """Base: an end, `do`, of a request with a copy that has come to each point of its way."""

    family = "requests"

    @classmethod
    def all_marks(cls) -> tuple[str, ...]:
        return tuple(f"{cls.kind}.{point}" for point in POINTS)

    @classmethod
    def reachable_marks(cls, kinds: Collection[str], ranks: int) -> tuple[str, ...]:
        fails = any(kind.startswith("copy_") for kind in kinds)
        marks = [m for m in cls.all_marks() if ranks > 1 or not m.endswith(("partly", "failing"))]
        return tuple(mark for mark in marks if fails or not mark.endswith("failing"))

    def do(self, served: Served) -> bool:
        raise NotImplementedError

    def strike(self) -> None:
        replica = self.replica
        state = replica.state
        if replica.calm or not state.transfers or not self.strikes():
            return
        live = replica.engine.live
        found: dict[str, Transfer] = {}
        for copy in state.transfers.values():
            owner = state.by_row[copy.row]
            if owner is not None and owner.key in live and owner.live:
                found[self._point(copy)] = copy
        if not found:
            return
        hits = replica.sometimes
        point = min(sorted(found), key=lambda p: hits[f"{self.kind}.{p}"])  # the rarest so far
        copy = found[point]
        key = state.request_of(copy.row).key
        if self.do(live[key]):
            ident = copy.transfer
            told = f"{key} with transfer {ident} {point}"
            self.fire(told, self._gone(key, ident), f"{self.kind}.{point}")

    def _point(self, copy: Transfer) -> str:
        if copy.state is TransferState.FAILING:
            return "failing"
        if copy.completed:
            return "completed_partly"
        if copy.state is TransferState.ENQUEUED:
            return "enqueued"
        if copy.enqueued:
            return "enqueued_partly"
        handed = copy.pinned_seq <= self.replica.connector.position
        return "handed_over" if handed else "planned"

    def _gone(self, key: Key, ident: int) -> Callable[[], bool]:
        def gone() -> bool:
            state = self.replica.state
            return key not in state.requests and ident not in state.transfers

        return gone


class AbortInTransfer(EndInTransfer):
    kind = "abort_in_transfer"
    rule = "leases stay until every rank has answered, then all of them end"

    def do(self, served: Served) -> bool:
        self.replica.abort(served)
        return True


class PreemptInTransfer(EndInTransfer):
    kind = "preempt_in_transfer"
    rule = "leases stay until every rank has answered; the copy may still publish"

    def do(self, served: Served) -> bool:
        return self.replica.preempt(served)


class FinishInTransfer(EndInTransfer):
    kind = "finish_in_transfer"
    rule = "a copy of a finished request still completes and publishes, or fails and frees"

    def do(self, served: Served) -> bool:
        return self.replica.stop(served)


class IdReused(Fault):
    family = "requests"
    kind = "id_reused"
    rule = "an id in use is refused and nothing changes; one that drains names a new epoch"
    marks = ("id_reused.refused", "id_reused.draining")

    def strike(self) -> None:
        replica, state = self.replica, self.replica.state
        if not state.requests or not self.strikes():
            return
        if replica.engine.live and self.rng.random() < 0.5:
            served = self.rng.choice(list(replica.engine.live.values()))
            if served.key in state.requests and not self._ended(served.key):
                self._refused(served)
            return
        draining = sorted({request for request, _ in state.draining})
        open_ = {served.request for served in replica.engine.live.values()}
        names = [name for name in draining if name not in open_]
        if names:
            name = self.rng.choice(names)
            old = next(key for key in state.draining if key[0] == name)
            prompt = np.array([self.rng.randrange(EOS) for _ in range(3)], dtype=np.int64)
            served = replica.submit(WorkloadRequest(name, replica.now * 10.0, prompt, 4))
            self.require(served.epoch != old[1], f"{name} came again under epoch {old[1]}")

            def survived() -> bool:
                now = replica.state.requests
                return served.outcome != "live" and old not in now and served.key not in now

            self.fire(f"{old} again as epoch {served.epoch}", survived, "id_reused.draining")

    def _ended(self, key: Key) -> bool:
        return key in self.replica.state.draining

    def _refused(self, served: Served) -> None:
        coordinator = self.replica.coordinator
        before = coordinator.digest()
        try:
            coordinator.arrive(served.request, 1, 2, [])
            refused = False
        except UsageError:
            refused = coordinator.digest() == before
        self.require(refused, f"{served.request!r} is in use and was taken again")
        self.fire(f"{served.request!r} is in use", lambda: True, "id_reused.refused")


class LateAbort(Fault):
    family = "requests"
    kind = "late_abort"
    rule = "a client that goes away after the end of its request changes nothing of what is left"

    def strike(self) -> None:
        replica, state = self.replica, self.replica.state
        if not state.draining or not self.strikes():
            return
        key = self.rng.choice(list(state.draining))
        before = self._of(key)
        replica.coordinator.abort(*key)
        self.require(self._of(key) == before, f"{key} has ended, and an abort changed it")
        self.fire(f"{key} drains", lambda: key not in replica.state.requests)

    def _of(self, key: Key) -> object:
        request = self.replica.state.requests.get(key)
        if request is None:
            return None
        rows = [table[request.row].tobytes() for table in self.replica.state.rows.tables]
        return request.state, request.row, request.in_flight, tuple(request.reserved), rows


class StaleEpoch(Fault):
    family = "requests"
    kind = "stale_epoch"
    rule = "an end of an epoch that is over changes nothing of the one that follows it"

    def strike(self) -> None:
        replica = self.replica
        again = [s for s in replica.engine.live.values() if s.epoch > 1]
        if not again or not self.strikes():
            return
        served = self.rng.choice(again)
        old = self.rng.randrange(1, served.epoch)
        if (served.request, old) in replica.state.requests:
            return
        before = self._of(served)
        try:
            replica.coordinator.finish(served.request, old)
            held = False
        except UsageError:
            held = self._of(served) == before
        self.require(held, f"{served.request!r} finished under epoch {old}")
        replica.coordinator.abort(served.request, old)
        self.require(self._of(served) == before, f"{served.request!r} aborted under epoch {old}")
        self.fire(f"{served.key} under epoch {old}", lambda: served.outcome != "live")

    def _of(self, served: Served) -> object:
        request = self.replica.state.requests[served.key]
        return request.state, request.row, request.in_flight, tuple(request.reserved)
