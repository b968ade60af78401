"""Rows that a failing copy could take back: not confirmed, not published, not emitted."""

from __future__ import annotations

from kv_rig import PAGE, SchedulerRig, make_config, restoring

from hisparse.fsm import events as ev
from hisparse.fsm.wire import Ack, AckKind, TransferKind

PROMPT = list(range(40))


def test_rows_computed_while_a_restore_is_under_way_are_provisional():
    rig, key, copies = restoring(PROMPT)
    hit = rig.state.requests[key].hit_tokens
    assert rig.state.rows.computed[rig.row(key)] > hit
    assert rig.coordinator.confirmed(*key) == hit
    rig.complete(*[t.transfer for t in copies])
    assert rig.coordinator.confirmed(*key) == rig.state.rows.computed[rig.row(key)]


def test_provisional_pages_are_neither_published_nor_found():
    rig, key, copies = restoring(PROMPT)
    command = rig.step(ack=False)  # their write-backs complete before the restore does
    rig.complete(*[t.transfer for t in command.transfers])
    hit = rig.state.requests[key].hit_tokens // PAGE
    assert rig.state.rows.published[rig.row(key)] == hit
    fresh = rig.state.requests[key].hashes[hit:]
    assert not any(h in rig.state.prefix or h in rig.state.index_prefix for h in fresh)
    rig.complete(*[t.transfer for t in copies])
    assert all(h in rig.state.prefix and h in rig.state.index_prefix for h in fresh[:5])


def test_after_a_failed_restore_nothing_of_it_is_ever_published():
    rig, key, copies = restoring(PROMPT, on_copy_failure="fail")
    command = rig.step(ack=False)
    fresh = rig.state.requests[key].hashes[rig.state.requests[key].hit_tokens // PAGE :]
    rig.complete(*[t.transfer for t in command.transfers])
    rig.fail(copies[0].transfer)
    rig.complete(*[t.transfer for t in copies[1:]])
    for _ in range(3):
        rig.step()
    assert [e.reason for e in rig.events(ev.RequestAborted)] == ["copy failed"]
    assert not any(h in rig.state.prefix for h in fresh)
    assert rig.drained()


def test_a_spill_makes_the_steps_behind_it_provisional_until_it_completes():
    rig = SchedulerRig(make_config(blocks=26, write_back="on_pressure"))
    first = rig.arrive("first", PROMPT, new=20)
    rig.step()
    rig.arrive("second", [900 + i for i in range(40)])
    command = rig.step(only=[first], ack=False)
    certain = rig.coordinator.confirmed(*first)
    spills = [t.transfer for t in command.transfers if t.kind is TransferKind.SPILL]
    rig.enqueue(*spills)
    rig.step(only=[first], ack=False)
    assert rig.coordinator.confirmed(*first) == certain
    rig.complete(*spills)
    assert rig.coordinator.confirmed(*first) > certain


def test_a_failure_known_with_the_enqueue_keeps_the_block():
    rig = SchedulerRig(make_config(blocks=26, write_back="on_pressure"))
    first = rig.arrive("first", PROMPT, new=20)
    rig.step()
    rig.arrive("second", [900 + i for i in range(40)])
    command = rig.step(only=[first], ack=False)
    spill = next(t for t in command.transfers if t.kind is TransferKind.SPILL)
    rig.acknowledge(
        Ack(AckKind.ENQUEUED, spill.transfer, spill.epoch),
        Ack(AckKind.FAILED, spill.transfer, spill.epoch),
    )
    assert spill.block in rig.blocks(first)
    assert not rig.events(ev.RequestAborted)


def test_a_copy_that_always_fails_ends_its_request_by_name():
    rig = SchedulerRig(make_config(blocks=64))
    key = rig.arrive("q", PROMPT, new=20)
    for _ in range(20):
        command = rig.step(ack=False)
        if not rig.state.requests.get(key) or not rig.state.requests[key].live:
            break
        rig.fail(*[t.transfer for t in command.transfers])
    assert [e.reason for e in rig.events(ev.RequestAborted)] == ["copy failed, 21 times"]


def test_the_worker_is_told_that_a_failed_page_names_nothing():
    rig = SchedulerRig(make_config(blocks=64))
    key = rig.arrive("q", PROMPT[:12], new=20)
    rig.step(ack=False)
    command = rig.step(ack=False)
    rig.fail(command.transfers[0].transfer)
    update = rig.step(ack=False).tables[0]
    assert (update.row, update.entry, update.ids) == (rig.row(key), 0, (0,))
