"""Requests that go back after a failed copy: what is taken back, when what held it may go, and that
nobody else notices."""

from __future__ import annotations

from kv_rig import PAGE, SchedulerRig, make_config, restoring

from hisparse.fsm import events as ev
from hisparse.fsm.machines import RequestState
from hisparse.fsm.snapshot import restore, snapshot
from hisparse.fsm.wire import Table, TransferKind
from hisparse.kv import acknowledgements, rewind
from hisparse.kv.prefix import find_prefix

PROMPT = list(range(40))


def squeezed(enqueued=None):
    """(rig, request, its spills): spills are enqueued (all, or that many) and replaced, and one
    step was computed since."""
    rig = SchedulerRig(make_config(blocks=24, write_back="on_pressure"))
    first = rig.arrive("first", PROMPT, new=20)
    rig.step()
    rig.arrive("second", [900 + i for i in range(40)])
    command = rig.step(only=[first], ack=False)
    spills = [t.transfer for t in command.transfers if t.kind is TransferKind.SPILL]
    assert len(spills) > 1
    rig.enqueue(*spills[:enqueued])
    rig.step(only=[first], ack=False)
    return rig, first, spills


def settle(rig, *spared):
    """Every copy under way completes, but for `spared`."""
    rig.complete(*[t for t in rig.state.transfers if t not in spared])


def to_the_end(rig, key, steps=60):
    """Serve `key` to its last row, every copy good."""
    for _ in range(steps):
        if rig.state.rows.computed[rig.row(key)] == len(PROMPT) + 19:
            return
        rig.step()
    raise AssertionError(f"{key} does not end")


def test_a_failed_spill_takes_the_request_back_to_the_page_that_is_lost():
    rig, first, spills = squeezed()
    rows = rig.state.rows
    computed, certain = int(rows.computed[rig.row(first)]), rig.coordinator.confirmed(*first)
    assert certain < computed
    rig.complete(spills[0])
    rig.fail(spills[1])
    told = rig.coordinator.take_rewound()
    assert [(e.request, e.rows, e.certain) for e in told] == [("first", PAGE, certain)]
    assert rows.computed[rig.row(first)] == rig.coordinator.confirmed(*first) == PAGE
    assert not rig.events(ev.RequestAborted) and not rig.coordinator.take_rewound()
    rig.retire()
    settle(rig)
    to_the_end(rig, first)
    rig.finish(first)
    assert rig.coordinator.metrics.counts["rewinds"] == 1


def test_who_never_asks_is_told_of_requests_that_are_there_and_once_each():
    rig, first, spills = squeezed()
    certain = rig.coordinator.confirmed(*first)
    for spill in (spills[2], spills[1]):
        rig.fail(spill)
    assert [(e.rows, e.certain) for e in rig.events(ev.RequestRewound)] == [
        (2 * PAGE, certain), (PAGE, 2 * PAGE),
    ]  # fmt: skip
    told = rig.coordinator._rewound
    assert [(e.rows, e.certain) for e in told.values()] == [(PAGE, certain)]
    rig.coordinator.abort(*first)
    rig.retire()
    settle(rig)
    rig.step()
    assert not rig.coordinator.take_rewound()


def test_it_computes_nothing_until_copies_of_what_was_taken_back_are_acknowledged():
    rig, first, spills = squeezed()
    rig.fail(spills[0])
    rig.retire()
    held = rig.host(first)
    assert len([t for t in rig.state.transfers.values() if t.row == rig.row(first)]) > 1
    assert rig.state.requests[first].state is RequestState.REWINDING
    command = rig.step(only=[first], ack=False)
    assert rig.state.rows.computed[rig.row(first)] == 0 and not command.transfers
    assert rig.host(first) == held, "leases of copies under way are kept"
    settle(rig, spills[-1])
    assert rig.host(first) == held
    rig.complete(spills[-1])
    rig.retire()
    assert not any(rig.host(first)) and not any(rig.blocks(first))
    assert rig.state.requests[first].state is RequestState.PREFILL
    rig.step(only=[first])
    assert rig.state.rows.computed[rig.row(first)] > 0


