"""Recorded selections: what attention selected, in a sidecar beside the log. No torch.

The scheduler's log says nothing of top-k: selections stay on the device. A run may be asked to copy
them out, of all requests or of one in n, after each resolve; verbs that ask what a hot region would
hit (`hisparse what-if --hot-rows`) need them.

Owns      the stream ``selections`` of a log directory: a log of its own, in the log's format, with
          one kind of event, which no other stream has.
Makes     `SelectionsTaken`, one a (step, request epoch, index group) and call.
Needs     what the step's leaders resolved, copied out when the step's work is done, and the
          RESIDENT table that they saw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from hisparse.device.rows import StepRows
from hisparse.errors import LogError
from hisparse.fsm.codec import Codec
from hisparse.fsm.events.base import Event
from hisparse.fsm.log import EventLog
from hisparse.fsm.log_reader import DiskReader, Loss
from hisparse.fsm.state import State

STREAM = "selections"


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


@dataclass(frozen=True)
class Resolved:
    """One call of a leader, on the host: `rows` without padding, `top_k` int ``[n, k]``, and how
    many rows each request row missed."""

    group: int
    rows: StepRows
    top_k: npt.NDArray[np.integer]
    misses: Mapping[int, int]


class SelectionRecorder:
    """Records what leaders resolved.

    Args:
        state: the scheduler's, for the names of request rows.
        page_size: tokens a page.
        log: where the events go.
        one_in: 1: all requests; n: one in n.
    """

    def __init__(self, state: State, page_size: int, log: EventLog, one_in: int = 1) -> None:
        self.log = log
        self._state = state
        self._one_in = one_in
        self._page_size = page_size

    def record(self, calls: Sequence[Resolved], resident: npt.NDArray[np.int32]) -> None:
        """Record the calls of the step under way, in order.

        resident: the RESIDENT table that they saw, int32 ``[max_requests, entries]``. Call before
        the scheduler hears of the step: request rows have the owners that they had in it.
        """
        named = [r for r in self._state.by_row if r is not None and r.live]
        keys = {r.row: r.key for r in named if sampled(r.request, self._one_in)}
        for call in calls:
            for row, (request, epoch) in keys.items():
                at = np.flatnonzero(call.rows.rows == row)
                if not len(at):
                    continue
                mine, missed = call.top_k[at], call.misses.get(row, 0)
                found, needed = self._counted(resident[row], mine)
                event = SelectionsTaken(
                    0, self._state.step, request, epoch, call.group,
                    int(call.rows.positions[at[0]]), mine.shape[1],
                    mine.astype("<i4").tobytes(), found, needed - missed, missed,
                )  # fmt: skip
                self.log.append(event)

    def _counted(
        self, resident: npt.NDArray[np.int32], selected: npt.NDArray[np.integer]
    ) -> tuple[int, int]:
        """Positions, each once a row: those in resident blocks, and those that are not."""
        ordered = np.sort(selected, axis=1)
        once = ordered >= 0
        once[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
        hosted = resident[np.maximum(ordered, 0) // self._page_size] == 0
        needed = int(np.count_nonzero(once & hosted))
        return int(np.count_nonzero(once)) - needed, needed


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
