"""A01: admitted, two copies sent and enqueued, preempted, resumed under the same id, a third copy,
then the old copies complete, then the third, then finish: old completions count down the new life.

Here a transfer has an id that is never given out again and carries its request's epoch; both are in
the acknowledgement. There is no counter by request id that anything could count down.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from kv_rig import SchedulerRig, make_config

from hisparse.fsm import events as ev
from hisparse.fsm.wire import Ack, AckKind

TOKENS = list(range(8))  # two pages


def two_lives():
    """(rig, first life, its copies, second life, its copies): all sent, all enqueued."""
    rig = SchedulerRig(make_config())
    old = rig.arrive("q", TOKENS, new=8)
    rig.step(ack=False)
    first = [t.transfer for t in rig.step(ack=False).transfers]
    rig.enqueue(*first)
    rig.coordinator.preempt(*old)
    new = rig.arrive("q", TOKENS, new=8)
    rig.step(ack=False)
    second = [t.transfer for t in rig.step(ack=False).transfers]
    rig.enqueue(*second)
    assert len(first) == len(second) == 2 and new[1] > old[1]
    return rig, old, first, new, second


def test_old_completions_settle_old_copies_and_nothing_of_the_new_life():
    rig, old, first, new, second = two_lives()
    mine = rig.state.requests[new]
    before = (mine.in_flight, rig.blocks(new), rig.host(new), list(mine.reserved))
    rig.complete(*first)
    assert (mine.in_flight, rig.blocks(new), rig.host(new), mine.reserved) == before
    rig.retire()
    assert old not in rig.state.requests, "nothing of the old life is left"
    rig.complete(*second)
    rig.finish(new)
    rig.retire()
    assert rig.drained()


def test_an_acknowledgement_of_another_generation_settles_nothing():
    rig, old, first, new, second = two_lives()
    in_flight = dict(rig.state.transfers)
    for kind in (AckKind.ENQUEUED, AckKind.COMPLETED, AckKind.FAILED):
        rig.acknowledge(Ack(kind, second[0], old[1]), Ack(kind, first[0], new[1]))
    assert rig.state.transfers == in_flight
    assert not rig.events(ev.TransferCompleted) and not rig.events(ev.TransferFailed)


@settings(max_examples=20)
@given(st.permutations(["old 0", "old 1", "new 0", "new 1", "finish", "retire"]), st.data())
def test_in_every_order_each_copy_settles_once_and_everything_comes_back(order, data):
    rig, _, first, new, second = two_lives()
    failed = data.draw(st.sampled_from([None, "old 0", "new 1"]))
    for what in order:
        name, _, number = what.partition(" ")
        if name == "finish":
            rig.finish(new)
        elif name == "retire":
            rig.retire()
        else:
            transfer = (first if name == "old" else second)[int(number)]
            (rig.fail if what == failed else rig.complete)(transfer)
        assert all(request.in_flight >= 0 for request in rig.state.requests.values())
    for _ in range(2):
        rig.step()
    assert rig.drained()
    settled = [t for e in rig.events(ev.TransferCompleted) for t in e.transfers]
    settled += [t for e in rig.events(ev.TransferFailed) for t in e.transfers]
    assert len(settled) == len(set(settled)) and set(settled) >= {*first, *second}