def test_a_spill_of_rows_that_were_taken_back_settles_and_replaces_nothing():
    rig, first, spills = squeezed(enqueued=1)
    rig.fail(spills[0])
    entries = {t: rig.state.transfers[t].entry for t in spills[1:]}
    table = rig.state.table(Table.RESIDENT)[rig.row(first)]
    blocks = {entry: int(table[entry]) for entry in entries.values()}
    rig.enqueue(*spills[1:])
    assert {entry: int(table[entry]) for entry in blocks} == blocks and all(blocks.values())
    settle(rig)
    rig.retire()
    assert rig.state.requests[first].state is RequestState.PREFILL and not table.any()
    replaced = {entry for e in rig.events(ev.PagesSpilled) for entry in e.entries}
    assert not replaced & set(entries.values())


def test_lost_pages_are_kept_until_no_step_can_read_them():
    rig, first, spills = squeezed()
    settle(rig, spills[0])
    rig.fail(spills[0])
    lost = rig.host(first)[0]
    assert rig.page_state(lost) == "FAILED"
    rig.retire(rig.state.step - 1)
    assert rig.page_state(lost) == "FAILED"
    rig.retire()
    assert lost not in rig.host(first)


def test_of_a_step_under_way_nothing_is_accepted():
    rig, first, spills = squeezed()
    row = rig.row(first)
    rig.coordinator.grow([row], [1])
    step = rig.coordinator.plan_step([row], [1])
    rig.send()
    rig.fail(spills[0])
    settle(rig)
    rig.retire()
    assert rig.state.requests[first].state is RequestState.REWINDING
    rig.coordinator.rows_computed(step, [row], [1], [(row, b"h" * 16)])
    assert rig.state.rows.computed[row] == 0
    assert rig.state.requests[first].hashes == rig.hasher.extend(b"", PROMPT)
    assert rig.state.requests[first].state is RequestState.PREFILL
    rig.check()


def test_hashes_of_withdrawn_tokens_are_forgotten():
    rig, first, spills = squeezed()
    for _ in range(6):  # seals a page of generated tokens while its rows are provisional
        rig.step(only=[first], ack=False)
    assert len(rig.state.requests[first].hashes) > len(PROMPT) // PAGE
    rig.fail(spills[0])
    assert rig.state.requests[first].hashes == rig.hasher.extend(b"", PROMPT)


