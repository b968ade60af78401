"""Restarts: a worker rank that is lost and comes again, and a scheduler that goes on with a log.

A rank that is gone takes its GPU pool with it, and its own host pools. Every page is spread over
all ranks, so nothing that was cached before it is whole: live requests leave the GPU and come back
by `arrive`; what the rank had not acknowledged has failed on it; other ranks still answer for their
copies, and leases stay until they have. Nobody is admitted until nothing is held any more; then the
caches are forgotten, and the rank joins.

    RankLost ── preempt all, its copies fail ── others answer, all drain ── RankJoined ── forget all
                          nobody is admitted in between

A log can break off inside of a decision. Whoever goes on with it completes what its last input led
to, and aborts every request that had not ended: their tokens were the other process's. What was
cached stays, for ranks that are still there.
"""

from __future__ import annotations

from hisparse.fsm import events as ev
from hisparse.fsm.state import Key, State
from hisparse.kv.acknowledgements import acknowledge
from hisparse.kv.caches import drop_all, drop_gpu
from hisparse.kv.decision import Decision, ints
from hisparse.kv.lifecycle import drain, end_request
from hisparse.kv.suffix import SuffixSource


def unanswered(state: State, rank: int, seq: int) -> ev.AcknowledgementsTaken:
    """What a lost rank would have said of its copies, as `acknowledge` takes it: all failed."""
    bit = 1 << rank
    ids = [i for i, t in state.transfers.items() if not t.completed & bit]
    ids += [i for i, copy in state.suffix_copies.items() if not copy.answered & bit]
    copies = [state.transfers.get(i) or state.suffix_copies[i] for i in ids]
    return ev.AcknowledgementsTaken(
        seq, rank, state.worker_epoch[rank], 0, 0, (), (), (), (),
        ints(ids), ints(copy.epoch for copy in copies), state.retired[rank],
    )  # fmt: skip


def lose(state: State, rank: int, suffix: SuffixSource | None, seq: int) -> Decision[list[Key]]:
    """Decide what the RankLost at `seq` leads to; returns who was preempted by it."""
    preempted = []
    for request in [request for request in state.by_row if request is not None and request.live]:
        yield ev.RequestPreempted(seq, *request.key, "rank lost")
        yield from end_request(state, request.key, False, seq)
        preempted.append(request.key)
    yield from answered(state, unanswered(state, rank, seq), suffix, seq)
    return preempted


def answered(
    state: State, said: ev.AcknowledgementsTaken, suffix: SuffixSource | None, seq: int
) -> Decision[None]:
    """What a rank's words lead to where no request is live."""
    yield from acknowledge(state, said, seq)
    if suffix is not None:
        yield from suffix.result(said, seq)
    for key in list(state.draining):
        yield from drain(state, key, seq)


def complete(
    state: State, last: ev.Event | None, suffix: SuffixSource | None, cause: int
) -> Decision[None]:
    """Go on where a log broke off behind the input `last`: its decisions, as far as they are
    missing; then every request that has not ended is aborted."""
    ended = list(state.draining)
    for key, request in list(state.requests.items()):
        if request.live or key in state.waiting:
            yield ev.RequestAborted(cause, *key, "scheduler restarted")
            ended.append(key)
    for key in ended:
        if key in state.requests:
            yield from end_request(state, key, False, cause)
    match last:
        case ev.AcknowledgementsTaken() if last.worker_epoch == state.worker_epoch[last.rank]:
            yield from answered(state, last, suffix, cause)
        case ev.RankLost():
            yield from answered(state, unanswered(state, last.rank, cause), suffix, cause)
        case ev.PrefixCacheReset() | ev.RankJoined():
            yield from drop_all(state, suffix, cause)
        case ev.MemoryReleased():
            dropped = drop_all(state, suffix, cause) if last.level == 2 else drop_gpu(state, cause)
            yield from dropped
