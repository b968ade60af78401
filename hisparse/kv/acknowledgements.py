"""What a rank's acknowledgements lead to: quorum, table replacement, publication, release.

An acknowledgement settles exactly the transfer that it names, id and epoch; one that names nothing
in flight is inert. COMPLETED implies ENQUEUED. What failed on one rank is lost for all, at once;
its leases stay until every rank has answered, since another may still be copying. The expected
ranks were declared when the transfer was planned; they are never learnt from who answers.
"""

from __future__ import annotations

import numpy as np

from hisparse.errors import ProtocolError
from hisparse.fsm import events as ev
from hisparse.fsm.machines import PageTrigger, TransferState
from hisparse.fsm.state import State, Transfer
from hisparse.fsm.wire import Ack, Acknowledgements, TransferKind
from hisparse.kv.decision import Decision, ints
from hisparse.kv.host_pool import next_page_epochs, page_epochs, take_pages
from hisparse.kv.lifecycle import end_request
from hisparse.kv.publication import publish
from hisparse.kv.residency import replace_enqueued
from hisparse.kv.rewind import give_back_restores, rewind

SPILL = TransferKind.SPILL  # names of their own: they are looked up a copy
FAILING, FAILED = TransferState.FAILING, TransferState.FAILED
COPY_FAILURES_MAX = 16  # of one request; then its host tier is taken to be broken


def as_input(state: State, acks: Acknowledgements) -> ev.AcknowledgementsTaken | None:
    """The input event for what is new in `acks`; None when nothing is (old epoch, duplicate).

    Raises ProtocolError on a gap: the missing acknowledgements have to be read again; for a rank
    that this replica has not; for a step that was not planned yet.
    """
    rank = acks.rank
    if not 0 <= rank < state.config.ranks:
        raise ProtocolError(
            f"acknowledgements of rank {rank}: this replica has ranks 0..{state.config.ranks - 1}"
        )
    if acks.worker_epoch != state.worker_epoch[rank]:
        return None
    expected = state.acked[rank] + 1
    if acks.first_seq > expected:
        raise ProtocolError(
            f"rank {rank}: acknowledgements from {acks.first_seq}, expected {expected}: "
            f"read the stream again from {expected}"
        )
    fresh = acks.acks[expected - acks.first_seq :]
    if not fresh:
        return None
    by_kind: tuple[list[Ack], ...] = ([], [], [], [])  # in the order of `AckKind`
    for ack in fresh:
        by_kind[ack.kind].append(ack)
    enqueued, completed, failed, steps = by_kind
    retired = max([state.retired[rank], *[a.ident for a in steps]])
    if retired > state.step:
        raise ProtocolError(
            f"rank {rank} retires step {retired}, and the last one planned is {state.step}: these "
            "acknowledgements are another replica's, or of an earlier start of this one"
        )
    return ev.AcknowledgementsTaken(
        0, rank, acks.worker_epoch, expected, acks.last_seq,
        ints([a.ident for a in enqueued]), ints([a.epoch for a in enqueued]),
        ints([a.ident for a in completed]), ints([a.epoch for a in completed]),
        ints([a.ident for a in failed]), ints([a.epoch for a in failed]), retired,
    )  # fmt: skip


