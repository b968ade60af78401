"""Faults, by name, put into the production code for the length of a `with`.

Each takes a promise out of the code (and out of the assertion that guards it, where there is one),
so that a fault has to be found by an invariant and not by the code's own checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import msgspec
import numpy as np

from hisparse.device.runtime import HiSparseRuntime
from hisparse.device.transfers import TransferQueue
from hisparse.engine import loop
from hisparse.fsm import events as ev
from hisparse.fsm import fold, project
from hisparse.fsm.evolve import blocks as evolve_blocks
from hisparse.fsm.evolve import pages as evolve_pages
from hisparse.fsm.evolve import suffix as evolve_suffix
from hisparse.fsm.machine import columns
from hisparse.fsm.machines import HOST_PAGE, BlockTrigger, PageState, PageTrigger
from hisparse.fsm.wire import Table
from hisparse.kv import (
    acknowledgements,
    coordinator,
    lifecycle,
    managers,
    promotion,
    publication,
    residency,
    rewind,
    suffix_cpu,
)
from hisparse.kv.block_pool import block_epochs
from hisparse.kv.coordinator import HiSparseCoordinator
from hisparse.kv.decision import ints
from hisparse.kv.host_pool import page_epochs


def relay(events):
    """A decision made of `events`: a list's own iterator could not be sent their seqs."""
    while events:
        yield events.pop(0)


@contextmanager
def no_spill_before_free() -> Iterator[None]:
    """Dirty pages lose their block at once; the copy that should precede is never planned."""

    def drop_dirty(state, kind, row, entries, cause):
        if not len(entries):
            return
        gone = state.table(Table.RESIDENT)[row, entries].astype(np.int64)
        yield ev.PagesSpilled(
            cause, row, BlockTrigger.retired, ints(entries), ints(gone),
            block_epochs(state, gone), (0,) * len(gone),
        )  # fmt: skip

    with mock.patch.object(residency, "pin", drop_dirty):
        yield


@contextmanager
def publish_at_enqueue() -> Iterator[None]:
    """A page is published as soon as its copy is in a stream."""
    table = HOST_PAGE.table.copy()
    table[PageState.ENQUEUED, PageTrigger.published] = PageState.PUBLISHED
    replace = acknowledgements._replace_spilled

    def eager(state, group, cause):
        yield from replace(state, group, cause)
        with mock.patch.object(publication, "PageState", EnqueuedIsComplete):
            found = list(publication.publish(state, sorted({t.row for t in group}), cause))
        yield from relay(found)

    class EnqueuedIsComplete:
        COMPLETED = PageState.ENQUEUED

    with (
        mock.patch.object(HOST_PAGE, "columns", columns(table)),
        mock.patch.object(acknowledgements, "_replace_spilled", eager),
    ):
        yield


@contextmanager
def skip_one_host_copy() -> Iterator[None]:
    """The fifth copy is acknowledged and never made."""
    copy, made = TransferQueue._copy, [0]

    def skipping(self, transfer):
        made[0] += 1
        return True if made[0] == 5 else copy(self, transfer)

    with mock.patch.object(TransferQueue, "_copy", skipping):
        yield


@contextmanager
def reuse_an_epoch() -> Iterator[None]:
    """A block is given out again under the epoch that it had."""

    def kept(state, blocks):
        return ints(np.maximum(state.blocks.epoch[blocks], 1))

    def take(what, columns, at, epochs):
        columns[at] = epochs

    with (
        mock.patch.object(managers, "next_block_epochs", kept),
        mock.patch.object(residency, "next_block_epochs", kept),
        mock.patch.object(evolve_blocks, "raise_epochs", take),
    ):
        yield


@contextmanager
def drop_wait(why: str) -> Iterator[None]:
    """One kind of wait between streams is left out."""
    wait = TransferQueue._wait

    def leaky(self, stream, event, reason):
        if reason != why:
            wait(self, stream, event, reason)

    with mock.patch.object(TransferQueue, "_wait", leaky):
        yield


@contextmanager
def host_page_freed_before_readers_retire() -> Iterator[None]:
    """Host pages of an ended request go back while a step that reads them is still queued."""

    def at_once(state, key, cause):
        with mock.patch.object(state, "retired", [1 << 60]):
            events = list(real(state, key, cause))
        yield from relay(events)

    real = lifecycle.drain
    with mock.patch.object(lifecycle, "drain", at_once):
        yield


@contextmanager
def hot_region_skipped() -> Iterator[None]:
    """A request loses pages without a hot region to read them through."""

    def none(state, row, cause):
        return
        yield

    def spilled(state, e, seq):
        request = state.request_of(e.row)
        with mock.patch.object(request, "hot", request.hot.LEASED):
            real(state, e, seq)

    real = evolve_blocks.pages_spilled
    with (
        mock.patch.object(residency, "lease_hot", none),
        mock.patch.dict(fold.HANDLERS, {ev.PagesSpilled: spilled}),
    ):
        yield


