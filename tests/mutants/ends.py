"""Finish, abort, preempt: what happens to leases when a request ends."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import numpy as np

from hisparse.fsm import events as ev
from hisparse.fsm import fold
from hisparse.fsm.evolve import requests as evolve_requests
from hisparse.fsm.machines import BlockRole, BlockTrigger, PageTrigger, RequestState
from hisparse.fsm.wire import Table, TransferKind
from hisparse.kv import acknowledgements, coordinator, lifecycle, publication
from hisparse.kv.block_pool import block_epochs
from hisparse.kv.decision import ints
from hisparse.kv.host_pool import page_epochs
from hisparse.kv.managers import HiSparseResidentManager
from hisparse.kv.transfers import pin

from .registry import altered, mutant, nothing, relay


@contextmanager
def sources_given_back_at(reason):
    release = HiSparseResidentManager.release

    def all_of_them(self, row, cause):
        yield from release(self, row, cause)
        left = self.entries(row)
        if len(left) and self.state.request_of(row).reason == reason:
            yield from self.give_back(row, left, BlockTrigger.retired, cause)

    with mock.patch.object(HiSparseResidentManager, "release", all_of_them):
        yield


@mutant
def preempted_sources_given_back():
    """A preemption returns all blocks at once, those with a queued copy too.
    (preempt-frees-source-under-queued-copy)"""
    with sources_given_back_at("preempt"):
        yield


@mutant
def finished_sources_given_back():
    """A finish returns all blocks at once, with copies outstanding.
    (source-slots-freed-on-first-chunk)"""
    with sources_given_back_at("stop"):
        yield


def _write_back(state, row, entries, cause):
    """A copy of `entries` as it would be planned now."""
    request, n = state.request_of(row), len(entries)
    blocks = state.table(Table.RESIDENT)[row, entries].astype(np.int64)
    pages = np.array(request.reserved[:n], dtype=np.int64)
    ranks, first = (1 << state.config.ranks) - 1, state.next_transfer
    return ev.TransferPinned(
        cause, TransferKind.WRITE_BACK, row, request.epoch, ranks, ranks,
        ints(range(first, first + n)), ints(entries), ints(blocks), block_epochs(state, blocks),
        ints(pages), page_epochs(state, pages),
    )  # fmt: skip


def _dirty(state, row):
    sealed = np.arange(int(state.rows.computed[row]) // state.page_size)
    return sealed[lifecycle._is_dirty(state, row, sealed)] if state.config.offload else sealed[:0]


@mutant
def stored_after_the_end():
    """The copies that an end leads to are planned with the next step, from blocks that are free
    by then. (last-block-stored-after-finish-races-reuse)"""
    late = []
    plan = coordinator.HiSparseCoordinator.plan_step

    def remember(state, kind, row, entries, cause):
        if len(entries):
            late.append(_write_back(state, row, entries, cause))
        yield from nothing()

    def then(self, rows, counts):
        step = plan(self, rows, counts)
        while late:
            self._record(late.pop(0))
        return step

    with (
        mock.patch.object(lifecycle, "pin", remember),
        mock.patch.object(coordinator.HiSparseCoordinator, "plan_step", then),
    ):
        yield


@mutant
def torn_down_before_it_is_copied():
    """A preempted request's blocks go first, and are copied then. (retract-frees-then-backs-up)"""

    def backwards(state, key, keep, cause):
        request = state.requests[key]
        if keep and request.row >= 0 and request.reason == "preempt":
            entries = _dirty(state, request.row)
            copy = _write_back(state, request.row, entries, cause) if len(entries) else None
            yield from HiSparseResidentManager(state).release(request.row, cause)
            if copy is not None:
                yield copy
        yield from lifecycle.end_request(state, key, keep, cause)

    with mock.patch.object(coordinator, "end_request", backwards):
        yield


@mutant
def planned_by_hashes_and_not_by_rows():
    """An abort stores every page that has a hash, computed or not.
    (abort-mid-transfer-hash-list-longer-than-blocks)"""

    def everything(state, key, keep, cause):
        request = state.requests[key]
        row, offload = request.row, state.config.offload
        if row >= 0 and offload and not keep:
            entries = np.arange(min(int(state.rows.pages[row]), len(request.hashes)))
            entries = entries[lifecycle._is_dirty(state, row, entries)][: len(request.reserved)]
            yield from pin(state, TransferKind.WRITE_BACK, row, entries, cause)
        yield from lifecycle.end_request(state, key, keep, cause)

    def by_hashes(state, rows, cause):
        rows, kept = list(rows), state.rows.confirmed.copy()
        for row in rows:
            state.rows.confirmed[row] = len(state.request_of(row).hashes) * state.page_size
        found = list(publication.publish(state, rows, cause))
        state.rows.confirmed[:] = kept
        yield from relay(found)

    with (
        mock.patch.object(coordinator, "end_request", everything),
        mock.patch.object(acknowledgements, "publish", by_hashes),
    ):
        yield


@mutant
def late_abort_forgets_the_request():
    """An abort that comes after the end takes the record away that leases still lean on.
    (ack-for-request-already-freed)"""
    aborted = fold.HANDLERS[ev.RequestAborted]

    def eager(state, e, seq):
        request = state.requests.get((e.request, e.epoch))
        if request is not None and request.state is RequestState.DRAINING:
            del state.requests[request.key], state.draining[request.key]
            return
        aborted(state, e, seq)

    with mock.patch.dict(fold.HANDLERS, {ev.RequestAborted: eager}):
        yield


@mutant
def aborted_reservation_leaks():
    """The host pages that an aborted request was promised are not given back.
    (abort-of-retracted-request-leaks-host-copy)"""
    drained = fold.HANDLERS[ev.RequestDrained]

    def leaky(state, key, keep, cause):
        def kept(event):
            abandoned = isinstance(event, ev.HostPagesReleased)
            abandoned = abandoned and event.trigger is PageTrigger.abandoned
            if not (abandoned and state.requests[key].reason == "abort"):
                yield event

        return altered(lifecycle.end_request(state, key, keep, cause), kept)

    def unseen(state, e, seq):
        state.requests[(e.request, e.epoch)].reserved = []
        drained(state, e, seq)

    with (
        mock.patch.object(coordinator, "end_request", leaky),
        mock.patch.dict(fold.HANDLERS, {ev.RequestDrained: unseen}),
    ):
        yield


@mutant
def hot_region_given_back_twice():
    """The lease of a hot region is released twice."""

    def twice(state, key, keep, cause):
        def again(event):
            yield event
            if isinstance(event, ev.BlocksReleased) and event.role is BlockRole.HOT:
                yield event

        return altered(lifecycle.end_request(state, key, keep, cause), again)

    with mock.patch.object(coordinator, "end_request", twice):
        yield


@mutant
def aborted_request_still_waits():
    """An abort leaves a request that waits in the queue."""
    ended = evolve_requests._ended

    def left(state, key, trigger, why, seq):
        waits = key in state.waiting
        ended(state, key, trigger, why, seq)
        if waits and why == "abort":
            state.waiting[key] = None

    with mock.patch.object(evolve_requests, "_ended", left):
        yield
