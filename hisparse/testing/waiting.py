"""`reclaim_first`: nobody waits for GPU blocks while pages that are on the host hold some.

A page above its request's window whose host copy is valid can go at once, and costs nothing, but
where window and hot region are no less than all pages of the request. So
when the head of the queue has waited for GPU blocks from one step to the next, no copy is under way
that would free any, and nothing was spilled meanwhile, no such page may have been there all the
time. Recounted from tables and states; shares no code with those who decide.
"""

from __future__ import annotations

import numpy as np

from hisparse.errors import InvariantViolation
from hisparse.fsm.cursor import LogCursor
from hisparse.fsm.events import PagesSpilled
from hisparse.fsm.machines import BlockState
from hisparse.fsm.state import Key, State
from hisparse.fsm.wire import Table
from hisparse.kv.coordinator import HiSparseCoordinator

Held = set[tuple[int, int, int]]  # request row, block, its epoch


class Waiting:
    """Of the queue of `coordinator`."""

    def __init__(self, coordinator: HiSparseCoordinator) -> None:
        self.coordinator = coordinator
        self._cursor = LogCursor(coordinator.log, coordinator.log.last_seq)
        self._before: tuple[Key | None, Held] = (None, set())

    def check(self) -> None:
        """After a step. Raises InvariantViolation ``reclaim_first``."""
        state = self.coordinator.state
        spilled = any(isinstance(event, PagesSpilled) for _, event in self._cursor.take())
        head, before = self._before
        now = next(iter(state.waiting), None)
        if now is None or not self._stuck(state, now):
            self._before = (None, set())
            return
        held = _could_go(state)
        self._before = (now, held)
        if head == now and not spilled and (kept := sorted(held & before)):
            row, block, _ = kept[0]
            text = f"{now} waits for GPU blocks, and row {row} keeps block {block}, above its "
            text += "window and valid on the host, for a whole step"
            raise InvariantViolation("reclaim_first", text, seq=state.seq)

    def _stuck(self, state: State, head: Key) -> bool:
        """Whether it waits for blocks, and for nothing else that would bring some."""
        away = state.asleep or state.lost or state.rewinding
        return state.requests[head].deferred == "gpu_blocks" and not (away or state.transfers)


def _could_go(state: State) -> Held:
    """Blocks of whole pages that are on the host, of rows that hold more than their window."""
    found: Held = set()
    resident = state.table(Table.RESIDENT)
    for row in np.flatnonzero(state.rows.live).tolist():
        blocks, window = resident[row], state.window_pages
        stays = state.rows.pages_max[row] <= window + state.hot_blocks
        if stays or np.count_nonzero(blocks) <= window:
            continue
        whole = blocks[: int(state.rows.computed[row]) // state.page_size].astype(np.int64)
        clean = whole[(whole > 0) & (state.blocks.state[whole] == BlockState.CLEAN)]
        found |= {(row, block, int(state.blocks.epoch[block])) for block in clean.tolist()}
    return found
