"""evolve: host pages, the prefix index, and transfers between the tiers.

PYTEST_DONT_REWRITE (what an assertion says is part of a fault's signature, see `fsm.reduce`)
"""

from __future__ import annotations

from collections import Counter
from itertools import repeat

import numpy as np

from hisparse.fsm import events as ev
from hisparse.fsm.columns import I64, add_one, ids, some
from hisparse.fsm.evolve.blocks import check_epochs, check_held, move_blocks, raise_epochs
from hisparse.fsm.evolve.requests import confirm_rows
from hisparse.fsm.machines import (
    HOST_PAGE,
    TRANSFER,
    BlockTrigger,
    PageState,
    PageTrigger,
    TransferState,
    TransferTrigger,
)
from hisparse.fsm.state import State, Transfer
from hisparse.fsm.wire import Table, TransferKind

# What is looked up once a copy.
RESTORE, SPILL = TransferKind.RESTORE, TransferKind.SPILL
STATES = tuple(TransferState)
PUBLISHED = int(PageState.PUBLISHED)


def move_pages(state: State, pages: I64, trigger: PageTrigger) -> None:
    p = state.pages
    HOST_PAGE.apply(p.state, pages, trigger, epochs=p.epoch, seq=state.seq + 1)


def host_pages_reserved(state: State, e: ev.HostPagesReserved, seq: int) -> None:
    pages, p = ids(e.pages), state.pages
    move_pages(state, pages, PageTrigger.reserved)
    raise_epochs("host page", p.epoch, pages, e.epochs)
    p.free.remove(pages)
    p.refs[pages] = 1
    p.partner[pages] = 0
    state.request_of(e.row).reserved.extend(e.pages)


def prefix_leased(state: State, e: ev.PrefixLeased, seq: int) -> None:
    pages, p = ids(e.pages), state.pages
    check_epochs("host page", p.epoch, pages, e.epochs)
    assert not some(p.state[pages] != PUBLISHED), "a prefix names only published pages"
    p.evictable.remove(pages[p.refs[pages] == 0])
    p.refs[pages] += 1
    state.table(Table.HOST)[e.row, : len(pages)] = pages
    state.rows.published[e.row] = len(pages)


def host_pages_released(state: State, e: ev.HostPagesReleased, seq: int) -> None:
    pages, p = ids(e.pages), state.pages
    check_epochs("host page", p.epoch, pages, e.epochs)
    request = state.request_of(e.row)
    _check_tokens(state, e, seq)
    left = p.refs[pages] - 1
    p.refs[pages] = left
    assert not some(left < 0), "a host page was given back twice"
    state.table(Table.HOST)[e.row, ids(e.entries)] = 0
    if e.trigger is None:
        idle = pages[p.refs[pages] == 0]
        assert not some(p.state[idle] != PUBLISHED), "an idle page needs a trigger"
        p.evictable.push(idle)
        return
    assert not np.count_nonzero(p.refs[pages]), "a host page with other owners cannot become free"
    move_pages(state, pages, e.trigger)
    if e.trigger is PageTrigger.abandoned:
        gone = set(e.pages)
        request.reserved = [page for page in request.reserved if page not in gone]
    _free_pages(state, pages)


def _check_tokens(state: State, e: ev.HostPagesReleased, seq: int) -> None:
    request = state.request_of(e.row)
    if e.trigger is PageTrigger.abandoned:
        assert not e.entries, f"{request.key}: a reservation has no table entry, {e.entries}"
        reserved = set(request.reserved)
        what, entries = f"reservation of row {e.row}:", e.pages
        held = [page if page in reserved else 0 for page in e.pages]
    else:
        what, entries = f"HOST entry of row {e.row}:", e.entries
        held = state.table(Table.HOST)[e.row, ids(e.entries)].tolist()
    check_held(HOST_PAGE, what, held, e.pages, e.epochs, entries, seq)


def host_pages_evicted(state: State, e: ev.HostPagesEvicted, seq: int) -> None:
    pages, p = ids(e.pages), state.pages
    check_epochs("host page", p.epoch, pages, e.epochs)
    move_pages(state, pages, PageTrigger.evicted)
    p.evictable.remove(pages)
    for page in e.pages:
        del state.prefix[p.hash_of.pop(page)]
    _free_pages(state, pages)


