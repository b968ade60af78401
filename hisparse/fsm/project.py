"""project: events in ``(from_seq, to_seq]`` -> the SparseKVOffloadCommand that they amount to.

The worker acts on the log through this function alone: whatever is not an event cannot reach it.
Request ids, hashes, tokens and logical pages stay behind; rows, entries and physical ids go over.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

from hisparse.fsm import events as ev
from hisparse.fsm.machines import BlockTrigger, PageTrigger
from hisparse.fsm.wire import (
    IndexCopy,
    IndexTransfer,
    SparseKVOffloadCommand,
    SparseKVPageTransfer,
    Table,
    TableUpdate,
    TransferKind,
)

FREED = (
    BlockTrigger.abandoned,
    BlockTrigger.retired,
    BlockTrigger.dropped,
    BlockTrigger.spilled,
)


# The kinds of a steady step that mean nothing to a worker, passed over before the others are tried.
UNTOLD = (ev.RowsComputed, ev.TransferEnqueued, ev.TransferCompleted, ev.PagesPublished)


class Projection:
    """Collects what events mean for a worker, in order.

    Args:
        poison: also report freed blocks and host pages, so that the worker can overwrite them.
    """

    def __init__(self, poison: bool) -> None:
        self.poison = poison
        self.step = 0
        self.resets: list[int] = []
        self.tables: list[TableUpdate] = []
        self.fences: list[int] = []
        self.poison_blocks: dict[int, None] = {}
        self.poison_hosts: dict[int, None] = {}
        self.index_copies: list[IndexCopy] = []
        self.transfers: list[SparseKVPageTransfer] = []
        self.acked: dict[int, int] = {}
        self.index_transfers: list[IndexTransfer] = []
        self.poison_suffixes: dict[int, None] = {}
        self.memory: list[int] = []

    def _set(self, table: Table, row: int, entries: Iterable[int], values: Iterable[int]) -> None:
        self._set_places(table, [(row, entry) for entry in entries], values)

    def _set_places(
        self, table: Table, places: Iterable[tuple[int, int]], values: Iterable[int]
    ) -> None:
        """Table updates at (row, entry), adjacent entries of a row in one."""
        row, first, run = -1, 0, list[int]()
        for (at, entry), value in sorted(zip(places, values, strict=True)):
            if at == row and first + len(run) == entry:
                run.append(value)
                continue
            if run:
                self.tables.append(TableUpdate(table, row, first, tuple(run)))
            row, first, run = at, entry, [value]
        if run:
            self.tables.append(TableUpdate(table, row, first, tuple(run)))

    def _freed(self, blocks: ev.Ints) -> None:
        # A block copied from in this very command is read after the poison would land: leave it.
        if self.poison:
            sources = {copy.source for copy in self.index_copies}
            self.poison_blocks.update(dict.fromkeys(b for b in blocks if b not in sources))

    def add(self, e: object) -> None:
        """Take one event in; kinds that mean nothing to a worker are passed over."""
        if type(e) in UNTOLD:
            return
        match e:
            case ev.StepPlanned():
                self.step = e.step
            case ev.AcknowledgementsTaken():
                self.acked[e.rank] = e.last_seq
            case ev.RequestAdmitted():
                # What the row's last request changed since the last command is over with it.
                self.tables = [update for update in self.tables if update.row != e.row]
                self.resets.append(e.row)
            case ev.PrefixLeased():
                self._set(Table.HOST, e.row, range(len(e.pages)), e.pages)
            case ev.BlocksReserved():
                self._set_places(Table(e.role), e.places(), e.blocks)
            case ev.BlocksAdopted():
                self._set(Table(e.role), e.row, e.entries, e.blocks)
            case ev.HotLeased():
                self._set(Table.HOT, e.row, range(len(e.blocks)), e.blocks)
            case ev.PagesSpilled():
                self._set(Table.RESIDENT, e.row, e.entries, [0] * len(e.entries))
                self.fences += [t for t in e.transfers if t]
                if e.trigger in FREED:
                    self._freed(e.blocks)
            case ev.BlocksReleased():
                self._set(Table(e.role), e.row, e.entries, [0] * len(e.entries))
                if e.trigger in FREED:
                    self._freed(e.blocks)
            case ev.BlocksEvicted():
                self._freed(e.blocks)
            case ev.IndexPagesCopied():
                self._copy_index(e)
            case ev.TransferPinned():
                self._copy_pages(e)
            case ev.HostPagesReleased():
                self._set(Table.HOST, e.row, e.entries, [0] * len(e.entries))
                freed = (PageTrigger.released, PageTrigger.reclaimed)
                if self.poison and e.trigger in freed:
                    self.poison_hosts.update(dict.fromkeys(e.pages))
            case ev.HostPagesEvicted():
                if self.poison:
                    self.poison_hosts.update(dict.fromkeys(e.pages))

            case ev.MemoryReleased():
                self.memory.append(e.level)
                self.index_copies.clear()  # for requests that have ended; the memory goes first
            case ev.MemoryRestored():
                self.memory.append(0)
            case ev.SuffixPinned():
                columns = (e.transfers, e.blocks, e.block_epochs, e.slots)
                self.index_transfers += [
                    IndexTransfer(ident, e.epoch, e.load, *rest)
                    for ident, *rest in zip(*columns, e.suffixes, e.suffix_epochs, strict=True)
                ]
            case ev.SuffixEvicted():
                if self.poison:
                    self.poison_suffixes.update(dict.fromkeys(e.suffixes))

    def _copy_index(self, e: ev.IndexPagesCopied) -> None:
        """Runs of slots that move together become one copy."""
        runs: list[list[int]] = []
        for source, from_slot, block, slot in zip(
            e.sources, e.source_slots, e.blocks, e.slots, strict=True
        ):
            last = runs[-1] if runs else None
            follows = last is not None and (
                [last[0], last[1] + last[4], last[2], last[3] + last[4]]
                == [source, from_slot, block, slot]
            )
            if follows and last is not None:
                last[4] += 1
            else:
                runs.append([source, from_slot, block, slot, 1])
        self.index_copies += [IndexCopy(*run) for run in runs]

    def _copy_pages(self, e: ev.TransferPinned) -> None:
        if e.kind is not TransferKind.RESTORE:
            rows = e.rows or repeat(e.row, len(e.entries))
            self._set_places(Table.HOST, zip(rows, e.entries, strict=True), e.pages)
        epochs = e.request_epochs or repeat(e.epoch)
        self.transfers += map(
            SparseKVPageTransfer,
            e.transfers, epochs, repeat(e.kind), e.blocks, e.block_epochs, e.pages, e.page_epochs,
        )  # fmt: skip

    def command(
        self, worker_epoch: int, from_seq: int, to_seq: int, epochs: tuple[int, ...] = ()
    ) -> SparseKVOffloadCommand:
        """The command for everything taken in so far."""
        return SparseKVOffloadCommand(
            step=self.step,
            worker_epoch=worker_epoch,
            from_seq=from_seq,
            to_seq=to_seq,
            resets=tuple(self.resets),
            tables=tuple(self.tables),
            fences=tuple(self.fences),
            poison_blocks=tuple(self.poison_blocks),
            poison_hosts=tuple(self.poison_hosts),
            index_copies=tuple(self.index_copies),
            transfers=tuple(self.transfers),
            acked=tuple(self.acked.items()),
            index_transfers=tuple(self.index_transfers),
            poison_suffixes=tuple(self.poison_suffixes),
            memory=tuple(self.memory),
            epochs=epochs,
        )


def project(
    events: Iterable[tuple[int, object]],
    *,
    worker_epoch: int,
    from_seq: int,
    poison: bool,
    epochs: tuple[int, ...] = (),
) -> SparseKVOffloadCommand:
    """Project a contiguous run of events that starts right after `from_seq`."""
    projection, seq = Projection(poison), from_seq
    for seq, event in events:  # noqa: B007  (the last seq is the command's to_seq)
        projection.add(event)
    return projection.command(worker_epoch, from_seq, seq, epochs)
