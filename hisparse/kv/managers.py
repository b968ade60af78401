"""Managers: block-pool bookkeeping, one class a cache group. They decide; the fold keeps the books.

`HiSparseResidentManager` is a `SingleTypeKVCacheManager` with host-backed holes: an entry of its
table may be 0, which means "read the page from the host tier".
"""

from __future__ import annotations

import numpy as np

from hisparse.config import ceil_div
from hisparse.fsm import events as ev
from hisparse.fsm.machines import BlockRole, BlockState, BlockTrigger, HotState
from hisparse.fsm.state import State
from hisparse.fsm.wire import Table
from hisparse.kv.block_pool import block_epochs, next_block_epochs, take_blocks
from hisparse.kv.budget import spare, window_unmet
from hisparse.kv.decision import I64, Decision, ints, spans
from hisparse.kv.groups import (
    HOT_GROUP,
    INDEX_GROUP,
    RESIDENT_GROUP,
    KVCacheGroup,
    device_pool,
)
from hisparse.kv.residency import reclaim, spill_head, split_clean

# How a block whose rows were taken back goes: nothing in it is wanted, by anybody.
_UNWANTED = (
    (BlockTrigger.abandoned, BlockState.RESERVED),
    (BlockTrigger.retired, BlockState.DIRTY),
    (BlockTrigger.dropped, BlockState.CLEAN),
)


class SingleTypeKVCacheManager:
    """Grows and releases one table of one role."""

    role: BlockRole
    group: KVCacheGroup

    def __init__(self, state: State) -> None:
        self.state = state
        self.pool = device_pool(state, self.group)

    def entries(self, row: int) -> I64:
        """Table entries that name a block, in order."""
        return np.flatnonzero(self.state.table(Table(self.role))[row])

    def statistics(self) -> dict[str, int]:
        """Of all requests: `entries` of the table that name a block, and the `blocks` named, one
        that several share once."""
        table = self.state.table(Table(self.role))
        return {
            "entries": int(np.count_nonzero(table)),
            "blocks": len(np.unique(table[table != 0])),
        }

    def blocks(self, row: int, entries: I64) -> I64:
        named: I64 = self.state.table(Table(self.role))[row, entries].astype(np.int64)
        return named

    def reserve(self, row: int, entry: int, n: int, cause: int) -> Decision[None]:
        """Lease `n` blocks as entries `entry`, `entry` + 1, …"""
        blocks = yield from take_blocks(self.state, n, cause)
        epochs = next_block_epochs(self.state, blocks)
        yield ev.BlocksReserved(cause, self.role, row, entry, ints(blocks), epochs)

    def reserve_rows(self, rows: I64, first: I64, end: I64, cause: int) -> Decision[None]:
        """Lease a block for each entry in ``[first[i], end[i])`` of `rows[i]`."""
        rows, entries = spans(rows, first, end)
        if len(rows) and rows[0] == rows[-1] and (rows == rows[0]).all():
            yield from self.reserve(int(rows[0]), int(entries[0]), len(rows), cause)
        elif len(rows):
            blocks = yield from take_blocks(self.state, len(rows), cause)
            epochs = next_block_epochs(self.state, blocks)
            yield ev.BlocksReserved(
                cause, self.role, -1, -1, ints(blocks), epochs, ints(rows), ints(entries)
            )

    def release(self, row: int, cause: int) -> Decision[None]:
        """Give back what the ended request holds, tail first: its head is found again longest."""
        raise NotImplementedError

    def give_back(
        self, row: int, entries: I64, trigger: BlockTrigger | None, cause: int
    ) -> Decision[None]:
        """Give `entries` back, last first; `trigger` moves the blocks (None: others hold them)."""
        if len(entries):
            entries = entries[::-1]
            blocks = self.blocks(row, entries)
            yield ev.BlocksReleased(
                cause, self.role, row, trigger, ints(entries), ints(blocks),
                block_epochs(self.state, blocks),
            )  # fmt: skip