def _free_pages(state: State, pages: I64) -> None:
    assert np.count_nonzero(pages) == len(pages), "the null page is never freed"
    blocks = state.pages.partner[pages]
    state.blocks.partner[blocks] = 0
    state.pages.partner[pages] = 0
    state.pages.free.push(pages)


def pages_published(state: State, e: ev.PagesPublished, seq: int) -> None:
    p = state.pages
    pages = ids(e.pages)
    check_epochs("host page", p.epoch, pages, e.epochs)
    move_pages(state, pages[pages != 0] if 0 in e.pages else pages, PageTrigger.published)
    for page, page_hash in zip(e.pages, e.page_hashes, strict=True):
        assert (page_hash in state.prefix) == (page == 0), "one published page a prefix"
        if page:
            state.prefix[page_hash] = page
            p.hash_of[page] = page_hash
    published = state.rows.published
    for row, entry in e.places():
        assert published[row] == entry, "publication is gap-free"
        published[row] += 1


# -- transfers ------------------------------------------------------------------------------------


def transfer_pinned(state: State, e: ev.TransferPinned, seq: int) -> None:
    blocks, pages = ids(e.blocks), ids(e.pages)
    check_epochs("block", state.blocks.epoch, blocks, e.block_epochs)
    check_epochs("host page", state.pages.epoch, pages, e.page_epochs)
    assert e.readers and not e.readers & ~e.writers, "every reading rank writes its own copy"
    owners, epochs = e.rows or (e.row,) * len(blocks), e.request_epochs or repeat(e.epoch)
    rows, entries = ids(owners), ids(e.entries)
    resident, host = state.table(Table.RESIDENT), state.table(Table.HOST)
    assert resident[rows, entries].tolist() == list(e.blocks), (
        "a transfer names the block of another entry"
    )
    if e.kind is RESTORE:
        assert not some(host[rows, entries] != pages), (
            "a restore reads another page than the table's"
        )
        state.pages.refs[pages] += 1
        add_one(state.rows.unsettled, rows)
    else:
        _fill_reservations(state, e, owners)
        move_blocks(state, blocks, BlockTrigger.pinned)
        move_pages(state, pages, PageTrigger.pinned)
        host[rows, entries] = pages
        if e.kind is SPILL:
            add_one(state.rows.spilling, rows)
    first = state.next_transfer
    state.next_transfer += len(e.transfers)
    assert e.transfers == tuple(range(first, state.next_transfer)), (
        "transfer ids count up and are never reused"
    )
    made = map(
        Transfer,
        e.transfers, epochs, repeat(e.kind), owners, e.entries, e.blocks, e.block_epochs, e.pages,
        e.page_epochs, repeat(e.readers), repeat(e.writers), repeat(seq),
    )  # fmt: skip
    state.transfers.update(zip(e.transfers, made, strict=True))
    for row in owners:
        state.request_of(row).in_flight += 1


def _fill_reservations(state: State, e: ev.TransferPinned, owners: ev.Ints) -> None:
    """Copies to the host take their pages from the reservations of their requests."""
    filled: dict[int, list[int]] = {}
    for row, page in zip(owners, e.pages, strict=True):
        filled.setdefault(row, []).append(page)
    for row, pages in filled.items():
        reserved = state.request_of(row).reserved
        assert reserved[: len(pages)] == pages, "a copy fills the reservation in order"
        del reserved[: len(pages)]


def _move_transfers(moved: list[Transfer], trigger: TransferTrigger, seq: int) -> None:
    before = after = None
    for t in moved:
        if t.state is not before:  # mostly all are in one state
            before = t.state
            after = STATES[TRANSFER.next(before, trigger, t.transfer, epoch=t.epoch, seq=seq)]
        assert after is not None
        t.state = after


