"""Pages come back when the pressure is gone, a few a step, never in a chase."""

from __future__ import annotations

import pytest
from kv_rig import SchedulerRig, make_config

from hisparse.fsm import events as ev
from hisparse.fsm.machines import HotState
from hisparse.fsm.wire import TransferKind

CALM = 4
BLOCKS = 28


def relieved(write_back="eager", rows=64, **changes):
    """A long request that lost pages to a short one, which has just ended; `rows` a step."""
    changes = {"promote_after_steps": CALM, "promote_pages": 2} | changes
    rig = SchedulerRig(make_config(blocks=BLOCKS, write_back=write_back, **changes))
    long = rig.arrive("long", list(range(40)), new=24)
    rig.step()
    short = rig.arrive("short", [900 + i for i in range(44)], new=4)
    for _ in range(3):
        rig.step(rows=rows)
    assert rig.blocks(long).count(0) > 1 and rig.state.requests[long].hot is HotState.LEASED
    rig.coordinator.abort(*short)
    return rig, long


def restores(command):
    return [t for t in command.transfers if t.kind is TransferKind.RESTORE]


def until_restored(rig):
    """Steps until one brings pages back by copy; that command, not acknowledged yet."""
    for _ in range(30):
        command = rig.step(ack=False)
        if restores(command):
            return command
        rig.complete(*[t.transfer for t in command.transfers])
        rig.retire(command.step)
    raise AssertionError("nothing came back")


def promoted(rig):
    return [e for e in rig.events(ev.PolicyChosen) if e.resource == "promotion"]


@pytest.mark.parametrize("write_back", ["eager", "on_pressure"])
def test_all_pages_come_back_and_then_the_hot_region_goes(write_back):
    rig, long = relieved(write_back)
    for _ in range(CALM + 10):
        rig.step()
    assert 0 not in rig.blocks(long)
    assert rig.state.requests[long].hot is HotState.RELEASED
    assert int(rig.state.rows.hot[rig.row(long)]) == 0
    assert promoted(rig) and rig.events(ev.HotReleased)


def test_nothing_comes_back_before_the_hold_is_over_and_few_pages_a_step():
    rig, _ = relieved()
    until = rig.state.promotion_held_until
    assert until > rig.state.step
    for _ in range(CALM + 10):
        command = rig.step()
        if command.step < until:
            assert not restores(command)
        assert len(restores(command)) <= 2
    assert promoted(rig)


def test_a_gpu_copy_that_is_still_cached_is_taken_back_without_a_copy():
    rig, long = relieved("eager", rows=4)  # the short one did not come to use what was made room
    before = len(rig.events(ev.BlocksAdopted))
    commands = [rig.step() for _ in range(CALM + 10)]
    assert not any(restores(command) for command in commands)
    assert len(rig.events(ev.BlocksAdopted)) > before and 0 not in rig.blocks(long)


def test_the_youngest_pages_come_back_first_and_only_durable_ones():
    rig, long = relieved("on_pressure")
    command = until_restored(rig)
    holes = [i for i, block in enumerate(rig.blocks(long)) if not block]
    assert holes == list(range(len(holes))) and holes, "what is still on the host is the oldest"
    assert all(rig.page_state(t.host) in ("COMPLETED", "PUBLISHED") for t in restores(command))


def test_the_hot_region_stays_until_the_last_restore_is_complete():
    rig, long = relieved("on_pressure", promote_pages=20)
    pending = restores(until_restored(rig))
    assert 0 not in rig.blocks(long), "stream order: the next step reads the blocks"
    rig.step(ack=False)
    assert rig.state.requests[long].hot is HotState.LEASED
    rig.complete(*[t.transfer for t in pending])
    rig.step(ack=False)
    assert rig.state.requests[long].hot is HotState.RELEASED


def test_a_region_given_back_is_wanted_again_under_new_pressure():
    rig, long = relieved()
    for _ in range(CALM + 10):
        rig.step()
    rig.arrive("third", [1900 + i for i in range(44)], new=4)
    for _ in range(3):
        rig.step()
    assert rig.state.requests[long].hot is HotState.LEASED
    assert len([e for e in rig.events(ev.HotLeased) if e.row == rig.row(long)]) == 2


def test_nothing_comes_back_while_somebody_waits():
    rig, long = relieved()
    waiting = rig.arrive("big", [1900 + i for i in range(60)], new=4)
    rig.coordinator.arrive("huge", 60, 64, rig.hasher.extend(b"", [2900 + i for i in range(60)]))
    for _ in range(CALM + 12):
        rig.step(only=[long])
        if rig.state.waiting:
            assert not promoted(rig), waiting


def test_a_request_comes_back_only_if_it_fits_to_its_end():
    """The room is counted for the request's last page, not for the pages that it has today."""
    rig, long = relieved()
    hog = rig.arrive("hog", [1900 + i for i in range(8)], new=50)
    for _ in range(CALM + 10):
        rig.step(only=[long, hog])
    rows, row = rig.state.rows, rig.row(long)
    need = int(rows.pages_max[row]) + int(rows.pages_max[rig.row(hog)])
    assert need > BLOCKS - 8
    assert not promoted(rig)


def test_no_pages_come_back_with_promotion_off():
    rig, _ = relieved(promote_pages=0)
    for _ in range(CALM + 10):
        rig.step()
    assert not promoted(rig) and not rig.events(ev.HotReleased)


@pytest.mark.parametrize("policy", ["hybrid", "lru", "even"])
def test_under_steady_load_pages_do_not_go_back_and_forth(policy):
    """Short requests come and go beside a long one, for 240 steps. Each round of promotion needs a
    calm of its own, so rounds are bounded by the steps, however the load swings."""
    steps = 240
    rig = SchedulerRig(
        make_config(
            blocks=90, host_pages=400, longest=256, name=policy, write_back="on_pressure",
            promote_after_steps=CALM, promote_pages=2,
        )
    )  # fmt: skip
    rig.check = lambda: None  # its fold of the whole log, at each of so many steps
    rig.arrive("long", list(range(8)), new=246)
    live = []
    for step in range(steps):
        if step % 12 == 0:
            tokens = [1000 * (step + 1) + i for i in range(200)]
            live.append((step, rig.arrive(f"s{step}", tokens, new=8)))
        for began, key in list(live):
            if step - began >= 4:
                rig.coordinator.abort(*key)
                live.remove((began, key))
        rig.step(rows=200)
    rounds, last = 0, -CALM
    step = 0
    for _, e in rig.log.read(1):
        if isinstance(e, ev.StepPlanned):
            step = e.step
        elif isinstance(e, ev.PolicyChosen) and e.resource == "promotion":
            rounds += last < 0
            last = step
        elif isinstance(e, ev.PolicyChosen):
            last = -CALM
    assert 1 <= rounds <= steps / CALM