def acknowledge(state: State, e: ev.AcknowledgementsTaken, cause: int) -> Decision[None]:
    """Apply one rank's news to every transfer that it names."""
    bit = 1 << e.rank
    failed = [t for t in _named(state, e.failed, e.failed_epochs) if not t.completed & bit]
    if failed:  # first: what is known to have failed is not acted on as enqueued
        yield from _fail(state, e.rank, failed, cause)
    enqueued = _named(state, e.enqueued, e.enqueued_epochs)
    completed = _named(state, e.completed, e.completed_epochs)
    both = {t.transfer: t for t in enqueued + completed}  # COMPLETED implies ENQUEUED
    fresh = [t for t in both.values() if not t.enqueued & bit and t.state is not FAILING]
    unseen = [t for t in completed if not t.completed & bit]
    for last in (False, True):  # whether this rank is the last that was waited for
        group = [t for t in fresh if (t.enqueued | bit == t.readers) is last]
        if group:
            yield ev.TransferEnqueued(cause, e.rank, last, ints([t.transfer for t in group]))
        if group and last:
            yield from _replace_spilled(state, group, cause)
    for last in (False, True):
        group = [t for t in unseen if (t.completed | bit == t.writers) is last]
        if group:
            yield ev.TransferCompleted(cause, e.rank, last, ints([t.transfer for t in group]))
        if group and last:
            lost = [t for t in group if t.state is FAILED]  # on another rank
            yield from _failed_for_good(state, lost, cause)
            yield from give_back_restores(state, lost, cause)
            yield from publish(state, sorted({t.row for t in group}), cause)


def _named(state: State, idents: ev.Ints, epochs: ev.Ints) -> list[Transfer]:
    found = []
    for ident, epoch in zip(idents, epochs, strict=True):
        transfer = state.transfers.get(ident)
        if transfer is not None and transfer.epoch == epoch:
            found.append(transfer)
    return found


def _replace_spilled(state: State, group: list[Transfer], cause: int) -> Decision[None]:
    """Spills that every reader has enqueued: table entry replaced, source lease released."""
    rows: dict[int, list[int]] = {}
    computed = state.rows.computed
    for t in [t for t in group if t.kind is SPILL]:
        if state.rows.live[t.row] and t.entry * state.page_size < computed[t.row]:
            rows.setdefault(t.row, []).append(t.entry)  # else ended, or rewound: settles unread
    for row, entries in rows.items():
        yield from replace_enqueued(state, row, np.array(sorted(entries)), cause)


def _fail(state: State, rank: int, failed: list[Transfer], cause: int) -> Decision[None]:
    """A failed copy never becomes valid. Its page is tried again while the block still holds it.
    Where steps could read what it did not write, the request is rewound or fails, by policy; after
    so many failures it fails, by name."""
    news = [t for t in failed if t.state is not FAILING]
    again = [t for t in failed if t.state is FAILING]
    for last in (False, True):
        group = [t for t in failed if (t.completed | 1 << rank == t.writers) is last]
        if group:
            yield ev.TransferFailed(cause, rank, ints(t.transfer for t in group), last)
        if group and last:
            yield from _failed_for_good(state, group, cause)
    yield from give_back_restores(state, again, cause)
    read: dict[int, list[Transfer]] = {}
    for t in news:
        if t.is_read or state.request_of(t.row).failures > COPY_FAILURES_MAX:
            read.setdefault(t.row, []).append(t)
    for row, copies in sorted(read.items()):
        request = state.request_of(row)
        if not request.live:
            continue
        few = request.failures <= COPY_FAILURES_MAX
        if few and state.config.policy.on_copy_failure == "rewind":
            yield from rewind(state, row, copies, cause)
        else:
            reason = "copy failed" if few else f"copy failed, {request.failures} times"
            yield ev.RequestAborted(cause, request.request, request.epoch, reason)
            yield from end_request(state, request.key, False, cause)


def _failed_for_good(state: State, failed: list[Transfer], cause: int) -> Decision[None]:
    """All ranks have answered: host pages that nothing could read are taken back, and as many are
    reserved for another try."""
    for t in failed:
        if t.is_read:
            continue  # a step under way may read the lost page: it stays until that is over
        page = np.array([t.page])
        yield ev.HostPagesReleased(
            cause, t.row, PageTrigger.reclaimed, ints(page), page_epochs(state, page), (t.entry,)
        )
        if state.rows.live[t.row]:
            fresh = yield from take_pages(state, 1, cause)
            yield ev.HostPagesReserved(cause, t.row, ints(fresh), next_page_epochs(state, fresh))
