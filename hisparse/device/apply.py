"""The part of a command that is not a page transfer: resets, tables, poison, index copies.

Owns nothing; queues ops through `DeviceCalls` in the order that `SparseKVOffloadCommand` promises.
Everything runs on compute, in program order with the rows that steps write and read, except the
poison of host pages, which runs on d2h: the stream of those who write the host pool.

Needs from the scheduler: a poisoned block's last reader is fenced by this or an earlier command; a
poisoned page has no reader and no copy left that was not acknowledged.
"""

from __future__ import annotations

from functools import partial

from hisparse.device.backend import Copies, DeviceCalls
from hisparse.device.binding import BoundCache
from hisparse.device.layout import NULL, POISON, Geometry
from hisparse.device.tables import DeviceTables
from hisparse.errors import ProtocolError
from hisparse.fsm.wire import IndexCopy, SparseKVOffloadCommand, TransferKind


def check_command(
    geometry: Geometry, tables: DeviceTables, command: SparseKVOffloadCommand
) -> None:
    """Raise ProtocolError if `command` names a row, id or slot that does not exist."""

    def check_ids(what: str, ids: tuple[int, ...], limit: int) -> None:
        bad = [i for i in ids if not NULL < i < limit]
        if bad:
            raise ProtocolError(f"step {command.step}: {what} {bad} not in 1..{limit - 1}")

    blocks, pages = geometry.gpu_blocks, geometry.host_pages
    bad_rows = [row for row in command.resets if not 0 <= row < geometry.max_requests]
    if bad_rows:
        raise ProtocolError(f"step {command.step}: resets {bad_rows} name no row")
    for update in command.tables:
        tables.check(update)
    check_ids("poison_blocks", command.poison_blocks, blocks)
    check_ids("poison_hosts", command.poison_hosts, pages)
    for copy in command.index_copies:
        check_ids("index copy blocks", (copy.source, copy.block), blocks)
        last = geometry.index_pages - copy.pages
        if not (copy.pages >= 0 and 0 <= copy.source_slot <= last and 0 <= copy.slot <= last):
            raise ProtocolError(f"{copy}: leaves a block of {geometry.index_pages} indexer pages")
    check_ids("transfer blocks", tuple(t.block for t in command.transfers), blocks)
    check_ids("transfer hosts", tuple(t.host for t in command.transfers), pages)
    slots = [t.slot for t in command.index_transfers]
    check_ids("index transfer blocks", tuple(t.block for t in command.index_transfers), blocks)
    suffixes = tuple(t.suffix for t in command.index_transfers)
    check_ids("suffix pages", (*suffixes, *command.poison_suffixes), geometry.suffix_pages)
    if not all(0 <= slot < geometry.index_pages for slot in slots):
        raise ProtocolError(f"step {command.step}: index transfers leave a block: slots {slots}")
    _check_unordered(command)


def _check_unordered(command: SparseKVOffloadCommand) -> None:
    """Transfers of one command run on two streams in any order: they may not meet, and a source
    may not be poisoned by its own command. Raises ProtocolError."""
    restores = [t for t in command.transfers if t.kind == TransferKind.RESTORE]
    spills = [t for t in command.transfers if t.kind != TransferKind.RESTORE]
    for what, written, others in (
        ("block", [t.block for t in restores], [t.block for t in spills]),
        ("host page", [t.host for t in spills], [t.host for t in restores]),
    ):
        if len(set(written)) < len(written) or not set(written).isdisjoint(others):
            raise ProtocolError(f"step {command.step}: two transfers meet in a {what}: {written}")
    read = {t.suffix for t in command.index_transfers if t.load}
    kept = [t.suffix for t in command.index_transfers if not t.load]
    if len(set(kept)) < len(kept) or not read.isdisjoint((*kept, *command.poison_suffixes)):
        raise ProtocolError(f"step {command.step}: two writers, or a reader, meet in {kept}")
    poisoned = [t for t in spills if t.block in command.poison_blocks]
    if poisoned or any(t.host in command.poison_hosts for t in restores):
        raise ProtocolError(f"step {command.step}: a transfer's source is poisoned: {poisoned}")


class CommandApplier:
    """Queues one command's table and block work."""

    def __init__(
        self, calls: DeviceCalls, tables: DeviceTables, cache: BoundCache, copies: Copies
    ) -> None:
        self._calls = calls
        self._tables = tables
        self._cache = cache
        self._copies = copies
        self._leaders = [cache.handles[group.layers[0]].runtime for group in cache.groups]

    def apply(self, command: SparseKVOffloadCommand) -> int:
        """Queue it all; returns the indexer pages to be copied."""
        device = self._calls.device
        for op in device.kernels.change_tables(self._tables, self._leaders, command):
            device.compute.enqueue(op)
        self._poison(command)
        copies = command.index_copies
        for batch in [copies] if self._copies.batched and copies else [(c,) for c in copies]:
            self._copy_index(batch)
        return sum(copy.pages for copy in copies)

    def _poison(self, command: SparseKVOffloadCommand) -> None:
        device, cache = self._calls.device, self._cache
        fill = device.kernels.fill_blocks
        if command.poison_blocks:
            ids = command.poison_blocks
            self._calls.enqueue(
                device.compute, partial(fill, cache.blocks, ids, POISON), [("gpu", True, ids)]
            )
        if command.poison_hosts:
            ids = command.poison_hosts
            self._calls.enqueue(
                device.d2h,
                [partial(fill, view, ids, POISON) for view in cache.host],
                [("host", True, ids)],
            )
        if command.poison_suffixes:
            ids = command.poison_suffixes
            self._calls.enqueue(
                device.d2h,
                [partial(fill, view, ids, POISON) for view in cache.suffix],
                [("suffix", True, ids)],
            )

    def _copy_index(self, copies: tuple[IndexCopy, ...]) -> None:
        self._calls.enqueue(
            self._calls.device.compute,
            self._copies.copy_index(copies),
            [
                ("gpu", False, tuple(copy.source for copy in copies)),
                ("gpu", True, tuple(copy.block for copy in copies)),
            ],
        )
