"""What a prefix finds, and from when on."""

from __future__ import annotations

from unittest import mock

import numpy as np

from hisparse.engine.loop import ReferenceEngine
from hisparse.fsm import events as ev
from hisparse.fsm import fold
from hisparse.fsm.machine import columns
from hisparse.fsm.machines import HOST_PAGE, PageState, PageTrigger
from hisparse.fsm.wire import Table, TransferKind
from hisparse.kv import acknowledgements, coordinator, lifecycle, publication, suffix_cpu, validate
from hisparse.kv.host_pool import page_epochs
from hisparse.kv.transfers import pin

from .registry import mutant, relay


@mutant
def publish_at_enqueue():
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


def _as_if_confirmed(state, rows, cause, confirmed):
    """What would be published of `rows` if so much of each was confirmed."""
    rows, kept = list(rows), state.rows.confirmed.copy()
    state.rows.confirmed[rows] = confirmed[rows]
    found = list(publication.publish(state, rows, cause))
    state.rows.confirmed[:] = kept
    yield from relay(found)


@mutant
def published_by_tokens_and_not_by_rows():
    """A request counts its tokens, of which the last has no row yet: the page that it fills is
    stored and published. (final-sampled-token-slot-poisons-block)"""
    page_hashes = ReferenceEngine.page_hashes

    def of_all_tokens(self, served, pages):
        return page_hashes(self, served, max(pages, len(served.tokens) // self.hasher.page_size))

    def end_request(state, key, keep, cause):
        row, size = state.requests[key].row, state.page_size
        if keep and row >= 0 and state.config.offload and state.requests[key].reserved:
            tokens = int(state.rows.computed[row]) + 1
            last = np.array([tokens // size - 1])
            if tokens % size == 0 and lifecycle._is_dirty(state, row, last).all():
                yield from pin(state, TransferKind.WRITE_BACK, row, last, cause)
        yield from lifecycle.end_request(state, key, keep, cause)

    def publish(state, rows, cause):
        return _as_if_confirmed(state, rows, cause, state.rows.confirmed + 1)

    with (
        mock.patch.object(ReferenceEngine, "page_hashes", of_all_tokens),
        mock.patch.object(validate, "_hashes", lambda *given: None),
        mock.patch.object(coordinator, "end_request", end_request),
        mock.patch.object(acknowledgements, "publish", publish),
    ):
        yield


@mutant
def published_before_it_is_certain():
    """Rows are published once they are computed, though a copy that they read may still fail."""

    def publish(state, rows, cause):
        return _as_if_confirmed(state, rows, cause, state.rows.computed)

    with (
        mock.patch.object(acknowledgements, "publish", publish),
        mock.patch.object(suffix_cpu, "publish", publish),
    ):
        yield


@mutant
def published_with_a_hole():
    """A page that is not complete is passed over, and those behind it are told of.
    (events-advertise-unretrievable-blocks)"""

    def publish(state, rows, cause):
        host, found = state.table(Table.HOST), []
        for row in rows:
            request = state.request_of(row)
            accepted = int(state.rows.confirmed[row]) // state.page_size
            for entry in range(int(state.rows.published[row]), min(accepted, len(request.hashes))):
                page, name = int(host[row, entry]), request.hashes[entry]
                if state.pages.state[page] == PageState.COMPLETED and name not in state.prefix:
                    epochs = page_epochs(state, np.array([page]))
                    found.append(ev.PagesPublished(cause, row, entry, (page,), epochs, (name,)))
        yield from relay(found)

    with mock.patch.object(acknowledgements, "publish", publish):
        yield


@mutant
def provisional_rows_confirmed():
    """Rows count as certain as soon as they are computed, whatever their step could read."""
    computed = fold.HANDLERS[ev.RowsComputed]

    def hasty(state, e, seq):
        computed(state, e, seq)
        at = np.array(e.rows, dtype=np.int64)
        state.rows.confirmed[at] = state.rows.computed[at]

    with mock.patch.dict(fold.HANDLERS, {ev.RowsComputed: hasty}):
        yield
