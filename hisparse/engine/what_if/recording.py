"""Recording: the inputs of a run, read out of its log, in scheduler steps. Pure.

Owns what does not depend on what the scheduler decided. A *slot* is the number of steps that had
been planned: what lies in slot s came after step s and before step s + 1.

    arrivals     slot, lengths, page hashes; and the tokens that a request had when it finished
    disturbances abort, preempt: the computed rows of the request, and how many steps later
    ticks        slot and time; resets of the prefix cache: slot
    ranks        which slot acknowledged each copy, and each step, counted from its command

What a request would have generated beyond the log is not known: its end is its `max_tokens` then.
A preemption is an input here: whoever took it (the serving loop, not the coordinator) is asked to
do so again at the same count of computed rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hisparse.fsm import events as ev
from hisparse.fsm.state import Key
from hisparse.fsm.wire import TransferKind

CopyKey = tuple[int, int, TransferKind, int]  # request number, life, kind, table entry


@dataclass
class Life:
    """A request between an arrival and its end, or the preemption after which it arrives again."""

    prompt_tokens: int
    hashes: list[list[bytes]]  # of each page: as often as its rows were computed, in that order
    pages: int  # how many have a hash now; a rewind takes some back
    since: int  # slot from which `most` could be seen
    computed: int = -1  # rows; -1 until it is admitted
    most: int = -1  # that it ever had computed; a rewind takes rows back
    verified: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of steps that began at this row, behind the prompt: rows planned, rows accepted."""

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


@dataclass
class Recording:
    """Takes a log in, event by event, from its first one."""

    page_size: int
    requests: list[RecordedRequest] = field(default_factory=list)
    disturbances: list[Disturbance] = field(default_factory=list)
    ticks: list[TimeTold] = field(default_factory=list)
    resets: list[CachesReset] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    numbers: dict[Key, int] = field(default_factory=dict)  # of requests, by id and epoch
    copies: dict[int, tuple[CopyKey, int]] = field(default_factory=dict)  # and their command's step
    steps: int = 0
    last_step_seq: int = 0
    _held: dict[int, Key] = field(default_factory=dict)
    _by_key: dict[Key, tuple[RecordedRequest, int]] = field(default_factory=dict)
    _again: dict[str, RecordedRequest] = field(default_factory=dict)  # preempted, to arrive again
    _ended: set[Key] = field(default_factory=set)  # and not forgotten yet
    _planned_seq: int = 0  # of a step whose own decisions are being told
    _planned: dict[int, int] = field(default_factory=dict)  # rows of the last step, by request row
    _retired: dict[int, int] = field(default_factory=dict)

    def take(self, seq: int, event: ev.Event) -> None:
        """Take the next event in."""
        if event.cause < self._planned_seq:
            self._planned_seq = 0
        match event:
            case ev.RequestArrived():
                self._arrived(seq, event)
            case ev.RequestAdmitted():
                self._held[event.row] = (event.request, event.epoch)
                life = self._life(event.row)
                life.computed = life.most = event.hit_tokens
                life.since = self.steps + 1
            case ev.RequestDrained():
                key = (event.request, event.epoch)
                self._by_key.pop(key)
                self._ended.discard(key)
                self._held.pop(event.row, None)
            case ev.StepPlanned():
                self.steps, self._planned_seq, self.last_step_seq = event.step, seq, seq
                self._planned = dict(zip(event.rows, event.counts, strict=True))
            case ev.RowsComputed():
                self._computed(event)
            case ev.RequestRewound():
                life = self._life(event.row)
                life.computed = event.rows
                life.pages = min(life.pages, max(life.prompt_tokens, event.rows) // self.page_size)
            case ev.RequestFinished():
                request, at = self._by_key[event.request, event.epoch]
                request.total_tokens = request.lives[at].computed + 1
                request.finish_seq = seq
                self._ended.add((event.request, event.epoch))
            case ev.RequestAborted() | ev.RequestPreempted() if event.cause == 0:
                self._disturbed(seq, event)
            case ev.RequestAborted():  # the coordinator's own: a copy lost rows
                self._ended.add((event.request, event.epoch))
            case ev.Tick():
                self.ticks.append(TimeTold(seq, self.steps, event.now_us))
            case ev.PrefixCacheReset():
                self.resets.append(CachesReset(seq, self.steps))
            case ev.TransferPinned():
                self._pinned(event)
            case ev.AcknowledgementsTaken():
                self._acknowledged(seq, event)

    @property
    def open_requests(self) -> int:
        """Requests that the log has not seen the last of."""
        return len(self._by_key)

    def _arrived(self, seq: int, event: ev.RequestArrived) -> None:
        hashes = [[page_hash] for page_hash in event.page_hashes]
        life = Life(event.prompt_tokens, hashes, len(hashes), self.steps)
        request = self._again.pop(event.request, None)
        if request is not None:
            life.since += 1  # it came in the middle of a slot, and is seen in the next one
        else:
            request = RecordedRequest(
                len(self.requests), event.request, event.prompt_tokens, event.max_tokens,
                seq, self.steps, [],
            )  # fmt: skip
            self.requests.append(request)
        request.lives.append(life)
        self._by_key[event.request, event.epoch] = (request, len(request.lives) - 1)
        self.numbers[event.request, event.epoch] = request.number

    def _computed(self, event: ev.RowsComputed) -> None:
        for row, count in zip(event.rows, event.counts, strict=True):
            life = self._life(row)
            if life.computed >= life.prompt_tokens:
                life.verified[life.computed] = (self._planned[row], count)
            life.computed += count
            if life.computed > life.most:
                life.most, life.since = life.computed, event.step
        for row, page_hash in zip(event.hash_rows, event.page_hashes, strict=True):
            self._life(row).told(page_hash)

    def _life(self, row: int) -> Life:
        request, at = self._by_key[self._held[row]]
        return request.lives[at]

    def _disturbed(self, seq: int, event: ev.RequestAborted | ev.RequestPreempted) -> None:
        key = (event.request, event.epoch)
        if key not in self._by_key or key in self._ended:
            return  # after an end: it changed nothing
        self._ended.add(key)
        request, at = self._by_key[key]
        life, preempts = request.lives[at], isinstance(event, ev.RequestPreempted)
        self.disturbances.append(
            Disturbance(
                seq,
                request.number,
                at,
                preempts,
                life.most,
                self.steps - life.since,
                self.steps,
            )
        )
        if preempts:
            self._again[event.request] = request

    def _pinned(self, event: ev.TransferPinned) -> None:
        command = self.steps if self._planned_seq else self.steps + 1
        named = zip(event.transfers, event.entries, event.owners(), strict=True)
        for ident, entry, (row, _) in named:
            request, at = self._by_key[self._held[row]]
            key = (request.number, at, event.kind, entry)
            self.copies[ident] = (key, command)

    def _acknowledged(self, seq: int, e: ev.AcknowledgementsTaken) -> None:
        before = self._retired.get(e.rank, 0)
        self._retired[e.rank] = e.retired_step
        self.messages.append(
            Message(
                seq, self.steps, e.rank, e.enqueued, e.completed, e.failed, before, e.retired_step
            )
        )
