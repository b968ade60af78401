"""The liveness phase: faults have ceased, and everything has to come to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hisparse.errors import InvariantViolation

if TYPE_CHECKING:
    from hisparse.testing.replica import SimReplica

STALLED_STEPS_MAX = 400  # in which no request comes to an end


def settle(replica: SimReplica) -> None:
    """Serve all that is there to its end. Raises InvariantViolation ``progress`` if it does not
    end, ``survives`` for a fault that was not survived, ``conservation`` if something is left."""
    replica.cease()
    _serve(replica)
    while True:
        for rank in replica.ranks:
            rank.device.synchronize(None)
        replica.step()  # says what ended last
        replica.step()  # takes it in
        if not _busy(replica):
            break
        _serve(replica)  # a rank was told of something only now, and died of it
    replica.check()
    replica.cached.check(again=True)
    replica.look_at_incidents()
    if replica.incidents:
        first = replica.incidents[0]
        text = f"{first.kind} in step {first.step} was not survived: {first.told}"
        raise InvariantViolation("survives", text, seq=replica.state.seq)
    _nothing_left(replica)
    replica.watch.whole_log()


def _serve(replica: SimReplica) -> None:
    """Until nobody holds anything, and every rank is there."""
    ended, at = -1, replica.now
    while replica.down or _busy(replica):
        if ended != replica.served:
            ended, at = replica.served, replica.now
        if replica.now - at > STALLED_STEPS_MAX:
            state = replica.state
            held = [f"{key[0]}/{key[1]} {r.state.name}" for key, r in state.requests.items()]
            text = f"faults have ceased, and for {STALLED_STEPS_MAX} steps no request ended: "
            text += f"{held}, transfers {sorted(state.transfers)}"
            raise InvariantViolation("progress", text, seq=state.seq)
        if replica.coordinator.is_sleeping:
            replica.wake_up()
        replica.step()


def _busy(replica: SimReplica) -> bool:
    state = replica.state
    held = replica.engine.live or state.requests or state.transfers or state.suffix_copies
    under_way = any(rank.inbox or len(rank.channel) or rank.dead for rank in replica.ranks)
    return bool(held) or under_way or replica.coordinator.is_sleeping or state.lost > 0


def _nothing_left(replica: SimReplica) -> None:
    """Nobody holds anything: both tiers can be emptied, and ranks give all memory back."""
    seq = replica.state.seq
    if not replica.reset():
        text = "requests are gone, and the caches cannot be emptied: something is still leased"
        raise InvariantViolation("conservation", text, seq=seq)
    replica.check()
    for rank in replica.ranks:
        assert not rank.dead, f"rank {rank.number} never came again"
        rank.connector.shutdown()
        left = rank.device.statistics()["allocated_bytes"]
        if left:
            text = f"rank {rank.number} holds {left} B after its shutdown"
            raise InvariantViolation("conservation", text, seq=seq)
