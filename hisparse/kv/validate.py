"""What a caller may ask: every input is checked here before anything of it is logged or changed.

Each function raises UsageError that names the request, what was asked and what would do; after it
returned, the input cannot fail to fold.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from hisparse.errors import UsageError
from hisparse.fsm.machines import RequestState
from hisparse.fsm.state import Request, State


def arrival(state: State, request: str, prompt_tokens: int, max_tokens: int, hashes: int) -> None:
    """A new request: an id that no live or waiting request has, and lengths that make sense."""
    for key, other in state.requests.items():
        if key[0] == request and (other.live or other.state is RequestState.WAITING):
            raise UsageError(f"request {request!r} (epoch {key[1]}) is live: end it first")
    if not 1 <= prompt_tokens < max_tokens:
        raise UsageError(
            f"request {request!r}: prompt_tokens={prompt_tokens} must be at least 1 and below "
            f"max_tokens={max_tokens}"
        )
    whole = prompt_tokens // state.page_size
    if hashes != whole:
        raise UsageError(f"request {request!r}: {hashes} page hashes for {whole} whole pages")


def known(state: State, request: str, epoch: int) -> Request:
    """The request of that id and epoch."""
    found = state.requests.get((request, epoch))
    if found is None:
        raise UsageError(f"request {request!r} has no epoch {epoch}: it has ended, or never was")
    return found


def ends(
    state: State, request: str, epoch: int, verb: str, allowed: Sequence[RequestState]
) -> None:
    """An end of a request that is in one of the `allowed` states."""
    found = known(state, request, epoch)
    if found.state not in allowed:
        names = ", ".join(s.name for s in allowed)
        raise UsageError(
            f"{verb}: request {request!r} (epoch {epoch}) is {found.state.name}, must be {names}"
        )


def growth(state: State, rows: Sequence[int], wanted: Sequence[int]) -> None:
    """Live rows, each once, none beyond what it was admitted for."""
    _distinct(state, rows, wanted)
    held = state.rows
    at, more = np.array(rows, dtype=np.int64), np.array(wanted, dtype=np.int64)
    wrong = ~held.live[at] | (held.computed[at] + more > held.limit[at]) | (more < 0)
    if wrong.any():
        i = int(np.argmax(wrong))
        raise UsageError(
            f"request row {rows[i]} wants {wanted[i]} rows: it is "
            f"{'live' if held.live[rows[i]] else 'not live'}, has computed "
            f"{held.computed[rows[i]]} and was admitted for {held.limit[rows[i]]}"
        )


def plan(state: State, rows: Sequence[int], counts: Sequence[int]) -> None:
    """Live rows, each once, with a place for every row that is planned and no step under way."""
    _distinct(state, rows, counts)
    held = state.rows
    for row, count in zip(rows, counts, strict=True):
        room = int(held.pages[row]) * state.page_size - int(held.computed[row])
        if not held.live[row] or not 1 <= count <= room or held.planned[row] > held.computed[row]:
            raise UsageError(
                f"plan_step: request row {row} plans {count} rows: it is "
                f"{'live' if held.live[row] else 'not live'}, has places for {room} more, and "
                f"{held.planned[row] - held.computed[row]} rows of it are in a step under way"
            )


def computed(
    state: State,
    step: int,
    rows: Sequence[int],
    counts: Sequence[int],
    page_hashes: Sequence[tuple[int, bytes]],
) -> list[int]:
    """Rows that `step`, the last one planned, did plan; returns the places of those still live."""
    if step != state.step:
        raise UsageError(f"rows_computed({step}): the step under way is {state.step}")
    _distinct(state, rows, counts)
    held, kept = state.rows, []
    made = Counter(row for row, _ in page_hashes)
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if held.used[row] and not held.live[row]:
            continue  # its request ended while the step was under way
        under_way = int(held.planned[row] - held.computed[row])
        if held.last_step[row] != step or not 0 <= count <= under_way:
            raise UsageError(
                f"rows_computed({step}): row {row} accepts {count} rows, planned {under_way}"
            )
        whole = (int(held.computed[row]) + count) // state.page_size
        hashes = len(state.request_of(row).hashes) + made[row]
        if made[row] and hashes > whole:
            raise UsageError(f"request row {row}: {hashes} page hashes for {whole} whole pages")
        kept.append(i)
    if not set(made) <= set(rows):
        raise UsageError(f"page hashes of rows {sorted(set(made) - set(rows))}, not of this step")
    return kept


def _distinct(state: State, rows: Sequence[int], counts: Sequence[int]) -> None:
    if len(rows) != len(counts) or len(set(rows)) != len(rows):
        raise UsageError(f"rows {list(rows)} with counts {list(counts)}: name each row once")
    limit = len(state.rows.used)
    if rows and not 0 <= min(rows) <= max(rows) < limit:
        raise UsageError(f"rows {list(rows)}: request rows are 0..{limit - 1}")
