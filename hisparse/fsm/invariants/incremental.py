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

from collections.abc import Iterable
from typing import Any

import numpy as np

from hisparse.fsm import events as ev
from hisparse.fsm.invariants.entries import Entries, Fault
from hisparse.fsm.machines import BlockState, PageState, PageTrigger
from hisparse.fsm.state import State, Transfer
from hisparse.fsm.wire import Table, TransferKind

Places = dict[int, set[tuple[int, int]]]  # id -> (row, entry) that name it
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
_NAMES = {  # fields of block ids, and of host page ids
    kind: tuple(
        tuple(name for name in names if name in kind.__struct_fields__)
        for names in (("blocks", "sources"), ("pages",))
    )
    for kind in ev.EVENT_TYPES
}
# Events that name no id and change no table: nothing is to be rechecked after them.
_QUIET = frozenset(
    kind
    for kind, names in _NAMES.items()
    if not any(names)
    and kind not in (*_CHANGES, *_WHOLE_ROW, *_SETTLING, ev.StepPlanned, ev.RowsComputed)
)
_RESTORE = TransferKind.RESTORE
_FREE, _CACHED, _LOST = (
    int(s) for s in (BlockState.FREE, BlockState.CACHED, BlockState.QUARANTINED)
)
_PAGE_FREE, _PAGE_PUBLISHED, _PAGE_LOST = (
    int(s) for s in (PageState.FREE, PageState.PUBLISHED, PageState.QUARANTINED)
)
FEW_ENTRIES = 8  # up to that many, plain numbers are faster than arrays


