"""Recorder: one who runs decisions. It appends each event to the log, and folds it before the next.

    input ──► append, evolve ──► decide ──► event ──► append, evolve ──► decide … until it returns

Owns the State and the writing end of the scheduler's log, and does no I/O beyond `log.append`.
After an event that cannot be folded it takes nothing more.
"""

from __future__ import annotations

import msgspec

from hisparse.config import HiSparseConfig
from hisparse.errors import IllegalTransition, UsageError
from hisparse.fsm import events as ev
from hisparse.fsm.fold import evolve
from hisparse.fsm.history import with_history
from hisparse.fsm.invariants import Checker
from hisparse.fsm.log import EventLog
from hisparse.fsm.metrics import Metrics
from hisparse.fsm.state import Key, State, digest
from hisparse.fsm.state_size import fresh_state
from hisparse.kv.decision import Decision, T
from hisparse.kv.policies import resolve


class Recorder:
    """Args:
        config: sizes and policy.
        log: where events go; its next seq must be 1 (a fresh log), and nobody else's.
        recovered: the state to begin with where the log is not fresh.

    With ``checks="on"`` every event goes through the run invariants before it is folded; what they
    find is kept in `checker.violations`.
    """

    def __init__(self, config: HiSparseConfig, log: EventLog, recovered: State | None) -> None:
        if log.next_seq != 1 and recovered is None:
            raise UsageError(
                f"the log holds events up to {log.next_seq - 1}: use a fresh one, or go on with it "
                f"by {type(self).__name__}.recover(config, log)"
            )
        resolve(config.policy.name)
        if recovered is None:
            log.claim()
        self.config = config
        self.log = log
        self.state = fresh_state(config) if recovered is None else recovered
        self._broken: Exception | None = None
        self._rewound: dict[Key, ev.RequestRewound] = {}  # not told to the engine yet
        self.metrics = Metrics(config)
        begun = self.state if self.state.seq else None
        self.checker = Checker(config, state=begun) if config.checks == "on" else None

    def _record(self, event: ev.Event) -> int:
        if self._broken is not None:
            raise UsageError(f"this coordinator stopped at an earlier fault: {self._broken}")
        seq = self.log.append(event)
        self._fold(event, seq)
        if isinstance(event, ev.RequestRewound):
            self._note_rewound(event)
        return seq

    def _fold(self, event: ev.Event, seq: int) -> None:
        if self.checker is not None:
            self.checker.event(seq, event)
        try:
            evolve(self.state, event, seq)
        except IllegalTransition as error:
            self._broken = error  # the log now ends in an event that cannot be folded
            raise with_history(error, self.log) from error
        except Exception as error:
            self._broken = error
            raise
        self.metrics.take(event)

    def _note_rewound(self, e: ev.RequestRewound) -> None:
        """One word a request, however often it goes back before anybody asks; `plan_step` forgets
        those that are gone."""
        before = self._rewound.get((e.request, e.epoch))
        if before is not None and before.certain > e.certain:
            e = msgspec.structs.replace(e, certain=before.certain)
        self._rewound[e.request, e.epoch] = e

    def _run(self, decision: Decision[T]) -> T:
        try:
            event = next(decision)
            while True:
                event = decision.send(self._record(event))
        except StopIteration as stop:
            result: T = stop.value
            return result

    def digest(self) -> str:
        """Hex digest of the state; equal to that of a fold of the same log."""
        return digest(self.state)
