"""What ranks say of their copies, and who has to have said it."""

from __future__ import annotations

from unittest import mock

import msgspec

from hisparse.device.acks import AckStream
from hisparse.device.worker import HiSparseWorker
from hisparse.fsm import events as ev
from hisparse.fsm import fold
from hisparse.kv import acknowledgements, coordinator, lifecycle, restart, transfers

from .registry import altered, mutant

replace = msgspec.structs.replace


@mutant
def acknowledgements_name_no_epoch():
    """A copy's acknowledgement is taken for whatever transfer has that number."""

    def named(state, idents, epochs):
        return [state.transfers[ident] for ident in idents if ident in state.transfers]

    with mock.patch.object(acknowledgements, "_named", named):
        yield


@mutant
def preemption_forgets_what_is_in_flight():
    """Copies in flight are counted by request id: a preemption starts the count anew.
    (reqid-aba-across-preemption)"""
    preempted = fold.HANDLERS[ev.RequestPreempted]

    def forgetful(state, e, seq):
        preempted(state, e, seq)
        state.requests[(e.request, e.epoch)].in_flight = 0

    with mock.patch.dict(fold.HANDLERS, {ev.RequestPreempted: forgetful}):
        yield


@mutant
def any_rank_is_enough():
    """What one rank says counts as said by all. (union-of-rank-acks-instead-of-quorum)"""

    def hasty(state, e, cause):
        def last(event):
            quorum = isinstance(event, ev.TransferEnqueued | ev.TransferCompleted)
            yield replace(event, last=True) if quorum else event

        return altered(acknowledgements.acknowledge(state, e, cause), last)

    with (
        mock.patch.object(coordinator, "acknowledge", hasty),
        mock.patch.object(restart, "acknowledge", hasty),
    ):
        yield


@mutant
def quorum_is_one_rank_short():
    """Off by one: the last rank is not among those that a copy waits for."""

    def pinned(cause, kind, row, epoch, readers, writers, *rest):
        readers, writers = readers >> 1 or readers, writers >> 1 or writers
        return ev.TransferPinned(cause, kind, row, epoch, readers, writers, *rest)

    with mock.patch.object(transfers, "TransferPinned", pinned):
        yield


@mutant
def failed_copies_count_as_complete():
    """The status of a copy is dropped on the way. (failed-transfer-counted-as-success)"""

    def hopeful(state, e, cause):
        done, epochs = e.completed + e.failed, e.completed_epochs + e.failed_epochs
        e = replace(e, completed=done, completed_epochs=epochs, failed=(), failed_epochs=())
        return acknowledgements.acknowledge(state, e, cause)

    with (
        mock.patch.object(coordinator, "acknowledge", hopeful),
        mock.patch.object(restart, "acknowledge", hopeful),
    ):
        yield


@mutant
def first_rank_to_retire_is_enough():
    """Host pages go back when one rank is through with the steps that read them."""
    with mock.patch.object(lifecycle, "min", max, create=True):
        yield


@mutant
def first_copy_to_end_ends_all():
    """Whether a request that ended has copies in flight is a yes or no, and the first that settles
    makes it a no. (abort-with-both-directions-pending)"""
    completed = fold.HANDLERS[ev.TransferCompleted]

    def hasty(state, e, seq):
        rows = {state.transfers[ident].row for ident in e.transfers}
        completed(state, e, seq)
        for row in rows if e.last else ():
            if not state.rows.live[row]:
                state.request_of(row).in_flight = 0

    with mock.patch.dict(fold.HANDLERS, {ev.TransferCompleted: hasty}):
        yield


@mutant
def gap_in_acknowledgements_passed_over():
    """What was lost between two messages is taken for said."""

    def forgiving(state, acks):
        expected = state.acked[acks.rank] + 1
        if acks.first_seq > expected:
            acks = replace(acks, first_seq=expected)
        return acknowledgements.as_input(state, acks)

    with mock.patch.object(coordinator, "as_input", forgiving):
        yield


@mutant
def acknowledgements_said_once():
    """What a rank has said once is gone, whether it arrived or not."""
    poll = HiSparseWorker.poll

    def once(self):
        said = poll(self)
        if said is not None:
            self.acks.trim(said.last_seq)
        return said

    with mock.patch.object(HiSparseWorker, "poll", once):
        yield


@mutant
def one_acknowledgement_too_many_trimmed():
    """Off by one: with what was taken in, the next one goes that was not."""
    trim = AckStream.trim

    def greedy(self, seq):
        trim(self, min(seq + 1, self.last_seq))

    with mock.patch.object(AckStream, "trim", greedy):
        yield


@mutant
def dead_workers_are_listened_to():
    """Acknowledgements of an old worker epoch are taken for the new one's."""

    def trusting(state, acks):
        if 0 <= acks.rank < len(state.worker_epoch):
            acks = replace(acks, worker_epoch=state.worker_epoch[acks.rank])
        return acknowledgements.as_input(state, acks)

    with mock.patch.object(coordinator, "as_input", trusting):
        yield
