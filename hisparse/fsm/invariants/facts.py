"""Facts of a run: what a log said so far, for the run invariants. No conclusions are drawn here.

Who holds which block and page by which event, what each rank really acknowledged, how far each
request is computed. Shares no code with `decide` or `evolve`, so that neither can mislead it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from hisparse.config import ceil_div
from hisparse.fsm import events as ev
from hisparse.fsm.invariants.records import Copy, Tenant
from hisparse.fsm.invariants.suffix_facts import Suffix
from hisparse.fsm.machines import BlockRole, BlockTrigger
from hisparse.fsm.wire import TransferKind

KEPT = (None, BlockTrigger.cached)  # releases after which a block still holds its content
Place = tuple[BlockRole, int, int]  # a table entry: role, request row, entry


class Run:
    """What a log said so far."""

    def __init__(self, page_size: int, index_pages_per_block: int, ranks: int) -> None:
        self.page_size = page_size
        self.index_pages_per_block = index_pages_per_block
        self.ranks = (1 << ranks) - 1
        self.retired = [0] * ranks
        self.step = 0
        self.tenants: dict[tuple[str, int], Tenant] = {}
        self.rows: dict[int, Tenant] = {}
        self.copies: dict[int, Copy] = {}  # unsettled, or settled and its page still holds it
        self.copy_of_block: dict[int, Copy] = {}  # unsettled, by the block that it reads or writes
        self.reads_of_page: dict[int, set[int]] = {}  # unsettled restores that read the page
        self.block_epoch: dict[int, int] = {}
        self.holders: dict[int, set[Place]] = {}  # block -> table entries that name it
        self.block_at: dict[Place, int] = {}
        self.content: dict[int, tuple[BlockRole, Tenant, int]] = {}  # block -> whose entry it holds
        self.restored: dict[int, int] = {}  # block -> host page that fills it
        self.page_epoch: dict[int, int] = {}
        self.leases: dict[int, set[int]] = {}  # page -> rows that hold it
        self.host: dict[int, dict[int, int]] = {}  # row -> entry -> page with a copy of it
        self.page_writer: dict[int, Copy] = {}  # page -> the copy that fills it
        self.page_hash: dict[int, bytes] = {}  # published page -> hash
        self.suffix = Suffix()

    def span(self, role: BlockRole) -> int:
        """Pages that an entry of the role's table stands for."""
        return self.index_pages_per_block if role is BlockRole.INDEX else 1

    def places(self, e: ev.BlocksReserved | ev.HotLeased) -> list[Place]:
        if isinstance(e, ev.HotLeased):
            return [(BlockRole.HOT, e.row, i) for i in range(len(e.blocks))]
        return [(e.role, row, entry) for row, entry in e.places()]

    def written(self, e: ev.StepPlanned) -> list[Place]:
        """The entries that hold the rows of a planned step."""
        places: dict[Place, None] = {}
        size = self.page_size
        sizes = ((BlockRole.RESIDENT, size), (BlockRole.INDEX, size * self.index_pages_per_block))
        for row, start, count in zip(e.rows, e.starts, e.counts, strict=True):
            for role, size in sizes:
                for entry in range(start // size, ceil_div(start + count, size)):
                    places[role, row, entry] = None
        return list(places)

    def entries_of(self, e: ev.HostPagesReleased) -> dict[int, int]:
        """Pages that are given back -> the entry of the row that has a copy in it."""
        held, named = self.host.get(e.row, {}), dict(zip(e.pages, e.entries, strict=False))
        if len(named) == len(e.pages) and all(held.get(at) == page for page, at in named.items()):
            return named
        gone = set(e.pages)  # a reservation, or a wrong word: wherever it is
        return {page: entry for entry, page in held.items() if page in gone}

    def take(self, e: ev.Event) -> None:
        """Note what `e` says."""
        handler = _TAKE.get(type(e))
        if handler is not None:
            handler(self, e)

    def _tier(self, e: ev.Event) -> None:
        self.suffix.take(e, self.rows)

    # -- requests -------------------------------------------------------------------------------
    def _arrived(self, e: ev.RequestArrived) -> None:
        self.tenants[(e.request, e.epoch)] = Tenant(
            e.request, e.epoch, list(e.page_hashes), e.prompt_tokens
        )

    def _admitted(self, e: ev.RequestAdmitted) -> None:
        tenant = self.rows[e.row] = self.tenants[(e.request, e.epoch)]
        tenant.live, tenant.computed, tenant.planned = True, e.hit_tokens, e.hit_tokens
        self.host[e.row] = {}

    def _planned(self, e: ev.StepPlanned) -> None:
        self.step = e.step
        for row, start, count in zip(e.rows, e.starts, e.counts, strict=True):
            self.rows[row].last_step, self.rows[row].planned = e.step, start + count

    def _computed(self, e: ev.RowsComputed) -> None:
        for row, count in zip(e.rows, e.counts, strict=True):
            self.rows[row].computed += count
            self.rows[row].planned = self.rows[row].computed
        for row, page_hash in zip(e.hash_rows, e.page_hashes, strict=True):
            self.rows[row].hashes.append(page_hash)

    def _rewound(self, e: ev.RequestRewound) -> None:
        tenant = self.rows[e.row]
        before = msgspec.structs.replace(tenant, hashes=list(tenant.hashes), computed=e.certain)
        for block, (role, owner, entry) in self.content.items():
            if owner is not tenant:
                continue
            # Others keep what they share, and a GPU copy of a published page stays one.
            copied = role is BlockRole.RESIDENT and entry < tenant.leased
            if copied or len(self.holders.get(block, ())) > 1:
                self.content[block] = (role, before, entry)
        if tenant.planned == tenant.computed:
            tenant.planned = e.rows
        tenant.computed = e.rows
        tenant.published = min(tenant.published, ceil_div(e.rows, self.page_size))
        tenant.leased = min(tenant.leased, tenant.published)
        del tenant.hashes[max(tenant.prompt_tokens, e.rows) // self.page_size :]

    def _resumed(self, e: ev.RequestResumed) -> None:
        """What was loaded of the pages that it computes again is over, and counts for nothing."""
        first = ceil_div(self.rows[e.row].computed, self.page_size)
        entry, slot = divmod(first, self.index_pages_per_block)
        block = self.block_at.get((BlockRole.INDEX, e.row, entry))
        self.suffix.unsure -= {at for at in self.suffix.unsure if at[0] == block and at[1] >= slot}

    def _ended(self, e: ev.RequestFinished | ev.RequestAborted | ev.RequestPreempted) -> None:
        if (tenant := self.tenants.get((e.request, e.epoch))) is not None:
            tenant.live = False

    def _drained(self, e: ev.RequestDrained) -> None:
        self.tenants.pop((e.request, e.epoch), None)
        self.rows.pop(e.row, None)

    # -- GPU blocks -----------------------------------------------------------------------------
    def _reserved(self, e: ev.BlocksReserved | ev.HotLeased) -> None:
        for place, block, epoch in zip(self.places(e), e.blocks, e.epochs, strict=True):
            self.block_epoch[block] = epoch
            self.restored.pop(block, None)
            self._hold(place, block)
            self.content[block] = (place[0], self.rows[place[1]], place[2])
        if self.suffix.unsure:
            self.suffix.take(e, self.rows)

    def _adopted(self, e: ev.BlocksAdopted) -> None:
        for entry, block in zip(e.entries, e.blocks, strict=True):
            self._hold((e.role, e.row, entry), block)

    def _hold(self, place: Place, block: int) -> None:
        self.holders.setdefault(block, set()).add(place)
        self.block_at[place] = block

    def _given_back(self, e: ev.BlocksReleased | ev.PagesSpilled) -> None:
        role = e.role if isinstance(e, ev.BlocksReleased) else BlockRole.RESIDENT
        for entry, block in zip(e.entries, e.blocks, strict=True):
            self.holders.get(block, set()).discard((role, e.row, entry))
            self.block_at.pop((role, e.row, entry), None)
            if e.trigger not in KEPT:
                self.content.pop(block, None)

    def _evicted(self, e: ev.BlocksEvicted) -> None:
        for block in e.blocks:
            self.content.pop(block, None)

    # -- host pages -----------------------------------------------------------------------------
    def _promised(self, e: ev.HostPagesReserved) -> None:
        for page, epoch in zip(e.pages, e.epochs, strict=True):
            self._forget(page)
            self.page_epoch[page] = epoch
            self.leases[page] = {e.row}

    def _leased(self, e: ev.PrefixLeased) -> None:
        self.rows[e.row].published = self.rows[e.row].leased = len(e.pages)
        for entry, page in enumerate(e.pages):
            self.leases.setdefault(page, set()).add(e.row)
            self.host[e.row][entry] = page

    def _handed_back(self, e: ev.HostPagesReleased) -> None:
        held = self.host[e.row]
        for entry in self.entries_of(e).values():
            del held[entry]
        for page in e.pages:
            self.leases.get(page, set()).discard(e.row)
            if e.trigger is not None:
                self._forget(page)

    def _lost(self, e: ev.HostPagesEvicted) -> None:
        for page in e.pages:
            self._forget(page)

    def _forget(self, page: int) -> None:
        """The page holds nothing any more."""
        self.page_hash.pop(page, None)
        writer = self.page_writer.pop(page, None)
        if writer is not None and writer.settled:
            self.copies.pop(writer.ident, None)

    def _published(self, e: ev.PagesPublished) -> None:
        named = zip(e.places(), e.pages, e.page_hashes, strict=True)
        for (row, entry), page, page_hash in named:
            self.rows[row].published = entry + 1
            if page:
                self.page_hash[page] = page_hash

    # -- transfers ------------------------------------------------------------------------------
    def _pinned(self, e: ev.TransferPinned) -> None:
        named = zip(e.owners(), e.transfers, e.entries, e.blocks, e.pages, strict=True)
        for (row, epoch), ident, entry, block, page in named:
            rows_end = self.rows[row].computed
            copy = Copy(
                ident, e.kind, row, entry, epoch, block, page, e.readers, e.writers, rows_end
            )
            self.copies[ident] = self.copy_of_block[block] = copy
            if e.kind is TransferKind.RESTORE:
                self.reads_of_page.setdefault(page, set()).add(ident)
                self.restored[block] = page
            else:
                self.page_writer[page] = copy
                self.host[row][entry] = page

    def _acks(self, e: ev.AcknowledgementsTaken) -> None:
        if self.suffix.copies:
            self.suffix.take(e, self.rows)
        bit = 1 << e.rank
        for name in ("enqueued", "completed", "failed"):
            named = zip(getattr(e, name), getattr(e, f"{name}_epochs"), strict=True)
            for ident, epoch in named:
                copy = self.copies.get(ident)
                if copy is None or copy.epoch != epoch:
                    continue
                setattr(copy, name, getattr(copy, name) | bit)
        self.retired[e.rank] = e.retired_step

    def _rank_lost(self, e: ev.RankLost) -> None:
        """It ends no copy any more, and reads nothing."""
        bit = 1 << e.rank
        for copy in self.copies.values():
            heard = copy.completed & bit and not copy.assumed
            copy.failed |= 0 if copy.settled or heard else bit
        for page in self.suffix.copies.values():
            page.failed |= 0 if page.settled or page.completed & bit else bit
        self.retired[e.rank] = self.step

    def _settled(self, e: ev.TransferCompleted | ev.TransferFailed) -> None:
        failed = isinstance(e, ev.TransferFailed)
        for copy in [self.copies[ident] for ident in e.transfers if ident in self.copies]:
            copy.told |= failed
            if not e.last:
                continue
            copy.settled = True
            if self.copy_of_block.get(copy.block) is copy:
                del self.copy_of_block[copy.block]
            if copy.kind is TransferKind.RESTORE:
                self.reads_of_page[copy.page].discard(copy.ident)
                del self.copies[copy.ident]


_TAKE: dict[type[ev.Event], Callable[[Run, Any], None]] = {
    ev.RequestArrived: Run._arrived,
    ev.RequestAdmitted: Run._admitted,
    ev.StepPlanned: Run._planned,
    ev.RowsComputed: Run._computed,
    ev.RequestRewound: Run._rewound,
    ev.RequestResumed: Run._resumed,
    ev.RequestFinished: Run._ended,
    ev.RequestAborted: Run._ended,
    ev.RequestPreempted: Run._ended,
    ev.RequestDrained: Run._drained,
    ev.AcknowledgementsTaken: Run._acks,
    ev.RankLost: Run._rank_lost,
    ev.TransferPinned: Run._pinned,
    ev.TransferCompleted: Run._settled,
    ev.TransferFailed: Run._settled,
    ev.BlocksReserved: Run._reserved,
    ev.HotLeased: Run._reserved,
    ev.BlocksAdopted: Run._adopted,
    ev.BlocksReleased: Run._given_back,
    ev.PagesSpilled: Run._given_back,
    ev.BlocksEvicted: Run._evicted,
    ev.HostPagesReserved: Run._promised,
    ev.PrefixLeased: Run._leased,
    ev.HostPagesReleased: Run._handed_back,
    ev.HostPagesEvicted: Run._lost,
    ev.PagesPublished: Run._published,
    ev.SuffixPinned: Run._tier,
    ev.SuffixEvicted: Run._tier,
    ev.SuffixCompleted: Run._tier,
    ev.SuffixFailed: Run._tier,
}
