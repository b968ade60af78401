"""Invariants of one state: each yields a message per fault and looks only at its argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from hisparse.fsm.machines import BlockRole, BlockState, HotState, PageState
from hisparse.fsm.state import State
from hisparse.fsm.wire import Table, TransferKind

Bools = npt.NDArray[np.bool_]


def _report(what: str, wrong: Bools, states: npt.NDArray[np.uint8], name: type) -> Iterator[str]:
    for ident in np.flatnonzero(wrong)[:4].tolist():
        yield f"{what} {ident} ({name(int(states[ident])).name})"


def conservation(state: State) -> Iterator[str]:
    """Queue membership, references and state agree for every id; the null ids are in no queue."""
    b, p = state.blocks, state.pages
    free, cached = b.state == BlockState.FREE, b.state == BlockState.CACHED
    idle = free | cached
    held = np.where(b.state == BlockState.QUARANTINED, True, b.refs > 0)
    wrong = (b.free.members() != free) | (b.cached.members() != cached) | (held == idle)
    wrong[0] = b.free.members()[0] or b.cached.members()[0] or b.refs[0] != 0 or not free[0]
    for fault in _report("block", wrong, b.state, BlockState):
        yield f"{fault} is not in exactly one of free, cached, leased, quarantined"
    free = p.state == PageState.FREE
    evictable = (p.state == PageState.PUBLISHED) & (p.refs == 0)
    held = np.where(p.state == PageState.QUARANTINED, True, p.refs > 0)
    wrong = (p.free.members() != free) | (p.evictable.members() != evictable)
    wrong |= held == (free | evictable)
    wrong[0] = p.free.members()[0] or p.evictable.members()[0] or p.refs[0] != 0 or not free[0]
    for fault in _report("host page", wrong, p.state, PageState):
        yield f"{fault} is not in exactly one of free, evictable, leased, quarantined"
    if len(state.suffix.state):
        yield from _tier_conserved(state)


def _tier_conserved(state: State) -> Iterator[str]:
    """The CPU tier of indexer pages: like host pages, and found exactly where it says."""
    s = state.suffix
    free, stored = s.state == PageState.FREE, s.state == PageState.PUBLISHED
    evictable = stored & (s.refs == 0)
    wrong = (s.free.members() != free) | (s.evictable.members() != evictable)
    wrong |= (s.refs > 0) & ~stored
    wrong[0] = s.free.members()[0] or s.evictable.members()[0] or s.refs[0] != 0 or not free[0]
    for fault in _report("suffix page", wrong, s.state, PageState):
        yield f"{fault} is not in exactly one of free, evictable, leased, in flight"
    found = {page: page_hash for page_hash, page in state.suffix_index.items()}
    if found != s.hash_of or set(found) != set(np.flatnonzero(~free).tolist()):
        yield "the index of the suffix tier names other pages than are held"


def refcount_exact(state: State) -> Iterator[str]:
    """References of blocks and pages, recounted from tables, reservations and restores."""
    blocks = np.zeros(len(state.blocks.refs), dtype=np.int64)
    for table in (Table.RESIDENT, Table.INDEX, Table.HOT):
        blocks += np.bincount(state.table(table).ravel(), minlength=len(blocks))
    pages = np.bincount(state.table(Table.HOST).ravel(), minlength=len(state.pages.refs))
    for request in state.requests.values():
        for page in request.reserved:
            pages[page] += 1
    for transfer in state.transfers.values():
        if transfer.kind is TransferKind.RESTORE:
            pages[transfer.page] += 1
    suffixes = np.zeros(len(state.suffix.refs), dtype=np.int64)
    for copy in state.suffix_copies.values():
        suffixes[copy.suffix] += copy.load
    for what, refs, counted in (
        ("block", state.blocks.refs, blocks),
        ("host page", state.pages.refs, pages),
        ("suffix page", state.suffix.refs, suffixes),
    ):
        counted[:1] = 0
        for ident in np.flatnonzero(refs != counted)[:4].tolist():
            yield f"{what} {ident} has {refs[ident]} references, {counted[ident]} entries name it"


def always_readable(state: State) -> Iterator[str]:
    """Every computed row of a live request: in a readable block, or on a readable host page."""
    rows, page_size = state.rows, state.page_size
    live = np.flatnonzero(rows.live)
    if not len(live):
        return
    resident, host = state.table(Table.RESIDENT)[live], state.table(Table.HOST)[live]
    needed = np.arange(resident.shape[1]) * page_size < rows.computed[live][:, None]
    page_state = state.pages.state[host]
    durable = np.isin(page_state, (PageState.COMPLETED, PageState.PUBLISHED))
    enqueued = page_state == PageState.ENQUEUED
    hot = np.array([state.request_of(r).hot is HotState.LEASED for r in live.tolist()])
    # A resolve reads the block that an entry names, and the host only where it names none.
    on_host = (resident == 0) & (host > 0) & (durable | enqueued) & hot[:, None]
    block_state = state.blocks.state[resident]
    filling = [t.block for t in state.transfers.values() if t.kind is TransferKind.RESTORE]
    restoring = (block_state == BlockState.RESERVED) & durable & np.isin(resident, filling)
    kept = (BlockState.DIRTY, BlockState.PINNED, BlockState.ENQUEUED, BlockState.CLEAN)
    owned = state.blocks.role[resident] == BlockRole.RESIDENT
    on_gpu = (resident > 0) & owned & (np.isin(block_state, kept) | restoring)
    for at, entry in np.argwhere(needed & ~on_gpu & ~on_host)[:4].tolist():
        row = int(live[at])
        yield (
            f"page {entry} of request row {row} has {rows.computed[row]} computed rows before its "
            f"end and no readable copy (block {resident[at, entry]}, host page {host[at, entry]})"
        )


STATE_CHECKS: dict[str, Callable[[State], Iterator[str]]] = {
    "conservation": conservation,
    "refcount_exact": refcount_exact,
    "always_readable": always_readable,
}
