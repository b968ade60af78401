"""State machines: declared with `transitions`, run as dense tables.

Owns nothing and does no I/O. A `Machine` is built once, at import, from a declaration (enum of
states, named triggers, arrows). From the very `transitions.Machine` object that is also the oracle
in the tests, it compiles a table ``next_state[state, trigger]`` of uint8 in which ``ILLEGAL`` marks
what the declaration does not allow. The hot path applies it, as `columns`, to whole arrays of ids.

Guards are not here: a table is a pure (state, trigger) -> state. `decide` evaluates guards and
picks the trigger (``enqueued_partial`` or ``enqueued_last``).
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import transitions

from hisparse.errors import IllegalTransition

ILLEGAL = 255
U8 = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64] | Sequence[int]


def columns(table: U8) -> tuple[bytes, ...]:
    """Each trigger's column of `table`, for `bytes.translate`: states move in a third of the time
    that indexing an array takes."""
    rest = bytes([ILLEGAL]) * (256 - len(table))
    return tuple(column.tobytes() + rest for column in table.T)


class Machine:
    """One declared machine and the table compiled from it.

    Args:
        name: the name used in errors and diagrams (``"BlockLease"``).
        states: IntEnum of states; values must be 0..n-1, the initial state first.
        triggers: IntEnum of triggers; values must be 0..m-1.
        arrows: (trigger, source or sources, destination) triples.
        final: states in which an instance may end its life.
    """

    def __init__(
        self,
        name: str,
        states: type[enum.IntEnum],
        triggers: type[enum.IntEnum],
        arrows: Sequence[tuple[enum.IntEnum, Any, enum.IntEnum]],
        final: Sequence[enum.IntEnum] = (),
    ) -> None:
        for what, members in (("state", states), ("trigger", triggers)):
            if [int(m) for m in members] != list(range(len(members))):
                raise ValueError(f"{name}: {what} values must count up from 0")
        self.name = name
        self.states = states
        self.triggers = triggers
        self.final = tuple(final)
        self.declaration: list[dict[str, Any]] = [
            {"trigger": t.name, "source": s, "dest": d} for t, s, d in arrows
        ]
        self.table = self._compile()
        self.columns = columns(self.table)

    def attach(self, model: object, initial: enum.IntEnum | None = None) -> transitions.Machine:
        """The readable machine itself, driving `model.state`; the oracle of the tests."""
        return transitions.Machine(
            model,
            states=self.states,
            transitions=self.declaration,
            initial=initial if initial is not None else self.states(0),
            auto_transitions=False,
        )

    def _compile(self) -> U8:
        machine = self.attach(type("Model", (), {})())
        shape = (len(self.states), len(self.triggers))
        table = np.full(shape, ILLEGAL, dtype=np.uint8)
        for trigger, event in machine.events.items():
            for arrows in event.transitions.values():
                for arrow in arrows:
                    cell = (self.states[str(arrow.source)], self.triggers[trigger])
                    if table[cell] != ILLEGAL:
                        raise ValueError(f"{self.name}: two arrows {arrow.source} --{trigger}-->")
                    table[cell] = self.states[str(arrow.dest)]
        return table

    def next(
        self,
        state: int,
        trigger: enum.IntEnum,
        ident: object = None,
        *,
        epoch: int | None = None,
        seq: int | None = None,
    ) -> int:
        """State after `trigger` of one instance. Raises IllegalTransition."""
        after = self.columns[trigger][state]
        if after == ILLEGAL:
            raise IllegalTransition(
                self.name, ident, self.states(state).name, trigger.name, epoch=epoch, seq=seq
            )
        return after

    def apply(
        self,
        states: U8,
        ids: npt.NDArray[np.int64],
        trigger: enum.IntEnum,
        *,
        epochs: npt.NDArray[Any] | None = None,
        seq: int | None = None,
    ) -> None:
        """Move every instance of `ids` in the array `states`, all or none.

        Raises IllegalTransition for the first id whose state does not allow `trigger`; then
        nothing has changed.
        """
        after = states[ids].tobytes().translate(self.columns[trigger])
        if ILLEGAL in after:
            bad = int(ids[after.index(ILLEGAL)])
            raise IllegalTransition(
                self.name,
                bad,
                self.states(int(states[bad])).name,
                trigger.name,
                epoch=None if epochs is None else int(epochs[bad]),
                seq=seq,
            )
        states[ids] = np.frombuffer(after, dtype=np.uint8)

    def mermaid(self) -> str:
        """The declaration as a Mermaid state diagram (one block, no fences)."""
        lines = ["stateDiagram-v2", f"    [*] --> {self.states(0).name}"]
        for arrow in self.declaration:
            sources = arrow["source"] if isinstance(arrow["source"], list) else [arrow["source"]]
            lines += [f"    {s.name} --> {arrow['dest'].name}: {arrow['trigger']}" for s in sources]
        lines += [f"    {s.name} --> [*]" for s in self.final]
        return "\n".join(lines)
