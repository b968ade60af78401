"""What a caller may ask: every input is checked here before anything of it is logged or changed.

Each function raises UsageError that names the request, what was asked and what would do; after it
returned, the input cannot fail to fold.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hisparse.errors import UsageError
from hisparse.fsm.columns import bound, ids, some
from hisparse.fsm.machines import RequestState
from hisparse.fsm.state import Request, State
from hisparse.kv.decision import I64

Rows = Sequence[int] | I64  # request rows, or counts of them
INT_MAX = (1 << 63) - 1  # of what the log keeps


def is_count(value: object) -> bool:
    """Whether it is a number of something: True and False are not."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def count(value: object, what: str, least: int = 0, most: int = INT_MAX) -> int:
    """`value` as the log keeps it. Raises UsageError, beginning with `what`, for what is no int of
    ``least..most``."""
    if not is_count(value) or not least <= value <= most:  # type: ignore[operator]
        raise UsageError(f"{what}={value!r} must be an int of {least}..{most}")
    return int(value)  # type: ignore[call-overload, no-any-return]


def text(value: object, what: str) -> str:
    """`value` as the log keeps it. Raises UsageError, beginning with `what`, for what is no string
    that UTF-8 can write."""
    if not isinstance(value, str):
        raise UsageError(f"{what}={value!r} must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{what}={value!r} must be a string that UTF-8 can write: {error.reason}"
        ) from None
    return str.__str__(value)  # of a class that derives from str, too


def arrival(
    state: State, request: str, prompt_tokens: int, max_tokens: int, hashes: Sequence[bytes]
) -> tuple[str, int, int]:
    """A new request: an id that no live or waiting request has, and lengths that make sense; as
    the log keeps them."""
    request = text(request, "request")
    prompt_tokens = count(prompt_tokens, f"request {request!r}: prompt_tokens")
    max_tokens = count(max_tokens, f"request {request!r}: max_tokens")
    for key, other in state.requests.items():
        if key[0] == request and (other.live or other.state is RequestState.WAITING):
            raise UsageError(f"request {request!r} (epoch {key[1]}) is live: end it first")
    if not 1 <= prompt_tokens < max_tokens:
        raise UsageError(
            f"request {request!r}: prompt_tokens={prompt_tokens} must be at least 1 and below "
            f"max_tokens={max_tokens}"
        )
    whole = prompt_tokens // state.page_size
    if len(hashes) != whole:
        raise UsageError(f"request {request!r}: {len(hashes)} page hashes for {whole} whole pages")
    strange = [one for one in hashes if not isinstance(one, bytes)]
    if strange:
        raise UsageError(f"request {request!r}: page hash {strange[0]!r} must be bytes")
    return request, prompt_tokens, max_tokens


def rank(state: State, number: int) -> int:
    """A rank that this replica has."""
    if not is_count(number) or not 0 <= number < state.config.ranks:
        raise UsageError(f"rank {number!r}: this replica has ranks 0..{state.config.ranks - 1}")
    return int(number)


def known(state: State, request: str, epoch: int) -> Request:
    """The request of that id and epoch."""
    named = isinstance(request, str) and is_count(epoch)
    found = state.requests.get((request, epoch)) if named else None
    if found is None:
        raise UsageError(f"request {request!r} has no epoch {epoch}: it has ended, or never was")
    return found


def ends(
    state: State, request: str, epoch: int, verb: str, allowed: Sequence[RequestState]
) -> Request:
    """An end of a request that is in one of the `allowed` states; returns that request."""
    found = known(state, request, epoch)
    if found.state not in allowed:
        names = ", ".join(s.name for s in allowed)
        raise UsageError(
            f"{verb}: request {request!r} (epoch {epoch}) is {found.state.name}, must be {names}"
        )
    return found


def growth(state: State, rows: Rows, wanted: Rows) -> tuple[I64, I64]:
    """Live rows, each once, none beyond what it was admitted for; returns both as columns."""
    at, more = _columns(state, rows, wanted)
    held = state.rows
    wrong = ~held.live[at] | (held.computed[at] + more > held.limit[at]) | (more < 0)
    if some(wrong):
        i = int(np.argmax(wrong))
        raise UsageError(
            f"request row {at[i]} wants {more[i]} rows: it is "
            f"{'live' if held.live[at[i]] else 'not live'}, has computed "
            f"{held.computed[at[i]]} and was admitted for {held.limit[at[i]]}"
        )
    return at, more


