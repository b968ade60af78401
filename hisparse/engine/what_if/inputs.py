"""Inputs of a recorded run: its requests with their lives, and what was told to it, in which slot.

A *slot* is the number of steps that had been planned: what lies in slot s came after step s and
before step s + 1. `seq` is where an input stands in the log that it was read from.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from hisparse.fsm import events as ev
from hisparse.fsm.wire import TransferKind


class IndexPages(enum.Enum):
    """Why an indexer page is copied: to the CPU tier, or back."""

    STORE = enum.auto()
    LOAD = enum.auto()


CopyKind = TransferKind | IndexPages
CopyKey = tuple[int, int, CopyKind, int]  # request number, life, kind, page of the request


class Verified(NamedTuple):
    """Of a step that began with the newest token: rows planned and accepted; and whether there may
    have been more drafts, for which no place was found."""

    planned: int
    accepted: int
    cut: bool


@dataclass
class Life:
    """A request between an arrival and its end, or the preemption after which it arrives again."""

    seq: int  # of its arrival
    prompt_tokens: int
    hashes: list[list[bytes]]  # of each page: as often as its rows were computed, in that order
    pages: int  # how many have a hash now; a rewind takes some back
    since: int  # slot from which `most` could be seen
    computed: int = -1  # rows; -1 until it is admitted
    most: int = -1  # that it ever had computed; a rewind takes rows back
    verified: dict[int, list[Verified]] = field(default_factory=dict)  # by the newest token's row

    def hash(self, page: int, nth: int) -> bytes | None:
        """The hash of a page that is computed for the `nth` time (from 0)."""
        known = self.hashes[page] if page < len(self.hashes) else []
        return known[min(nth, len(known) - 1)] if known else None

    def told(self, page_hash: bytes) -> None:
        """The next page has this hash."""
        if self.pages == len(self.hashes):
            self.hashes.append([])
        self.hashes[self.pages].append(page_hash)
        self.pages += 1


@dataclass
class RecordedRequest:
    """A request, all its lives. `number` counts arrivals from 0."""

    number: int
    request: str
    prompt_tokens: int
    max_tokens: int
    seq: int
    slot: int
    lives: list[Life]
    total_tokens: int | None = None  # prompt included, where it finished
    finish_seq: int = 0

    @property
    def max_new(self) -> int:
        return self.max_tokens - self.prompt_tokens


@dataclass(frozen=True)
class Disturbance:
    """An abort or a preemption of a request: `lag` slots after its `life` had computed `rows`."""

    seq: int
    number: int
    life: int
    preempts: bool
    rows: int  # most that it ever had computed; -1: it was waiting
    lag: int
    seen_slot: int  # in which it was recorded
    slot: int | None = None  # in which it is to happen, whatever the request's progress


@dataclass(frozen=True)
class TimeTold:
    seq: int
    slot: int
    now_us: int


@dataclass(frozen=True)
class CachesReset:
    seq: int
    slot: int


@dataclass(frozen=True)
class MemoryTold:
    """Sleep at a level, or wake (0)."""

    seq: int
    slot: int
    level: int


@dataclass(frozen=True)
class Message:
    """Acknowledgements taken in one slot: transfer ids; steps ``(after_step, retired_step]``."""

    seq: int
    slot: int
    rank: int
    enqueued: ev.Ints
    completed: ev.Ints
    failed: ev.Ints
    after_step: int
    retired_step: int
