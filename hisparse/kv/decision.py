"""The shape of every decision: a generator of events that reads the state and never writes it.

A decider yields an event and receives its seq, which it uses as the `cause` of what follows. The
one who runs it (`kv.coordinator`) appends each event and evolves the state before it asks for the
next, so a decider always sees the effect of what it decided.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from hisparse.fsm.events import Event, Ints

T = TypeVar("T")
Decision = Generator[Event, int, T]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def ints(values: npt.NDArray[np.generic] | Iterable[int]) -> Ints:
    """Any ids as the tuple of plain ints that an event carries (a copy, never a view)."""
    return tuple(values.tolist() if isinstance(values, np.ndarray) else values)


def spans(rows: I64, first: I64, end: I64) -> tuple[I64, I64]:
    """Entries ``[first[i], end[i])`` of each `rows[i]`, flat: (rows, entries)."""
    counts = end - first
    if not np.count_nonzero(counts):
        return rows[:0], first[:0]
    if not np.count_nonzero(counts != 1):
        return rows, first
    starts = np.cumsum(counts) - counts  # where each row's entries begin among all
    within = np.arange(int(counts.sum())) - np.repeat(starts, counts)
    return np.repeat(rows, counts), np.repeat(first, counts) + within
