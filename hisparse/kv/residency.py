"""Residency: who loses resident pages under pressure, which ones, and how.

Everything stays resident while it fits. Under pressure the policy (`kv.policies`) ranks those
requests that hold pages above their windows; each loses its oldest sealed ones (head first, so
that its durable prefix grows without gaps), and only after its hot region is leased. A page leaves
by the cheapest way that its block's state allows:

    CLEAN      the host page is valid          table entry replaced now
    ENQUEUED   the copy is in stream order     table entry replaced now, behind the copy's fence
    DIRTY      nothing is on the host          a spill is planned; replaced when it is enqueued
    PINNED     a copy is on its way            wait for its acknowledgement
The unsealed tail never leaves.
"""

from __future__ import annotations

import numpy as np

from hisparse.fsm import events as ev
from hisparse.fsm.machines import BlockState, BlockTrigger, HotState, PageState
from hisparse.fsm.state import State
from hisparse.fsm.wire import Table, TransferKind
from hisparse.kv.block_pool import block_epochs, next_block_epochs, take_blocks
from hisparse.kv.budget import excess_pages
from hisparse.kv.decision import I64, Decision, ints
from hisparse.kv.policies.base import ask_victims
from hisparse.kv.policies.registry import policy_of
from hisparse.kv.transfers import pin

REPLACEABLE = (BlockState.CLEAN, BlockState.ENQUEUED, BlockState.DIRTY)


def lease_hot(state: State, row: int, cause: int) -> Decision[None]:
    """Give `row` its hot region (promised at admission, so the blocks are there)."""
    if state.request_of(row).hot is HotState.LEASED:
        return
    yield ev.HotWanted(cause, row)
    blocks = yield from take_blocks(state, state.hot_blocks, cause)
    yield ev.HotLeased(cause, row, ints(blocks), next_block_epochs(state, blocks))


def reclaim(state: State, need: int, cause: int, resource: str) -> Decision[None]:
    """Make `need` blocks spare, now or within a step, from pages above their requests' windows."""
    if not state.config.offload:
        return
    need -= int(state.rows.spilling.sum())
    excess = excess_pages(state)
    if need <= 0 or not excess.any():
        return
    policy = policy_of(state)
    victims = ask_victims(policy, state, need, resource)
    name = state.config.policy.name
    cause = yield ev.PolicyChosen(cause, name, policy.choice, resource, need, int(excess.sum()))
    yield from _hold_promotion(state, cause)
    for row, pages in victims:
        if need <= 0:
            return
        need -= yield from spill_head(state, row, min(need, pages), cause)


def _hold_promotion(state: State, cause: int) -> Decision[None]:
    """Nothing comes back for a while (`kv.promotion`). Renewed when half of it is over."""
    pause = state.config.policy.promote_after_steps
    if state.promotion_held_until < state.step + pause - pause // 2:
        yield ev.PromotionHeld(cause, state.step + pause)


def leaves_when_sealed(state: State) -> bool:
    """Whether the sealed pages of requests that read from the host go there at once: pressure is
    not long past, or the policy keeps nothing."""
    return state.step < state.promotion_held_until or policy_of(state).host_first


def spill_head(state: State, row: int, most: int, cause: int) -> Decision[int]:
    """Let `row` lose up to `most` of its oldest sealed resident pages; returns how many will go."""
    entries = _sealed_resident(state, row)
    blocks = state.table(Table.RESIDENT)[row, entries].astype(np.int64)
    states = state.blocks.state[blocks]
    entries = entries[np.isin(states, REPLACEABLE)][:most]
    if not len(entries):
        return 0
    yield from lease_hot(state, row, cause)
    blocks = state.table(Table.RESIDENT)[row, entries].astype(np.int64)
    states = state.blocks.state[blocks]
    yield from pin(state, TransferKind.SPILL, row, entries[states == BlockState.DIRTY], cause)
    yield from replace_enqueued(state, row, entries[states == BlockState.ENQUEUED], cause)
    yield from _drop_clean(state, row, entries[states == BlockState.CLEAN], cause)
    return len(entries)


def _sealed_resident(state: State, row: int) -> I64:
    """Entries of whole, computed and accepted pages that are resident, oldest first."""
    sealed = int(state.rows.computed[row]) // state.page_size
    return np.flatnonzero(state.table(Table.RESIDENT)[row, :sealed])


def replace_enqueued(state: State, row: int, entries: I64, cause: int) -> Decision[None]:
    """Spill pages whose copies are enqueued on every reading rank: stream order protects them."""
    if not len(entries):
        return
    by_entry = {t.entry: t.transfer for t in state.transfers.values() if t.row == row}
    blocks = state.table(Table.RESIDENT)[row, entries].astype(np.int64)
    yield ev.PagesSpilled(
        cause, row, BlockTrigger.spilled, ints(entries), ints(blocks),
        block_epochs(state, blocks), ints(by_entry[e] for e in entries.tolist()),
    )  # fmt: skip


def _drop_clean(state: State, row: int, entries: I64, cause: int) -> Decision[None]:
    """Spill pages that the host already holds; findable ones stay readable until reused."""
    blocks = state.table(Table.RESIDENT)[row, entries].astype(np.int64)
    for trigger, chosen in split_clean(state, blocks):
        if chosen.any():
            gone = blocks[chosen]
            yield ev.PagesSpilled(
                cause, row, trigger, ints(entries[chosen]), ints(gone),
                block_epochs(state, gone), (0,) * len(gone),
            )  # fmt: skip


def split_clean(
    state: State, blocks: I64
) -> list[tuple[BlockTrigger, np.ndarray[tuple[int], np.dtype[np.bool_]]]]:
    """How clean blocks are given back: `cached` where a prefix can find them, else `dropped`."""
    pages = state.blocks.partner[blocks]
    findable = (state.pages.state[pages] == PageState.PUBLISHED) & (
        state.pages.partner[pages] == blocks
    )
    return [(BlockTrigger.cached, findable), (BlockTrigger.dropped, ~findable)]
