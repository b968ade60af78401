"""Watch: everything that is looked at beside one scheduler process, from its begin to its end.

The invariants of the state; `replay_equal`, against a second state that folds every event since the
last look, written and read back, and second counters; `no_silent_loss` (`hisparse.testing.losses`);
`reclaim_first` (`hisparse.testing.waiting`). After a restart the
second state begins as a snapshot of what was recovered, and the whole log is folded at the end.
"""

from __future__ import annotations

from copy import deepcopy

from hisparse.errors import InvariantViolation
from hisparse.fsm.codec import Codec
from hisparse.fsm.cursor import LogCursor
from hisparse.fsm.events import EVENT_TYPES, LogGap
from hisparse.fsm.fold import evolve
from hisparse.fsm.snapshot import restore, snapshot
from hisparse.fsm.state import State, digest
from hisparse.kv.coordinator import HiSparseCoordinator
from hisparse.testing.losses import Losses
from hisparse.testing.tagged import Seen
from hisparse.testing.waiting import Waiting


class Watch:
    """Of `coordinator`, whose config has checks on. Every method raises InvariantViolation."""

    def __init__(self, coordinator: HiSparseCoordinator, seen: Seen) -> None:
        self.coordinator = coordinator
        self._losses = Losses(coordinator, seen)
        self._waiting = Waiting(coordinator)
        self._codec = Codec(EVENT_TYPES)
        config, state = coordinator.config, coordinator.state
        self._shadow = restore(config, snapshot(state)) if state.seq else State(config)
        self._cursor = LogCursor(coordinator.log, state.seq)
        self._metrics = deepcopy(coordinator.metrics)

    def after_step(self) -> None:
        """What costs little."""
        self._losses.check()
        self._waiting.check()
        self._raise_first()

    def everything(self) -> None:
        """The whole state, and what was folded since the last look."""
        coordinator, codec = self.coordinator, self._codec
        assert coordinator.checker is not None
        coordinator.checker.state(coordinator.state)
        self._raise_first()
        for seq, event in self._cursor.take():
            evolve(self._shadow, codec.decode(*codec.encode(event)), seq)  # type: ignore[arg-type]
            self._metrics.take(event)  # type: ignore[arg-type]
        self._counted()
        self._equal(self._shadow, "the fold since the last look")

    def whole_log(self) -> None:
        """The log from its first event on, where it has all of them."""
        if not self.coordinator.recovered_seq:
            return  # the second state began there
        state = State(self.coordinator.config)
        for seq, event in self.coordinator.log.read(1):
            if isinstance(event, LogGap):
                return
            evolve(state, event, seq)  # type: ignore[arg-type]
        self._equal(state, "the fold of the whole log")

    def _counted(self) -> None:
        """Metrics are a fold of the log, too."""
        folded, live = self._metrics.counts, self.coordinator.metrics.counts
        wrong = [f"{name} {live[name]}, not {n}" for name, n in folded.items() if live[name] != n]
        if wrong:
            text = f"metrics count what the log does not say: {', '.join(wrong)}"
            raise InvariantViolation("replay_equal", text, seq=self.coordinator.state.seq)

    def _equal(self, folded: State, what: str) -> None:
        replayed, live = digest(folded), self.coordinator.digest()
        if replayed != live:
            step, seq = self.coordinator.state.step, self.coordinator.state.seq
            text = f"step {step}: {what} gives {replayed}, live is {live}"
            raise InvariantViolation("replay_equal", text, seq=seq)

    def _raise_first(self) -> None:
        assert self.coordinator.checker is not None
        self.coordinator.checker.raise_first()
