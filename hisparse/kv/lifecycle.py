"""The ends of a request: rows accepted and pages sealed, then finish, abort or preempt, and drain.

At an end the request's leases are handed over in the same decision: pages with a copy under way
stay leased to it (the copy still publishes), everything else on the GPU goes back at once, since
all writers are stream-ordered. Host pages go back when every rank has retired the last step that
could read them and every transfer has settled; only then is the row free for another request.
"""

from __future__ import annotations

import numpy as np

from hisparse.fsm import events as ev
from hisparse.fsm.machines import BlockState, PageState, PageTrigger
from hisparse.fsm.state import Key, State
from hisparse.fsm.wire import Table, TransferKind
from hisparse.kv.budget import window_need
from hisparse.kv.decision import I64, Bools, Decision, ints, spans
from hisparse.kv.host_pool import page_epochs
from hisparse.kv.managers import HiSparseHotManager, HiSparseIndexManager, HiSparseResidentManager
from hisparse.kv.policies.registry import policy_of
from hisparse.kv.residency import leaves_when_sealed
from hisparse.kv.transfers import pin, pin_rows

DIRTY = int(BlockState.DIRTY)  # numpy compares an array with a plain int five times faster


def seal_pages(state: State, rows: I64, first: I64, cause: int) -> Decision[None]:
    """Pages of `rows[i]` from `first[i]` on are whole: seal index blocks, write back (eager)."""
    end = state.rows.computed[rows] // state.page_size
    yield from HiSparseIndexManager(state).seal(rows, first, end, cause)
    if not state.config.offload or state.config.policy.write_back != "eager":
        return
    again = [i for i, row in enumerate(rows.tolist()) if state.request_of(row).failures]
    if again:
        first[again] = 0  # a page whose copy failed is copied again with the next that is sealed
    rows, entries = spans(rows, first, end)
    dirty = _is_dirty(state, rows, entries)
    rows, entries = rows[dirty], entries[dirty]
    held = state.rows
    if np.count_nonzero(held.hot[rows]) and leaves_when_sealed(state):
        above = (held.resident - held.spilling - window_need(state))[rows]
        starts = np.flatnonzero(np.diff(rows, prepend=-1))
        nth = np.arange(len(rows)) - np.repeat(starts, np.diff(starts, append=len(rows)))
        all_of_it = above >= np.bincount(rows)[rows]
        fits = nth < above if policy_of(state).host_first else all_of_it
        leave = (held.hot[rows] > 0) & fits
        yield from pin_rows(state, TransferKind.SPILL, rows[leave], entries[leave], cause)
        rows, entries = rows[~leave], entries[~leave]
    yield from pin_rows(state, TransferKind.WRITE_BACK, rows, entries, cause)


def _is_dirty(state: State, rows: I64 | int, entries: I64) -> Bools:
    """Which of these pages exist on the GPU alone and have no copy planned."""
    blocks = state.table(Table.RESIDENT)[rows, entries]
    dirty: Bools = state.blocks.state[blocks] == DIRTY  # the null block is always FREE
    return dirty


def end_request(state: State, key: Key, keep: bool, cause: int) -> Decision[None]:
    """Hand over the leases of a request that just ended; `keep` writes its sealed pages back."""
    request = state.requests[key]
    row = request.row
    if row < 0:
        yield ev.RequestDrained(cause, *key, row)
        return
    if keep and state.config.offload:
        sealed = np.arange(int(state.rows.computed[row]) // state.page_size)
        sealed = sealed[_is_dirty(state, row, sealed)]
        yield from pin(state, TransferKind.WRITE_BACK, row, sealed, cause)
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
    if state.rows.index[row]:  # an index block was kept for a copy to or from the CPU tier
        yield from HiSparseIndexManager(state).release(row, cause)
    # Without a host tier nothing but stream-ordered work reads, so there is nothing to wait for.
    unread = not state.config.offload or min(state.retired) >= state.rows.last_step[row]
    if request.in_flight or not unread or state.rows.index[row]:
        return
    entries = np.flatnonzero(state.table(Table.HOST)[row])[::-1]
    yield from release_copies(state, row, entries, cause)  # the head of a prefix is evicted last
    yield ev.RequestDrained(cause, *key, row)


def release_copies(state: State, row: int, entries: I64, cause: int) -> Decision[None]:
    """Give back the host pages behind these entries of `row`, in this order: failed copies, those
    that nobody was told of, and the lease of published ones."""
    pages = state.table(Table.HOST)[row, entries].astype(np.int64)
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
