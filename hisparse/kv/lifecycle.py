"""The ends of a request: rows accepted and pages sealed, then finish, abort or preempt, and drain.

At an end the request's leases are handed over in the same decision: pages with a copy under way
stay leased to it (the copy still publishes), everything else on the GPU goes back at once, since
all writers are stream-ordered. Host pages go back when every rank has retired the last step that
could read them and every transfer has settled; only then is the row free for another request.
"""

from __future__ import annotations

import numpy as np

from hisparse.fsm import events as ev
from hisparse.fsm.machines import BlockState, HotState, PageState, PageTrigger
from hisparse.fsm.state import Key, State
from hisparse.fsm.wire import Table, TransferKind
from hisparse.kv.budget import window_need
from hisparse.kv.decision import I64, Decision, ints
from hisparse.kv.host_pool import page_epochs
from hisparse.kv.managers import HiSparseHotManager, HiSparseIndexManager, HiSparseResidentManager
from hisparse.kv.transfers import pin


def seal_pages(state: State, row: int, first: int, cause: int) -> Decision[None]:
    """Pages of `row` from `first` on are whole: seal index blocks, and write back (eager)."""
    end = int(state.rows.computed[row]) // state.page_size
    yield from HiSparseIndexManager(state).seal(row, first, end, cause)
    if not state.config.offload or state.config.policy.write_back != "eager":
        return
    entries = _dirty(state, row, end)
    squeezed = state.request_of(row).hot is HotState.LEASED
    above = int(state.rows.resident[row] - state.rows.spilling[row] - window_need(state)[row])
    spilled = len(entries) if squeezed and above >= len(entries) else 0
    yield from pin(state, TransferKind.SPILL, row, entries[:spilled], cause)
    yield from pin(state, TransferKind.WRITE_BACK, row, entries[spilled:], cause)


def _dirty(state: State, row: int, end: int) -> I64:
    """Sealed pages below `end` that exist on the GPU alone and have no copy planned."""
    table = state.table(Table.RESIDENT)[row, :end]
    return np.flatnonzero((table != 0) & (state.blocks.state[table] == BlockState.DIRTY))


def end_request(state: State, key: Key, keep: bool, cause: int) -> Decision[None]:
    """Hand over the leases of a request that just ended; `keep` writes its sealed pages back."""
    request = state.requests[key]
    row = request.row
    if row < 0:
        yield ev.RequestDrained(cause, *key, row)
        return
    if keep and state.config.offload:
        sealed = int(state.rows.computed[row]) // state.page_size
        yield from pin(state, TransferKind.WRITE_BACK, row, _dirty(state, row, sealed), cause)
    if request.reserved:
        pages = np.array(request.reserved, dtype=np.int64)
        yield ev.HostPagesReleased(
            cause, row, PageTrigger.abandoned, ints(pages), page_epochs(state, pages)
        )
    yield from HiSparseHotManager(state).release(row, cause)
    yield from HiSparseIndexManager(state).release(row, cause)
    yield from HiSparseResidentManager(state).release(row, cause)
    yield from drain(state, key, cause)


def drain(state: State, key: Key, cause: int) -> Decision[None]:
    """Release what has settled of an ended request; forget it when nothing is left."""
    request = state.requests[key]
    row = request.row
    yield from HiSparseResidentManager(state).release(row, cause)
    # Without a host tier nothing but stream-ordered work reads, so there is nothing to wait for.
    unread = not state.config.offload or min(state.retired) >= state.rows.last_step[row]
    if request.in_flight or not unread:
        return
    table = state.table(Table.HOST)[row]
    entries = np.flatnonzero(table)[::-1]  # tail first: the head of a prefix is evicted last
    pages = table[entries].astype(np.int64)
    states = state.pages.state[pages]
    for trigger, wanted in (
        (PageTrigger.reclaimed, PageState.FAILED),
        (PageTrigger.released, PageState.COMPLETED),
        (None, PageState.PUBLISHED),
    ):
        gone, where = pages[states == wanted], entries[states == wanted]
        if len(gone):
            yield ev.HostPagesReleased(
                cause, row, trigger, ints(gone), page_epochs(state, gone), ints(where)
            )
    yield ev.RequestDrained(cause, *key, row)
