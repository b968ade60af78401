"""Look-ups, budgets, and the queue."""

from __future__ import annotations

from unittest import mock

import numpy as np
from pydantic import field_validator

from hisparse.config import PolicyConfig
from hisparse.connector.hisparse import HiSparseConnector
from hisparse.fsm import events as ev
from hisparse.fsm import fold
from hisparse.fsm.machines import BlockTrigger
from hisparse.fsm.wire import Table
from hisparse.kv import (
    admission,
    budget,
    coordinator,
    lifecycle,
    residency,
    transfers,
    validate,
)
from hisparse.kv.block_pool import block_epochs
from hisparse.kv.decision import ints
from hisparse.testing import swarm

from .registry import altered, mutant, nothing


@mutant
def pinned_by_a_look_up():
    """A look-up leases what it finds, and nothing gives that back where no admission follows.
    (pin-on-lookup-never-retrieved)"""
    deferred = fold.HANDLERS[ev.AdmissionDeferred]

    def pinning(state, e, seq):
        deferred(state, e, seq)
        for name in state.requests[(e.request, e.epoch)].hashes:
            page = state.prefix.get(name, 0)
            if page:
                if page in state.pages.evictable:
                    state.pages.evictable.remove(np.array([page]))
                state.pages.refs[page] += 1

    with mock.patch.dict(fold.HANDLERS, {ev.AdmissionDeferred: pinning}):
        yield


@mutant
def hit_of_an_earlier_look_up():
    """What a request found when it first was looked at is what it is given, whenever it is
    admitted. (hit-seen-then-evicted-before-allocate)"""
    seen = {}
    look, pages_of = admission.local_hit, admission._prefix_pages

    def local_hit(state, request):
        if request.key not in seen:
            seen[request.key] = pages_of(state, request, look(state, request))
        return len(seen[request.key])

    def prefix_pages(state, request, hit):
        known = seen.get(request.key, ())
        return known[:hit] if hit <= len(known) else pages_of(state, request, hit)

    with (
        mock.patch.object(admission, "local_hit", local_hit),
        mock.patch.object(coordinator, "local_hit", local_hit),
        mock.patch.object(admission, "_prefix_pages", prefix_pages),
    ):
        yield


@mutant
def nothing_is_taken_in_while_somebody_waits():
    """The loop reads no acknowledgements before the head of the queue is admitted.
    (blockless-head-strands-holders)"""
    update = HiSparseConnector.update_connector_output

    def busy(self, output):
        if not self.coordinator.state.waiting:
            update(self, output)

    with mock.patch.object(HiSparseConnector, "update_connector_output", busy):
        yield


@mutant
def nothing_is_reclaimed_for_an_admission():
    """Only blocks that are free already count. (admission-checks-only-currently-free)"""
    with mock.patch.object(admission, "reclaim", nothing):
        yield


@mutant
def host_pool_is_not_budgeted():
    """The gate looks at the GPU alone. (admission-ignores-host-pool-or-hot-budget)"""
    binding = admission._binding

    def blind(state, request):
        found = binding(state, request)
        return None if found is not None and found[0] == "host_pages" else found

    with mock.patch.object(admission, "_binding", blind):
        yield


@mutant
def hot_regions_are_not_budgeted():
    """Hot regions of those that run are promised and not counted."""

    def without_hot(state):
        rows, per_block = state.rows, state.index_pages_per_block
        index = (rows.pages_max + (per_block - 1)) // per_block - rows.index
        return int((budget.window_unmet(state) + index * rows.live).sum())

    with mock.patch.object(budget, "promised", without_hot):
        yield


@mutant
def rest_of_a_hit_is_not_reserved():
    """A request that finds a prefix reserves nothing for what it computes behind it.
    (landing-choice-not-stable)"""

    def admit(state, request, cause, suffix=None):
        def without(event):
            if not (isinstance(event, ev.HostPagesReserved) and request.hit_tokens):
                yield event

        return altered(admission.admit(state, request, cause, suffix), without)

    with mock.patch.object(coordinator, "admit", admit):
        yield


@mutant
def half_of_the_host_pages_are_there():
    """The host pool gives half of the pages that were asked for, and where no page is left a block
    is given up as if it had been copied. (host-alloc-failure-treated-as-backed-up)"""

    def admit(state, request, cause, suffix=None):
        def fewer(event):
            if isinstance(event, ev.HostPagesReserved) and len(event.pages) > 1:
                half = len(event.pages) // 2
                pages, epochs = event.pages[:half], event.epochs[:half]
                event = ev.HostPagesReserved(event.cause, event.row, pages, epochs)
            yield event

        return altered(admission.admit(state, request, cause, suffix), fewer)

    def pin(state, kind, row, entries, cause):
        left = len(state.request_of(row).reserved)
        return transfers.pin(state, kind, row, entries[:left], cause)

    def pin_rows(state, kind, rows, entries, cause):
        for row in dict.fromkeys(rows.tolist()):
            yield from pin(state, kind, row, entries[rows == row], cause)

    def spill(state, kind, row, entries, cause):
        left = len(state.request_of(row).reserved)
        yield from pin(state, kind, row, entries, cause)
        rest = entries[left:]
        if len(rest):
            gone = state.table(Table.RESIDENT)[row, rest].astype(np.int64)
            yield ev.PagesSpilled(
                cause, row, BlockTrigger.retired, ints(rest), ints(gone),
                block_epochs(state, gone), (0,) * len(gone),
            )  # fmt: skip

    with (
        mock.patch.object(coordinator, "admit", admit),
        mock.patch.object(lifecycle, "pin", pin),
        mock.patch.object(lifecycle, "pin_rows", pin_rows),
        mock.patch.object(residency, "pin", spill),
    ):
        yield


@mutant
def hot_regions_below_a_selection_are_accepted():
    """The configuration may have fewer hot rows than a row selects.
    (unsupported-combination-not-refused)"""

    class Lenient(PolicyConfig):
        @field_validator("hot_rows")
        @classmethod
        def _hot_holds_top_k(cls, hot_rows):
            return hot_rows

    with mock.patch.object(swarm, "PolicyConfig", Lenient):
        yield


@mutant
def id_in_use_is_taken():
    """A request arrives under the id of one that is open."""
    with mock.patch.object(validate, "arrival", lambda state, *asked: asked[:3]):
        yield


@mutant
def ends_name_no_epoch():
    """An abort ends whoever has that id now."""
    abort = coordinator.HiSparseCoordinator.abort

    def whoever(self, request, epoch, reason="abort"):
        now = [key for key in self.state.requests if key[0] == request]
        abort(self, *(now[-1] if now else (request, epoch)), reason)

    with mock.patch.object(coordinator.HiSparseCoordinator, "abort", whoever):
        yield
