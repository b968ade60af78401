"""`always_readable` of the table entries that events touched, judged once a step is planned. Pure.

Owns the entries that were touched since. One of a live request with computed rows needs a readable
block, or a host page that a hot region can read it from: what `state.always_readable` says of all.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hisparse.fsm.machines import BlockRole, BlockState, HotState, PageState
from hisparse.fsm.state import State
from hisparse.fsm.wire import Table, TransferKind

Fault = tuple[str, int, str]  # invariant, seq, message
Place = tuple[int, int]  # request row, entry of its resident table
FEW = 48  # up to that many, plain numbers are faster than arrays
_RESTORE = TransferKind.RESTORE
_RESERVED = int(BlockState.RESERVED)
_ENQUEUED, _COMPLETED, _PUBLISHED = (
    int(s) for s in (PageState.ENQUEUED, PageState.COMPLETED, PageState.PUBLISHED)
)
_RESIDENT_ROLE = int(BlockRole.RESIDENT)
_KEPT_FIRST, _KEPT_LAST = int(BlockState.DIRTY), int(BlockState.CLEAN)  # and all between


class Entries:
    """Touched entries of one state."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._touched: dict[Place, int] = {}  # -> seq

    def touch(self, places: Iterable[Place]) -> None:
        """Note `places`, which the event at the state's seq touched."""
        touched, seq = self._touched, self.state.seq
        for place in places:
            touched[place] = seq

    def unreadable(self) -> list[Fault]:
        """Faults of what was touched, as (invariant, seq that touched it last, message)."""
        if not self._touched:
            return []
        touched, self._touched = self._touched, {}
        places = list(touched)
        if len(places) > FEW:
            places = self._doubtful(places)
        found: list[Fault] = []
        for row, entry in places:
            if (text := self._unreadable(row, entry)) is not None:
                found.append(("always_readable", touched[row, entry], text))
        return found

    def _doubtful(self, places: list[Place]) -> list[Place]:
        """Those of `places` that no block of their own makes readable."""
        state, at = self.state, np.array(places, dtype=np.int64)
        row, entry, rows = at[:, 0], at[:, 1], state.rows
        block = state.table(Table.RESIDENT)[row, entry]
        now = state.blocks.state[block]
        good = (block > 0) & (state.blocks.role[block] == _RESIDENT_ROLE)
        good &= (now >= _KEPT_FIRST) & (now <= _KEPT_LAST)
        needed = rows.live[row] & (entry * state.page_size < rows.computed[row])
        return [places[i] for i in (needed & ~good).nonzero()[0].tolist()]

    def _unreadable(self, row: int, entry: int) -> str | None:
        """A sentence if the page has computed rows of a live request and no readable copy."""
        state, rows = self.state, self.state.rows
        if not rows.live[row] or entry * state.page_size >= rows.computed[row]:
            return None
        block = state.table(Table.RESIDENT).item(row, entry)
        page = state.table(Table.HOST).item(row, entry)
        page_state = state.pages.state.item(page)
        durable = page_state in (_COMPLETED, _PUBLISHED)
        if block:
            now = state.blocks.state.item(block)
            owned = state.blocks.role.item(block) == _RESIDENT_ROLE
            if block > 0 and owned and _KEPT_FIRST <= now <= _KEPT_LAST:
                return None
            if owned and now == _RESERVED and durable and self._being_restored(block):
                return None
        elif (
            page
            and (durable or page_state == _ENQUEUED)
            and state.request_of(row).hot is HotState.LEASED
        ):
            return None
        return (
            f"page {entry} of request row {row} has {rows.computed[row]} computed rows before its "
            f"end and no readable copy (block {block}, host page {page})"
        )

    def _being_restored(self, block: int) -> bool:
        return any(t.block == block for t in self.state.transfers.values() if t.kind is _RESTORE)
