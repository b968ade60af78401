"""What a worker acknowledges: what is queued, what has happened, until it was taken in."""

from __future__ import annotations

import time

import pytest
from backends import hold
from device_rig import PAGE, Rig, contents, resident, restore, spill

from hisparse.errors import InvariantViolation, ProtocolError

on_both = pytest.mark.usefixtures("backend")


def kinds(message):
    return [(ack.kind.name, ack.ident) for ack in message.acks] if message else []


@on_both
def test_enqueued_at_once_completed_and_retired_when_seen():
    """The streams of copies stand still: held on a GPU, by `lag` where they are simulated."""
    rig = Rig(lag=1.0)
    tables = (resident(0, 0, 1),)
    rig.run_step(tables=tables, transfers=(spill(1, 1, 1), restore(2, 2, 3)))  # loads kernels
    hold(rig.device, "d2h")()
    rig.device.synchronize()
    taken = rig.worker.poll().last_seq
    let_go = [hold(rig.device, stream) for stream in ("d2h", "h2d")]
    rig.run_step(tables=tables, transfers=(spill(7, 1, 1), restore(8, 2, 3)), acked=((0, taken),))
    queued = [("ENQUEUED", 7), ("ENQUEUED", 8)]
    for _ in range(2):
        assert kinds(rig.worker.poll()) == queued
    for go in let_go:
        go()
    rig.device.synchronize()
    seen = [("COMPLETED", 7), ("COMPLETED", 8), ("RETIRED", 2)]
    assert kinds(rig.worker.poll()) == queued + seen


@on_both
def test_a_page_whose_copy_is_completed_is_there_for_the_cpu_to_read():
    """Nothing waits for the device: what the acknowledgement says is enough."""
    for seed in range(6):
        rig = Rig(seed=seed)
        rig.begin(tables=(resident(0, 0, 1),))
        rig.write_page(0, 0)
        rig.end()
        let_go = hold(rig.device, "d2h")
        rig.run_step(transfers=(spill(1, 1, 1),))
        polls = 0
        while ("COMPLETED", 1) not in kinds(rig.worker.poll()):
            let_go()
            time.sleep(0.001)
            assert (polls := polls + 1) < 4000
        for layer in rig.layers:
            page = rig.worker.handles[layer].runtime.host.array[1]
            assert (page == contents(0, layer, range(PAGE))).all()


@on_both
def test_steps_retire_in_order_and_after_their_restores():
    for seed in range(50):
        rig = Rig(seed=seed, lag=0.7)
        for step in range(1, 6):
            rig.run_step(transfers=(restore(step, step, step),))
            rig.worker.poll()
        rig.device.synchronize()
        seen = kinds(rig.worker.poll())
        assert [i for kind, i in seen if kind == "RETIRED"] == [1, 2, 3, 4, 5]
        for step in range(1, 6):
            places = [seen.index((k, step)) for k in ("ENQUEUED", "COMPLETED", "RETIRED")]
            assert places == sorted(places)


@on_both
def test_acknowledgements_are_sent_until_a_command_says_they_were_taken():
    rig = Rig()
    rig.run_step(transfers=(spill(1, 1, 1),))
    rig.device.synchronize()
    first = rig.worker.poll()
    assert first.first_seq == 1 and first.last_seq == 3
    assert rig.worker.poll() == first, "the first message may have got lost"
    rig.run_step(acked=((0, 2), (1, 99)))
    again = rig.worker.poll()
    assert again.first_seq == 3 and again.acks[0] == first.acks[2]


@on_both
def test_a_command_cannot_have_taken_what_was_never_sent():
    rig = Rig()
    with pytest.raises(ProtocolError, match="taken up to 4, this rank sent 0"):
        rig.worker.begin_step(rig.command(acked=((0, 4),)))
    assert rig.worker.to_seq == 0


@on_both
def test_a_failed_copy_leaves_its_destination_untouched():
    rig = Rig(copy_fault=lambda transfer: transfer.transfer == 1)
    rig.put("gpu", 0, 0, 1)
    rig.put("gpu", 0, 1, 2)
    before = rig.worker.host_pool.copy()
    rig.run_step(transfers=(spill(1, 1, 1), spill(2, 2, 2)))
    rig.device.synchronize()
    assert kinds(rig.worker.poll()) == [
        ("ENQUEUED", 1),
        ("ENQUEUED", 2),
        ("FAILED", 1),
        ("COMPLETED", 2),
        ("RETIRED", 1),
    ]
    host_view = rig.worker.handles[0].runtime.host.array
    assert (host_view[1] == 0).all() and (before == 0).all()
    assert (host_view[2] == contents(0, 0, range(PAGE, 2 * PAGE))).all()


def test_a_fault_that_is_told_keeps_no_acknowledgement_back(monkeypatch):
    rig = Rig()
    rig.run_step()
    rig.device.synchronize()
    with monkeypatch.context() as patch, pytest.raises(InvariantViolation):
        patch.setattr(rig.device, "check", tells)
        rig.worker.poll()
    assert kinds(rig.worker.poll()) == [("RETIRED", 1)]


def tells():
    raise InvariantViolation("content", "row 0, position 1, layer 0: told once")
