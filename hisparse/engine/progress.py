"""Progress of a serving loop: what it held at most, who waited for what, and whether it moves."""

from __future__ import annotations

from hisparse.errors import InvariantViolation
from hisparse.fsm.state import Key, State

STALL_STEPS_MAX = 1000


class Progress:
    """Looked at after each step."""

    def __init__(self) -> None:
        self.gpu_blocks = 0  # most in use
        self.concurrent_requests = 0  # most live at once
        self.waits: dict[str, set[Key]] = {}  # resource -> who waited for it
        self._stalled = 0

    def watch(self, state: State, computed: bool) -> None:
        """Raises InvariantViolation ``progress`` where work waits and nothing moves: a deadlock."""
        used = len(state.blocks.state) - 1 - state.blocks.available
        self.gpu_blocks = max(self.gpu_blocks, used)
        running = int(state.rows.live.sum())
        self.concurrent_requests = max(self.concurrent_requests, running)
        for key in state.waiting:
            if resource := state.requests[key].deferred:
                self.waits.setdefault(resource, set()).add(key)
        idle = computed or not state.requests
        self._stalled = 0 if idle else self._stalled + 1
        if self._stalled > STALL_STEPS_MAX:
            raise InvariantViolation(
                "progress",
                f"{len(state.requests)} requests held, nothing computed for {self._stalled} steps",
                seq=state.seq,
            )
