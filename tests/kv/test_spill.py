"""The spill transaction, as the scheduler sees it: who may be reused when."""

from __future__ import annotations

import pytest
from kv_rig import SchedulerRig, make_config

from hisparse.errors import ProtocolError
from hisparse.fsm import events as ev
from hisparse.fsm.wire import Ack, AckKind, Acknowledgements, TransferKind

PROMPT = list(range(40))  # ten pages


def squeezed(write_back="on_pressure", **policy):
    """A request of ten resident pages, then another that needs room: the first loses pages."""
    rig = SchedulerRig(make_config(blocks=26, write_back=write_back, **policy))
    first = rig.arrive("first", PROMPT, new=20)
    rig.step()
    second = rig.arrive("second", [900 + i for i in range(40)], new=4)
    return rig, first, second


def test_everything_stays_resident_while_it_fits():
    rig = SchedulerRig(make_config(blocks=64))
    key = rig.arrive("q", PROMPT)
    rig.step()
    assert 0 not in rig.blocks(key)
    assert not rig.events(ev.PagesSpilled) and not rig.events(ev.HotLeased)


def test_pressure_leases_a_hot_region_before_any_page_leaves():
    rig, first, _ = squeezed()
    rig.step(ack=False)
    spills = [i for i, (_, e) in enumerate(rig.log.read(1)) if isinstance(e, ev.TransferPinned)]
    leases = [i for i, (_, e) in enumerate(rig.log.read(1)) if isinstance(e, ev.HotLeased)]
    assert leases and leases[0] < spills[0]
    assert rig.state.requests[first].hot.name == "LEASED"


def test_a_spilled_block_is_free_only_when_its_copy_is_enqueued():
    rig, first, _ = squeezed()
    command = rig.step(only=[first], ack=False)
    spills = [t for t in command.transfers if t.kind is TransferKind.SPILL]
    assert spills
    assert all(t.block in rig.blocks(first) for t in spills), "planned is not given back"
    rig.enqueue(*[t.transfer for t in spills])
    assert not any(t.block in rig.blocks(first) for t in spills)
    assert all(rig.page_state(t.host) == "ENQUEUED" for t in spills)


def test_pages_leave_head_first_and_the_tail_never():
    rig, first, _ = squeezed()
    for _ in range(4):
        rig.step()
    table = rig.blocks(first)
    gone = [entry for entry, block in enumerate(table) if not block]
    assert gone == list(range(len(gone))) and gone
    assert table[-1], "the open tail stays"


def test_a_request_is_not_spilled_below_its_window_while_copies_are_under_way():
    rig, first, _ = squeezed()
    rig.arrive("third", [1900 + i for i in range(40)])
    for _ in range(6):
        rig.step(only=[first], ack=False)
        row = rig.row(first)
        kept = rig.state.rows.resident[row] - rig.state.rows.spilling[row]
        assert kept >= rig.config.window_pages


def test_the_command_fences_reuse_behind_the_copy():
    rig, first, _ = squeezed()
    command = rig.step(only=[first], ack=False)
    spills = [t.transfer for t in command.transfers if t.kind is TransferKind.SPILL]
    rig.enqueue(*spills)
    following = rig.step(ack=False)
    assert set(following.fences) >= set(spills)


def test_eager_write_back_keeps_the_block_readable():
    rig = SchedulerRig(make_config(blocks=64, write_back="eager"))
    key = rig.arrive("q", PROMPT)
    rig.step(ack=False)
    assert rig.block_states(key) == ["PINNED"] * 10
    command = rig.step(ack=False)
    rig.enqueue(*[t.transfer for t in command.transfers])
    assert set(rig.block_states(key)[:10]) == {"ENQUEUED"}
    rig.complete(*[t.transfer for t in command.transfers])
    assert set(rig.block_states(key)[:10]) == {"CLEAN"}
    assert 0 not in rig.blocks(key)


def test_a_clean_page_leaves_without_another_copy():
    rig, first, _ = squeezed(write_back="eager")
    for _ in range(4):
        rig.step()
    assert rig.blocks(first)[0] == 0
    spilled = [e for e in rig.events(ev.PagesSpilled) if e.row == rig.row(first)]
    assert any(set(e.transfers) == {0} for e in spilled)


