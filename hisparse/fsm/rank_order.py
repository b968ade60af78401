"""A rank's stream beside the fold of the scheduler's log: each command's part of it is due once the
fold is at that command's `to_seq`, whose tables say what the rows of its step touch. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hisparse.fsm import events as ev
from hisparse.fsm.clocks import Clocks, Logged
from hisparse.fsm.state import State
from hisparse.fsm.step_accesses import step_accesses


class RankOrder:
    """Runs the clocks of one rank beside a fold of the scheduler's log.

    Call `folded` after each event of that log, and `finish` at its end; `clocks.found` then holds
    what is unordered, `steps` how many steps' own rows were looked at.
    """

    def __init__(
        self, name: str, events: Iterable[Logged], blocks: int, pages: int, suffixes: int = 0
    ) -> None:
        self.name = name
        self.clocks = Clocks(blocks, pages, suffixes)
        self.steps = 0
        self._planned: ev.StepPlanned | None = None
        self._segments = _segments(events)
        self._next: list[Logged] | None = None
        self._advance()

    def folded(self, seq: int, event: object, state: State) -> None:
        """`event` was folded as `seq`; `state` is what it led to."""
        if isinstance(event, ev.StepPlanned):
            self._planned = event
        while self._next is not None and self._to_seq <= seq:
            command, planned, accesses = self._next[0][1], self._planned, None
            if (
                isinstance(command, ev.CommandApplied)
                and planned is not None
                and planned.step == command.step
                and command.to_seq == seq
            ):
                accesses, self.steps = step_accesses(state, planned), self.steps + 1
            self.clocks.segment(self._next, accesses)
            self._advance()

    def _advance(self) -> None:
        """Take the next segment up; it is due once the fold is at its `to_seq`."""
        self._next = next(self._segments, None)
        command = None if self._next is None else self._next[0][1]
        self._to_seq = command.to_seq if isinstance(command, ev.CommandApplied) else 0

    def finish(self) -> None:
        """Commands that the scheduler's log does not reach: what their stream says of itself."""
        while self._next is not None:
            self.clocks.segment(self._next, None)
            self._advance()


def _segments(events: Iterable[Logged]) -> Iterator[list[Logged]]:
    held: list[Logged] = []
    for seq, event in events:
        if isinstance(event, ev.CommandApplied) and held:
            yield held
            held = []
        held.append((seq, event))
    if held:
        yield held
