"""The shape of every decision: a generator of events that reads the state and never writes it.

A decider yields an event and receives its seq, which it uses as the `cause` of what follows. The
one who runs it (`kv.recorder`) appends each event and evolves the state before it asks for the
next, so a decider always sees the effect of what it decided.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import numpy as np

from hisparse.fsm.columns import I64, Bools, ints
from hisparse.fsm.events import Event

T = TypeVar("T")
Decision = Generator[Event, int, T]
__all__ = ["I64", "Bools", "Decision", "T", "ints", "spans"]


def spans(rows: I64, first: I64, end: I64) -> tuple[I64, I64]:
    """Entries ``[first[i], end[i])`` of each `rows[i]`, flat: (rows, entries)."""
    counts = end - first
    kinds = set(counts.tolist())
    if kinds <= {0}:
        return rows[:0], first[:0]
    if kinds == {1}:
        return rows, first
    starts = np.cumsum(counts) - counts  # where each row's entries begin among all
    within = np.arange(int(counts.sum())) - np.repeat(starts, counts)
    return np.repeat(rows, counts), np.repeat(first, counts) + within
