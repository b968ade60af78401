"""A copy that fails on one rank while another has yet to end its own: lost for all at once, and its
block and host page are nobody else's until every rank has answered."""

from __future__ import annotations

import pytest
from kv_rig import PAGE, SchedulerRig, make_config

from hisparse.fsm import events as ev
from hisparse.fsm.machines import BlockState, PageState, RequestState, TransferState
from hisparse.fsm.wire import TransferKind
from hisparse.kv.residency import spill_head

PROMPT = list(range(40))
ON_PRESSURE = {"write_back": "on_pressure", "promote_after_steps": 4, "promote_pages": 2}
CASES = {
    TransferKind.WRITE_BACK: {},
    TransferKind.SPILL: {"blocks": 26} | ON_PRESSURE,
    TransferKind.RESTORE: {"blocks": 27} | ON_PRESSURE,
}


def complete(rig, copies):
    for rank in range(2):
        rig.complete(*copies, rank=rank)


def made(kind):
    """(rig of two ranks, request, its copies of `kind`, enqueued on both ranks)."""
    rig = SchedulerRig(make_config(ranks=2, **CASES[kind]))
    key = rig.arrive("first", PROMPT, new=24)
    rig.step()
    if kind is TransferKind.WRITE_BACK:
        command = rig.step(ack=False)
    else:
        other = rig.arrive("second", [900 + i for i in range(44)])
        if kind is TransferKind.SPILL:
            command = rig.step(only=[key], ack=False)
    if kind is TransferKind.RESTORE:
        for _ in range(3):
            rig.step()
        rig.abort(other)
        command = until_restored(rig)
    copies = [t.transfer for t in command.transfers if t.kind is kind]
    for rank in range(2):
        rig.enqueue(*copies, rank=rank)
    return rig, key, copies


def until_restored(rig):
    for _ in range(30):
        command = rig.step(ack=False)
        if any(t.kind is TransferKind.RESTORE for t in command.transfers):
            return command
        complete(rig, [t.transfer for t in command.transfers])
        rig.retire(command.step)
    raise AssertionError("nothing came back")


@pytest.mark.parametrize("answer", ["complete", "fail"])
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.name)
def test_nothing_that_the_other_rank_may_touch_is_given_back_before_it_answers(kind, answer):
    rig, _, copies = made(kind)
    state, lost = rig.state, copies[0]
    copy = state.transfers[lost]
    page, block, holds = copy.page, copy.block, copy.holds_block
    rig.fail(lost)
    assert copy.state is TransferState.FAILING
    rig.coordinator.abort_all("over")
    complete(rig, [t for t in state.transfers if t != lost])
    rig.retire()
    assert list(state.transfers) == [lost] and not rig.coordinator.sleep(2)
    assert state.pages.state[page] not in (PageState.FREE, PageState.RESERVED)
    assert not holds or state.blocks.state[block] not in (BlockState.FREE, BlockState.CACHED)
    getattr(rig, answer)(lost, rank=1)
    assert not state.requests and not state.transfers and rig.drained()


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.name)
def test_it_settles_at_once_where_every_other_rank_has_answered(kind):
    rig, _, copies = made(kind)
    rig.complete(copies[0], rank=1)
    rig.fail(copies[0])
    assert copies[0] not in rig.state.transfers
    rig.coordinator.abort_all("over")
    complete(rig, list(rig.state.transfers))
    rig.retire()
    assert rig.drained()


@pytest.mark.parametrize("kind", [TransferKind.SPILL, TransferKind.RESTORE], ids=lambda k: k.name)
def test_what_failed_on_one_rank_is_lost_at_once_and_made_good_when_all_have_answered(kind):
    rig, key, copies = made(kind)
    rig.fail(copies[1], rank=1)
    assert len(rig.coordinator.take_rewound()) == 1
    complete(rig, [t for t in rig.state.transfers if t != copies[1]])
    rig.retire()
    assert rig.state.requests[key].state is RequestState.REWINDING
    rig.complete(copies[1], rank=0)
    assert rig.state.requests[key].state is not RequestState.REWINDING
    assert len(rig.events(ev.RequestRewound)) == 1
    for _ in range(60):
        rig.step(only=[key])
    assert rig.coordinator.confirmed(*key) == len(PROMPT) + 24


def test_a_page_whose_copy_failed_on_one_rank_is_not_read_through_that_copy():
    """Under pressure too, its block keeps its place until the page can be copied again."""
    rig, key, copies = made(TransferKind.WRITE_BACK)
    row, before = rig.row(key), rig.blocks(key)
    rig.fail(copies[0])
    assert rig.block_states(key)[0] == "PINNED"
    rig.coordinator._run(spill_head(rig.state, row, len(copies), rig.state.seq))
    assert rig.blocks(key)[0] == before[0] and not any(rig.blocks(key)[1 : len(copies)])
    rig.complete(copies[0], rank=1)
    assert rig.block_states(key)[0] == "DIRTY" and not rig.coordinator.take_rewound()
    again = [t.block for _ in range(PAGE + 1) for t in rig.step().transfers]
    assert before[0] in again
