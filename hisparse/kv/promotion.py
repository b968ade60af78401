"""Promotion: pages come back to the GPU when the pressure is gone, and then the hot region goes.

Spilling and promoting must not chase each other, so the two are apart in time and in room. Pressure
holds all promotion back for `promote_after_steps` steps (PromotionHeld, renewed while it lasts);
after that a request may come back only if the spare blocks hold all its pages to its very end, the
growth to their ends of all requests that are resident already, and the watermark; and while a
request waits, none comes back. Nothing that is running can then bring the pressure back, only a
later arrival: at most one round of promotion in `promote_after_steps` steps, whatever the load.
What is lost again was clean, and costs no copy.

    hold over, nobody waits
       │ policy ranks the requests; the first for which there is room
       ▼
    host page ── GPU copy still cached? ── adopted ──┐
       └─ no: RESTORE, at most promote_pages a step ─┴─► no page left on the host ─► HotReleased

A restored entry names its block at once, as at admission: the next step's compute stream waits for
the copies, which is why a step takes few of them. The hot region is given back when all of them are
complete, and stays promised to the request: it can be wanted again without waiting.
"""

from __future__ import annotations

import numpy as np

from hisparse.fsm import events as ev
from hisparse.fsm.machines import BlockRole, BlockState, PageState
from hisparse.fsm.state import State
from hisparse.fsm.wire import Table, TransferKind
from hisparse.kv.block_pool import block_epochs, next_block_epochs, take_blocks
from hisparse.kv.budget import spare, window_unmet
from hisparse.kv.decision import I64, Decision, ints
from hisparse.kv.managers import HiSparseHotManager
from hisparse.kv.policies.base import ask_promotions
from hisparse.kv.policies.registry import policy_of
from hisparse.kv.transfers import pin

DURABLE = (PageState.COMPLETED, PageState.PUBLISHED)


def promote(state: State, cause: int) -> Decision[None]:
    """Bring pages back, a few a step, and give back hot regions that nothing is read through."""
    if state.step < state.promotion_held_until or not np.count_nonzero(state.rows.hot):
        return
    if state.rewinding:
        return  # what a request holds beyond its rows is not of its pages
    hot = state.rows.live & (state.rows.hot > 0)
    policy = policy_of(state)
    if policy.host_first:
        return
    yield from _give_back_hot(state, hot, cause)
    if state.waiting or not state.config.policy.promote_pages:
        return
    room = spare(state) - _reserve(state, hot)
    on_host = state.rows.pages > state.rows.resident
    rest = state.rows.pages_max - state.rows.resident
    if not (hot & on_host & (rest <= room)).any():
        return
    for row in ask_promotions(policy, state):
        if hot[row] and on_host[row] and rest[row] <= room:
            entries = _durable_holes(state, row)[-state.config.policy.promote_pages :]
            if len(entries):
                yield from _bring_back(state, row, entries, room, cause)
                return


def _reserve(state: State, hot: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """Blocks that promotion leaves alone: the watermark, and what resident requests will take
    beyond what they are promised."""
    rows = state.rows
    rest = rows.pages_max - rows.resident - window_unmet(state)
    growing = np.where(rows.live & ~hot, rest, 0)
    return int(growing.sum()) + state.config.policy.watermark_blocks


def _durable_holes(state: State, row: int) -> I64:
    """Entries that are read from the host and whose host page is valid, oldest first."""
    placed = int(state.rows.pages[row])
    holes = np.flatnonzero(state.table(Table.RESIDENT)[row, :placed] == 0)
    pages = state.table(Table.HOST)[row, holes]
    durable: I64 = holes[np.isin(state.pages.state[pages], DURABLE)]
    return durable


def _bring_back(state: State, row: int, entries: I64, room: int, cause: int) -> Decision[None]:
    """The youngest pages first: what stays on the host if pressure returns is the oldest."""
    cause = yield ev.PolicyChosen(
        cause, state.config.policy.name, "promote_tail_first", "promotion", len(entries), room
    )
    entries = yield from adopt_cached(state, row, entries, cause)
    if not len(entries):
        return
    blocks = yield from take_blocks(state, len(entries), cause)
    for run in np.split(np.arange(len(entries)), np.flatnonzero(np.diff(entries) > 1) + 1):
        yield ev.BlocksReserved(
            cause, BlockRole.RESIDENT, row, int(entries[run[0]]), ints(blocks[run]),
            next_block_epochs(state, blocks[run]),
        )  # fmt: skip
    yield from pin(state, TransferKind.RESTORE, row, entries, cause)


def adopt_cached(state: State, row: int, entries: I64, cause: int) -> Decision[I64]:
    """Take back the GPU copies that are still cached; returns the entries that have none."""
    pages = state.table(Table.HOST)[row, entries].astype(np.int64)
    blocks = state.pages.partner[pages].astype(np.int64)
    cached = state.blocks.state[blocks] == BlockState.CACHED
    if cached.any():
        yield ev.BlocksAdopted(
            cause, BlockRole.RESIDENT, row, ints(entries[cached]), ints(blocks[cached]),
            block_epochs(state, blocks[cached]),
        )  # fmt: skip
    missing: I64 = entries[~cached]
    return missing


def _give_back_hot(
    state: State, hot: np.ndarray[tuple[int], np.dtype[np.bool_]], cause: int
) -> Decision[None]:
    """Regions of requests whose pages are all in blocks, none of them on its way in or out."""
    rows = state.rows
    whole = np.flatnonzero(hot & (rows.resident == rows.pages) & (rows.spilling == 0)).tolist()
    if not whole:
        return
    moving = {t.row for t in state.transfers.values() if t.kind is TransferKind.RESTORE}
    for row in whole:
        if row not in moving:
            yield from HiSparseHotManager(state).release(row, cause)
