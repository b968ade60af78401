"""A backend at a named place of a step, that a wrong call is made at."""

from __future__ import annotations

import hashlib

import numpy as np
from embedding_rig import INDEX_ROW, ROW, Engine, opened

from hisparse.fsm.wire import Table

PROMPT = list(range(100, 120))


class World:
    """A backend at a named place of a step, with a request that decodes and one that waits."""

    def __init__(self, place):
        self.backend = opened(gpu_blocks=14)
        self.engine = engine = Engine(self.backend)
        self.stale = engine.admit("a", PROMPT, 8)
        self.backend.abort("a")
        self.backend.drain()
        engine.admit("a", PROMPT, 30)
        engine.prefill("a")
        engine.decode("a")
        engine.admit("w", PROMPT[::-1], 30)
        assert self.backend.requests == ("a", "w")
        self.stale_plan = engine.decode("a")
        self.plan = None
        if place == "idle":
            return
        engine.tokens["a"].append(7)
        self.plan = self.backend.plan_step({"a": [7]})
        if place != "planned":
            self.backend.begin_step(self.plan)
        if place == "written":
            self.backend.write_index(0, self.zeros(INDEX_ROW))
            self.backend.write(0, self.zeros(ROW))
        if place == "computed":
            engine.compute(self.plan)
        self.place = place

    @staticmethod
    def zeros(width, n=1, dtype=np.uint8):
        return np.zeros((n, width), dtype)

    def top_k(self, *positions, dtype=np.int32):
        return np.array([positions], dtype=dtype)

    def fingerprint(self):
        """Everything that a call could have changed, on both sides and in the log."""
        backend, worker = self.backend, self.backend.worker
        tables = [worker.tables[table].tobytes() for table in Table]
        hot = [group.leader.positions.tobytes() for group in worker.groups]
        pools = hashlib.blake2b(worker.gpu_pool.tobytes() + worker.host_pool.tobytes()).digest()
        return (
            backend.coordinator.digest(),
            backend.coordinator.log.statistics(),
            backend.coordinator.metrics.counts.copy(),
            (tables, hot, pools, worker.statistics(), backend.device.statistics()),
            [(len(group.calls), dict(group.replayed)) for group in worker.groups],
            [(s.epoch, list(s.tokens)) for s in backend.scheduler._sessions.values()],
        )

    def go_on(self):
        """End the step as if nothing had been, then decode: every byte is looked at."""
        if self.plan is not None:
            rank = self.backend.rank
            if self.place != "computed" and (rank._written or rank._indexed):
                self.backend.abandon_step()  # its rows are none of the engine's
                self.plan, self.place = self.backend.plan_step({"a": [7]}), "planned"
            if self.place == "planned":
                self.backend.begin_step(self.plan)
            if self.place != "computed":
                self.engine.compute(self.plan)
            self.backend.end_step()
        before = self.engine.rows_read
        self.engine.decode("a")
        self.engine.decode("a")
        assert self.engine.rows_read > before
        self.backend.shutdown()
        assert not self.backend.coordinator.checker.violations