def plan(state: State, rows: Rows, counts: Rows) -> tuple[I64, I64]:
    """Live rows, each once, with a place for every row that is planned and no step under way;
    returns both as columns."""
    at, planned = _columns(state, rows, counts)
    held = state.rows
    computed = held.computed[at]
    room = held.pages[at] * state.page_size - computed
    wrong = ~held.live[at] | (planned < 1) | (planned > room) | (held.planned[at] > computed)
    if state.rewinding:
        wrong |= rewinding(state, at)
    if some(wrong):
        i = int(np.argmax(wrong))
        raise UsageError(
            f"plan_step: request row {at[i]} plans {planned[i]} rows: it is "
            f"{_described(state, int(at[i]))}, has places for {room[i]} more, and "
            f"{held.planned[at[i]] - computed[i]} rows of it are in a step under way"
        )
    return at, planned


def rewinding(state: State, at: I64) -> npt.NDArray[np.bool_]:
    """Which of the request rows `at` are being rewound: they compute nothing."""
    if not state.rewinding:
        return np.zeros(len(at), dtype=np.bool_)
    return np.isin(at, [state.requests[key].row for key in state.rewinding])


def _described(state: State, row: int) -> str:
    if not state.rows.live[row]:
        return "not live"
    return "being rewound" if rewinding(state, np.array([row])).any() else "live"


def computed(
    state: State,
    step: int,
    rows: Rows,
    counts: Rows,
    page_hashes: Sequence[tuple[int, bytes]],
    under_way: I64,
) -> tuple[I64, I64]:
    """Rows that `step`, the last one planned, did plan (`under_way`); returns the columns of those
    whose request has not ended since, 0 accepted where it was rewound. A row whose request ended
    may be another's by now."""
    if step != state.step:
        raise UsageError(f"rows_computed({step}): the step under way is {state.step}")
    at, accepted = _columns(state, rows, counts)
    if state.rewinding:  # what was under way may have read what is lost
        accepted = np.where(rewinding(state, at), 0, accepted)
    held = state.rows
    ended = ~held.live[at] | (held.last_step[at] != step)
    before = held.computed[at]
    planned = held.planned[at] - before
    wrong = (accepted < 0) | (accepted > planned)
    if some(ended):
        wrong = np.where(ended, ~np.isin(at, under_way), wrong)
    if some(wrong):
        i = int(np.argmax(wrong))
        raise UsageError(
            f"rows_computed({step}): row {at[i]} accepts {accepted[i]} rows, planned {planned[i]}"
        )
    if page_hashes:
        _hashes(state, at, before + accepted, at[ended], page_hashes)
    return (at[~ended], accepted[~ended]) if some(ended) else (at, accepted)


def _hashes(
    state: State, at: I64, after: I64, ended: I64, page_hashes: Sequence[tuple[int, bytes]]
) -> None:
    """No more page hashes than whole pages, of rows of the step."""
    made: dict[int, int] = {}
    for row, _ in page_hashes:
        made[row] = made.get(row, 0) + 1
    above = np.zeros(len(state.rows.used), dtype=np.int64)  # one above the rows computed
    above[at] = after + 1
    strangers = [row for row in made if not 0 <= row < len(above) or not above[row]]
    if strangers:
        raise UsageError(f"page hashes of rows {sorted(strangers)}, not of this step")
    passed_over = {state.requests[key].row for key in state.rewinding}.union(ended.tolist())
    for row, more in made.items():
        if row not in passed_over:
            hashes = len(state.request_of(row).hashes) + more
            whole = (int(above[row]) - 1) // state.page_size
            if hashes > whole:
                raise UsageError(f"request row {row}: {hashes} page hashes for {whole} whole pages")


def _columns(state: State, rows: Rows, counts: Rows) -> tuple[I64, I64]:
    """`rows`, each once, and their counts, as columns."""
    at, beside = ids(rows), ids(counts)
    limit = len(state.rows.used)
    if 0 <= bound(at) <= limit and len(at) == len(beside):
        return at, beside
    if np.any((at < 0) | (at >= limit)):
        raise UsageError(f"rows {at.tolist()}: request rows are 0..{limit - 1}")
    raise UsageError(f"rows {at.tolist()} with counts {beside.tolist()}: name each row once")