class Incremental:
    """Watches one state. It may be made at any moment of the fold."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._entries = Entries(state)  # touched, not judged yet
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
        kind = type(event)
        self._event = event
        if kind in _QUIET:
            return
        self._blocks: list[int] = [0]
        self._pages: list[int] = [0]
        self._pairs: list[tuple[int, int]] = []
        if kind in _SETTLING:
            self._name_transfers(event)
            return
        blocks, pages = _NAMES[kind]
        for name in blocks:
            self._blocks += getattr(event, name)
        for name in pages:
            self._pages += getattr(event, name)
        if kind is ev.RowsComputed:
            size, computed = self.state.page_size, self.state.rows.computed
            for row, count in zip(event.rows, event.counts, strict=True):
                start = int(computed[row])
                first, last = start // size, (start + count - 1) // size
                self._pairs += [(row, entry) for entry in range(first, last + 1)]

    def _name_transfers(
        self, event: ev.TransferEnqueued | ev.TransferCompleted | ev.TransferFailed
    ) -> None:
        over = event.last and not isinstance(event, ev.TransferEnqueued)
        transfers = self.state.transfers
        for ident in event.transfers:
            transfer: Transfer | None = transfers.get(ident)
            if transfer is None:
                continue
            self._blocks.append(transfer.block)
            self._pages.append(transfer.page)
            self._pairs.append((transfer.row, transfer.entry))
            if over and transfer.kind is _RESTORE:
                self._page_refs[transfer.page] -= 1

    # -- after ------------------------------------------------------------------------------------
    def after(self) -> list[Fault]:
        """Faults of what the event touched, as (invariant, seq, message)."""
        event, kind = self._event, type(self._event)
        if kind in _QUIET:
            return []
        changes = _CHANGES.get(kind)
        if kind is ev.HostPagesReserved:
            self._count_pages(event.pages, 1)
        elif kind is ev.TransferPinned:
            self._count_pages(event.pages, 1 if event.kind is _RESTORE else -1)
        elif kind is ev.HostPagesReleased and event.trigger is PageTrigger.abandoned:
            self._count_pages(event.pages, -1)
        if changes is not None:
            for row in dict.fromkeys(getattr(event, "rows", ()) or (event.row,)):
                if row >= 0:
                    self._follow(row, changes or (Table(event.role),))
        if kind is ev.StepPlanned:
            self._name_written(event)
        elif kind in _WHOLE_ROW:
            # Of rows that are computed later, the event that accepts them speaks.
            computed = max(int(self.state.rows.computed[event.row]), 0)
            entries = min(
                -(-computed // self.state.page_size), self.state.table(Table.RESIDENT).shape[1]
            )
            self._pairs += [(event.row, entry) for entry in range(entries)]
        blocks, pages = set(self._blocks), set(self._pages)
        found: list[Fault] = []
        if len(blocks) > 1 or len(pages) > 1:
            self._check_blocks(blocks, found)
            self._check_pages(pages, found)
        self._note_entries(blocks, pages)
        if kind is ev.StepPlanned:
            found += self._entries.unreadable()
        return found

    def _count_pages(self, pages: tuple[int, ...], by: int) -> None:
        if len(pages) > FEW_ENTRIES:
            np.add.at(self._page_refs, np.array(pages, dtype=np.int64), by)
            return
        for page in pages:
            self._page_refs[page] += by

    def _follow(self, row: int, tables: Iterable[Table]) -> None:
        """Take the changed entries of `row` over, and count what they name."""
        for table in tables:
            now, was = self.state.table(table)[row], self._shadow[table][row]
            if now.tobytes() == was.tobytes():
                continue
            changed = (now != was).nonzero()[0]
            entries = changed.tolist()
            gone, come = was[changed].tolist(), now[changed].tolist()
            refs = self._page_refs if table is Table.HOST else self._block_refs
            named = self._pages if table is Table.HOST else self._blocks
            if len(entries) <= FEW_ENTRIES:
                for old, new in zip(gone, come, strict=True):
                    refs[old] -= 1
                    refs[new] += 1
            else:
                np.subtract.at(refs, was[changed], 1)
                np.add.at(refs, now[changed], 1)
            named += gone
            named += come
            places = self._places.get(table)
            if places is not None:
                for entry, old, new in zip(entries, gone, come, strict=True):
                    if old:
                        places.get(old, set()).discard((row, entry))
                    if new:
                        places.setdefault(new, set()).add((row, entry))
                    self._pairs.append((row, entry))
            was[changed] = now[changed]

    def _name_written(self, event: ev.StepPlanned) -> None:
        size, per_block = self.state.page_size, self.state.index_pages_per_block
        resident, index = self.state.table(Table.RESIDENT), self.state.table(Table.INDEX)
        blocks, pairs = self._blocks, self._pairs
        for row, start, count in zip(event.rows, event.starts, event.counts, strict=True):
            first, last = start // size, (start + count - 1) // size
            if first == last:
                blocks.append(resident.item(row, first))
                blocks.append(index.item(row, first // per_block))
                pairs.append((row, first))
                continue
            blocks += resident[row, first : last + 1].tolist()
            blocks += index[row, first // per_block : last // per_block + 1].tolist()
            pairs += [(row, entry) for entry in range(first, last + 1)]

    # Few ids an event, so plain numbers are faster here than arrays.
    def _check_blocks(self, ids: set[int], found: list[Fault]) -> None:
        b, counted = self.state.blocks, self._block_refs.item
        states, all_refs = b.state.item, b.refs.item
        free, cached = b.free.places.item, b.cached.places.item
        for ident in ids:
            now, refs = states(ident), all_refs(ident)
            in_free, in_cached = free(ident) != 0, cached(ident) != 0
            if ident == 0:
                good = not (in_free or in_cached or refs) and now == _FREE
            else:
                good = in_free == (now == _FREE) and in_cached == (now == _CACHED)
                good &= (now == _LOST or refs > 0) != (now in (_FREE, _CACHED))
            if not good:
                text = f"block {ident} ({BlockState(now).name}) is not in exactly one of free, "
                found.append(("conservation", self.state.seq, f"{text}cached, leased, quarantined"))
            if refs != counted(ident) and ident:
                text = f"has {refs} references, {counted(ident)} entries name it"
                found.append(("refcount_exact", self.state.seq, f"block {ident} {text}"))

    def _check_pages(self, ids: set[int], found: list[Fault]) -> None:
        p, counted = self.state.pages, self._page_refs.item
        states, all_refs = p.state.item, p.refs.item
        free, idle = p.free.places.item, p.evictable.places.item
        for ident in ids:
            now, refs = states(ident), all_refs(ident)
            in_free, in_evictable = free(ident) != 0, idle(ident) != 0
            if ident == 0:
                good = not (in_free or in_evictable or refs) and now == _PAGE_FREE
            else:
                evictable = now == _PAGE_PUBLISHED and refs == 0
                good = in_free == (now == _PAGE_FREE) and in_evictable == evictable
                good &= (now == _PAGE_LOST or refs > 0) != (now == _PAGE_FREE or evictable)
            if not good:
                text = f"host page {ident} ({PageState(now).name}) is not in exactly one of free, "
                found.append(
                    ("conservation", self.state.seq, f"{text}evictable, leased, quarantined")
                )
            if refs != counted(ident) and ident:
                text = f"has {refs} references, {counted(ident)} entries name it"
                found.append(("refcount_exact", self.state.seq, f"host page {ident} {text}"))

    def _note_entries(self, blocks: set[int], pages: set[int]) -> None:
        pairs = self._pairs
        named = ((self._places[Table.RESIDENT], blocks), (self._places[Table.HOST], pages))
        for places, ids in named:
            if len(ids) > 1:  # the null id has no place
                for ident in ids:
                    if ident in places:
                        pairs += places[ident]
        if pairs:
            self._entries.touch(pairs)

    def readable(self) -> list[Fault]:
        """Faults of the entries that were touched since a step was planned last."""
        return self._entries.unreadable()
