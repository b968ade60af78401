"""Epochs, queues, references: the books of both pools."""

from __future__ import annotations

from unittest import mock

import numpy as np

from hisparse.fsm import events as ev
from hisparse.fsm import fold
from hisparse.fsm.evolve import blocks as evolve_blocks
from hisparse.fsm.evolve import pages as evolve_pages
from hisparse.fsm.evolve import suffix as evolve_suffix
from hisparse.fsm.machines import BlockRole
from hisparse.fsm.wire import TransferKind
from hisparse.kv import acknowledgements, admission, coordinator, managers, residency, rewind
from hisparse.kv.decision import ints
from hisparse.kv.managers import SingleTypeKVCacheManager

from .registry import mutant


def take(what, columns, at, epochs):
    """Whatever epoch an event names."""
    columns[at] = epochs


@mutant
def reuse_an_epoch():
    """A block is given out again under the epoch that it had."""

    def kept(state, blocks):
        return ints(np.maximum(state.blocks.epoch[blocks], 1))

    with (
        mock.patch.object(managers, "next_block_epochs", kept),
        mock.patch.object(residency, "next_block_epochs", kept),
        mock.patch.object(evolve_blocks, "raise_epochs", take),
    ):
        yield


@mutant
def reuse_the_epoch_of_a_host_page():
    """A host page is given out again under the epoch that it had."""

    def kept(state, pages):
        return ints(np.maximum(state.pages.epoch[pages], 1))

    with (
        mock.patch.object(admission, "next_page_epochs", kept),
        mock.patch.object(rewind, "next_page_epochs", kept),
        mock.patch.object(acknowledgements, "next_page_epochs", kept),
        mock.patch.object(evolve_pages, "raise_epochs", take),
    ):
        yield


@mutant
def reference_dropped():
    """A restore forgets to give its lease of the host page back."""
    settle = evolve_pages._settle

    def leaky(state, transfers):
        settle(state, transfers)
        for t in transfers:
            if t.kind is t.kind.RESTORE:
                state.pages.refs[t.page] += 1

    with mock.patch.object(evolve_pages, "_settle", leaky):
        yield


@mutant
def unlocked_by_policy():
    """Where pages are written back eagerly, a copy that ends gives a lease back that it never took.
    (unlock-without-lock-by-policy-flag)"""
    completed = fold.HANDLERS[ev.TransferCompleted]

    def unlocking(state, e, seq):
        moved = [state.transfers[ident] for ident in e.transfers]
        completed(state, e, seq)
        if e.last and state.config.policy.write_back == "eager":
            for t in moved:
                if t.kind is TransferKind.WRITE_BACK:
                    state.pages.refs[t.page] -= 1

    with mock.patch.dict(fold.HANDLERS, {ev.TransferCompleted: unlocking}):
        yield


@mutant
def reference_clamped():
    """A load's lease is given back twice, and the count that would be below 0 is made 0."""

    def clamped(state, copy):
        tier, page = state.suffix, copy.suffix
        tier.refs[page] = max(int(tier.refs[page]) - 2, 0)
        if tier.refs[page] == 0 and page not in tier.evictable:
            tier.evictable.push(np.array([page]))

    with mock.patch.object(evolve_suffix, "_give_back", clamped):
        yield


@mutant
def freed_block_kept_in_no_queue():
    """Blocks of ended requests vanish: free by state, in no free list."""

    def lost(state, ids):
        with mock.patch.object(state.blocks, "free", mock.Mock(push=lambda _: None)):
            free(state, ids[:1])
        if len(ids) > 1:
            free(state, ids[1:])

    free = evolve_blocks.free_blocks
    with mock.patch.object(evolve_blocks, "free_blocks", lost):
        yield


@mutant
def block_given_back_twice_in_one_word():
    """A list of blocks to give back holds one of them twice. (duplicate-release-in-free-queue)"""
    give_back = SingleTypeKVCacheManager.give_back

    def twice(self, row, entries, trigger, cause):
        return give_back(self, row, np.concatenate([entries, entries[:1]]), trigger, cause)

    def trusting(*named):
        pass

    with (
        mock.patch.object(SingleTypeKVCacheManager, "give_back", twice),
        mock.patch.object(evolve_blocks, "check_held", trusting),
    ):
        yield


@mutant
def counted_where_it_lies_now():
    """Which table a block is taken off the count of is derived from where its content lies, and not
    said by the event. (tier-inferred-after-swap-corrupts-counters)"""
    leave = evolve_blocks._leave

    def inferred(state, role, row, entries, blocks):
        leave(state, role, row, entries, blocks)
        on_host = state.blocks.partner[blocks].any()
        now = BlockRole.RESIDENT if on_host else BlockRole.INDEX
        state.used_of(role)[row] += len(blocks)
        state.used_of(now)[row] -= len(blocks)

    with mock.patch.object(evolve_blocks, "_leave", inferred):
        yield


@mutant
def events_share_what_the_state_changes():
    """An event keeps no copy of the hashes that it was given: it grows with the request's own list.
    (host-view-keeps-whole-arena-alive)"""
    arrived = fold.HANDLERS[ev.RequestArrived]

    def sharing(state, e, seq):
        arrived(state, e, seq)
        if isinstance(e.page_hashes, list):  # not of one that was read from a log
            state.requests[(e.request, e.epoch)].hashes = e.page_hashes

    with (
        mock.patch.object(coordinator, "tuple", list, create=True),
        mock.patch.dict(fold.HANDLERS, {ev.RequestArrived: sharing}),
    ):
        yield


@mutant
def evicted_page_is_still_found():
    """A host page's place in the prefix index outlives its content."""
    evicted = fold.HANDLERS[ev.HostPagesEvicted]

    def kept(state, e, seq):
        names = {page: state.pages.hash_of[page] for page in e.pages}
        evicted(state, e, seq)
        for page, name in names.items():
            state.prefix[name] = page

    with mock.patch.dict(fold.HANDLERS, {ev.HostPagesEvicted: kept}):
        yield
