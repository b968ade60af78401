"""evolve: the CPU tier of indexer pages, and the copies between it and the index blocks.

PYTEST_DONT_REWRITE (what an assertion says is part of a fault's signature, see `fsm.reduce`)
"""

from __future__ import annotations

import numpy as np

from hisparse.fsm import events as ev
from hisparse.fsm.columns import I64, ids
from hisparse.fsm.evolve.blocks import check_epochs, move_blocks, raise_epochs
from hisparse.fsm.evolve.requests import confirm_rows, register_index_page
from hisparse.fsm.machines import HOST_PAGE, BlockState, BlockTrigger, PageState, PageTrigger
from hisparse.fsm.state import Request, State, SuffixCopy
from hisparse.fsm.wire import Table


def suffix_asked(state: State, e: ev.SuffixAsked, seq: int) -> None:
    key = (e.request, e.epoch)
    assert key in state.waiting, f"{key} is not waiting: its suffix is not asked for"
    assert 0 <= e.found <= e.asked, (e.found, e.asked)
    state.suffix_answers[key] = (e.page, e.found)


def _move(state: State, pages: I64, *triggers: PageTrigger) -> None:
    for trigger in triggers:
        HOST_PAGE.apply(
            state.suffix.state, pages, trigger, epochs=state.suffix.epoch, seq=state.seq + 1
        )


def suffix_pinned(state: State, e: ev.SuffixPinned, seq: int) -> None:
    blocks, pages, entries = ids(e.blocks), ids(e.suffixes), ids(e.entries)
    request, per_block = state.request_of(e.row), state.index_pages_per_block
    check_epochs("block", state.blocks.epoch, blocks, e.block_epochs)
    table = state.table(Table.INDEX)[e.row]
    assert (table[entries // per_block] == blocks).all(), "a copy names the block of another entry"
    assert (entries % per_block == ids(e.slots)).all(), "a copy names the slot of another page"
    if e.load:
        _lease(state, e, request, pages)
        move_blocks(state, np.unique(blocks), BlockTrigger.written)
        state.rows.unsettled[e.row] += len(pages)
    else:
        assert (state.blocks.state[blocks] == BlockState.CLEAN).all(), "only sealed blocks are read"
        end = (int(entries.max()) + 1) * state.page_size
        assert end <= state.rows.confirmed[e.row], f"{request.key} stores rows that are not certain"
        _reserve(state, e, request, pages)
    request.in_flight += len(pages)
    parts = (e.transfers, e.entries, e.blocks, e.block_epochs, e.suffixes, e.suffix_epochs)
    for ident, entry, block, block_epoch, page, page_epoch in zip(*parts, strict=True):
        assert ident == state.next_transfer, "transfer ids count up and are never reused"
        state.next_transfer += 1
        state.suffix_copies[ident] = SuffixCopy(
            ident, e.epoch, e.load, e.row, entry, block, block_epoch, page, page_epoch,
            e.writers, seq,
        )  # fmt: skip


def _lease(state: State, e: ev.SuffixPinned, request: Request, pages: I64) -> None:
    tier = state.suffix
    check_epochs("suffix page", tier.epoch, pages, e.suffix_epochs)
    assert (tier.state[pages] == PageState.PUBLISHED).all(), "only stored pages are loaded"
    for page, entry in zip(e.suffixes, e.entries, strict=True):
        assert tier.hash_of[page] == request.hashes[entry], f"suffix page {page} is another's"
    tier.evictable.remove(pages[tier.refs[pages] == 0])
    tier.refs[pages] += 1


def _reserve(state: State, e: ev.SuffixPinned, request: Request, pages: I64) -> None:
    tier = state.suffix
    _move(state, pages, PageTrigger.reserved, PageTrigger.pinned)
    raise_epochs("suffix page", tier.epoch, pages, e.suffix_epochs)
    tier.free.remove(pages)
    for page, entry in zip(e.suffixes, e.entries, strict=True):
        page_hash = request.hashes[entry]
        assert page_hash not in state.suffix_index, "a page is stored once"
        state.suffix_index[page_hash] = page
        tier.hash_of[page] = page_hash


def suffix_completed(state: State, e: ev.SuffixCompleted, seq: int) -> None:
    _answer(state, e, failed=0)


def suffix_failed(state: State, e: ev.SuffixFailed, seq: int) -> None:
    _answer(state, e, failed=1 << e.rank)


def _answer(state: State, e: ev.SuffixCompleted | ev.SuffixFailed, failed: int) -> None:
    moved = [state.suffix_copies[ident] for ident in e.transfers]
    for copy in moved:
        assert copy.writers >> e.rank & 1 and not copy.answered >> e.rank & 1, (copy, e.rank)
        copy.answered |= 1 << e.rank
        copy.failed |= failed
        assert e.last == (copy.answered == copy.writers), "the quorum decides, not the event"
    if not e.last:
        return
    settled = []
    for copy in moved:
        del state.suffix_copies[copy.transfer]
        request = state.request_of(copy.row)
        assert request.in_flight > 0, f"transfer {copy.transfer} settled twice"
        request.in_flight -= 1
        request.failures += bool(copy.failed)
        if not copy.load:
            _stored(state, copy)
        else:
            _give_back(state, copy)
            gone = copy.entry * state.page_size >= state.rows.computed[copy.row]  # taken back
            if gone or not copy.failed:
                settled.append((copy, gone))
    for copy, gone in settled:  # what else failed stays so: rows that read it are never certain
        if not gone:
            register_index_page(state, state.request_of(copy.row), copy.entry)
        state.rows.unsettled[copy.row] -= 1
        assert state.rows.unsettled[copy.row] >= 0, f"row {copy.row}: more settled than were read"
        if state.rows.unsettled[copy.row] == 0:
            confirm_rows(state, copy.row)


def _stored(state: State, copy: SuffixCopy) -> None:
    page, tier = np.array([copy.suffix]), state.suffix
    if not copy.failed:
        _move(state, page, PageTrigger.enqueued, PageTrigger.completed, PageTrigger.published)
        tier.evictable.push(page)
        return
    _move(state, page, PageTrigger.failed, PageTrigger.reclaimed)
    _forget(state, page)


def _give_back(state: State, copy: SuffixCopy) -> None:
    tier = state.suffix
    tier.refs[copy.suffix] -= 1
    assert tier.refs[copy.suffix] >= 0, f"suffix page {copy.suffix} was given back twice"
    if tier.refs[copy.suffix] == 0:
        tier.evictable.push(np.array([copy.suffix]))


def suffix_evicted(state: State, e: ev.SuffixEvicted, seq: int) -> None:
    pages, tier = ids(e.suffixes), state.suffix
    check_epochs("suffix page", tier.epoch, pages, e.suffix_epochs)
    _move(state, pages, PageTrigger.evicted)
    tier.evictable.remove(pages)
    _forget(state, pages)


def _forget(state: State, pages: I64) -> None:
    """Pages that just became FREE: nothing finds them."""
    assert pages.all(), "the null page is never freed"
    for page in pages.tolist():
        del state.suffix_index[state.suffix.hash_of.pop(page)]
    state.suffix.free.push(pages)


def touch_suffix(state: State, request: Request) -> None:
    """An ended request's stored pages are the most recently used, its head last to be evicted."""
    tier = state.suffix
    found = [state.suffix_index[h] for h in reversed(request.hashes) if h in state.suffix_index]
    pages = np.array(found, dtype=np.int64)
    pages = pages[(tier.state[pages] == PageState.PUBLISHED) & (tier.refs[pages] == 0)]
    tier.evictable.remove(pages)
    tier.evictable.push(pages)
