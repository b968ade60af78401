"""One kind of id over a whole log: an entry for every event that names or moves an id."""

from __future__ import annotations

from array import array

import numpy as np

from hisparse.export.html.payload import Columns
from hisparse.fsm.machines import BlockState, PageState, RequestState, TransferState

UNKNOWN = 15  # the state of a lane while nobody can know it
NAMED = 0x40  # beside the state of an entry: the event names the id
STATES: dict[str, list[str]] = {
    "block": [s.name for s in BlockState],
    "page": [s.name for s in PageState],
    "request": ["GONE", *(s.name for s in RequestState if s is not RequestState.GONE)],
    "transfer": ["SETTLED", *(s.name for s in TransferState)],
}
CODES = {what: {name: at for at, name in enumerate(names)} for what, names in STATES.items()}


class Lane:
    """Entries of one kind of id, in the order of the log."""

    def __init__(self, what: str) -> None:
        self.codes = CODES[what]
        self.now: dict[int, int] = {}
        self.ids, self.at, self.states = array("I"), array("I"), array("B")
        # Who an id was given to, an entry a birth: block or page, place in the log, role, row.
        self.births: list[array[int]] = [array("I") for _ in range(5)]

    def add(self, ident: int, at: int, state: int) -> None:
        self.ids.append(ident)
        self.at.append(at)
        self.states.append(state)

    def born(self, at: int, ident: int, role: int, row: int, entry: int = 0) -> None:
        """The id was given to `row`, as entry `entry` of the table that `role` belongs to."""
        for column, value in zip(self.births, (ident, at, role, row, entry), strict=True):
            column.append(u32(value))

    def write(self, name: str, columns: Columns, count: int) -> None:
        """The entries by id; `count` ids from 0 on."""
        ids = np.frombuffer(self.ids, dtype=np.uint32)
        order = np.argsort(ids, kind="stable")
        columns.u32(
            f"{name}.first", np.searchsorted(ids[order], np.arange(count + 1)), ascending=True
        )
        columns.u32(f"{name}.at", np.frombuffer(self.at, dtype=np.uint32)[order], ascending=True)
        columns.u8(f"{name}.state", np.frombuffer(self.states, dtype=np.uint8)[order])
        born = [np.frombuffer(column, dtype=np.uint32) for column in self.births]
        order = np.argsort(born[0], kind="stable")
        columns.u32(
            f"{name}.births", np.searchsorted(born[0][order], np.arange(count + 1)), ascending=True
        )
        for label, column in zip(("at", "role", "row", "entry"), born[1:], strict=True):
            columns.u32(f"{name}.birth_{label}", column[order], ascending=label == "at")


def u32(value: int) -> int:
    """The nearest number that a column holds: a foreign log may say anything."""
    return min(max(value, 0), 0xFFFFFFFF)
