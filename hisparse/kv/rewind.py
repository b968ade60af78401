"""Rewind: a copy failed whose page steps had read; the request goes back and computes on.

The last valid boundary lies before the first lost page and before the first row that is not
certain, on a page boundary; a failed restore loses no row, since its host page is valid. A page
whose indexer rows could not be loaded is lost too, though its host page is published: the request
gives its lease back and computes the page for itself. Rows
beyond it are taken back at once (RequestRewound). What held them goes back when nothing can touch
it any more: copies of these pages keep their leases until they are acknowledged, host pages until
every rank has retired the last step that could read them. Then the request goes on (RequestResumed)
and computes the rows again, from tokens that the engine still has.

    rows      0 ........ published ........ boundary ........ certain ........ computed
              found by prefix    kept       | taken back, tokens stand | tokens withdrawn
"""

from __future__ import annotations

import numpy as np

from hisparse.config import ceil_div
from hisparse.fsm import events as ev
from hisparse.fsm.machines import BlockState, BlockTrigger, PageState, TransferState
from hisparse.fsm.state import Key, State, Transfer
from hisparse.fsm.wire import Table, TransferKind
from hisparse.kv.block_pool import block_epochs
from hisparse.kv.budget import spare, stays
from hisparse.kv.decision import I64, Decision, ints
from hisparse.kv.host_pool import next_page_epochs, take_pages
from hisparse.kv.lifecycle import end_request, release_copies
from hisparse.kv.managers import HiSparseIndexManager, HiSparseResidentManager
from hisparse.kv.residency import lease_hot, reclaim
from hisparse.kv.transfers import pin


def rewind(state: State, row: int, failed: list[Transfer], cause: int) -> Decision[None]:
    """`failed` copies of `row`, which steps could read, are known to have failed."""
    request, rows, page_size = state.request_of(row), state.rows, state.page_size
    computed, certain = int(rows.computed[row]), int(rows.confirmed[row])
    lost = [t.entry * page_size for t in failed if t.kind is not TransferKind.RESTORE]
    boundary = min([certain, *lost])
    if boundary < computed:
        boundary -= boundary % page_size
    first = ceil_div(boundary, page_size)
    reopened = _reopened(state, row, first)
    cause = yield ev.RequestRewound(
        cause, *request.key, row, boundary, certain, ints(reopened), block_epochs(state, reopened)
    )
    yield from give_back_restores(state, failed, cause)
    yield from resume(state, request.key, cause)


def rewind_to_page(state: State, row: int, first: int, cause: int) -> Decision[bool]:
    """Take `row` back to page `first`, from which on its prefix has no indexer rows; False, and
    nothing changed, where the host pages that it needs for itself are not there."""
    request = state.request_of(row)
    shared = int(state.rows.published[row]) - first  # not written: they are others' too
    if shared > state.pages.available:
        return False
    reopened = _reopened(state, row, first)
    cause = yield ev.RequestRewound(
        cause, *request.key, row, first * state.page_size, int(state.rows.confirmed[row]),
        ints(reopened), block_epochs(state, reopened),
    )  # fmt: skip
    if shared > 0:
        fresh = yield from take_pages(state, shared, cause)
        yield ev.HostPagesReserved(cause, row, ints(fresh), next_page_epochs(state, fresh))
    yield from resume(state, request.key, cause)
    return True


def give_back_restores(state: State, failed: list[Transfer], cause: int) -> Decision[None]:
    """Blocks that restores among `failed` were to fill for live requests, once no rank fills them
    any more. Their host pages are valid, and are read through the hot region from now on. Who stays
    has none, and restores them again (so often as `kv.acknowledgements` lets copies fail)."""
    rows: dict[int, list[int]] = {}
    for t in failed:
        over = t.kind is TransferKind.RESTORE and t.transfer not in state.transfers
        kept = t.entry * state.page_size < state.rows.computed[t.row]
        if over and kept and state.rows.live[t.row]:
            rows.setdefault(t.row, []).append(t.entry)
    for row, entries in rows.items():
        if stays(state)[row]:
            yield from pin(state, TransferKind.RESTORE, row, np.array(entries), cause)
            continue
        yield from lease_hot(state, row, cause)
        yield from HiSparseResidentManager(state).give_back(
            row, np.array(entries), BlockTrigger.abandoned, cause
        )


def _reopened(state: State, row: int, first: int) -> I64:
    """The index block that holds pages on both sides of page `first`, if it was sealed and is not
    shared (a shared one is copied when the request resumes)."""
    entry, within = divmod(first, state.index_pages_per_block)
    block = state.table(Table.INDEX)[row, entry : entry + 1].astype(np.int64)
    alone = (state.blocks.state[block] == BlockState.CLEAN) & (state.blocks.refs[block] == 1)
    return block[alone] if within else block[:0]


def resume(state: State, key: Key, cause: int) -> Decision[None]:
    """Give back what a rewinding request holds beyond its rows, if that is possible by now."""
    rows, row = state.rows, state.requests[key].row
    first = ceil_div(int(rows.computed[row]), state.page_size)
    if rows.planned[row] > rows.computed[row]:
        return  # a step is under way
    mine = [t for t in state.transfers.values() if t.row == row]
    if any(t.entry >= first or t.state is TransferState.FAILING for t in mine):
        return
    beyond = state.table(Table.INDEX)[row, first // state.index_pages_per_block :]
    if any(copy.block in beyond for copy in state.suffix_copies.values()):
        return
    held = state.table(Table.HOST)[row, first:].any()
    if held and min(state.retired) < rows.last_step[row]:
        return
    index = HiSparseIndexManager(state)
    need = index.shared_beyond(row, first)  # blocks of its own in their place: nobody owes it these
    if need > spare(state):
        yield from reclaim(state, need - spare(state), cause, "rewind")
    if need > spare(state):
        if not rows.spilling.any():
            yield ev.RequestAborted(cause, *key, "copy failed, and no GPU block to rewind to")
            yield from end_request(state, key, False, cause)
        return
    yield from _replace_host_pages(state, row, first, cause)
    yield from HiSparseResidentManager(state).release_beyond(row, first, cause)
    yield from index.release_beyond(row, first, cause)
    yield ev.RequestResumed(cause, *key, row)


def _replace_host_pages(state: State, row: int, first: int, cause: int) -> Decision[None]:
    """Copies of rows that were taken back: as many pages are reserved in their place. (In that of
    published ones, when the request went back.)"""
    entries = np.flatnonzero(state.table(Table.HOST)[row, first:]) + first
    pages = state.table(Table.HOST)[row, entries]
    own = int(np.count_nonzero(state.pages.state[pages] != PageState.PUBLISHED))
    yield from release_copies(state, row, entries, cause)
    if own:
        fresh = yield from take_pages(state, own, cause)
        yield ev.HostPagesReserved(cause, row, ints(fresh), next_page_epochs(state, fresh))
