"""Invariants of a run: each event against what the log said before it.

`Run` keeps raw facts (who owns what by which event, what each rank really acknowledged) and draws
no conclusions; it shares no code with `decide` or `evolve`. An invariant is one function of
(run, event), called before the run takes the event in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from hisparse.fsm import events as ev
from hisparse.fsm.machines import BlockRole, PageTrigger
from hisparse.fsm.wire import TransferKind

Key = tuple[str, int]


class Planned(msgspec.Struct):
    """A transfer as it was planned, and the ranks that really answered."""

    kind: TransferKind
    row: int
    entry: int
    page: int
    readers: int
    writers: int
    enqueued: int = 0
    completed: int = 0
    failed: bool = False
    settled: bool = False


class Run:
    """What a log said so far."""

    def __init__(self, page_size: int, index_pages_per_block: int, ranks: int) -> None:
        self.page_size = page_size
        self.index_pages_per_block = index_pages_per_block
        self.hashes_of: dict[Key, list[bytes]] = {}
        self.row_key: dict[int, Key] = {}
        self.live: set[int] = set()
        self.computed: dict[int, int] = {}
        self.last_step: dict[int, int] = {}
        self.retired = [0] * ranks
        self.transfers: dict[int, Planned] = {}
        self.block_epoch: dict[int, int] = {}
        self.page_epoch: dict[int, int] = {}
        self.content: dict[int, tuple[BlockRole, Key, int]] = {}  # block -> role, owner, entry
        self.host_copy: dict[tuple[int, int], int] = {}  # (row, entry) -> transfer, 0 = leased
        self.page_writer: dict[int, int] = {}  # page -> transfer that fills it
        self.page_hash: dict[int, bytes] = {}  # published page -> hash

    def hashes(self, row: int) -> list[bytes]:
        return self.hashes_of[self.row_key[row]]

    def take(self, e: ev.Event) -> None:
        """Note what `e` says."""
        handler = _TAKE.get(type(e))
        if handler is not None:
            handler(self, e)

    def _arrived(self, e: ev.RequestArrived) -> None:
        self.hashes_of[(e.request, e.epoch)] = list(e.page_hashes)

    def _admitted(self, e: ev.RequestAdmitted) -> None:
        self.row_key[e.row] = (e.request, e.epoch)
        self.live.add(e.row)
        self.computed[e.row], self.last_step[e.row] = e.hit_tokens, 0
        for at in [at for at in self.host_copy if at[0] == e.row]:
            del self.host_copy[at]

    def _planned(self, e: ev.StepPlanned) -> None:
        for row in e.rows:
            self.last_step[row] = e.step

    def _computed(self, e: ev.RowsComputed) -> None:
        for row, count in zip(e.rows, e.counts, strict=True):
            self.computed[row] += count
        for row, page_hash in zip(e.hash_rows, e.page_hashes, strict=True):
            self.hashes(row).append(page_hash)

    def _ended(self, e: ev.RequestFinished | ev.RequestAborted | ev.RequestPreempted) -> None:
        for row, key in self.row_key.items():
            if key == (e.request, e.epoch):
                self.live.discard(row)

    def _drained(self, e: ev.RequestDrained) -> None:
        self.hashes_of.pop((e.request, e.epoch), None)
        self.row_key.pop(e.row, None)

    def _acks(self, e: ev.AcknowledgementsTaken) -> None:
        bit = 1 << e.rank
        for idents, mask in ((e.enqueued, "enqueued"), (e.completed, "completed")):
            for ident in idents:
                if (planned := self.transfers.get(ident)) is not None:
                    setattr(planned, mask, getattr(planned, mask) | bit)
        for ident in e.failed:
            if (planned := self.transfers.get(ident)) is not None:
                planned.failed = True
        self.retired[e.rank] = e.retired_step

    def _pinned(self, e: ev.TransferPinned) -> None:
        for ident, entry, page in zip(e.transfers, e.entries, e.pages, strict=True):
            self.transfers[ident] = Planned(e.kind, e.row, entry, page, e.readers, e.writers)
            if e.kind is not TransferKind.RESTORE:
                self.host_copy[(e.row, entry)] = ident
                self.page_writer[page] = ident

    def _settled(self, e: ev.TransferCompleted | ev.TransferFailed) -> None:
        if isinstance(e, ev.TransferFailed) or e.last:
            for ident in e.transfers:
                self.transfers[ident].settled = True

    def _blocks(self, e: ev.BlocksReserved | ev.HotLeased) -> None:
        role = e.role if isinstance(e, ev.BlocksReserved) else BlockRole.HOT
        first = e.entry if isinstance(e, ev.BlocksReserved) else 0
        for i, (block, epoch) in enumerate(zip(e.blocks, e.epochs, strict=True)):
            self.block_epoch[block] = epoch
            self.content[block] = (role, self.row_key[e.row], first + i)

    def _adopted(self, e: ev.BlocksAdopted) -> None:
        for block, entry in zip(e.blocks, e.entries, strict=True):
            self.content[block] = (e.role, self.row_key[e.row], entry)

    def _pages(self, e: ev.HostPagesReserved) -> None:
        for page, epoch in zip(e.pages, e.epochs, strict=True):
            self.page_epoch[page] = epoch
            self.page_hash.pop(page, None)

    def _leased(self, e: ev.PrefixLeased) -> None:
        for entry in range(len(e.pages)):
            self.host_copy[(e.row, entry)] = 0

    def _published(self, e: ev.PagesPublished) -> None:
        for page, page_hash in zip(e.pages, e.page_hashes, strict=True):
            if page:
                self.page_hash[page] = page_hash

    def _released(self, e: ev.HostPagesReleased) -> None:
        if e.trigger is PageTrigger.reclaimed:
            gone = {self.page_writer.get(page) for page in e.pages}
            for at in [at for at, ident in self.host_copy.items() if ident and ident in gone]:
                del self.host_copy[at]


_TAKE: dict[type[ev.Event], Callable[[Run, Any], None]] = {
    ev.RequestArrived: Run._arrived,
    ev.RequestAdmitted: Run._admitted,
    ev.StepPlanned: Run._planned,
    ev.RowsComputed: Run._computed,
    ev.RequestFinished: Run._ended,
    ev.RequestAborted: Run._ended,
    ev.RequestPreempted: Run._ended,
    ev.RequestDrained: Run._drained,
    ev.AcknowledgementsTaken: Run._acks,
    ev.TransferPinned: Run._pinned,
    ev.TransferCompleted: Run._settled,
    ev.TransferFailed: Run._settled,
    ev.BlocksReserved: Run._blocks,
    ev.HotLeased: Run._blocks,
    ev.BlocksAdopted: Run._adopted,
    ev.HostPagesReserved: Run._pages,
    ev.PrefixLeased: Run._leased,
    ev.PagesPublished: Run._published,
    ev.HostPagesReleased: Run._released,
}


# -- the invariants -------------------------------------------------------------------------------


def spill_before_free(run: Run, e: ev.Event) -> Iterator[str]:
    """A resident block leaves a live request only behind an enqueued copy of its page."""
    if isinstance(e, ev.BlocksReleased):
        if e.role is not BlockRole.RESIDENT:
            return
    elif not isinstance(e, ev.PagesSpilled):
        return
    if e.row not in run.live:
        return
    for entry, block in zip(e.entries, e.blocks, strict=True):
        if entry * run.page_size >= run.computed[e.row]:
            continue
        ident = run.host_copy.get((e.row, entry))
        if ident is None:
            yield f"block {block} is given back with the only copy of page {entry} of row {e.row}"
        elif ident:
            planned = run.transfers[ident]
            answered = planned.enqueued | planned.completed
            if planned.failed or answered & planned.readers != planned.readers:
                yield (
                    f"block {block} is given back, its copy (transfer {ident}) is enqueued on "
                    f"ranks {answered:b} of {planned.readers:b}"
                )


def complete_before_publish(run: Run, e: ev.Event) -> Iterator[str]:
    """A published page was seen complete by every rank that writes it."""
    if not isinstance(e, ev.PagesPublished):
        return
    for page in e.pages:
        if not page:
            continue
        planned = run.transfers[run.page_writer[page]]
        if planned.failed or planned.completed & planned.writers != planned.writers:
            yield (
                f"host page {page} is published, its copy (transfer {run.page_writer[page]}) is "
                f"complete on ranks {planned.completed:b} of {planned.writers:b}"
            )


def publish_accepted_only(run: Run, e: ev.Event) -> Iterator[str]:
    """Publication ends where accepted, computed rows end."""
    if isinstance(e, ev.PagesPublished):
        end = (e.entry + len(e.pages)) * run.page_size
        if end > run.computed[e.row]:
            yield f"row {e.row} publishes rows up to {end}, computed {run.computed[e.row]}"


def one_content(run: Run, e: ev.Event) -> Iterator[str]:
    """Epochs rise at every reuse; whoever adopts an id expects exactly what it holds."""
    if isinstance(e, ev.BlocksReserved | ev.HotLeased | ev.HostPagesReserved):
        pages = isinstance(e, ev.HostPagesReserved)
        known = run.page_epoch if pages else run.block_epoch
        for ident, epoch in zip(e.pages if pages else e.blocks, e.epochs, strict=True):  # type: ignore[union-attr]
            if epoch <= known.get(ident, 0):
                what = "host page" if pages else "block"
                yield f"{what} {ident} is given out again under epoch {epoch}"
    elif isinstance(e, ev.BlocksAdopted):
        n = run.index_pages_per_block if e.role is BlockRole.INDEX else 1
        for block, entry in zip(e.blocks, e.entries, strict=True):
            role, owner, held = run.content[block]
            want = run.hashes(e.row)[entry * n : (entry + 1) * n]
            # The first owner's hashes may be forgotten; then its published page speaks for it.
            have = run.hashes_of.get(owner, [])[held * n : (held + 1) * n]
            if role is not e.role or (have and have != want):
                yield f"row {e.row} adopts block {block}, which holds another prefix page"
    elif isinstance(e, ev.PrefixLeased):
        for page, want_hash in zip(e.pages, run.hashes(e.row), strict=False):
            if run.page_hash.get(page) != want_hash:
                yield f"row {e.row} leases host page {page}, which holds another prefix page"


def rank_quorum(run: Run, e: ev.Event) -> Iterator[str]:
    """`last` means that every declared rank really said so."""
    if isinstance(e, ev.TransferEnqueued | ev.TransferCompleted) and e.last:
        done = isinstance(e, ev.TransferCompleted)
        for ident in e.transfers:
            planned = run.transfers[ident]
            want = planned.writers if done else planned.readers
            have = planned.completed if done else planned.enqueued | planned.completed
            if have & want != want:
                yield f"transfer {ident} counts as answered by {want:b}, ranks {have:b} did"


def settle_once(run: Run, e: ev.Event) -> Iterator[str]:
    """No transfer completes or fails twice."""
    settles = isinstance(e, ev.TransferFailed) or (isinstance(e, ev.TransferCompleted) and e.last)
    if settles:
        for ident in e.transfers:  # type: ignore[attr-defined]
            if run.transfers[ident].settled:
                yield f"transfer {ident} settles twice"


def host_reuse_after_readers(run: Run, e: ev.Event) -> Iterator[str]:
    """Host pages go back after the last step that could read them has retired on every rank."""
    readable = (None, PageTrigger.released)
    if isinstance(e, ev.HostPagesReleased) and e.trigger in readable:
        last = run.last_step[e.row]
        if min(run.retired) < last:
            yield f"row {e.row} gives host pages back, ranks have retired {run.retired} of {last}"


RUN_CHECKS: dict[str, Callable[[Run, ev.Event], Iterator[str]]] = {
    "spill_before_free": spill_before_free,
    "complete_before_publish": complete_before_publish,
    "publish_accepted_only": publish_accepted_only,
    "one_content": one_content,
    "rank_quorum": rank_quorum,
    "settle_once": settle_once,
    "host_reuse_after_readers": host_reuse_after_readers,
}
