"""Leases of blocks and host pages, and copies between them, fitted to the state of now. Pure.

Each function gives the event with the columns that can happen now, or None if there is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from hisparse.fsm import events as ev
from hisparse.fsm.machine import ILLEGAL
from hisparse.fsm.machines import (
    HOT_REGION,
    TRANSFER,
    BlockRole,
    BlockState,
    BlockTrigger,
    HotState,
    HotTrigger,
    PageState,
    PageTrigger,
    TransferTrigger,
)
from hisparse.fsm.rerun.names import RESIDENT, E, Names, with_columns
from hisparse.fsm.wire import Table, TransferKind

replace = msgspec.structs.replace
_BLOCKS = ("blocks", "epochs")
_PAGES = ("pages", "epochs")
_BLOCK_EXITS = (BlockTrigger.abandoned, BlockTrigger.retired, BlockTrigger.dropped, None)
_PAGE_EXITS = (PageTrigger.abandoned, PageTrigger.released, PageTrigger.reclaimed, None)
_BLOCKS_MOVE: dict[type, BlockTrigger] = {
    ev.BlocksEvicted: BlockTrigger.evicted,
    ev.BlocksSealed: BlockTrigger.sealed,
}
_HOT_MOVES: dict[type, HotTrigger] = {
    ev.HotWanted: HotTrigger.wanted,
    ev.HotLeased: HotTrigger.leased,
    ev.HotReleased: HotTrigger.released,
}


def _placed(made: E, row: int, places: list[tuple[int, int]]) -> E:
    """`made` at `places`: in the form of one row where they are one, without a gap."""
    first = places[0][1]
    if row >= 0 and places == [(row, first + at) for at in range(len(places))]:
        return replace(made, row=row, entry=first, rows=(), entries=())
    rows, entries = zip(*places, strict=True)
    return replace(made, row=-1, entry=-1, rows=rows, entries=entries)


def reserved(names: Names, e: ev.BlocksReserved) -> ev.BlocksReserved | None:
    state, table = names.state, names.state.table(Table(e.role))
    kept, places = list[tuple[int, int]](), list[tuple[int, int]]()
    for (old, entry), block, epoch in zip(e.places(), e.blocks, e.epochs, strict=True):
        row = names.row(old)
        if row < 0 or state.blocks.state[block] != BlockState.FREE:
            continue
        now = names.new_entry(old, e.role, entry)
        if now >= table.shape[1] or table[row, now] or (row, now) in places:
            continue
        names.entered(old, e.role, entry, now)
        names.blocks[block, epoch] = state.blocks.epoch.item(block) + 1
        kept.append((block, names.blocks[block, epoch]))
        places.append((row, now))
    if not kept:
        return None
    return _placed(with_columns(e, _BLOCKS, kept), names.row(e.row), places)


def adopted(names: Names, e: ev.BlocksAdopted) -> ev.BlocksAdopted | None:
    row, state, kept = names.row(e.row), names.state, list[tuple[int, int, int]]()
    if row < 0:
        return None
    for entry, block, old in zip(e.entries, e.blocks, e.epochs, strict=True):
        epoch = names.block(block, old)
        if epoch is None or state.blocks.role[block] != e.role:
            continue
        if not state.blocks.refs[block] and not names.block_goes(block, BlockTrigger.adopted):
            continue
        now = names.new_entry(e.row, e.role, entry)
        names.entered(e.row, e.role, entry, now)
        kept.append((now, block, epoch))
    return replace(with_columns(e, ("entries", *_BLOCKS), kept), row=row) if kept else None


def blocks_moved(names: Names, e: Any) -> Any:
    trigger, kept = _BLOCKS_MOVE[type(e)], list[tuple[int, int]]()
    for block, old in zip(e.blocks, e.epochs, strict=True):
        epoch = names.block(block, old)
        if epoch is not None and names.block_goes(block, trigger):
            kept.append((block, epoch))
    return with_columns(e, _BLOCKS, kept) if kept else None


def _owned(names: Names, e: Any, role: BlockRole, row: int) -> Iterator[tuple[int, int, int, int]]:
    """(place, entry, block, epoch) of table entries that the row still has."""
    table = names.state.table(Table(role))
    for at, (entry, block, old) in enumerate(zip(e.entries, e.blocks, e.epochs, strict=True)):
        epoch, now = names.block(block, old), names.entry(e.row, role, entry)
        if epoch is not None and now >= 0 and table[row, now] == block:
            yield at, now, block, epoch


def released(names: Names, e: ev.BlocksReleased) -> ev.BlocksReleased | None:
    """By another trigger, where what wrote or sealed the first block is gone."""
    row = names.row(e.row)
    owned = list(_owned(names, e, e.role, row)) if row >= 0 else []
    for trigger in (e.trigger, *_BLOCK_EXITS):
        kept = [part[1:] for part in owned if _goes(names, part[2], trigger)]
        if kept:
            made = with_columns(e, ("entries", *_BLOCKS), kept)
            return replace(made, row=row, trigger=trigger)
    return None


def _goes(names: Names, block: int, trigger: BlockTrigger | None) -> bool:
    others = names.state.blocks.refs.item(block) > 1
    return others if trigger is None else not others and names.block_goes(block, trigger)


def spilled(names: Names, e: ev.PagesSpilled) -> ev.PagesSpilled | None:
    request, state, kept = names.tenant(e.row), names.state, list[tuple[int, int, int, int]]()
    if request is None or request.hot is not HotState.LEASED:
        return None
    for at, entry, block, epoch in _owned(names, e, RESIDENT, request.row):
        ident = e.transfers[at] and names.transfers.get(e.transfers[at], -1)
        if not _goes(names, block, e.trigger):
            continue
        if state.table(Table.HOST)[request.row, entry] and ident in (0, *state.transfers):
            kept.append((entry, block, epoch, ident))
    made = with_columns(e, ("entries", *_BLOCKS, "transfers"), kept)
    return replace(made, row=request.row) if kept else None


def index_copied(names: Names, e: ev.IndexPagesCopied) -> ev.IndexPagesCopied | None:
    fields = ("sources", "source_epochs", "source_slots", "blocks", "slots")
    row, kept = names.row(e.row), list[tuple[int, ...]]()
    own = set(names.state.table(Table.INDEX)[row].tolist()) if row >= 0 else ()
    for source, old, slot, block, to in zip(*(getattr(e, f) for f in fields), strict=True):
        epoch = names.block(source, old)
        if epoch is not None and block in own and names.block_goes(block, BlockTrigger.written):
            kept.append((source, epoch, slot, block, to))
    return replace(with_columns(e, fields, kept), row=row) if kept else None


def pages_reserved(names: Names, e: ev.HostPagesReserved) -> ev.HostPagesReserved | None:
    row, pages, kept = names.row(e.row), names.state.pages, list[tuple[int, int]]()
    for page, epoch in zip(e.pages, e.epochs, strict=True):
        if row >= 0 and pages.state[page] == PageState.FREE:
            names.pages[page, epoch] = pages.epoch.item(page) + 1
            kept.append((page, names.pages[page, epoch]))
    return replace(with_columns(e, _PAGES, kept), row=row) if kept else None


def pages_released(names: Names, e: ev.HostPagesReleased) -> ev.HostPagesReleased | None:
    """By another trigger, where what filled or published the first page is gone."""
    request, state, held = names.tenant(e.row), names.state, list[tuple[int, int, int]]()
    if request is None:
        return None
    for at, (page, old) in enumerate(zip(e.pages, e.epochs, strict=True)):
        epoch, now = names.page(page, old), -1
        if epoch is None:
            continue
        if page not in request.reserved:
            now = names.entry(e.row, RESIDENT, e.entries[at]) if e.entries else -1
            if now < 0 or state.table(Table.HOST)[request.row, now] != page:
                continue
        held.append((page, epoch, now))
    for trigger in (e.trigger, *_PAGE_EXITS):
        promised = trigger is PageTrigger.abandoned
        kept = [part for part in held if promised == (part[2] < 0)]
        kept = [part for part in kept if _page_goes(names, part[0], trigger)]
        if kept:
            made = with_columns(e, (*_PAGES, "entries"), kept)
            entries = () if promised else made.entries
            return replace(made, row=request.row, trigger=trigger, entries=entries)
    return None


def _page_goes(names: Names, page: int, trigger: PageTrigger | None) -> bool:
    pages = names.state.pages
    others = pages.refs.item(page) > 1
    if trigger is None:
        return others or pages.state[page] == PageState.PUBLISHED
    return not others and names.page_goes(page, trigger)


def pages_evicted(names: Names, e: ev.HostPagesEvicted) -> ev.HostPagesEvicted | None:
    pages, kept = names.state.pages, list[tuple[int, int]]()
    for page, old in zip(e.pages, e.epochs, strict=True):
        epoch = names.page(page, old)
        idle = not pages.refs[page] and page in pages.hash_of
        if epoch is not None and idle and names.page_goes(page, PageTrigger.evicted):
            kept.append((page, epoch))
    return with_columns(e, _PAGES, kept) if kept else None


def published(names: Names, e: ev.PagesPublished) -> ev.PagesPublished | None:
    state, kept, places = names.state, list[tuple[int, int, bytes]](), list[tuple[int, int]]()
    parts = zip(e.places(), e.pages, e.epochs, e.page_hashes, strict=True)
    done: dict[int, int] = {}
    for (old, entry), page, old_epoch, name in parts:
        row, epoch = names.row(old), names.page(page, old_epoch)
        now = names.entry(old, RESIDENT, entry)
        if row < 0 or epoch is None or (name in state.prefix) != (page == 0):
            continue
        if now < 0 or now != done.get(row, state.rows.published.item(row)):
            continue
        if page and not names.page_goes(page, PageTrigger.published):
            continue
        done[row] = now + 1
        kept.append((page, epoch, name))
        places.append((row, now))
    if not kept:
        return None
    return _placed(with_columns(e, (*_PAGES, "page_hashes"), kept), names.row(e.row), places)


def pinned(names: Names, e: ev.TransferPinned) -> ev.TransferPinned | None:
    """Copies out fill the reservations in order."""
    state, kept, filled = names.state, list[tuple[int, ...]](), dict[int, int]()
    fields = ("transfers", "entries", "blocks", "block_epochs", "pages", "page_epochs")
    parts = zip(e.owners(), *(getattr(e, name) for name in fields), strict=True)
    for (old, _), ident, entry, block, block_was, page, page_was in parts:
        request, now = names.tenant(old), names.entry(old, RESIDENT, entry)
        block_epoch, page_epoch = names.block(block, block_was), names.page(page, page_was)
        if request is None or now < 0 or block_epoch is None or page_epoch is None:
            continue
        row, n = request.row, filled.get(request.row, 0)
        if state.table(Table.RESIDENT)[row, now] != block:
            continue
        if e.kind is TransferKind.RESTORE:
            fits = state.table(Table.HOST).item(row, now) == page
        else:
            fits = request.reserved[n : n + 1] == [page]
            fits &= names.block_goes(block, BlockTrigger.pinned)
            fits &= names.page_goes(page, PageTrigger.pinned)
            filled[row] = n + fits
        if fits:
            names.transfers[ident] = state.next_transfer + len(kept)
            copy = (names.transfers[ident], now, block, block_epoch, page, page_epoch)
            kept.append((*copy, row, request.epoch))
    if not kept:
        return None
    made = with_columns(e, (*fields, "rows", "request_epochs"), kept)
    owner = names.tenant(e.row)
    if e.rows or owner is None:
        return made
    return replace(made, row=owner.row, epoch=owner.epoch, rows=(), request_epochs=())


def answered(names: Names, e: Any) -> Any:
    """Enqueued, completed or failed on a rank: those whose quorum says what the event says."""
    state, kept = names.state, list[int]()
    for old in e.transfers:
        transfer, bit = state.transfers.get(names.transfers.get(old, -1)), 1 << e.rank
        if transfer is None:
            continue
        ranks, done = transfer.writers, transfer.completed
        trigger = TransferTrigger.failed if e.last else TransferTrigger.failed_partial
        if isinstance(e, ev.TransferEnqueued):
            ranks, done = transfer.readers, transfer.enqueued
            trigger = TransferTrigger.enqueued_last if e.last else TransferTrigger.enqueued_partial
        elif isinstance(e, ev.TransferCompleted):
            trigger = (
                TransferTrigger.completed_last if e.last else TransferTrigger.completed_partial
            )
        fits = ranks & bit and not done & bit and e.last == (done | bit == ranks)
        if fits and TRANSFER.table[transfer.state, trigger] != ILLEGAL:
            kept.append(transfer.transfer)
    return replace(e, transfers=tuple(kept)) if kept else None


def hot(names: Names, e: E) -> E | None:
    request = names.tenant(e.row)  # type: ignore[attr-defined]
    if request is None or HOT_REGION.table[request.hot, _HOT_MOVES[type(e)]] == ILLEGAL:
        return None
    return replace(e, row=request.row)


def hot_leased(names: Names, e: ev.HotLeased) -> ev.HotLeased | None:
    made, state, kept = hot(names, e), names.state, list[tuple[int, int]]()
    if made is None or state.table(Table.HOT)[made.row].any():
        return None
    for entry, (block, epoch) in enumerate(zip(e.blocks, e.epochs, strict=True)):
        if state.blocks.state[block] == BlockState.FREE:
            names.entered(e.row, BlockRole.HOT, entry, len(kept))
            names.blocks[block, epoch] = state.blocks.epoch.item(block) + 1
            kept.append((block, names.blocks[block, epoch]))
    return with_columns(made, _BLOCKS, kept)