@contextmanager
def table_update_lost() -> Iterator[None]:
    """The projection forgets that spilled pages are read from the host now."""
    add = project.Projection.add

    def forgetful(self, e):
        if isinstance(e, ev.PagesSpilled):
            kept = len(self.tables)
            add(self, e)
            del self.tables[kept:]
        else:
            add(self, e)

    with mock.patch.object(project.Projection, "add", forgetful):
        yield


@contextmanager
def reference_dropped() -> Iterator[None]:
    """A restore forgets to give its lease of the host page back."""
    settle = evolve_pages._settle

    def leaky(state, transfers):
        settle(state, transfers)
        for t in transfers:
            if t.kind is t.kind.RESTORE:
                state.pages.refs[t.page] += 1

    with mock.patch.object(evolve_pages, "_settle", leaky):
        yield


@contextmanager
def freed_block_kept_in_no_queue() -> Iterator[None]:
    """Blocks of ended requests vanish: free by state, in no free list."""

    def lost(state, ids):
        with mock.patch.object(state.blocks, "free", mock.Mock(push=lambda _: None)):
            free(state, ids[:1])
        if len(ids) > 1:
            free(state, ids[1:])

    free = evolve_blocks.free_blocks
    with mock.patch.object(evolve_blocks, "free_blocks", lost):
        yield


@contextmanager
def fold_forgets() -> Iterator[None]:
    """Something outside the fold changes the live state: the log does not say so."""
    tick = HiSparseCoordinator.tick

    def drifting(self, now_us):
        tick(self, now_us)
        self.state.now_us += 1

    with mock.patch.object(HiSparseCoordinator, "tick", drifting):
        yield


@contextmanager
def provisional_rows_confirmed() -> Iterator[None]:
    """Rows count as certain as soon as they are computed, whatever their step could read."""
    computed = fold.HANDLERS[ev.RowsComputed]

    def hasty(state, e, seq):
        computed(state, e, seq)
        at = np.array(e.rows, dtype=np.int64)
        state.rows.confirmed[at] = state.rows.computed[at]

    with mock.patch.dict(fold.HANDLERS, {ev.RowsComputed: hasty}):
        yield


@contextmanager
def drift_that_heals() -> Iterator[None]:
    """The live state is wrong for three steps, then right again."""
    plan = HiSparseCoordinator.plan_step

    def drifting(self, rows, counts):
        step = plan(self, rows, counts)
        self.state.pages.epoch[0] = 1 if 3 <= step < 6 else 0
        return step

    with mock.patch.object(HiSparseCoordinator, "plan_step", drifting):
        yield


@contextmanager
def reset_while_pages_are_leased() -> Iterator[None]:
    """A reset takes published pages from the requests that read them."""

    def drop(state, suffix, cause):
        pages = np.flatnonzero(state.pages.state == PageState.PUBLISHED)
        if len(pages):
            yield ev.HostPagesEvicted(cause, ints(pages), page_epochs(state, pages))

    with (
        mock.patch.object(coordinator, "holders", lambda state: ""),
        mock.patch.object(HiSparseCoordinator, "sleep", lambda self, level: False),
        mock.patch.object(coordinator, "drop_all", drop),
    ):
        yield


@contextmanager
def hot_given_back_while_pages_are_on_host() -> Iterator[None]:
    """The pressure is gone, and so is the hot region, with pages still to be read through it."""

    def hasty(state, hot, cause):
        for row in np.flatnonzero(hot).tolist():
            yield from managers.HiSparseHotManager(state).release(row, cause)

    with mock.patch.object(promotion, "_give_back_hot", hasty):
        yield


@contextmanager
def indexer_page_loaded_to_another_slot() -> Iterator[None]:
    """Indexer pages come back into the slot beside their own, where there is one."""
    copy = TransferQueue._copy_index

    def misplaced(self, transfer):
        if transfer.load:
            slot = (transfer.slot + 1) % self.geometry.index_pages
            transfer = msgspec.structs.replace(transfer, slot=slot)
        return copy(self, transfer)

    with mock.patch.object(TransferQueue, "_copy_index", misplaced):
        yield


@contextmanager
def promoted_before_the_host_page_is_valid() -> Iterator[None]:
    """Pages come back while the copies that fill their host pages are still under way."""
    with mock.patch.object(promotion, "DURABLE", tuple(PageState)):
        yield


@contextmanager
def index_block_freed_under_a_copy() -> Iterator[None]:
    """Index blocks of ended requests go back while they are copied to or from the CPU tier."""
    release = managers.HiSparseIndexManager.release

    def at_once(self, row, cause):
        with mock.patch.object(self.state, "suffix_copies", {}):
            events = list(release(self, row, cause))
        yield from relay(events)

    with mock.patch.object(managers.HiSparseIndexManager, "release", at_once):
        yield


@contextmanager
def failed_load_taken_for_complete() -> Iterator[None]:
    """A rank that could not copy an indexer page counts as one that did."""
    result = suffix_cpu.CpuSuffix.result

    def hopeful(self, taken, cause):
        done, epochs = taken.completed + taken.failed, taken.completed_epochs + taken.failed_epochs
        changed = {"completed": done, "completed_epochs": epochs, "failed": (), "failed_epochs": ()}
        return (yield from result(self, msgspec.structs.replace(taken, **changed), cause))

    with mock.patch.object(suffix_cpu.CpuSuffix, "result", hopeful):
        yield


