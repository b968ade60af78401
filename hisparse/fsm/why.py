"""Why a block, host page, request or transfer is as it is: the causal chain backwards. Pure.

`explain` collects, in one pass, the events that moved the id in its epoch (for a block also the
copies out of it and the step that last wrote it), and then follows each one's `cause`: to the
policy that chose it, to the request whose admission wanted room, to the input that began it all.
Links come newest first; a cause stands right under what it led to, one level deeper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from hisparse.errors import UsageError
from hisparse.fsm import events as ev
from hisparse.fsm.describe import runs
from hisparse.fsm.machines import BlockRole
from hisparse.fsm.watch import Target
from hisparse.fsm.witness import Key, keys_of

EVENTS_TOLD = 12  # that moved the id itself; the newest
CAUSES_DEEP = 8
ROWS_NAMED = 4
NEAR_EVENTS = 24  # after a policy's choice, in which the wait that it led to is looked for
Read = Callable[[int], Iterator[tuple[int, ev.Event]]]  # the log from a seq on
_BIRTHS = (ev.BlocksReserved, ev.HotLeased, ev.HostPagesReserved)


class Link(NamedTuple):
    """One event of the chain, in words; `depth` 0 moved the id itself, n is n causes away."""

    seq: int
    depth: int
    event: ev.Event
    text: str


class _Life:
    """What one id lived through since its epoch began, and who held each row when."""

    def __init__(self, wanted: Target, page_size: int, index_pages: int) -> None:
        self.wanted = wanted
        self.sizes = {BlockRole.RESIDENT: page_size, BlockRole.INDEX: page_size * index_pages}
        self.events: list[tuple[int, ev.Event]] = []
        self.written: tuple[int, ev.Event] | None = None
        self.tenants: dict[int, list[tuple[int, str]]] = {}
        self._key: Key | None = None if wanted.what == "request" else (wanted.what, wanted.number)
        self._transfers: set[int] = set()
        self._place: tuple[BlockRole, int, int] | None = None

    def take(self, seq: int, event: ev.Event) -> None:
        if isinstance(event, ev.RequestAdmitted):
            self.tenants.setdefault(event.row, []).append((seq, f"{event.request}/{event.epoch}"))
        elif isinstance(event, ev.RequestArrived) and self.wanted.what == "request":
            if self.wanted.ident in (event.request, f"{event.request}/{event.epoch}"):
                self._key, self.events = ("request", (event.request, event.epoch)), []
        elif isinstance(event, ev.AcknowledgementsTaken):
            return  # it comes as the cause of what it led to
        elif isinstance(event, ev.StepPlanned):
            self._note_write(seq, event)
            return
        if not self._names(event):
            return
        if isinstance(event, _BIRTHS) and self._key in [*keys_of(event)]:
            self.events, self.written, self._transfers, self._place = [], None, set(), None
        self.events.append((seq, event))
        self._follow(event)

    def _names(self, event: ev.Event) -> bool:
        if self._key in [*keys_of(event)]:
            return True
        return any(ident in self._transfers for ident in getattr(event, "transfers", ()))

    def _follow(self, event: ev.Event) -> None:
        what, ident = self._key or ("", 0)
        if isinstance(event, ev.TransferPinned) and what in ("block", "page"):
            ids = event.blocks if what == "block" else event.pages
            named = zip(event.transfers, ids, strict=False)
            self._transfers |= {transfer for transfer, at in named if at == ident}
        elif isinstance(event, ev.BlocksReserved) and what == "block":
            at = event.blocks.index(int(self.wanted.ident))
            self._place = (event.role, *event.places()[at])

    def _note_write(self, seq: int, event: ev.StepPlanned) -> None:
        if self._place is None or self._place[0] not in self.sizes or not self.events:
            return
        role, row, entry = self._place
        size = self.sizes[role]
        for at, start, count in zip(event.rows, event.starts, event.counts, strict=False):
            if at == row and start < (entry + 1) * size and start + count > entry * size:
                self.written = (seq, event)

    def who(self, row: int, seq: int) -> str:
        held = [name for since, name in self.tenants.get(row, ()) if since <= seq]
        return f"request {held[-1]} (row {row})" if held else f"row {row}"


def explain(
    wanted: Target, read: Read, at: int, *, page_size: int, index_pages: int = 1
) -> list[Link]:
    """The chain at seq `at`, newest first. Raises UsageError if the log never named the id."""
    life = _Life(wanted, page_size, index_pages)
    for seq, event in read(1):
        if seq > at:
            break
        life.take(seq, event)
    if not life.events:
        raise UsageError(f"no event up to seq {at} names {wanted.what} {wanted.ident}")
    told = life.events[-EVENTS_TOLD:]
    if life.written is not None:
        told = sorted([*told, life.written])
    links: list[Link] = []
    seen: set[int] = set()
    for seq, event in reversed(told):
        for link in _with_causes(seq, event, read, life):
            if link.seq in seen:
                continue
            seen.add(link.seq)
            links.append(link)
    return links


def _with_causes(seq: int, event: ev.Event, read: Read, life: _Life) -> Iterator[Link]:
    depth = 0
    while True:
        yield Link(seq, depth, event, words(event, seq, life.who))
        if isinstance(event, ev.PolicyChosen):
            for near, waiting in islice(read(seq + 1), NEAR_EVENTS):
                if isinstance(waiting, ev.AdmissionDeferred) and waiting.cause == event.cause:
                    yield Link(near, depth + 1, waiting, words(waiting, near, life.who))
                    break
        if not 0 < event.cause < seq or depth == CAUSES_DEEP:
            return
        seq, depth = event.cause, depth + 1
        event = next(read(seq))[1]


Who = Callable[[int, int], str]


def words(e: ev.Event, seq: int, who: Who) -> str:
    """What the event says, as a clause."""
    match e:
        case ev.RequestArrived() | ev.RequestAdmitted() | ev.RequestDrained():
            return _request_words(e)
        case ev.RequestFinished() | ev.RequestAborted() | ev.RequestPreempted():
            end = type(e).__name__.removeprefix("Request").lower()
            return f"request {e.request}/{e.epoch} was {end}: {e.reason or 'no reason given'}"
        case ev.RequestRewound():
            return (
                f"request {e.request}/{e.epoch} went back to {e.rows} computed rows: a copy failed "
                f"that steps had read; tokens of its first {e.certain} rows stand"
            )
        case ev.RequestResumed():
            return f"request {e.request}/{e.epoch} computes its rows again from there"
        case ev.SuffixAsked():
            return (
                f"request {e.request}/{e.epoch} asked for {e.asked} indexer pages from page "
                f"{e.page} on, {e.found} were promised"
            )
        case ev.MemoryReleased():
            what = "the GPU pool" if e.level == 1 else "the GPU pool and the host tiers"
            return f"sleep: {what} gave the memory up"
        case ev.MemoryRestored():
            return "wake: the pools have their memory again"
        case ev.RankLost():
            return f"the worker of rank {e.rank} was lost ({e.reason}), with all that it held"
        case ev.RankJoined():
            return f"a worker of rank {e.rank} joined in worker epoch {e.worker_epoch}"
        case ev.SchedulerRecovered():
            return f"another scheduler process went on with this log ({e.reason})"
        case ev.PrefixCacheReset():
            return "the prefix caches were reset"
        case ev.AdmissionDeferred() | ev.RequestRefused():
            what = "had to wait" if isinstance(e, ev.AdmissionDeferred) else "was refused"
            return (
                f"request {e.request}/{e.epoch} {what}: it needs {e.need} of {e.resource}, "
                f"{e.have} at hand"
            )
        case ev.PolicyChosen(resource="promotion"):
            return (
                f"policy {e.policy} chose {e.choice}: there is room for {e.have} blocks, "
                f"{e.need} pages come back to the GPU"
            )
        case ev.PromotionHeld():
            return f"pages leave under pressure: none comes back before step {e.until_step}"
        case ev.PolicyChosen():
            return (
                f"policy {e.policy} chose {e.choice} under pressure on {e.resource}: {e.need} "
                f"needed, {e.have} to be had"
            )
        case ev.StepPlanned():
            named = zip(e.rows, e.starts, e.counts, strict=False)
            parts = [f"{n} rows from {start} of {who(row, seq)}" for row, start, n in named]
            return f"step {e.step} was planned to compute " + "; ".join(parts[:4])
        case ev.RowsComputed():
            parts = [f"{n} of {who(row, seq)}" for row, n in zip(e.rows, e.counts, strict=False)]
            return f"step {e.step} computed rows: " + "; ".join(parts[:4])
        case ev.AcknowledgementsTaken():
            news = [
                f"transfers {runs(ids)} {name}"
                for name in ("enqueued", "completed", "failed")
                if (ids := getattr(e, name))
            ]
            told = "; ".join([*news, f"step {e.retired_step} retired"])
            return f"rank {e.rank} acknowledged: {told}"
        case ev.TransferPinned() | ev.TransferEnqueued() | ev.TransferCompleted():
            return _transfer_words(e, seq, who)
        case ev.TransferFailed():
            left = "" if e.last else ", others have not answered"
            return f"rank {e.rank} could not copy transfers {runs(e.transfers)}{left}"
        case _:
            return _lease_words(e, seq, who)


def _request_words(e: ev.RequestArrived | ev.RequestAdmitted | ev.RequestDrained) -> str:
    name = f"request {e.request}/{e.epoch}"
    if isinstance(e, ev.RequestArrived):
        return f"{name} arrived: prompt of {e.prompt_tokens} tokens, at most {e.max_tokens} in all"
    if isinstance(e, ev.RequestAdmitted):
        hit = f", {e.hit_tokens} tokens found by prefix" if e.hit_tokens else ""
        return f"{name} was admitted to row {e.row}, {e.steady_blocks} blocks promised{hit}"
    return f"{name} was drained: nothing of it is left on a device"


def _transfer_words(
    e: ev.TransferPinned | ev.TransferEnqueued | ev.TransferCompleted, seq: int, who: Who
) -> str:
    if isinstance(e, ev.TransferPinned):
        ends = f"blocks {runs(e.blocks)}", f"host pages {runs(e.pages)}"
        source, to = ends if e.kind is not e.kind.RESTORE else ends[::-1]
        kind = e.kind.name.lower().replace("_", "-")
        owners = _names((row for row, _ in e.owners()), seq, who)
        return (
            f"a {kind} was planned (transfers {runs(e.transfers)}): pages {runs(e.entries)} of "
            f"{owners} from {source} to {to}"
        )
    what = "in its stream" if isinstance(e, ev.TransferEnqueued) else "seen complete"
    last = "the last rank that was waited for" if e.last else "others are still waited for"
    return f"rank {e.rank} has transfers {runs(e.transfers)} {what} ({last})"


def _names(rows: Iterable[int], seq: int, who: Who) -> str:
    """Who holds these rows: the first few, and how many more."""
    held = list(dict.fromkeys(rows))
    more = f" and {len(held) - ROWS_NAMED} more" if len(held) > ROWS_NAMED else ""
    return ", ".join(who(row, seq) for row in held[:ROWS_NAMED]) + more


def _lease_words(e: ev.Event, seq: int, who: Who) -> str:
    match e:
        case ev.BlocksReserved():
            what, owners = e.role.name.lower(), _names((row for row, _ in e.places()), seq, who)
            return f"blocks {runs(e.blocks)} were given to {owners} as {what} blocks"
        case ev.BlocksAdopted():
            return f"{who(e.row, seq)} found its prefix in blocks {runs(e.blocks)} and shares them"
        case ev.BlocksEvicted():
            return f"cached blocks {runs(e.blocks)} were evicted to be reused"
        case ev.BlocksSealed():
            return f"index blocks {runs(e.blocks)} are final and may be shared"
        case ev.BlocksReleased():
            how = "other owners remain" if e.trigger is None else e.trigger.name
            return f"{who(e.row, seq)} gave blocks {runs(e.blocks)} back ({how})"
        case ev.PagesSpilled():
            return (
                f"pages {runs(e.entries)} of {who(e.row, seq)} are read from the host from here "
                f"on; blocks {runs(e.blocks)} were given back ({e.trigger.name})"
            )
        case ev.HostPagesReserved():
            return f"host pages {runs(e.pages)} were promised to {who(e.row, seq)}"
        case ev.PrefixLeased():
            return f"{who(e.row, seq)} found its prefix on host pages {runs(e.pages)}"
        case ev.HostPagesReleased():
            how = "they stay for the prefix cache" if e.trigger is None else e.trigger.name
            return f"{who(e.row, seq)} gave host pages {runs(e.pages)} back ({how})"
        case ev.HostPagesEvicted():
            return f"published host pages {runs(e.pages)} were evicted to be reused"
        case ev.PagesPublished():
            shown = runs(page for page in e.pages if page)
            owners = _names((row for row, _ in e.places()), seq, who)
            return f"host pages {shown} of {owners} became findable by prefix"
        case ev.SuffixPinned():
            ends = f"index blocks {runs(e.blocks)}", f"suffix pages {runs(e.suffixes)}"
            source, to = ends[::-1] if e.load else ends
            return (
                f"indexer pages {runs(e.entries)} of {who(e.row, seq)} were to be copied "
                f"(transfers {runs(e.transfers)}) from {source} to {to}"
            )
        case ev.SuffixEvicted():
            return f"suffix pages {runs(e.suffixes)} were evicted"
        case ev.SuffixCompleted():
            return f"rank {e.rank} saw the indexer pages of transfers {runs(e.transfers)} copied"
        case ev.SuffixFailed():
            return f"rank {e.rank} could not copy the indexer pages of {runs(e.transfers)}"
        case ev.HotWanted():
            return f"{who(e.row, seq)} wants a hot region: it is about to lose resident pages"
        case ev.HotLeased():
            return f"{who(e.row, seq)} was given blocks {runs(e.blocks)} as its hot region"
        case ev.HotReleased():
            return f"{who(e.row, seq)} gave its hot region back"
        case _:
            return type(e).__name__
