"""Worker ranks that die at any moment, come again, and come again wrongly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hisparse.errors import ProtocolError
from hisparse.fsm.wire import Table
from hisparse.testing.atlas.base import Fault
from hisparse.testing.rank import RankDevice, SimRank


class RankCrash(Fault):
    family = "ranks"
    kind = "rank_crash"
    rule = (
        "what the rank held is lost for all, its copies fail, nothing is admitted or found before "
        "all is forgotten; a new worker epoch begins at the log's end"
    )
    marks = (
        "rank_crash.idle",
        "rank_crash.serving",
        "rank_crash.copying",
        "rank_crash.behind",
        "rank_crash.in_step",
        "rank_crash.again",
    )
    rates = (0.003, 0.01, 0.03)

    def strike(self) -> None:
        if self.strikes():
            rank = self.rng.choice(self.replica.ranks)
            self.crash(rank, self._moment(rank))

    def command(self, rank: SimRank) -> None:
        if self.rng.random() < 0.2 and not rank.dead and self.strikes():
            self.crash(rank, "in_step")

    def crash(self, rank: SimRank, moment: str) -> None:
        replica = self.replica
        replica.restarts.crash_rank(rank.number, self.rng.choice([0, 0, 1, 4]))
        self.fire(f"rank {rank.number}, {moment}", self.came_again(rank), f"{self.kind}.{moment}")

    def came_again(self, gone: SimRank) -> Callable[[], bool]:
        """Whether a worker that followed `gone` has said that it ended a step."""
        number = gone.number

        def survived() -> bool:
            replica = self.replica
            now = replica.ranks[number]
            lost = replica.state.lost >> number & 1
            return now is not gone and not lost and replica.state.acked[number] > 0

        return survived

    def _moment(self, rank: SimRank) -> str:
        state = self.replica.state
        if rank.dead:
            return "again"
        if rank.inbox:
            return "behind"
        if len(rank.worker.transfers):
            return "copying"
        return "serving" if state.rows.live.any() else "idle"


class RankStaleCursor(Fault):
    family = "ranks"
    kind = "rank_stale_cursor"
    rule = "a worker that begins elsewhere than it was told, or in an old epoch, applies nothing"
    marks = ("rank_stale_cursor.offset", "rank_stale_cursor.epoch")
    rates = (0.01, 0.05)

    def command(self, rank: SimRank) -> None:
        """Beside the rank another worker of it begins, and is given the rank's next command."""
        ready = len(rank.inbox) == 1 and not rank.dead
        if not ready or not self.strikes():
            return
        replica, worker = self.replica, rank.worker
        stale = self.rng.random() < 0.5
        others = [seq for seq in self._offsets(worker.to_seq) if seq != worker.to_seq]
        if stale and not others:
            return
        impostor = replica.make_rank(
            rank.number,
            RankDevice(0, 0.5),
            worker_epoch=worker.worker_epoch - (not stale),
            at_seq=self.rng.choice(others) if stale else worker.to_seq,
        )
        meta = rank.inbox[0].meta
        self.require(
            impostor.refuses(meta), f"rank {rank.number} began at {impostor.worker.to_seq}"
        )
        impostor.connector.shutdown()
        seq = worker.to_seq

        def survived() -> bool:
            return rank.dead or worker.to_seq > seq

        mark = f"{self.kind}.{'offset' if stale else 'epoch'}"
        self.fire(f"rank {rank.number} at {impostor.worker.to_seq}", survived, mark)

    def _offsets(self, to_seq: int) -> list[int]:
        """Anywhere in the log, and next to where it should be."""
        last = self.replica.log.last_seq
        return [self.rng.randrange(last + 1), max(to_seq - 1, 0), min(to_seq + 1, last), 0]


class DummyStep(Fault):
    family = "ranks"
    kind = "dummy_step"
    rule = "a dummy step between steps leaves no trace in tables, hot rows, cursor or counters"
    rates = (0.01, 0.05)

    def strike(self) -> None:
        """An engine profiles: padding rows, as many as the rank takes or fewer."""
        if not self.strikes():
            return
        rank = self.rng.choice(self.replica.ranks)
        if rank.dead or rank.worker.asleep:
            return
        rank.device.synchronize(rank.device.compute)
        before = self._trace(rank)
        self._run(rank, self.rng.randint(1, rank.worker.capabilities.rows))
        self.require(self._trace(rank) == before, f"rank {rank.number} is not as it was")
        self.fire(f"rank {rank.number}", lambda: True)

    def _run(self, rank: SimRank, n: int) -> None:
        worker, layout = rank.worker, rank.worker.config.layout
        nothing = np.full((n, worker.capabilities.top_k), -1, dtype=np.int32)
        data = np.zeros((n, layout.row_bytes), dtype=np.uint8)
        with worker.warm_up(n) as rows:
            for group, layers in enumerate(layout.index_groups):
                worker.index.write(group, rows, data[:, : layout.index_row_bytes])
                for place, layer in enumerate(layers):
                    worker.handles[layer].write(rows, data)
                    worker.handles[layer].gather(rows, None if place else nothing)

    def _trace(self, rank: SimRank) -> object:
        worker = rank.worker
        kept = [worker.tables[table].tobytes() for table in Table]
        for handle in worker.handles:
            held = vars(handle.runtime.resolver) if handle.runtime.is_leader else {}
            kept += [v.tobytes() for v in held.values() if isinstance(v, np.ndarray)]
        return worker.to_seq, worker.acks.last_seq, worker.statistics(), kept


class OldWorkerSpeaks(Fault):
    family = "ranks"
    kind = "ack_old_worker"
    rule = "acknowledgements of an old worker epoch are inert"
    rates = (0.1, 0.5)

    def strike(self) -> None:
        """A worker that was given up says more than it did."""
        replica, state = self.replica, self.replica.state
        dead = [n for n, epoch in enumerate(state.worker_epoch) if epoch > 1]
        if not dead or not self.strikes():
            return
        number = self.rng.choice(dead)
        said = replica.runner.last_words.get(number)
        if said is None or said.worker_epoch >= state.worker_epoch[number]:
            return
        before = replica.coordinator.digest()
        try:
            news = replica.coordinator.update_acknowledgements(said)
        except ProtocolError:
            news = True
        held = not news and replica.coordinator.digest() == before
        self.require(held, f"rank {number}: epoch {said.worker_epoch} was listened to")
        self.fire(f"rank {number} of epoch {said.worker_epoch}", lambda: True)
