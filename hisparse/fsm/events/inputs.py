"""Inputs, kinds 1..19: what the scheduler was told, and what it was answered when it asked."""

from __future__ import annotations

from typing import ClassVar

from hisparse.fsm.events.base import Event, Hashes, Ints


class RequestArrived(Event, frozen=True, gc=False, array_like=True, tag=1):
    """A request: its lengths in tokens, and the salted chain hash of each whole prompt page."""

    is_input: ClassVar[bool] = True
    request: str
    epoch: int
    prompt_tokens: int
    max_tokens: int
    page_hashes: Hashes


class StepPlanned(Event, frozen=True, gc=False, array_like=True, tag=2):
    """Step `step` computes rows ``[starts[i], starts[i] + counts[i])`` of request row `rows[i]`."""

    is_input: ClassVar[bool] = True
    step: int
    rows: Ints
    starts: Ints
    counts: Ints


class RowsComputed(Event, frozen=True, gc=False, array_like=True, tag=3):
    """Of the rows planned in `step`, the first `counts[i]` of `rows[i]` are computed and accepted.

    `page_hashes[j]` is the chain hash of the next page of request row `hash_rows[j]` that these
    rows complete (pages of the prompt had theirs at arrival).
    """

    is_input: ClassVar[bool] = True
    step: int
    rows: Ints
    counts: Ints
    hash_rows: Ints
    page_hashes: Hashes


class RequestFinished(Event, frozen=True, gc=False, array_like=True, tag=4):
    is_input: ClassVar[bool] = True
    request: str
    epoch: int
    reason: str


class RequestAborted(Event, frozen=True, gc=False, array_like=True, tag=5):
    is_input: ClassVar[bool] = True
    request: str
    epoch: int
    reason: str


class RequestPreempted(Event, frozen=True, gc=False, array_like=True, tag=6):
    is_input: ClassVar[bool] = True
    request: str
    epoch: int
    reason: str


class Tick(Event, frozen=True, gc=False, array_like=True, tag=7):
    """Time passed: the only way in which a clock reaches `decide`."""

    is_input: ClassVar[bool] = True
    now_us: int


class AcknowledgementsTaken(Event, frozen=True, gc=False, array_like=True, tag=8):
    """The scheduler took ``(first_seq..last_seq)`` of a rank's acknowledgement stream in, now.

    `retired_step` is the last step whose every device access has happened on that rank.
    Each list holds transfer ids; `*_epochs` run parallel.
    """

    is_input: ClassVar[bool] = True
    rank: int
    worker_epoch: int
    first_seq: int
    last_seq: int
    enqueued: Ints
    enqueued_epochs: Ints
    completed: Ints
    completed_epochs: Ints
    failed: Ints
    failed_epochs: Ints
    retired_step: int


class LogGap(Event, frozen=True, gc=False, array_like=True, tag=9):
    """Events in ``(after_seq, this)`` were lost; the next snapshot resumes the fold."""

    is_input: ClassVar[bool] = True
    after_seq: int
    reason: str


class PolicyChosen(Event, frozen=True, gc=False, array_like=True, tag=10):
    """A policy answered pressure on `resource`: `need` wanted, `have` at hand, both in `unit`s."""

    is_input: ClassVar[bool] = True
    policy: str
    choice: str
    resource: str
    need: int
    have: int


class PrefixCacheReset(Event, frozen=True, gc=False, array_like=True, tag=12):
    """Everything that a prefix could find is to be forgotten, in every tier; nothing is leased."""

    is_input: ClassVar[bool] = True


class SuffixAsked(Event, frozen=True, gc=False, array_like=True, tag=13):
    """The suffix source was asked for indexer pages ``[page, page + asked)`` of a request that is
    about to be admitted: exactly those that its host prefix needs and the GPU lacks. It promised
    the first `found` of them."""

    is_input: ClassVar[bool] = True
    request: str
    epoch: int
    page: int
    asked: int
    found: int


class MemoryReleased(Event, frozen=True, gc=False, array_like=True, tag=14):
    """Sleep: the GPU pool gives its memory up; at `level` 2 the host tiers do too. What was cached
    there is evicted by the events that follow; nothing is leased."""

    is_input: ClassVar[bool] = True
    level: int


class RankLost(Event, frozen=True, gc=False, array_like=True, tag=16):
    """The worker of `rank` is gone, with its GPU pool and its own host pools; what it did not
    acknowledge it never will. `worker_epoch` is that of the worker which follows it: whatever an
    earlier one says from here on is inert."""

    is_input: ClassVar[bool] = True
    rank: int
    worker_epoch: int
    reason: str


class RankJoined(Event, frozen=True, gc=False, array_like=True, tag=17):
    """A worker of `rank` begins in `worker_epoch`, its cursor at `at_seq`. Nobody holds anything,
    and what was cached is forgotten in the events that follow: that rank has none of it."""

    is_input: ClassVar[bool] = True
    rank: int
    worker_epoch: int
    at_seq: int


class SchedulerRecovered(Event, frozen=True, gc=False, array_like=True, tag=18):
    """Another process goes on with this log. Requests that had not ended are aborted in the events
    that follow; what the log broke off in the middle of is completed there."""

    is_input: ClassVar[bool] = True
    reason: str


class MemoryRestored(Event, frozen=True, gc=False, array_like=True, tag=15):
    """Wake: the pools have their memory again, at the addresses that they had."""

    is_input: ClassVar[bool] = True