@contextmanager
def leased_indexer_page_evicted() -> Iterator[None]:
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


@contextmanager
def wrong_indexer_page_loaded() -> Iterator[None]:
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


@contextmanager
def lost_page_kept_by_a_rewind() -> Iterator[None]:
    """A request goes back to what is certain, and keeps the page whose copy failed."""

    def blind(state, row, failed, cause):
        yield from real(state, row, [t for t in failed if t.kind is t.kind.RESTORE], cause)

    real = acknowledgements.rewind
    with mock.patch.object(acknowledgements, "rewind", blind):
        yield


@contextmanager
def rewound_pages_freed_before_readers_retire() -> Iterator[None]:
    """Pages of rows that were taken back go while a step that reads them is still queued."""

    class Retired(list):
        """Says that every step is over."""

        def __iter__(self):
            return iter([1 << 60])

    def at_once(state, key, cause):
        kept, state.retired = state.retired, Retired(state.retired)
        try:
            yield from real(state, key, cause)
        finally:
            state.retired = kept

    real = coordinator.resume
    with (
        mock.patch.object(coordinator, "resume", at_once),
        mock.patch.object(rewind, "resume", at_once),
    ):
        yield


@contextmanager
def hot_rows_outlive_a_rewind() -> Iterator[None]:
    """The worker forgets no hot row of a page that was replaced on the host."""
    forget = HiSparseRuntime.forget_entries

    def forgetful(self, table, row, entries):
        if table != Table.HOST:
            forget(self, table, row, entries)

    with mock.patch.object(HiSparseRuntime, "forget_entries", forgetful):
        yield


@contextmanager
def rejected_drafts_accepted() -> Iterator[None]:
    """Rows of drafts count as accepted, whatever the target chose."""
    with mock.patch.object(loop, "standing", lambda drafts, chosen, eos: len(chosen)):
        yield


@contextmanager
def cached_over_sleep() -> Iterator[None]:
    """What is cached on the GPU is still found after its memory was given up."""

    def nothing(state, cause):
        return
        yield

    with mock.patch.object(coordinator, "drop_gpu", nothing):
        yield


WAITS = (
    "compute_after_spill",
    "d2h_after_compute",
    "h2d_after_compute",
    "compute_after_restore",
)

# name -> (the fault, invariants of which one has to name it)
MUTANTS = {
    "no_spill_before_free": (no_spill_before_free, {"spill_before_free"}),
    "publish_at_enqueue": (publish_at_enqueue, {"complete_before_publish"}),
    "skip_one_host_copy": (skip_one_host_copy, {"content"}),
    "reuse_an_epoch": (reuse_an_epoch, {"one_content"}),
    **{f"drop {why}": (lambda why=why: drop_wait(why), {"content"}) for why in WAITS},
    "host_page_freed_before_readers_retire": (
        host_page_freed_before_readers_retire,
        {"host_reuse_after_readers"},
    ),
    "hot_region_skipped": (hot_region_skipped, {"always_readable"}),
    "hot_given_back_while_pages_are_on_host": (
        hot_given_back_while_pages_are_on_host,
        {"always_readable"},
    ),
    "promoted_before_the_host_page_is_valid": (
        promoted_before_the_host_page_is_valid,
        {"always_readable", "content"},
    ),
    "table_update_lost": (table_update_lost, {"table_truth"}),
    "reference_dropped": (reference_dropped, {"refcount_exact"}),
    "freed_block_kept_in_no_queue": (freed_block_kept_in_no_queue, {"conservation"}),
    "fold_forgets": (fold_forgets, {"replay_equal"}),
    "drift_that_heals": (drift_that_heals, {"replay_equal"}),
    "indexer_page_loaded_to_another_slot": (indexer_page_loaded_to_another_slot, {"content"}),
    "index_block_freed_under_a_copy": (index_block_freed_under_a_copy, {"spill_before_free"}),
    "failed_load_taken_for_complete": (failed_load_taken_for_complete, {"rank_quorum"}),
    "leased_indexer_page_evicted": (
        leased_indexer_page_evicted,
        {"host_reuse_after_readers", "refcount_exact"},
    ),
    "wrong_indexer_page_loaded": (wrong_indexer_page_loaded, {"one_content"}),
    "cached_over_sleep": (cached_over_sleep, {"content"}),
    "reset_while_pages_are_leased": (reset_while_pages_are_leased, {"host_reuse_after_readers"}),
    "lost_page_kept_by_a_rewind": (lost_page_kept_by_a_rewind, {"always_readable"}),
    "rewound_pages_freed_before_readers_retire": (
        rewound_pages_freed_before_readers_retire,
        {"host_reuse_after_readers"},
    ),
    "hot_rows_outlive_a_rewind": (hot_rows_outlive_a_rewind, {"no_silent_loss", "content"}),
    "rejected_drafts_accepted": (rejected_drafts_accepted, {"content"}),
    "provisional_rows_confirmed": (provisional_rows_confirmed, {"no_silent_loss"}),
}
