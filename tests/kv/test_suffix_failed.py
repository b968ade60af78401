"""Copies of the suffix tier that fail: who read them goes back, and finds no row unwritten."""

from __future__ import annotations

import pytest
from kv_rig import PAGE
from suffix_rig import PAGES, STEM, again, lose_index, rig_with, serve

from hisparse.fsm import events as ev
from hisparse.fsm.machines import BlockState


def test_by_policy_a_failed_load_ends_in_the_shorter_prefix_by_event():
    rig = rig_with(on_copy_failure="fail")
    serve(rig)
    lose_index(rig, keep=6)
    key, command = again(rig, new=8)
    rig.retire()
    loads = [t for t in command.index_transfers if t.load]
    rig.fail(loads[2].transfer)
    (ended,) = rig.events(ev.RequestPreempted)
    assert (ended.request, ended.reason) == (key[0], "suffix load failed")
    assert rig.coordinator.take_preempted() == [key] and rig.coordinator.take_preempted() == []
    assert [e.suffixes for e in rig.events(ev.SuffixEvicted)] == [(loads[2].suffix,)]
    rig.complete(*[t.transfer for t in (*loads[:2], *loads[3:])])
    rig.complete(*[t.transfer for t in command.transfers])
    rig.step()
    assert rig.drained() and not rig.state.suffix.refs.any()
    back, command = again(rig, "again")
    assert rig.state.requests[back].hit_tokens == 8 * PAGE, "up to the page that could not be had"
    assert rig.coordinator.suffix.asked[-1][0] == rig.hasher.extend(b"", STEM)[8]


@pytest.mark.parametrize("ranks", [1, 2])
def test_who_read_a_failed_load_goes_back_to_its_page_and_computes_on(ranks):
    rig = rig_with(ranks=ranks)
    serve(rig)
    lose_index(rig, keep=6)
    key, command = again(rig, new=8)
    row, shared = rig.row(key), rig.host(key)[:PAGES]
    loads = [t for t in command.index_transfers if t.load]
    assert rig.state.rows.computed[row] == len(STEM) + 1
    rig.fail(loads[2].transfer, rank=ranks - 1)
    (back,) = rig.events(ev.RequestRewound)
    assert (back.row, back.rows, back.certain) == (row, 8 * PAGE, PAGES * PAGE)
    assert rig.coordinator.take_preempted() == [] and not rig.events(ev.RequestResumed)
    rest = [t.transfer for t in (*command.transfers, *loads)]
    for rank in range(ranks):
        failed_here = rank == ranks - 1
        rig.complete(*[t for t in rest if not failed_here or t != loads[2].transfer], rank=rank)
    assert not rig.events(ev.RequestResumed), "a step that reads the pages is not over"
    rig.retire()
    assert rig.events(ev.RequestResumed)
    assert rig.host(key)[:8] == shared[:8] and not any(rig.host(key)[8:])
    assert len(rig.state.requests[key].reserved) == rig.state.rows.pages_max[row] - 8
    assert [e.suffixes for e in rig.events(ev.SuffixEvicted)] == [(loads[2].suffix,)]
    for _ in range(6):
        rig.step()
    assert rig.coordinator.confirmed(*key) == rig.state.rows.computed[row] > len(STEM) + PAGE
    assert rig.state.rows.published[row] == PAGES + 1, "its own pages, as ever"
    rig.finish(key)
    rig.step()
    assert rig.drained()
    assert set(rig.hasher.extend(b"", STEM)) <= set(rig.state.index_prefix)


def test_a_second_failed_load_takes_it_further_back_and_what_lies_behind_is_nothings_name():
    rig = rig_with()
    serve(rig)
    lose_index(rig)
    key, command = again(rig, new=8)
    loads = [t for t in command.index_transfers if t.load]
    assert len(loads) == PAGES
    for at in (7, 9, 3):
        rig.fail(loads[at].transfer)
    assert [e.rows for e in rig.events(ev.RequestRewound)] == [7 * PAGE, 3 * PAGE]
    rig.complete(*[t.transfer for i, t in enumerate(loads) if i not in (7, 9, 3)])
    hashes = rig.hasher.extend(b"", STEM)
    assert [h in rig.state.index_prefix for h in hashes] == [True] * 3 + [False] * 10
    assert rig.state.rows.unsettled[rig.row(key)] == len(command.transfers)
    rig.complete(*[t.transfer for t in command.transfers])
    rig.retire()
    for _ in range(4):
        rig.step()
    assert rig.coordinator.confirmed(*key) == rig.state.rows.computed[rig.row(key)] > len(STEM)
    assert set(hashes) <= set(rig.state.index_prefix)


def test_without_host_pages_to_go_back_to_it_leaves_the_gpu():
    rig = rig_with(host_pages=17)
    serve(rig)
    lose_index(rig)
    key, command = again(rig, new=11)
    assert rig.state.pages.available < PAGES
    (first, *_) = [t for t in command.index_transfers if t.load]
    rig.fail(first.transfer)
    assert not rig.events(ev.RequestRewound) and rig.coordinator.take_preempted() == [key]
    assert [e.reason for e in rig.events(ev.RequestPreempted)] == ["suffix load failed"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_failed_load_did_not_write_is_never_stored_again(ranks):
    """The rest of its block is computed and the block sealed while the load is under way."""
    rig = rig_with(ranks=ranks, longest=96)
    serve(rig)
    lose_index(rig)
    key = rig.arrive("again", [*STEM, *range(700, 724)])
    loads = {t.transfer: t.slot for t in rig.step(ack=False).index_transfers}
    assert len(loads) == PAGES and rig.state.rows.computed[rig.row(key)] >= 18 * PAGE
    bad = rig.state.suffix_copies[max(loads)]
    assert bad.entry == PAGES - 1 and rig.state.blocks.state[bad.block] == BlockState.CLEAN
    for rank in range(ranks):
        rig.complete(*[t for t in loads if t != bad.transfer], rank=rank)
    for rank in range(ranks - 1):
        rig.complete(bad.transfer, rank=rank)
    rig.fail(bad.transfer, rank=ranks - 1)
    stored = [e for e in rig.events(ev.SuffixPinned) if not e.load and e.epoch == key[1]]
    assert PAGES - 1 not in [entry for e in stored for entry in e.entries]
    assert [e.rows for e in rig.events(ev.RequestRewound)] == [(PAGES - 1) * PAGE]


def test_a_failed_store_leaves_nothing_to_find():
    rig = rig_with()
    key = rig.arrive("first", STEM)
    rig.step()
    command = rig.step(ack=False)
    stores = [t.transfer for t in command.index_transfers]
    assert stores
    rig.fail(*stores)
    assert not rig.state.suffix_index
    assert rig.state.suffix.free.count == len(rig.state.suffix.state) - 1
    assert rig.state.requests[key].live
