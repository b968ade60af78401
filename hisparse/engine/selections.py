"""Recorded selections: what attention selected, in a sidecar beside the log. No torch.

The scheduler's log says nothing of top-k: selections stay on the device. A run may be asked to copy
them out, of all requests or of one in n, after each resolve; verbs that ask what a hot region would
hit (`hisparse what-if --hot-rows`) need them.

Owns      the stream ``selections`` of a log directory: a log of its own, in the log's format, with
          one kind of event, which no other stream has.
Makes     `SelectionsTaken`, one a (step, request epoch, index group).
Needs     a resolver that is called in stream order; what is told of a call is read from the tables
          that the call saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from hisparse.device.backend import Resolver
from hisparse.device.plan import Plan
from hisparse.device.rows import StepRows
from hisparse.device.worker import HiSparseWorker
from hisparse.errors import LogError
from hisparse.fsm.codec import Codec
from hisparse.fsm.events.base import Event
from hisparse.fsm.log import EventLog
from hisparse.fsm.log_reader import DiskReader, Loss
from hisparse.fsm.state import Key, State
from hisparse.fsm.wire import Table

STREAM = "selections"
STEPS_KEPT = 1024  # whose requests are remembered while their ops are queued


class SelectionsTaken(Event, frozen=True, gc=False, array_like=True, tag=128):
    """Rows ``start``, ``start`` + 1, … of a request selected `selected`: int32 little-endian
    ``[n, top_k]``, -1 padding. Each position of a row counts once, as resident in a GPU block, hit
    in the hot region, or missed."""

    step: int
    request: str
    epoch: int
    group: int
    start: int
    top_k: int
    selected: bytes
    resident: int
    hits: int
    misses: int


CODEC = Codec((SelectionsTaken,))


def sampled(request: str, one_in: int) -> bool:
    """Whether the selections of `request` are recorded: the same requests in every run."""
    return crc32(request.encode()) % one_in == 0


# -- writing --------------------------------------------------------------------------------------


class SelectionRecorder:
    """Records what the leaders of `worker` resolve.

    Args:
        worker: its leaders' resolvers are watched from here on.
        state: the scheduler's, for the names of request rows.
        log: where the events go.
        one_in: 1: all requests; n: one in n.
    """

    def __init__(
        self, worker: HiSparseWorker, state: State, log: EventLog, one_in: int = 1
    ) -> None:
        self.log = log
        self._state = state
        self._one_in = one_in
        self._tables = worker.tables
        self._page_size = worker.config.pools.page_size
        self._keys: dict[int, dict[int, Key]] = {}
        for group in worker.groups:
            runtime = worker.handles[group.layers[0]].runtime
            assert runtime.resolver is not None
            runtime.resolver = _Watched(self, group.group, runtime.resolver)

    def begin_step(self) -> None:
        """Note who holds which request row. Call before the step's first resolve is queued."""
        named = [r for r in self._state.by_row if r is not None and r.live]
        chosen = {r.row: r.key for r in named if sampled(r.request, self._one_in)}
        self._keys[self._state.step] = chosen
        self._keys.pop(self._state.step - STEPS_KEPT, None)

    def resolved(
        self, group: int, rows: StepRows, top_k: npt.NDArray[np.int64], step: int, plan: Plan
    ) -> None:
        """Record one call, inside its op."""
        for row, (request, epoch) in self._keys[step].items():
            at = np.flatnonzero(rows.rows == row)
            if not len(at):
                continue
            mine = top_k[at]
            resident, needed = self._counted(row, mine)
            misses = _misses(plan, self._tables[Table.HOT][row], self._page_size)
            event = SelectionsTaken(
                0, step, request, epoch, group, int(rows.positions[at[0]]), mine.shape[1],
                mine.astype("<i4").tobytes(), resident, needed - misses, misses,
            )  # fmt: skip
            self.log.append(event)

    def _counted(self, row: int, selected: npt.NDArray[np.int64]) -> tuple[int, int]:
        """Positions, each once a row: those in resident blocks, and those that are not."""
        ordered = np.sort(selected, axis=1)
        once = ordered >= 0
        once[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
        pages = np.maximum(ordered, 0) // self._page_size
        hosted = np.asarray(self._tables[Table.RESIDENT][row])[pages] == 0
        needed = int(np.count_nonzero(once & hosted))
        return int(np.count_nonzero(once)) - needed, needed


def _misses(plan: Plan, hot_blocks: npt.NDArray[np.int32], page_size: int) -> int:
    """Rows that `plan` copies into these hot blocks."""
    held = hot_blocks[hot_blocks > 0]
    copied = (np.isin(wave.destinations // page_size, held) for wave in plan.waves)
    return sum(int(np.count_nonzero(here)) for here in copied)


class _Watched:
    """A resolver that tells the recorder of each call."""

    def __init__(self, recorder: SelectionRecorder, group: int, inner: Resolver) -> None:
        self._recorder, self._group, self._inner = recorder, group, inner

    @property
    def state_bytes(self) -> int:
        return self._inner.state_bytes

    def plan(self, rows: StepRows, top_k: Any, step: int) -> Plan:
        plan: Plan = self._inner.plan(rows, top_k, step)
        self._recorder.resolved(self._group, rows, top_k, step, plan)
        return plan

    def forget_rows(self, rows: Sequence[int]) -> None:
        self._inner.forget_rows(rows)

    def forget_slots(self, row: int, first: int, last: int) -> None:
        self._inner.forget_slots(row, first, last)

    def forget_positions(self, row: int, first: int, last: int) -> None:
        self._inner.forget_positions(row, first, last)

    def statistics(self) -> dict[str, int]:
        return self._inner.statistics()


# -- reading --------------------------------------------------------------------------------------


class Selections(NamedTuple):
    """The sidecar of a log directory, and what of it could not be read."""

    taken: list[SelectionsTaken]
    loss: Loss | None


def read_selections(directory: Path) -> Selections | None:
    """The selections beside the log in `directory`; None where none were recorded.

    Raises LogError for a stream that holds something else, or rows of no whole number.
    """
    if not (directory / STREAM).is_dir():
        return None
    taken, reader = [], DiskReader(directory / STREAM, CODEC, strict=False)
    for seq, event in reader.read(1):
        if not isinstance(event, SelectionsTaken):
            raise LogError(f"event {seq} of {directory / STREAM} is no selection")
        if event.top_k < 1 or len(event.selected) % (4 * event.top_k) or event.start < 0:
            raise LogError(f"selection {seq}: {len(event.selected)} B for rows of {event.top_k}")
        taken.append(event)
    return Selections(taken, reader.loss)
