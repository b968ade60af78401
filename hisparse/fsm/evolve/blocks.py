"""evolve: leases of GPU blocks, and the tables that name them.

PYTEST_DONT_REWRITE (what an assertion says is part of a fault's signature, see `fsm.reduce`)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hisparse.errors import IllegalTransition, StaleEpoch
from hisparse.fsm import events as ev
from hisparse.fsm.columns import I64, add_one, ids, some
from hisparse.fsm.events.base import Ints
from hisparse.fsm.evolve.requests import register_index_page
from hisparse.fsm.machine import Machine
from hisparse.fsm.machines import (
    BLOCK_LEASE,
    HOT_REGION,
    BlockRole,
    BlockTrigger,
    HotState,
    HotTrigger,
)
from hisparse.fsm.state import State
from hisparse.fsm.wire import Table

TO_FREE = (
    BlockTrigger.abandoned,
    BlockTrigger.retired,
    BlockTrigger.dropped,
    BlockTrigger.spilled,
)


INDEX = int(BlockRole.INDEX)  # arrays are compared with plain ints in a fifth of the time


def check_epochs(what: str, columns: npt.NDArray[np.uint32], at: I64, epochs: Ints) -> None:
    """Every id must come with the epoch that the state holds. Raises StaleEpoch."""
    held = columns[at].tolist()
    if held != list(epochs):
        i = _first_other(held, epochs)
        raise StaleEpoch(f"{what} {at[i]} has epoch {held[i]}, the event names {epochs[i]}")


def _first_other(left: Sequence[int], right: Sequence[int]) -> int:
    return next(i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b)


def move_blocks(state: State, blocks: I64, trigger: BlockTrigger) -> None:
    b = state.blocks
    BLOCK_LEASE.apply(b.state, blocks, trigger, epochs=b.epoch, seq=state.seq + 1)


def raise_epochs(what: str, columns: npt.NDArray[np.uint32], at: I64, epochs: Ints) -> None:
    """Reuse begins a new epoch, exactly one above the last. Raises StaleEpoch."""
    raised = columns[at] + 1
    if raised.tolist() != list(epochs):
        i = _first_other(raised.tolist(), epochs)
        raise StaleEpoch(
            f"{what} {at[i]} is given out under epoch {epochs[i]}, its last was {columns[at[i]]}"
        )
    columns[at] = raised


def free_blocks(state: State, blocks: I64) -> None:
    """Blocks that just became FREE: nothing refers to them, nothing finds them."""
    b, pages = state.blocks, state.pages
    assert np.count_nonzero(blocks) == len(blocks), "the null block is never freed"
    partners = b.partner[blocks]
    linked = pages.partner[partners] == blocks
    pages.partner[partners[linked]] = 0
    pages.partner[0] = 0
    b.partner[blocks] = 0
    b.free.push(blocks)
    for block in blocks[b.role[blocks] == INDEX].tolist() if state.index_hashes else ():
        for page_hash in state.index_hashes.pop(block, ()):
            if state.index_prefix.get(page_hash, (0, 0))[0] == block:
                del state.index_prefix[page_hash]


def blocks_reserved(state: State, e: ev.BlocksReserved, seq: int) -> None:
    blocks, b = ids(e.blocks), state.blocks
    n = len(blocks)
    rows = ids(e.rows or (e.row,) * n)
    entries = ids(e.entries if e.rows else range(e.entry, e.entry + n))
    move_blocks(state, blocks, BlockTrigger.reserved)
    raise_epochs("block", b.epoch, blocks, e.epochs)
    b.free.remove(blocks)
    b.role[blocks] = e.role
    b.refs[blocks] = 1
    _enter(state, e.role, rows, entries, blocks)
    if e.role is BlockRole.RESIDENT:
        pages, ends = state.rows.pages, entries + 1
        if n == 1:
            pages[rows] = np.maximum(pages[rows], ends)
        else:
            np.maximum.at(pages, rows, ends)


def blocks_adopted(state: State, e: ev.BlocksAdopted, seq: int) -> None:
    blocks, b = ids(e.blocks), state.blocks
    check_epochs("block", b.epoch, blocks, e.epochs)
    assert (b.role[blocks] == e.role).all(), "a block keeps its role to the end of its epoch"
    cached = blocks[b.refs[blocks] == 0]
    move_blocks(state, cached, BlockTrigger.adopted)
    b.cached.remove(cached)
    b.refs[blocks] += 1
    _enter(state, e.role, np.full(len(blocks), e.row), ids(e.entries), blocks)
    if e.role is BlockRole.INDEX:
        request, per_block = state.request_of(e.row), state.index_pages_per_block
        for entry in e.entries:
            for page in range(entry * per_block, (entry + 1) * per_block):
                register_index_page(state, request, page)


def _enter(state: State, role: BlockRole, rows: I64, entries: I64, blocks: I64) -> None:
    table = state.table(Table(role))
    assert not np.count_nonzero(table[rows, entries]), (
        f"table {role.name} rows {np.unique(rows)}: entry given out twice"
    )
    table[rows, entries] = blocks
    add_one(state.used_of(role), rows)


def check_held(
    machine: Machine,
    what: str,
    held: Sequence[int],
    released: Ints,
    epochs: Ints,
    entries: Ints,
    seq: int,
) -> None:
    """No release without its token, the table entry (or reservation) that holds the id, and each
    token once. Raises IllegalTransition at the call, before anything is changed."""
    if list(held) == list(released) and 0 not in released and len(set(entries)) == len(entries):
        return
    for i, ident in enumerate(released):
        again = released[i] in released[:i]
        if again or i >= len(held) or held[i] != ident or not ident:
            where = f"{what} {entries[i]}" if i < len(entries) else f"any {what}"
            state = f"not held by {where}" + (", a second time" if again else "")
            raise IllegalTransition(
                machine.name, ident, state, "released", epoch=epochs[i], seq=seq
            )


def _check_held(state: State, role: BlockRole, e: ev.BlocksReleased | ev.PagesSpilled) -> None:
    held = state.table(Table(role))[e.row, ids(e.entries)].tolist()
    what = f"{role.name} entry of row {e.row}:"
    check_held(BLOCK_LEASE, what, held, e.blocks, e.epochs, e.entries, state.seq + 1)


def _leave(state: State, role: BlockRole, row: int, entries: I64, blocks: I64) -> None:
    table = state.table(Table(role))
    table[row, entries] = 0
    state.used_of(role)[row] -= len(blocks)
    left = state.blocks.refs[blocks] - 1
    state.blocks.refs[blocks] = left
    assert not some(left < 0), "a block was given back twice"


def blocks_written(state: State, rows: I64, starts: I64, ends: I64) -> None:
    """The rows of a planned step make their pages dirty, on the scheduler side, from the plan."""
    resident, index = state.table(Table.RESIDENT), state.table(Table.INDEX)
    first, last = starts // state.page_size, (ends - 1) // state.page_size
    first_index = first // state.index_pages_per_block
    parts = [resident[rows, first], index[rows, first_index]]
    for i in (first < last).nonzero()[0].tolist():
        last_index = last[i] // state.index_pages_per_block
        parts.append(resident[rows[i], first[i] + 1 : last[i] + 1])
        parts.append(index[rows[i], first_index[i] + 1 : last_index + 1])
    blocks = np.concatenate(parts).astype(np.int64)
    assert np.count_nonzero(blocks) == len(blocks), "a planned row has no block to be written to"
    move_blocks(state, blocks, BlockTrigger.written)


def blocks_evicted(state: State, e: ev.BlocksEvicted, seq: int) -> None:
    blocks = ids(e.blocks)
    check_epochs("block", state.blocks.epoch, blocks, e.epochs)
    move_blocks(state, blocks, BlockTrigger.evicted)
    state.blocks.cached.remove(blocks)
    free_blocks(state, blocks)


def blocks_sealed(state: State, e: ev.BlocksSealed, seq: int) -> None:
    blocks = ids(e.blocks)
    check_epochs("block", state.blocks.epoch, blocks, e.epochs)
    assert not some(state.blocks.role[blocks] != INDEX), "only index blocks are sealed"
    move_blocks(state, blocks, BlockTrigger.sealed)


def blocks_reopened(state: State, e: ev.RequestRewound) -> None:
    blocks = ids(e.blocks)
    check_epochs("block", state.blocks.epoch, blocks, e.epochs)
    assert (state.blocks.role[blocks] == BlockRole.INDEX).all(), "only index blocks are reopened"
    assert (state.blocks.refs[blocks] == 1).all(), "a shared block is not written again"
    move_blocks(state, blocks, BlockTrigger.reopened)


def blocks_released(state: State, e: ev.BlocksReleased, seq: int) -> None:
    blocks = ids(e.blocks)
    check_epochs("block", state.blocks.epoch, blocks, e.epochs)
    _check_held(state, e.role, e)
    _leave(state, e.role, e.row, ids(e.entries), blocks)
    _unowned(state, e.trigger, blocks)


def pages_spilled(state: State, e: ev.PagesSpilled, seq: int) -> None:
    blocks, entries = ids(e.blocks), ids(e.entries)
    check_epochs("block", state.blocks.epoch, blocks, e.epochs)
    _check_held(state, BlockRole.RESIDENT, e)
    assert not some(state.table(Table.HOST)[e.row, entries] == 0), "a spilled page has no host page"
    assert state.request_of(e.row).hot is HotState.LEASED, "no page leaves without a hot region"
    _leave(state, BlockRole.RESIDENT, e.row, entries, blocks)
    for ident in e.transfers:
        if ident:
            transfer = state.transfers[ident]
            transfer.holds_block = False
            state.rows.unsettled[e.row] += 1
            if transfer.kind is transfer.kind.SPILL:
                state.rows.spilling[e.row] -= 1
    _unowned(state, e.trigger, blocks)


def _unowned(state: State, trigger: BlockTrigger | None, blocks: I64) -> None:
    b = state.blocks
    if trigger is None:
        assert not some(b.refs[blocks] <= 0), "a block without owner needs a trigger"
        return
    assert not np.count_nonzero(b.refs[blocks]), "a block with other owners cannot change hands"
    move_blocks(state, blocks, trigger)
    if trigger in TO_FREE:
        free_blocks(state, blocks)
    else:
        b.cached.push(blocks)


def index_pages_copied(state: State, e: ev.IndexPagesCopied, seq: int) -> None:
    request, per_block = state.request_of(e.row), state.index_pages_per_block
    check_epochs("block", state.blocks.epoch, ids(e.sources), e.source_epochs)
    move_blocks(state, np.unique(ids(e.blocks)), BlockTrigger.written)
    entry_of = {int(b): i for i, b in enumerate(state.table(Table.INDEX)[e.row]) if b}
    for block, slot in zip(e.blocks, e.slots, strict=True):
        register_index_page(state, request, entry_of[block] * per_block + slot)


def hot_wanted(state: State, e: ev.HotWanted, seq: int) -> None:
    _move_hot(state, e.row, HotTrigger.wanted, seq)


def hot_leased(state: State, e: ev.HotLeased, seq: int) -> None:
    _move_hot(state, e.row, HotTrigger.leased, seq)
    blocks_reserved(
        state, ev.BlocksReserved(e.cause, BlockRole.HOT, e.row, 0, e.blocks, e.epochs), seq
    )


def hot_released(state: State, e: ev.HotReleased, seq: int) -> None:
    _move_hot(state, e.row, HotTrigger.released, seq)


def _move_hot(state: State, row: int, trigger: HotTrigger, seq: int) -> None:
    request = state.request_of(row)
    request.hot = HotState(HOT_REGION.next(request.hot, trigger, row, epoch=request.epoch, seq=seq))
