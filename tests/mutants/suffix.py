"""Indexer pages and their CPU tier."""

from __future__ import annotations

from unittest import mock

import msgspec

from hisparse.device.transfers import TransferQueue
from hisparse.fsm.evolve import suffix as evolve_suffix
from hisparse.kv import (
    managers,
    suffix_cpu,
)

from .registry import mutant, relay


@mutant
def indexer_page_loaded_to_another_slot():
    """Indexer pages come back into the slot beside their own, where there is one."""
    copy = TransferQueue._copy_index

    def misplaced(self, transfer):
        if transfer.load:
            slot = (transfer.slot + 1) % self.geometry.index_pages
            transfer = msgspec.structs.replace(transfer, slot=slot)
        return copy(self, transfer)

    with mock.patch.object(TransferQueue, "_copy_index", misplaced):
        yield


@mutant
def index_block_freed_under_a_copy():
    """Index blocks of ended requests go back while they are copied to or from the CPU tier."""
    release = managers.HiSparseIndexManager.release

    def at_once(self, row, cause):
        with mock.patch.object(self.state, "suffix_copies", {}):
            events = list(release(self, row, cause))
        yield from relay(events)

    with mock.patch.object(managers.HiSparseIndexManager, "release", at_once):
        yield


@mutant
def failed_load_taken_for_complete():
    """A rank that could not copy an indexer page counts as one that did."""
    result = suffix_cpu.CpuSuffix.result

    def hopeful(self, taken, cause):
        done, epochs = taken.completed + taken.failed, taken.completed_epochs + taken.failed_epochs
        changed = {"completed": done, "completed_epochs": epochs, "failed": (), "failed_epochs": ()}
        return (yield from result(self, msgspec.structs.replace(taken, **changed), cause))

    with mock.patch.object(suffix_cpu.CpuSuffix, "result", hopeful):
        yield


@mutant
def leased_indexer_page_evicted():
    """The CPU tier gives a page away that a load is still reading."""
    give = evolve_suffix._lease

    def lease(state, e, request, pages):
        give(state, e, request, pages)
        state.suffix.refs[pages] -= 1
        state.suffix.evictable.push(pages[state.suffix.refs[pages] == 0])

    def back(state, copy):
        return

    with (
        mock.patch.object(evolve_suffix, "_lease", lease),
        mock.patch.object(evolve_suffix, "_give_back", back),
    ):
        yield


@mutant
def wrong_indexer_page_loaded():
    """The source brings the pages of the suffix back in the wrong order."""
    pinned = suffix_cpu.CpuSuffix._pinned

    def shuffled(self, load, row, entries, pages, cause):
        return pinned(self, load, row, entries, pages[::-1] if load else pages, cause)

    def lease(state, e, request, pages):
        tier = state.suffix
        tier.evictable.remove(pages[tier.refs[pages] == 0])
        tier.refs[pages] += 1

    with (
        mock.patch.object(suffix_cpu.CpuSuffix, "_pinned", shuffled),
        mock.patch.object(evolve_suffix, "_lease", lease),
    ):
        yield
