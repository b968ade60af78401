"""Recording: the inputs of a run, read out of its log, in scheduler steps. Pure.

Owns what does not depend on what the scheduler decided (`inputs`), each with its slot:

    arrivals     slot, lengths, page hashes; and the tokens that a request had when it finished
    disturbances abort, preempt: the computed rows of the request, and how many steps later
    ticks        slot and time
    caches       resets of the prefix cache, sleep and wake: slot
    ranks        which slot acknowledged each copy, and each step, counted from its command

What a request would have generated beyond the log is not known: its end is its `max_tokens` then.
A preemption is an input here: whoever took it (the serving loop, not the coordinator) is asked to
do so again at the same count of computed rows. What the coordinator ends or preempts by itself, it
decides again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hisparse.engine.what_if.inputs import (
    CachesReset,
    CopyKey,
    CopyKind,
    Disturbance,
    IndexPages,
    Life,
    MemoryTold,
    Message,
    RecordedRequest,
    TimeTold,
    Verified,
)
from hisparse.errors import UsageError
from hisparse.fsm import events as ev
from hisparse.fsm.state import Key

ASKED_ANEW = (ev.StepPlanned, ev.RowsComputed, ev.PolicyChosen, ev.SuffixAsked)
"""Inputs that are the engine's, a policy's or a source's answers: a replay asks again."""


@dataclass
class Recording:
    """Takes a log in, event by event, from its first one."""

    page_size: int
    requests: list[RecordedRequest] = field(default_factory=list)
    disturbances: list[Disturbance] = field(default_factory=list)
    ticks: list[TimeTold] = field(default_factory=list)
    resets: list[CachesReset] = field(default_factory=list)
    memory: list[MemoryTold] = field(default_factory=list)
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
    _planned: dict[int, tuple[int, bool]] = field(default_factory=dict)  # `Verified`, by row
    _causes: set[int] = field(default_factory=set)  # of the events since rows were computed
    _retired: dict[int, int] = field(default_factory=dict)

    def take(self, seq: int, event: ev.Event) -> None:
        """Take the next event in.

        Raises UsageError for an input that no replay can be told of.
        """
        if event.cause < self._planned_seq:
            self._planned_seq = 0
        self._causes.add(event.cause)
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
                columns = zip(event.rows, event.starts, event.counts, strict=True)
                self._planned = {
                    row: (count, self._is_cut(row, start + count)) for row, start, count in columns
                }
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
            case ev.RequestPreempted():  # its own too: indexer pages could not be loaded
                self._ended.add((event.request, event.epoch))
                self._again[event.request], _ = self._by_key[event.request, event.epoch]
            case ev.Tick():
                self.ticks.append(TimeTold(seq, self.steps, event.now_us))
            case ev.PrefixCacheReset():
                self.resets.append(CachesReset(seq, self.steps))
            case ev.MemoryReleased():
                self.memory.append(MemoryTold(seq, self.steps, event.level))
            case ev.MemoryRestored():
                self.memory.append(MemoryTold(seq, self.steps, 0))
            case ev.TransferPinned():
                rows = [row for row, _ in event.owners()]
                self._pinned(event.kind, event.transfers, rows, event.entries)
            case ev.SuffixPinned():
                kind = IndexPages.LOAD if event.load else IndexPages.STORE
                rows = [event.row] * len(event.transfers)
                self._pinned(kind, event.transfers, rows, event.entries)
            case ev.AcknowledgementsTaken():
                self._acknowledged(seq, event)
            case _ if event.is_input and not isinstance(event, ASKED_ANEW):
                name = type(event).__name__
                raise UsageError(f"seq {seq} is an input that what-if does not know: {name}")

    @property
    def open_requests(self) -> int:
        """Requests that the log has not seen the last of."""
        return len(self._by_key)

    def _arrived(self, seq: int, event: ev.RequestArrived) -> None:
        hashes = [[page_hash] for page_hash in event.page_hashes]
        life = Life(seq, event.prompt_tokens, hashes, len(hashes), self.steps)
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
            if life.computed >= life.prompt_tokens - 1:
                verified = life.verified.setdefault(life.computed, [])
                planned, cut = self._planned[row]
                verified.append(Verified(planned, count, cut))
            life.computed += count
            if life.computed > life.most:
                life.most, life.since = life.computed, event.step
        self._causes.clear()
        for row, page_hash in zip(event.hash_rows, event.page_hashes, strict=True):
            self._life(row).told(page_hash)

    def _is_cut(self, row: int, end: int) -> bool:
        """Whether rows of a step up to `end` may be fewer than were wanted: they fill a page, and
        something was done to find a place for more."""
        return end % self.page_size == 0 and self._life(row).seq in self._causes

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

    def _pinned(
        self, kind: CopyKind, transfers: ev.Ints, rows: list[int], entries: ev.Ints
    ) -> None:
        command = self.steps if self._planned_seq else self.steps + 1
        for ident, row, entry in zip(transfers, rows, entries, strict=True):
            request, at = self._by_key[self._held[row]]
            self.copies[ident] = ((request.number, at, kind, entry), command)

    def _acknowledged(self, seq: int, e: ev.AcknowledgementsTaken) -> None:
        before = self._retired.get(e.rank, 0)
        self._retired[e.rank] = e.retired_step
        self.messages.append(
            Message(
                seq, self.steps, e.rank, e.enqueued, e.completed, e.failed, before, e.retired_step
            )
        )
