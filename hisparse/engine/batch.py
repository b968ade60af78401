"""The batch of a step: which requests compute how many rows, and their tokens, places and ends.

Decodes go first, with the drafts worth verifying, then prompts in chunks, each by arrival, until
the step's rows are spent. How many rows get a place is the coordinator's word, between the two
functions here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from hisparse.config import ScheduleConfig
from hisparse.device.rows import StepRows
from hisparse.engine.served import Served
from hisparse.fsm.machines import RequestState
from hisparse.fsm.state import Key, State
from hisparse.kv.decision import I64

COMPUTING = (RequestState.ADMITTED, RequestState.PREFILL, RequestState.DECODE)

Batch = list[tuple[int, Served, int]]  # request row, request, rows to compute


def wanted_rows(
    state: State, schedule: ScheduleConfig, served: Mapping[Key, Served], ending: Collection[Key]
) -> tuple[list[int], list[int]]:
    """Request rows in the order in which they are served, and the rows that each would compute;
    those that are `ending` compute none."""
    computed = state.rows.computed
    running = [
        (_left(served[q.key], int(computed[q.row])), q.arrived_seq, q.row)
        for q in state.by_row
        if q is not None and q.state in COMPUTING and q.key not in ending
    ]
    running.sort(key=lambda item: (item[0][0] > 1, item[1]))
    room, rows, wanted = schedule.step_rows, [], []
    for (known, drafts), _, row in running:
        want = min(min(known, schedule.prefill_chunk) + drafts, room)
        if want <= 0:
            break
        rows.append(row)
        wanted.append(want)
        room -= want
    return rows, wanted


def _left(served: Served, computed: int) -> tuple[int, int]:
    """Known tokens whose rows are to be computed, and drafts worth verifying behind the last of
    them: not more than could all be kept."""
    known = len(served.tokens) - computed
    room = served.max_new - len(served.generated) - 1
    return known, min(len(served.drafts), room) if known == 1 else 0


def gather_tokens(
    computed: I64, batch: Batch
) -> tuple[np.ndarray, StepRows, list[range], list[int]]:
    """The step's tokens, int64 [n], and their places; `ends[i]` are request i's slots among the
    sampled: one for its newest token, one for each draft. `computed` is by request row."""
    tokens: list[int] = []
    rows: list[int] = []
    positions: list[int] = []
    ends: list[range] = []
    sampled: list[int] = []
    for row, served, count in batch:
        start, known = int(computed[row]), len(served.tokens)
        tokens += served.tokens[start : start + count]
        drafts = max(0, start + count - known)
        tokens += served.drafts[:drafts]
        rows += [row] * count
        positions += range(start, start + count)
        wanted = drafts + 1 if start + count >= known else 0
        ends.append(range(len(sampled), len(sampled) + wanted))
        sampled += range(len(tokens) - wanted, len(tokens))
    step_rows = StepRows(np.array(rows, dtype=np.int32), np.array(positions, dtype=np.int64))
    return np.array(tokens, dtype=np.int64), step_rows, ends, sampled
