"""Columns: ids and counts as the tuples that events hold, and as the arrays that code works on.

`ints` makes the tuple, `ids` the array. A scheduler says the same columns over and over (the rows
of a step are planned, folded, accepted and folded again), so the last few long ones are remembered
in both shapes: a memo of immutable values, which changes no result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from hisparse.fsm.events.base import Ints

I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
LONG = 16  # values from which a column is worth remembering
REMEMBERED = 8
LARGEST = 1 << 24  # a value above it is no request row
_bound: tuple[I64 | None, int] = (None, 0)  # the answer that `bound` gave last
_recent: tuple[tuple[Ints, I64], ...] = ()  # newest first; replaced, never changed


def ints(values: npt.NDArray[np.generic] | Iterable[int]) -> Ints:
    """Any ids as the tuple of plain ints that an event carries (a copy, never a view)."""
    if not isinstance(values, np.ndarray):
        return tuple(values)
    if len(values) < LONG:
        return tuple(values.tolist())
    for known, array in _recent:
        if array is values:
            return known
    made = tuple(values.tolist())
    _remember(made, values.astype(np.int64))
    return made


def ids(values: Sequence[int] | I64) -> I64:
    """int64 [n]; not to be written to."""
    if isinstance(values, np.ndarray):
        return np.array(values, dtype=np.int64)
    if len(values) < LONG:
        return np.fromiter(values, np.int64, len(values))
    wanted = tuple(values)
    for known, array in _recent:
        if known is wanted or known == wanted:
            return array
    made = np.array(wanted, dtype=np.int64)
    _remember(wanted, made)
    return made


def some(mask: Bools) -> bool:
    """Whether any of `mask` holds: bytes are searched in a tenth of the time of a reduction."""
    return 1 in mask.tobytes()


def add_one(column: npt.NDArray[np.integer], at: I64) -> None:
    """Raise `column` by one at each of `at`, as often as it is named."""
    if len(at) == 1:
        column[at] += 1
    else:
        np.add.at(column, at, 1)


def same(left: I64, right: I64) -> bool:
    """Whether both columns hold the same values."""
    return left.tobytes() == right.tobytes()


def bound(values: I64) -> int:
    """One above the largest of distinct `values`, none below 0; -1 if they are not that."""
    global _bound
    if _bound[0] is not values or values.flags.writeable:
        top = int(values.view(np.uint64).max()) + 1 if len(values) else 0  # below 0: the largest
        once = top <= LARGEST and np.count_nonzero(np.bincount(values)) == len(values)
        _bound = (values, top if once else -1)
    return _bound[1]


def _remember(column: Ints, array: I64) -> None:
    global _recent
    array.flags.writeable = False
    _recent = ((column, array), *_recent[: REMEMBERED - 1])
