"""`no_silent_loss`: rows computed from the page of a failed copy are never confirmed; they are
computed again, in a later step, or end with their request."""

from __future__ import annotations

from hisparse.errors import InvariantViolation
from hisparse.fsm.cursor import LogCursor
from hisparse.fsm.events import RequestRewound
from hisparse.fsm.state import Key
from hisparse.kv.coordinator import HiSparseCoordinator
from hisparse.testing.tagged import Seen


class Losses:
    """Follows the rewinds of a coordinator's log, and compares what was tainted with them."""

    def __init__(self, coordinator: HiSparseCoordinator, seen: Seen) -> None:
        self.coordinator = coordinator
        self.seen = seen
        self._rewound: dict[Key, list[tuple[int, int]]] = {}  # step after it, rows kept
        self._cursor = LogCursor(coordinator.log, coordinator.log.last_seq)

    def check(self) -> None:
        """Raises InvariantViolation for a tainted row that is confirmed by now."""
        state = self.coordinator.state
        for _, event in self._cursor.take():
            if isinstance(event, RequestRewound):
                key = (event.request, event.epoch)
                self._rewound.setdefault(key, []).append((state.step, event.rows))
        for key, tainted in list(self.seen.tainted.items()):
            for end, kept in self._rewound.get(key, ()):
                tainted -= {(step, row) for step, row in tainted if step < end and row >= kept}
            request = state.requests.get(key)
            if request is None:
                del self.seen.tainted[key]
            elif tainted and request.row >= 0:
                confirmed = int(state.rows.confirmed[request.row])
                row = min(row for _, row in tainted)
                if confirmed > row:
                    raise InvariantViolation(
                        "no_silent_loss",
                        f"{key} is confirmed up to {confirmed}, row {row} read a failed copy",
                        seq=state.seq,
                    )
