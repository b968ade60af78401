"""The base of all events, and the types that their fields are made of."""

from __future__ import annotations

from typing import ClassVar

import msgspec

Ints = tuple[int, ...]
Hashes = tuple[bytes, ...]


class Event(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Base of all events. `cause` is the seq of what led to this one (0: nothing in the log).

    `is_input`: what only somebody else could say, and a fold needs nobody to say again: client,
    engine, rank, clock, the log's writer, a policy or suffix source that was asked. These answers
    have the question's cause; others have none, or else (an abort, a preemption) the scheduler said
    it for them.
    """

    is_input: ClassVar[bool] = False
    cause: int


def places_of(row: int, entry: int, rows: Ints, entries: Ints, n: int) -> list[tuple[int, int]]:
    """(row, entry) of each of `n` pages: `entry`, `entry` + 1, … of `row`, or `entries[i]` of
    `rows[i]`."""
    if rows:
        return list(zip(rows, entries, strict=True))
    return [(row, entry + i) for i in range(n)]
