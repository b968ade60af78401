"""offers: what can happen next in a world, read off a branch. Nothing is decided here."""

from __future__ import annotations

import msgspec

from hisparse.fsm.machines import LIVE, RequestState
from hisparse.fsm.wire import AckKind
from hisparse.kv.caches import holders
from hisparse.testing.explore.branch import RETIRED, Branch, Input

ENQUEUED, COMPLETED, FAILED = int(AckKind.ENQUEUED), int(AckKind.COMPLETED), int(AckKind.FAILED)
Said = tuple[tuple[int, int], ...]  # of a rank: kind, number of the transfer (0 of RETIRED)


class Offer(msgspec.Struct, frozen=True):
    """What a branch offers; by transfer in order of planning, or by rank."""

    inputs: tuple[Input, ...]  # of engine, clients, and who watches over ranks
    handed: tuple[bool, ...]  # whether ranks were told of the transfer
    enqueued: tuple[int, ...]
    completed: tuple[int, ...]
    waited: tuple[int, ...]  # steps since one began that waits for its copy; -1: none does
    unretired: tuple[int, ...]  # by rank
    lost: int
    idle: bool  # nothing is held and nothing is under way


def offer_of(branch: Branch) -> Offer:
    """Everything that `branch` offers."""
    state, told, ranks = branch.state, branch.told, range(branch.world.ranks)
    transfers = state.transfers.values()
    return Offer(
        tuple(_inputs(branch)),
        tuple([t.transfer < told.commanded for t in transfers]),
        tuple([t.enqueued for t in transfers]),
        tuple([t.completed for t in transfers]),
        tuple([state.step - told.waited.get(t.transfer, state.step + 1) for t in transfers]),
        tuple([told.unretired(state, rank) for rank in ranks]),
        state.lost,
        not holders(state) and not state.requests and not told.step_open and not state.lost,
    )


def _inputs(branch: Branch) -> list[Input]:
    world, state, told = branch.world, branch.state, branch.told
    requests = list(state.requests.values())
    open_ = {q.request for q in requests if q.live or q.state is RequestState.WAITING}
    found: list[Input] = [("arrive", n) for n, name in enumerate(branch.names) if name not in open_]
    untold = bool(state.lost) and told.position < told.lost_at  # ranks do not know of the loss yet
    news = untold or any(ident >= told.commanded for ident in state.transfers)
    if told.step_open:
        found.append(("computed",))
    elif news or state.rows.live.any() or (state.waiting and not state.lost):
        behind = max(told.unretired(state, rank) for rank in range(world.ranks))
        if behind <= world.unretired_steps:
            found.append(("plan",))
    for at, q in enumerate(requests):
        if q.state is RequestState.DECODE:
            found.append(("finish", at))
        if q.state is RequestState.WAITING or q.live:
            found.append(("abort", at))
        if q.state in LIVE:
            found.append(("preempt", at))
    for rank in range(world.ranks):
        if not state.lost >> rank & 1:
            found.append(("lose", rank))
        elif not untold:
            found.append(("join", rank))
    return found


def sayings(offer: Offer, rank: int, said: Said) -> list[tuple[int, int]]:
    """What a rank may say next: of each copy that it was told of, that it is in its stream, and how
    it ended; of a step, that it is over, once the copies are that it waits for."""
    if offer.lost >> rank & 1:
        return []
    bit, found, ready = 1 << rank, list[tuple[int, int]](), True
    ended = {t for kind, t in said if kind in (COMPLETED, FAILED)}
    step_ago = offer.unretired[rank] - 1 - sum(kind == RETIRED for kind, _ in said)
    for t, handed in enumerate(offer.handed):
        over = bool(offer.completed[t] & bit) or t in ended
        if offer.waited[t] >= step_ago and not over:
            ready = False
        if handed and not over:
            if not offer.enqueued[t] & bit and (ENQUEUED, t) not in said:
                found.append((ENQUEUED, t))
            found += [(COMPLETED, t), (FAILED, t)]
    if step_ago >= 0 and ready:
        found.append((RETIRED, 0))
    return found


def with_saying(said: Said, kind: int, transfer: int) -> Said:
    """`said` and one thing more, by kind: the input that a message becomes keeps no other order."""
    at = len(said)
    while at and said[at - 1][0] > kind:
        at -= 1
    return (*said[:at], (kind, transfer), *said[at:])