def test_a_failed_write_back_leaves_the_page_dirty_and_is_tried_again():
    rig = SchedulerRig(make_config(blocks=64))
    key = rig.arrive("q", PROMPT[:12], new=8)
    rig.step(ack=False)
    command = rig.step(ack=False)
    bad = command.transfers[1].transfer
    rig.enqueue(*[t.transfer for t in command.transfers])
    rig.complete(command.transfers[0].transfer)
    rig.fail(bad)
    assert rig.block_states(key)[:3] == ["CLEAN", "DIRTY", "ENQUEUED"]
    rig.complete(command.transfers[2].transfer)
    assert len(rig.state.prefix) == 1, "nothing is published past the hole"
    for _ in range(4):
        rig.step()
    assert len(rig.state.prefix) >= 3, "the next seal copied it again"


def test_by_policy_a_failed_spill_whose_block_is_gone_ends_the_request_by_name():
    rig, first, _ = squeezed(on_copy_failure="fail")
    command = rig.step(only=[first], ack=False)
    spill = next(t for t in command.transfers if t.kind is TransferKind.SPILL)
    rig.enqueue(*[t.transfer for t in command.transfers])
    rig.fail(spill.transfer)
    aborted = rig.events(ev.RequestAborted)
    assert [e.request for e in aborted] == ["first"] and aborted[0].reason == "copy failed"


def test_release_waits_for_every_reading_rank():
    config = make_config(blocks=26, write_back="on_pressure", ranks=3)
    rig = SchedulerRig(config)
    first = rig.arrive("first", PROMPT, new=20)
    rig.step()
    rig.arrive("second", [900 + i for i in range(40)])
    command = rig.step(only=[first], ack=False)
    spills = [t for t in command.transfers if t.kind is TransferKind.SPILL]
    for rank in range(3):
        assert all(t.block in rig.blocks(first) for t in spills), f"before rank {rank}"
        rig.enqueue(*[t.transfer for t in spills], rank=rank)
    assert not any(t.block in rig.blocks(first) for t in spills)


def test_acknowledgements_settle_exactly_what_they_name():
    rig = SchedulerRig(make_config(blocks=64))
    rig.arrive("q", PROMPT)
    rig.step(ack=False)
    transfer = rig.step(ack=False).transfers[0]
    before = rig.coordinator.digest()
    events = rig.state.seq
    rig.acknowledge(Ack(AckKind.COMPLETED, transfer.transfer, transfer.epoch + 1))
    rig.acknowledge(Ack(AckKind.COMPLETED, 10**6, transfer.epoch))
    assert len(rig.state.transfers) == 10 and rig.state.seq == events + 2
    assert before != rig.coordinator.digest(), "what was taken in is in the log all the same"


def test_a_duplicate_is_inert_and_a_gap_is_refused():
    rig = SchedulerRig(make_config(blocks=64))
    rig.arrive("q", PROMPT)
    rig.step()
    before = rig.coordinator.digest()
    assert not rig.coordinator.update_acknowledgements(
        Acknowledgements(0, 1, 1, (Ack(AckKind.RETIRED, 1),))
    )
    assert not rig.coordinator.update_acknowledgements(
        Acknowledgements(0, 99, 500, (Ack(AckKind.RETIRED, 1),))
    )
    with pytest.raises(ProtocolError, match="read the stream again"):
        rig.coordinator.update_acknowledgements(
            Acknowledgements(0, 1, 500, (Ack(AckKind.RETIRED, 1),))
        )
    assert rig.coordinator.digest() == before


def test_one_rank_may_complete_before_another_has_enqueued():
    rig = SchedulerRig(make_config(blocks=64, ranks=2))
    key = rig.arrive("q", PROMPT)
    rig.step(ack=False)
    transfers = [t.transfer for t in rig.step(ack=False).transfers]
    rig.complete(*transfers, rank=0)
    assert set(rig.block_states(key)[:10]) == {"PINNED"}, "rank 1 has not even queued its copy"
    rig.complete(*transfers, rank=1)
    assert set(rig.block_states(key)[:10]) == {"CLEAN"} and len(rig.state.prefix) == 10


def test_a_lost_page_is_reused_only_after_the_steps_that_could_read_it():
    rig, first, _ = squeezed()
    command = rig.step(only=[first], ack=False)
    spill = next(t for t in command.transfers if t.kind is TransferKind.SPILL)
    rig.enqueue(*[t.transfer for t in command.transfers])
    later = rig.step(only=[first], ack=False)  # may read the page in stream order
    rig.fail(spill.transfer)
    assert rig.page_state(spill.host) == "FAILED"
    flying = [t for t in (*command.transfers, *later.transfers) if t is not spill]
    rig.complete(*[t.transfer for t in flying])
    assert rig.page_state(spill.host) == "FAILED"
    rig.retire()
    for _ in range(3):
        rig.step()
    assert rig.page_state(spill.host) != "FAILED"
