"""The state invariants, rechecked after each event on what that event touched. Pure.

Promises what `state.py` promises for a full recount, for the ids and rows that an event names: the
blocks and pages in its lists, those of its transfers, and the table entries that changed in its
rows or that name one of these ids. What an event does to an id that it does not name is found by
the next full recount, which callers run every so often and at the end.

`conservation` and `refcount_exact` hold after every event. `always_readable` speaks of the next
resolve, and one decision takes several events (admitted, leased, placed): the entries that they
touch are kept, and judged once a step is planned. A fault has the seq that touched the entry last.

    watch = Incremental(state)
    watch.before(event)      takes note of what `evolve` is about to remove
    evolve(state, event, seq)
    watch.after()            yields (invariant, seq, message)
    watch.readable()         the same, for entries that no step was planned after

Owns shadows of the tables and its own reference counts, kept from the changes that it sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from hisparse.fsm import events as ev
from hisparse.fsm.machines import BlockRole, BlockState, HotState, PageState, PageTrigger
from hisparse.fsm.state import State, Transfer
from hisparse.fsm.wire import Table, TransferKind

Places = dict[int, set[tuple[int, int]]]  # id -> (row, entry) that name it
Fault = tuple[str, int, str]
# Tables of its row that an event changes; none named: the one of its role.
_CHANGES: dict[type, tuple[Table, ...]] = {
    ev.BlocksReserved: (),
    ev.BlocksAdopted: (),
    ev.BlocksReleased: (),
    ev.PagesSpilled: (Table.RESIDENT,),
    ev.HotLeased: (Table.HOT,),
    ev.PrefixLeased: (Table.HOST,),
    ev.HostPagesReleased: (Table.HOST,),
    ev.TransferPinned: (Table.HOST,),
    ev.RequestDrained: tuple(Table),
}
_WHOLE_ROW = (ev.RequestAdmitted, ev.HotLeased, ev.HotReleased)
_SETTLING = (ev.TransferEnqueued, ev.TransferCompleted, ev.TransferFailed)
_KEPT = (BlockState.DIRTY, BlockState.PINNED, BlockState.ENQUEUED, BlockState.CLEAN)
_FREE, _CACHED, _LOST = (
    int(s) for s in (BlockState.FREE, BlockState.CACHED, BlockState.QUARANTINED)
)
_PAGE_FREE, _PAGE_PUBLISHED, _PAGE_LOST = (
    int(s) for s in (PageState.FREE, PageState.PUBLISHED, PageState.QUARANTINED)
)


class Incremental:
    """Watches one state. It may be made at any moment of the fold."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._touched: dict[tuple[int, int], int] = {}  # (row, entry) -> seq, not judged yet
        self.resync()

    def resync(self) -> None:
        """Begin again from the state as it is: after a full recount, and where a fold resumes."""
        state = self.state
        self._shadow = [state.table(table).copy() for table in Table]
        self._block_refs = np.zeros(len(state.blocks.refs), dtype=np.int64)
        for table in (Table.RESIDENT, Table.INDEX, Table.HOT):
            self._block_refs += np.bincount(
                self._shadow[table].ravel(), minlength=len(self._block_refs)
            )
        self._page_refs = np.bincount(
            self._shadow[Table.HOST].ravel(), minlength=len(state.pages.refs)
        )
        for request in state.requests.values():
            for page in request.reserved:
                self._page_refs[page] += 1
        for transfer in state.transfers.values():
            if transfer.kind is TransferKind.RESTORE:
                self._page_refs[transfer.page] += 1
        self._places: dict[Table, Places] = {Table.RESIDENT: {}, Table.HOST: {}}
        for table, places in self._places.items():
            shadow = self._shadow[table]
            for row, entry in np.argwhere(shadow).tolist():
                places.setdefault(int(shadow[row, entry]), set()).add((row, entry))

    # -- before -----------------------------------------------------------------------------------
    def before(self, event: Any) -> None:
        """Note what `event` names, while the state still knows it."""
        self._event = event
        self._blocks: list[int] = [0]
        self._pages: list[int] = [0]
        self._pairs: list[tuple[int, int]] = []
        if isinstance(event, _SETTLING):
            self._name_transfers(event)
            return
        self._blocks.extend(getattr(event, "blocks", ()))
        self._blocks.extend(getattr(event, "sources", ()))
        self._pages.extend(getattr(event, "pages", ()))
        if isinstance(event, ev.RowsComputed):
            size = self.state.page_size
            for row, count in zip(event.rows, event.counts, strict=True):
                start = int(self.state.rows.computed[row])
                last = (start + count - 1) // size
                self._pairs += [(row, entry) for entry in range(start // size, last + 1)]

    def _name_transfers(
        self, event: ev.TransferEnqueued | ev.TransferCompleted | ev.TransferFailed
    ) -> None:
        over = isinstance(event, ev.TransferFailed) or (
            isinstance(event, ev.TransferCompleted) and event.last
        )
        for ident in event.transfers:
            transfer: Transfer | None = self.state.transfers.get(ident)
            if transfer is None:
                continue
            self._blocks.append(transfer.block)
            self._pages.append(transfer.page)
            self._pairs.append((transfer.row, transfer.entry))
            if over and transfer.kind is TransferKind.RESTORE:
                self._page_refs[transfer.page] -= 1

    # -- after ------------------------------------------------------------------------------------
    def after(self) -> Iterator[Fault]:
        """Faults of what the event touched, as (invariant, seq, message)."""
        event = self._event
        if isinstance(event, ev.HostPagesReserved):
            self._count_pages(event.pages, 1)
        elif isinstance(event, ev.TransferPinned):
            self._count_pages(event.pages, 1 if event.kind is TransferKind.RESTORE else -1)
        elif isinstance(event, ev.HostPagesReleased) and event.trigger is PageTrigger.abandoned:
            self._count_pages(event.pages, -1)
        if type(event) in _CHANGES and event.row >= 0:
            self._follow(event.row, _CHANGES[type(event)] or (Table(event.role),))
        if isinstance(event, ev.StepPlanned):
            self._name_written(event)
        elif isinstance(event, _WHOLE_ROW):
            entries = self.state.table(Table.RESIDENT).shape[1]
            self._pairs += [(event.row, entry) for entry in range(entries)]
        blocks, pages = set(self._blocks), set(self._pages)
        if len(blocks) > 1 or len(pages) > 1:
            yield from self._check_blocks(blocks)
            yield from self._check_pages(pages)
        self._note_entries(blocks, pages)
        if isinstance(event, ev.StepPlanned):
            yield from self.readable()

    def _count_pages(self, pages: tuple[int, ...], by: int) -> None:
        np.add.at(self._page_refs, np.array(pages, dtype=np.int64), by)

    def _follow(self, row: int, tables: Iterable[Table]) -> None:
        """Take the changed entries of `row` over, and count what they name."""
        for table in tables:
            now, was = self.state.table(table)[row], self._shadow[table][row]
            changed = np.flatnonzero(now != was)
            if not len(changed):
                continue
            gone, come = was[changed].tolist(), now[changed].tolist()
            refs = self._page_refs if table is Table.HOST else self._block_refs
            named = self._pages if table is Table.HOST else self._blocks
            np.subtract.at(refs, was[changed], 1)
            np.add.at(refs, now[changed], 1)
            named += gone
            named += come
            places = self._places.get(table)
            if places is not None:
                for entry, old, new in zip(changed.tolist(), gone, come, strict=True):
                    if old:
                        places.get(old, set()).discard((row, entry))
                    if new:
                        places.setdefault(new, set()).add((row, entry))
                    self._pairs.append((row, entry))
            was[changed] = now[changed]

    def _name_written(self, event: ev.StepPlanned) -> None:
        size, per_block = self.state.page_size, self.state.index_pages_per_block
        resident, index = self.state.table(Table.RESIDENT), self.state.table(Table.INDEX)
        for row, start, count in zip(event.rows, event.starts, event.counts, strict=True):
            first, last = start // size, (start + count - 1) // size
            self._blocks += resident[row, first : last + 1].tolist()
            self._blocks += index[row, first // per_block : last // per_block + 1].tolist()
            self._pairs += [(row, entry) for entry in range(first, last + 1)]

    # Few ids an event, so plain numbers are faster here than arrays.
    def _check_blocks(self, ids: set[int]) -> Iterator[Fault]:
        b, seq, counted = self.state.blocks, self.state.seq, self._block_refs
        for ident in ids:
            now, refs = int(b.state[ident]), int(b.refs[ident])
            in_free, in_cached = ident in b.free, ident in b.cached
            idle = now in (_FREE, _CACHED)
            good = in_free == (now == _FREE) and in_cached == (now == _CACHED)
            good &= (now == _LOST or refs > 0) != idle
            if ident == 0:
                good = not (in_free or in_cached or refs) and now == _FREE
            if not good:
                yield (
                    "conservation",
                    seq,
                    f"block {ident} ({BlockState(now).name}) is not in exactly one of free, "
                    "cached, leased, quarantined",
                )
            if ident and refs != counted[ident]:
                text = f"has {refs} references, {counted[ident]} entries name it"
                yield "refcount_exact", seq, f"block {ident} {text}"

    def _check_pages(self, ids: set[int]) -> Iterator[Fault]:
        p, seq, counted = self.state.pages, self.state.seq, self._page_refs
        for ident in ids:
            now, refs = int(p.state[ident]), int(p.refs[ident])
            in_free, in_evictable = ident in p.free, ident in p.evictable
            evictable = now == _PAGE_PUBLISHED and refs == 0
            good = in_free == (now == _PAGE_FREE) and in_evictable == evictable
            good &= (now == _PAGE_LOST or refs > 0) != (now == _PAGE_FREE or evictable)
            if ident == 0:
                good = not (in_free or in_evictable or refs) and now == _PAGE_FREE
            if not good:
                yield (
                    "conservation",
                    seq,
                    f"host page {ident} ({PageState(now).name}) is not in exactly one of free, "
                    "evictable, leased, quarantined",
                )
            if ident and refs != counted[ident]:
                text = f"has {refs} references, {counted[ident]} entries name it"
                yield "refcount_exact", seq, f"host page {ident} {text}"

    def _note_entries(self, blocks: set[int], pages: set[int]) -> None:
        for table, ids in ((Table.RESIDENT, blocks), (Table.HOST, pages)):
            places = self._places[table]
            for ident in ids:
                if ident:
                    self._pairs.extend(places.get(ident, ()))
        self._touched.update(dict.fromkeys(self._pairs, self.state.seq))

    def readable(self) -> Iterator[Fault]:
        """Every touched entry of a live request: a readable block, or a readable host page."""
        if not self._touched:
            return
        touched, self._touched = self._touched, {}
        state, pairs = self.state, np.array(list(touched), dtype=np.int64)
        row, entry = pairs[:, 0], pairs[:, 1]
        rows = state.rows
        needed = rows.live[row] & (entry * state.page_size < rows.computed[row])
        row, entry = row[needed], entry[needed]
        if not len(row):
            return
        block, page = state.table(Table.RESIDENT)[row, entry], state.table(Table.HOST)[row, entry]
        page_state, block_state = state.pages.state[page], state.blocks.state[block]
        durable = (page_state == PageState.COMPLETED) | (page_state == PageState.PUBLISHED)
        owned = state.blocks.role[block] == BlockRole.RESIDENT
        kept = (block_state >= _KEPT[0]) & (block_state <= _KEPT[-1])
        good = (block > 0) & owned & kept
        on_host = (block == 0) & (page > 0) & (durable | (page_state == PageState.ENQUEUED))
        for at in np.flatnonzero(~good).tolist():
            if on_host[at] and state.request_of(int(row[at])).hot is HotState.LEASED:
                continue
            restoring = owned[at] and block_state[at] == BlockState.RESERVED and durable[at]
            if block[at] and restoring and self._being_restored(int(block[at])):
                continue
            yield (
                "always_readable",
                touched[(int(row[at]), int(entry[at]))],
                f"page {entry[at]} of request row {row[at]} has {rows.computed[row[at]]} computed "
                f"rows before its end and no readable copy (block {block[at]}, host page "
                f"{page[at]})",
            )

    def _being_restored(self, block: int) -> bool:
        return any(
            t.block == block
            for t in self.state.transfers.values()
            if t.kind is TransferKind.RESTORE
        )
