"""Spill, restore, promotion, rewind, sleep: between the tiers."""

from __future__ import annotations

from unittest import mock

import numpy as np

from hisparse.fsm import events as ev
from hisparse.fsm import fold
from hisparse.fsm.evolve import blocks as evolve_blocks
from hisparse.fsm.machines import BlockTrigger, PageState
from hisparse.fsm.wire import Table
from hisparse.kv import (
    acknowledgements,
    coordinator,
    interruptions,
    lifecycle,
    managers,
    promotion,
    residency,
    rewind,
)
from hisparse.kv.block_pool import block_epochs
from hisparse.kv.coordinator import HiSparseCoordinator
from hisparse.kv.decision import ints
from hisparse.kv.host_pool import page_epochs

from .registry import mutant, relay


@mutant
def no_spill_before_free():
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


@mutant
def host_page_freed_before_readers_retire():
    """Host pages of an ended request go back while a step that reads them is still queued."""

    def at_once(state, key, cause):
        with mock.patch.object(state, "retired", [1 << 60]):
            events = list(real(state, key, cause))
        yield from relay(events)

    real = lifecycle.drain
    with mock.patch.object(lifecycle, "drain", at_once):
        yield


@mutant
def hot_region_skipped():
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


@mutant
def reset_while_pages_are_leased():
    """A reset takes published pages from the requests that read them."""

    def drop(state, suffix, cause):
        pages = np.flatnonzero(state.pages.state == PageState.PUBLISHED)
        if len(pages):
            yield ev.HostPagesEvicted(cause, ints(pages), page_epochs(state, pages))

    with (
        mock.patch.object(interruptions, "holders", lambda state: ""),
        mock.patch.object(HiSparseCoordinator, "sleep", lambda self, level: False),
        mock.patch.object(interruptions, "drop_all", drop),
    ):
        yield


@mutant
def hot_given_back_while_pages_are_on_host():
    """The pressure is gone, and so is the hot region, with pages still to be read through it."""

    def hasty(state, hot, cause):
        for row in np.flatnonzero(hot).tolist():
            yield from managers.HiSparseHotManager(state).release(row, cause)

    with mock.patch.object(promotion, "_give_back_hot", hasty):
        yield


@mutant
def promoted_before_the_host_page_is_valid():
    """Pages come back while the copies that fill their host pages are still under way."""
    with mock.patch.object(promotion, "DURABLE", tuple(PageState)):
        yield


@mutant
def lost_page_kept_by_a_rewind():
    """A request goes back to what is certain, and keeps the page whose copy failed."""

    def blind(state, row, failed, cause):
        yield from real(state, row, [t for t in failed if t.kind is t.kind.RESTORE], cause)

    real = acknowledgements.rewind
    with mock.patch.object(acknowledgements, "rewind", blind):
        yield


@mutant
def rewound_pages_freed_before_readers_retire():
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


@mutant
def cached_over_sleep():
    """What is cached on the GPU is still found after its memory was given up (H02,
    sleep-wake-breaks-offload)."""

    def nothing(state, cause):
        return
        yield

    with mock.patch.object(interruptions, "drop_gpu", nothing):
        yield