def transfer_enqueued(state: State, e: ev.TransferEnqueued, seq: int) -> None:
    moved, bit = [state.transfers[ident] for ident in e.transfers], 1 << e.rank
    for t in moved:
        assert t.readers & bit and not t.enqueued & bit, (t, e.rank)
        t.enqueued |= bit
        assert e.last == (t.enqueued == t.readers), "the quorum decides, not the event"
    trigger = TransferTrigger.enqueued_last if e.last else TransferTrigger.enqueued_partial
    _move_transfers(moved, trigger, seq)
    if e.last:
        out = [t for t in moved if t.kind is not RESTORE]
        move_blocks(state, ids([t.block for t in out]), BlockTrigger.enqueued)
        move_pages(state, ids([t.page for t in out]), PageTrigger.enqueued)


def transfer_completed(state: State, e: ev.TransferCompleted, seq: int) -> None:
    moved, bit = [state.transfers[ident] for ident in e.transfers], 1 << e.rank
    for t in moved:
        assert t.writers & bit and not t.completed & bit, (t, e.rank)
        t.completed |= bit
        assert e.last == (t.completed == t.writers), "the quorum decides, not the event"
    trigger = TransferTrigger.completed_last if e.last else TransferTrigger.completed_partial
    _move_transfers(moved, trigger, seq)
    if not e.last:
        return
    if any(t.state is TransferState.FAILED for t in moved):
        _failed(state, [t for t in moved if t.state is TransferState.FAILED])
        moved = [t for t in moved if t.state is not TransferState.FAILED]
    restored = [t for t in moved if t.kind is RESTORE]
    out = [t for t in moved if t.kind is not RESTORE]
    held = [t for t in out if t.holds_block]
    move_pages(state, ids([t.page for t in out]), PageTrigger.completed)
    _now_partners(state, held, BlockTrigger.completed)
    if restored:
        _now_partners(state, restored, BlockTrigger.restored)
        for t in restored:
            state.pages.refs[t.page] -= 1
    _settle(state, moved)
    read = [t.row for t in moved if t.kind is RESTORE or not t.holds_block]  # `is_read`
    for row, copies in sorted(Counter(read).items()) if read else ():
        state.rows.unsettled[row] -= copies
        assert state.rows.unsettled[row] >= 0, f"row {row}: more copies settled than were read"
        if state.rows.unsettled[row] == 0:
            confirm_rows(state, row)


def _now_partners(state: State, copied: list[Transfer], trigger: BlockTrigger) -> None:
    """Block and host page of each copy hold the same."""
    blocks, pages = ids([t.block for t in copied]), ids([t.page for t in copied])
    move_blocks(state, blocks, trigger)
    state.blocks.partner[blocks] = pages
    state.pages.partner[pages] = blocks


def transfer_failed(state: State, e: ev.TransferFailed, seq: int) -> None:
    moved = [state.transfers[ident] for ident in e.transfers]
    news = [t for t in moved if t.state is not TransferState.FAILING]
    for t in moved:
        assert t.writers >> e.rank & 1 and not t.completed >> e.rank & 1, (t, e.rank)
        t.completed |= 1 << e.rank
        assert e.last or t.completed != t.writers, "the quorum decides, not the event"
    trigger = TransferTrigger.failed if e.last else TransferTrigger.failed_partial
    _move_transfers(moved, trigger, seq)
    out = [t for t in news if t.kind is not RESTORE]
    move_pages(state, ids([t.page for t in out]), PageTrigger.failed)
    for t in news:
        state.request_of(t.row).failures += 1
    if e.last:
        _failed(state, moved)
    else:
        kept = ids([t.block for t in out if t.holds_block])
        move_blocks(state, kept, BlockTrigger.failed_partial)


def _failed(state: State, moved: list[Transfer]) -> None:
    """Failed copies on which every rank has answered: nothing can touch block or page any more."""
    held = ids([t.block for t in moved if t.kind is not RESTORE and t.holds_block])
    move_blocks(state, held, BlockTrigger.failed)
    for t in moved:
        if t.kind is RESTORE:
            state.pages.refs[t.page] -= 1
    _settle(state, moved)  # what was read of them stays unsettled, until the request is rewound


def _settle(state: State, transfers: list[Transfer]) -> None:
    for t in transfers:
        del state.transfers[t.transfer]
        request = state.request_of(t.row)
        assert request.in_flight > 0, f"transfer {t.transfer} settled twice"
        request.in_flight -= 1
        if t.kind is SPILL and t.holds_block:
            state.rows.spilling[t.row] -= 1
