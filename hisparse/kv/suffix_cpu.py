"""CpuSuffix: a CPU tier of indexer pages, bounded, one copy a hash, least recently used first out.

Pages of sealed index blocks whose rows are certain are copied to the tier (d2h), and come back into
fresh index blocks (h2d) when a host prefix is longer than what the GPU still knows. The books are
columns of the State, so a lookup is a function of the log.

    store   FREE -> RESERVED -> PINNED ........ all ranks answered -> PUBLISHED, found by lookup
    load    leases the page (`refs`) until all ranks answered; a leased page is not evicted
    failed  a store's page is FREE again; a load's page is evicted, its request goes back to it

A block with a copy in flight goes back when the copy has settled (`managers`, `lifecycle.drain`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hisparse.fsm import events as ev
from hisparse.fsm.machines import BlockState, PageState
from hisparse.fsm.state import Key, State, SuffixCopy
from hisparse.fsm.wire import Table
from hisparse.kv.block_pool import block_epochs
from hisparse.kv.decision import I64, Decision, ints
from hisparse.kv.lifecycle import end_request
from hisparse.kv.publication import publish
from hisparse.kv.rewind import rewind_to_page
from hisparse.kv.statistics import pool_statistics


class CpuSuffix:
    """The `SuffixSource` of ``suffix.name = "cpu"``; see there for what each verb promises."""

    def __init__(self, state: State) -> None:
        self.state = state

    def lookup(self, hashes: Sequence[bytes]) -> int:
        found = 0
        for page_hash in hashes:
            page = self.state.suffix_index.get(page_hash, 0)
            if not page or self.state.suffix.state[page] != PageState.PUBLISHED:
                break
            found += 1
        return found

    def load(self, row: int, first: int, end: int, cause: int) -> Decision[None]:
        hashes = self.state.request_of(row).hashes
        pages = [self.state.suffix_index[page_hash] for page_hash in hashes[first:end]]
        yield self._pinned(True, row, np.arange(first, end), np.array(pages, np.int64), cause)

    def store(self, row: int, first: int, end: int, cause: int) -> Decision[None]:
        state = self.state
        wanted = self._unstored(row, first, end)
        short = len(wanted) - state.suffix.free.count
        if short > 0:
            own = set(state.request_of(row).hashes)  # a prefix does not push itself out
            old = state.suffix.evictable.peek(short + len(own)).tolist()
            old = [page for page in old if state.suffix.hash_of[page] not in own][:short]
            if old:
                yield self._evicted(old, cause)
        wanted = wanted[: state.suffix.free.count]
        if wanted:
            pages = state.suffix.free.peek(len(wanted))
            yield self._pinned(False, row, np.array(wanted, np.int64), pages, cause)

    def _unstored(self, row: int, first: int, end: int) -> list[int]:
        """Pages of the row in sealed blocks, certain, hashed, and not in the tier. A block is named
        by the pages whose rows it really holds: not by one whose load into it failed."""
        state, request = self.state, self.state.request_of(row)
        per_block, table = state.index_pages_per_block, state.table(Table.INDEX)[row]
        final = min(int(state.rows.confirmed[row]) // state.page_size, len(request.hashes))
        found: list[int] = []
        for entry in range(first, end):
            if state.blocks.state[table[entry]] == BlockState.CLEAN:
                pages = range(entry * per_block, min((entry + 1) * per_block, final))
                known, named = state.suffix_index, state.index_hashes.get(int(table[entry]), ())
                hashes = request.hashes
                found += [p for p in pages if hashes[p] not in known and hashes[p] in named]
        return found

    def _pinned(self, load: bool, row: int, entries: I64, pages: I64, cause: int) -> ev.Event:
        state, per_block = self.state, self.state.index_pages_per_block
        blocks = state.table(Table.INDEX)[row, entries // per_block].astype(np.int64)
        epochs = state.suffix.epoch[pages].astype(np.int64) + (not load)
        first = state.next_transfer
        return ev.SuffixPinned(
            cause, load, row, state.request_of(row).epoch, (1 << state.config.ranks) - 1,
            ints(range(first, first + len(pages))), ints(entries), ints(blocks),
            block_epochs(state, blocks), ints(entries % per_block), ints(pages), ints(epochs),
        )  # fmt: skip

    def _evicted(self, pages: Iterable[int], cause: int) -> ev.Event:
        at = np.array(list(pages), dtype=np.int64)
        return ev.SuffixEvicted(cause, ints(at), ints(self.state.suffix.epoch[at]))

    def result(self, taken: ev.AcknowledgementsTaken, cause: int) -> Decision[list[Key]]:
        state, bit = self.state, 1 << taken.rank
        preempted: list[Key] = []
        for failed, idents, epochs in (
            (True, taken.failed, taken.failed_epochs),
            (False, taken.completed, taken.completed_epochs),
        ):
            named = [
                copy
                for ident, epoch in zip(idents, epochs, strict=True)
                if (copy := state.suffix_copies.get(ident)) is not None
                and copy.epoch == epoch
                and not copy.answered & bit
            ]
            for last in (False, True):
                group = [c for c in named if (c.answered | bit == c.writers) is last]
                if not group:
                    continue
                ids = ints(copy.transfer for copy in group)
                kind = ev.SuffixFailed if failed else ev.SuffixCompleted
                yield kind(cause, taken.rank, last, ids)
                if last:
                    yield from self._settled(group, cause)
                if failed:
                    preempted += yield from self._fall_back(group, cause)
        return preempted

    def _settled(self, group: list[SuffixCopy], cause: int) -> Decision[None]:
        """Pages of failed loads are not offered again; rows that became certain are published."""
        failed = {c.suffix for c in group if c.load and c.failed}
        idle = [page for page in sorted(failed) if page in self.state.suffix.evictable]
        if idle:
            yield self._evicted(idle, cause)
        rows = sorted({c.row for c in group if c.load})
        yield from publish(self.state, rows, cause)
        for row in rows:
            if self.state.rows.live[row]:
                yield from self.store(row, 0, int(self.state.rows.index[row]), cause)

    def _fall_back(self, group: list[SuffixCopy], cause: int) -> Decision[list[Key]]:
        """Who read a failed load goes back to its page; by policy, or without the host pages for
        that, it leaves the GPU. Nothing behind it was certain, so nothing is kept."""
        preempted = []
        size, computed = self.state.page_size, self.state.rows.computed
        lost: dict[int, int] = {}
        for copy in group:
            if copy.load:
                lost[copy.row] = min(copy.entry, lost.get(copy.row, copy.entry))
        for row, page in sorted(lost.items()):
            request = self.state.request_of(row)
            if not request.live or page * size >= computed[row]:
                continue
            back = self.state.config.policy.on_copy_failure == "rewind"
            if not back or not (yield from rewind_to_page(self.state, row, page, cause)):
                reason = "suffix load failed"
                yield ev.RequestPreempted(cause, request.request, request.epoch, reason)
                yield from end_request(self.state, request.key, False, cause)
                preempted.append(request.key)
        return preempted

    def statistics(self) -> dict[str, int]:
        """The tier's pages (`pool_statistics`), and its `copies` in flight: loads and stores."""
        pages = pool_statistics(self.state)["suffix_pool"]
        return pages | {"copies": len(self.state.suffix_copies)}

    def drop(self, cause: int) -> Decision[None]:
        old = self.state.suffix.evictable.ordered()
        if len(old):
            yield self._evicted(old.tolist(), cause)


def open_suffix(state: State) -> CpuSuffix | None:
    """The source that the configuration names."""
    return CpuSuffix(state) if len(state.suffix.state) else None