def test_a_failed_restore_loses_no_row_of_the_hit_which_is_read_from_the_host():
    rig, key, copies = restoring(PROMPT)
    hit = rig.state.requests[key].hit_tokens
    pages = rig.host(key)[: hit // PAGE]
    rig.fail(copies[0].transfer)
    assert rig.state.rows.computed[rig.row(key)] == hit
    assert rig.host(key)[: hit // PAGE] == pages and rig.blocks(key)[0] == 0
    rig.complete(*[t.transfer for t in copies[1:]])
    rig.retire()
    for _ in range(3):
        rig.step()
    assert rig.state.rows.computed[rig.row(key)] > 60 and not rig.events(ev.RequestAborted)
    rig.finish(key)
    for _ in range(3):
        rig.step()
    assert rig.drained()


def shared_middle():
    """(rig, request, its spills, sharer): pages 0..5 of the request lie in an index block that the
    sharer found by prefix, since a twin of equal content published them; its own go to the host."""
    rig = SchedulerRig(make_config(blocks=36, host_pages=200, write_back="on_pressure"))
    twin = rig.arrive("twin", PROMPT)
    first = rig.arrive("first", PROMPT, new=20)
    rig.step()
    rig.finish(twin)
    rig.step()
    sharer = rig.arrive("sharer", [*PROMPT[:24], *range(700, 704)], new=8)
    rig.step()
    rig.arrive("other", [900 + i for i in range(48)])
    command = rig.step(only=[first], ack=False)
    spills = [t.transfer for t in command.transfers if t.kind is TransferKind.SPILL]
    rig.enqueue(*spills)
    rig.step(only=[first], ack=False)
    index = rig.state.table(Table.INDEX)
    assert index[rig.row(sharer), 0] == index[rig.row(first), 0] != 0
    assert len(spills) > 2
    return rig, first, spills, sharer


def index_blocks(rig, key):
    return rig.state.table(Table.INDEX)[rig.row(key)].tolist()


def test_what_others_found_by_prefix_stays_and_is_not_written_again():
    rig, first, spills, sharer = shared_middle()
    shared, before = index_blocks(rig, sharer)[0], index_blocks(rig, first)
    kept = rig.state.transfers[spills[2]].entry
    settle(rig, spills[2])
    rig.fail(spills[2])
    rig.retire()
    assert 0 < kept < 6 and index_blocks(rig, sharer)[0] == shared
    own = index_blocks(rig, first)
    assert own[0] not in (0, shared) and not any(own[1:]), "the kept pages, in a block of its own"
    copied = rig.events(ev.IndexPagesCopied)[-1]
    assert (copied.sources, copied.blocks) == ((shared,) * kept, (own[0],) * kept)
    assert before[0] == shared
    later = rig.arrive("later", [*PROMPT[:24], *range(800, 803)], new=4)
    for _ in range(14):
        rig.step()
    rig.finish(sharer)
    assert rig.state.rows.computed[rig.row(first)] > 40
    rig.finish(first)
    for _ in range(3):
        rig.step()
    assert rig.state.requests[later].hit_tokens == 24


def test_a_block_that_was_shared_when_rows_were_taken_back_is_not_written_when_it_is_alone():
    rig, first, spills, sharer = shared_middle()
    shared = index_blocks(rig, sharer)[0]
    rig.fail(spills[2])
    assert rig.state.requests[first].state is RequestState.REWINDING
    rig.coordinator.abort(*sharer)
    assert rig.state.blocks.refs[shared] == 1 and index_blocks(rig, first)[0] == shared
    settle(rig, spills[2])
    rig.retire()
    assert index_blocks(rig, first)[0] not in (0, shared)
    to_the_end(rig, first)
    rig.finish(first)
    assert find_prefix(rig.state, rig.hasher.extend(b"", PROMPT), 10) == 10


def test_without_a_block_to_go_back_to_the_request_fails_by_name(monkeypatch):
    rig, _, spills, _ = shared_middle()
    monkeypatch.setattr(rewind, "spare", lambda state: 0)
    settle(rig, spills[2])
    rig.fail(spills[2])
    rig.retire()
    reasons = [e.reason for e in rig.events(ev.RequestAborted)]
    assert reasons == ["copy failed, and no GPU block to rewind to"]
    assert rig.coordinator.metrics.counts["requests_failed"] == 1


def test_copies_that_go_on_failing_end_the_request_by_name(monkeypatch):
    monkeypatch.setattr(acknowledgements, "COPY_FAILURES_MAX", 1)
    rig, first, spills = squeezed()
    rig.fail(spills[0])
    assert rig.state.requests[first].live
    rig.fail(spills[1])
    assert [e.reason for e in rig.events(ev.RequestAborted)] == ["copy failed, 2 times"]


def test_an_abort_while_it_goes_back_leaves_nothing_behind():
    rig, first, spills = squeezed()
    rig.fail(spills[0])
    rig.coordinator.abort(*first)
    assert not rig.state.rewinding
    settle(rig)
    for _ in range(8):
        rig.step()
    assert first not in rig.state.requests


def test_a_snapshot_knows_who_goes_back():
    rig, first, spills = squeezed()
    rig.fail(spills[0])
    assert list(restore(rig.config, snapshot(rig.state)).rewinding) == [first]
