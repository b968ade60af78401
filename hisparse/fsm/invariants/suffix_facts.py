"""Facts of a run about the CPU tier of indexer pages; see `facts.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hisparse.fsm import events as ev

if TYPE_CHECKING:
    from hisparse.fsm.invariants.records import Tenant


class IndexCopy(msgspec.Struct, eq=False):
    """A copy as it was planned, and the ranks that really answered."""

    ident: int
    load: bool
    epoch: int
    block: int
    slot: int
    suffix: int
    writers: int
    completed: int = 0
    failed: int = 0
    settled: bool = False


class Suffix:
    """What the log said of the tier."""

    def __init__(self) -> None:
        self.copies: dict[int, IndexCopy] = {}  # unsettled, and settled stores of pages still held
        self.store_of: dict[int, IndexCopy] = {}  # page -> the copy that fills it
        self.hash_of: dict[int, bytes] = {}
        self.epochs: dict[int, int] = {}
        self.unsure: set[tuple[int, int]] = set()  # block, slot: a load that is not complete

    def flying(self, *, block: int = 0, suffix: int = 0) -> list[int]:
        """Transfers under way to or from the block or the page."""
        return [
            c.ident
            for c in self.copies.values()
            if not c.settled and ((block and c.block == block) or (suffix and c.suffix == suffix))
        ]

    def take(self, e: ev.Event, rows: dict[int, Tenant]) -> None:
        """Note what `e` says."""
        match e:
            case ev.SuffixPinned():
                self._pinned(e, rows.get(e.row))
            case ev.AcknowledgementsTaken():
                for name in ("completed", "failed"):
                    named = zip(getattr(e, name), getattr(e, f"{name}_epochs"), strict=True)
                    for ident, epoch in named:
                        copy = self.copies.get(ident)
                        if copy is not None and copy.epoch == epoch:
                            setattr(copy, name, getattr(copy, name) | 1 << e.rank)
            case ev.SuffixCompleted() | ev.SuffixFailed() if e.last:
                for copy in [self.copies[ident] for ident in e.transfers if ident in self.copies]:
                    self._settle(copy)
            case ev.SuffixEvicted():
                for page in e.suffixes:
                    self._forget(page)
            case ev.BlocksReserved() | ev.HotLeased():
                self.unsure -= {at for at in self.unsure if at[0] in e.blocks}

    def _pinned(self, e: ev.SuffixPinned, tenant: Tenant | None) -> None:
        columns = (e.transfers, e.entries, e.blocks, e.slots, e.suffixes, e.suffix_epochs)
        for ident, entry, block, slot, page, epoch in zip(*columns, strict=True):
            copy = IndexCopy(ident, e.load, e.epoch, block, slot, page, e.writers)
            self.copies[ident] = copy
            if e.load:
                self.unsure.add((block, slot))
                continue
            self.store_of[page], self.epochs[page] = copy, epoch
            if tenant is not None and entry < len(tenant.hashes):
                self.hash_of[page] = tenant.hashes[entry]

    def _settle(self, copy: IndexCopy) -> None:
        copy.settled = True
        if copy.load:
            del self.copies[copy.ident]
            if not copy.failed:
                self.unsure.discard((copy.block, copy.slot))
        elif copy.failed:
            self._forget(copy.suffix)

    def _forget(self, page: int) -> None:
        self.hash_of.pop(page, None)
        store = self.store_of.pop(page, None)
        if store is not None and store.settled:
            self.copies.pop(store.ident, None)