class HiSparseResidentManager(SingleTypeKVCacheManager):
    """Resident pages of all latent layers; holes are read from the host."""

    role = BlockRole.RESIDENT
    group = RESIDENT_GROUP

    def grow(self, row: int, rows_wanted: int, cause: int) -> Decision[int]:
        """Give places to the next `rows_wanted` rows of `row`; returns how many rows have one."""
        state, page_size = self.state, self.state.page_size
        start = int(state.rows.computed[row])
        have = int(state.rows.pages[row])
        need = ceil_div(start + rows_wanted, page_size) - have
        if need > 0:
            allowed = self._allowed(row)
            if need > allowed:
                yield from reclaim(state, need - allowed, cause, "growth")
                allowed = self._allowed(row)
            if need > allowed and state.config.offload:
                yield from spill_head(state, row, need - allowed, cause)
                allowed = self._allowed(row)
            need = min(need, allowed)
        if need > 0:
            yield from self.reserve(row, have, need, cause)
        return min(rows_wanted, int(state.rows.pages[row]) * page_size - start)

    def extend(self, rows: I64, rows_wanted: I64, cause: int) -> Decision[bool]:
        """Give places to the next rows of all of `rows` at once, if no page has to leave for it."""
        held, page_size = self.state.rows, self.state.page_size
        have = held.pages[rows]
        end = -(-(held.computed[rows] + rows_wanted) // page_size)
        free = spare(self.state)
        if int((end - have).sum()) > free:
            beyond = np.maximum(end - have - window_unmet(self.state)[rows], 0)
            if int(beyond.sum()) > free:
                return False
        yield from self.reserve_rows(rows, have, end, cause)
        return True

    def _allowed(self, row: int) -> int:
        """Blocks that the row may take now: what it is owed, then what nobody is."""
        free = spare(self.state)
        assert free >= 0, f"{-free} more blocks are promised than the pool has"
        return int(window_unmet(self.state)[row]) + free

    def release(self, row: int, cause: int) -> Decision[None]:
        """Pages with a copy under way stay leased to it; the rest goes back now."""
        state, entries = self.state, self.entries(row)
        blocks = self.blocks(row, entries)
        states = self.pool.state[blocks]
        copied = {t.block for t in state.transfers.values() if t.holds_block}
        idle = ~np.isin(blocks, list(copied))
        reserved, dirty = BlockState.RESERVED, BlockState.DIRTY
        abandoned = entries[idle & (states == reserved)]
        yield from self.give_back(row, abandoned, BlockTrigger.abandoned, cause)
        retired = entries[idle & (states == dirty)]
        yield from self.give_back(row, retired, BlockTrigger.retired, cause)
        clean = entries[idle & (states == BlockState.CLEAN)]
        for trigger, chosen in split_clean(state, self.blocks(row, clean)):
            yield from self.give_back(row, clean[chosen], trigger, cause)

    def release_beyond(self, row: int, first: int, cause: int) -> Decision[None]:
        """Give back pages from `first` on, whose rows were taken back and which nobody copies."""
        entries = self.entries(row)
        entries = entries[entries >= first]
        states = self.pool.state[self.blocks(row, entries)]
        for trigger, state in _UNWANTED:
            yield from self.give_back(row, entries[states == state], trigger, cause)


class HiSparseIndexManager(SingleTypeKVCacheManager):
    """Indexer rows, several pages a block; never on the host, shared and cached on the GPU."""

    role = BlockRole.INDEX
    group = INDEX_GROUP

    def grow(self, row: int, cause: int) -> Decision[None]:
        """Blocks for every page that was given a place (promised at admission)."""
        need = ceil_div(int(self.state.rows.pages[row]), self.state.index_pages_per_block)
        have = int(self.state.rows.index[row])
        if need > have:
            yield from self.reserve(row, have, need - have, cause)

    def extend(self, rows: I64, cause: int) -> Decision[None]:
        """The same for all of `rows` at once."""
        have = self.state.rows.index[rows].astype(np.int64)
        need = -(-self.state.rows.pages[rows] // self.state.index_pages_per_block)
        yield from self.reserve_rows(rows, have, need, cause)

    def seal(self, rows: I64, first_page: I64, end_page: I64, cause: int) -> Decision[None]:
        """Pages ``[first_page[i], end_page[i])`` of `rows[i]` became final: blocks that they fill
        are sealed."""
        per_block = self.state.index_pages_per_block
        rows, entries = spans(rows, first_page // per_block, end_page // per_block)
        if len(rows):
            blocks = self.state.table(Table.INDEX)[rows, entries].astype(np.int64)
            blocks = blocks[self.pool.state[blocks] == BlockState.DIRTY]
            if len(blocks):
                yield ev.BlocksSealed(cause, ints(blocks), block_epochs(self.state, blocks))

    def seal_final(self, row: int, cause: int) -> Decision[None]:
        """The request ended: blocks that hold pages which a prefix can find are sealed."""
        blocks = self.blocks(row, self.entries(row))
        named = self.state.index_hashes
        found = np.array([bool(named.get(block)) for block in blocks.tolist()], dtype=np.bool_)
        own = (self.pool.refs[blocks] == 1) & (self.pool.state[blocks] == BlockState.DIRTY)
        sealable = blocks[own & found]
        if len(sealable):
            yield ev.BlocksSealed(cause, ints(sealable), block_epochs(self.state, sealable))

    def release(self, row: int, cause: int) -> Decision[None]:
        """Blocks with a copy to or from the CPU tier under way stay; the rest goes back now."""
        state = self.state
        yield from self.seal_final(row, cause)
        entries = self.entries(row)
        blocks = self.blocks(row, entries)
        if state.suffix_copies:
            copied = [copy.block for copy in state.suffix_copies.values()]
            entries = entries[~np.isin(blocks, copied)]
            blocks = self.blocks(row, entries)
        shared = self.pool.refs[blocks] > 1
        states = self.pool.state[blocks]
        yield from self.give_back(row, entries[shared], None, cause)
        reserved = ~shared & (states == BlockState.RESERVED)
        yield from self.give_back(row, entries[reserved], BlockTrigger.abandoned, cause)
        unfound = entries[~shared & (states == BlockState.DIRTY)]
        yield from self.give_back(row, unfound, BlockTrigger.retired, cause)
        final = ~shared & (states == BlockState.CLEAN)
        yield from self.give_back(row, entries[final], BlockTrigger.cached, cause)

    def shared_beyond(self, row: int, first: int) -> int:
        """Blocks with pages from `first` on that others hold too, or held when they were taken
        back."""
        entries = self.entries(row)
        entries = entries[entries >= first // self.state.index_pages_per_block]
        shared = self.pool.refs[self.blocks(row, entries)] > 1
        edge = self._edge(row, first)
        also = len(edge) and self._is_final(edge) and self.pool.refs[edge[0]] == 1
        return int(np.count_nonzero(shared)) + bool(also)

    def _edge(self, row: int, first: int) -> I64:
        """The block with pages on both sides of `first`, if there is one."""
        entry, kept = divmod(first, self.state.index_pages_per_block)
        return self.blocks(row, np.array([entry])) if kept else np.zeros(0, dtype=np.int64)

    def _is_final(self, edge: I64) -> bool:
        return int(self.pool.state[edge[0]]) == BlockState.CLEAN

    def release_beyond(self, row: int, first: int, cause: int) -> Decision[None]:
        """Give back blocks of pages from `first` on. Of a block that is final, since others shared
        it, these are copied to a block of its own if it holds earlier pages too."""
        state, per_block = self.state, self.state.index_pages_per_block
        entries = self.entries(row)
        entries = entries[entries >= ceil_div(first, per_block)]
        blocks = self.blocks(row, entries)
        shared = self.pool.refs[blocks] > 1
        yield from self.give_back(row, entries[shared], None, cause)
        for trigger, wanted in _UNWANTED:
            mine = entries[~shared & (self.pool.state[blocks] == wanted)]
            yield from self.give_back(row, mine, trigger, cause)
        entry, kept = divmod(first, per_block)
        edge = self._edge(row, first)
        if len(edge) and self._is_final(edge):
            way = None if self.pool.refs[edge[0]] > 1 else BlockTrigger.cached
            yield from self.give_back(row, np.array([entry]), way, cause)
            fresh = yield from take_blocks(state, 1, cause, keep=frozenset(edge.tolist()))
            epochs = next_block_epochs(state, fresh)
            yield ev.BlocksReserved(cause, self.role, row, entry, ints(fresh), epochs)
            own = self.blocks(row, np.array([entry]))
            yield ev.IndexPagesCopied(
                cause, row, ints(np.repeat(edge, kept)),
                block_epochs(state, np.repeat(edge, kept)), ints(range(kept)),
                ints(np.repeat(own, kept)), ints(range(kept)),
            )  # fmt: skip


class HiSparseHotManager(SingleTypeKVCacheManager):
    """The hot region: leased by `residency.lease_hot`, given back at the end."""

    role = BlockRole.HOT
    group = HOT_GROUP

    def release(self, row: int, cause: int) -> Decision[None]:
        if self.state.request_of(row).hot is HotState.LEASED:
            yield ev.HotReleased(cause, row)
        yield from self.give_back(row, self.entries(row), BlockTrigger.abandoned, cause)
