"""Indexer and host prefix of different length: the suffix source is asked for what is missing."""

from __future__ import annotations

import pytest
from kv_rig import PAGE, make_config
from suffix_rig import PAGES, STEM, again, lose_index, rig_with, serve

from hisparse.fsm import events as ev
from hisparse.fsm.log import MemoryLog
from hisparse.fsm.machines import BlockState, PageState
from hisparse.fsm.wire import Table
from hisparse.kv.coordinator import HiSparseCoordinator
from hisparse.kv.suffix_cpu import CpuSuffix


def test_every_final_page_is_stored_once_and_only_when_it_is_certain():
    rig = rig_with()
    serve(rig)
    serve(rig, "twice")
    stored = [h for e in rig.events(ev.SuffixPinned) for h in e.suffixes if not e.load]
    hashes = rig.hasher.extend(b"", STEM)
    assert sorted(rig.state.suffix_index) == sorted(hashes)
    assert len(stored) == len(set(stored)) == PAGES
    states = rig.state.suffix.state[list(rig.state.suffix_index.values())]
    assert (states == PageState.PUBLISHED).all()


@pytest.mark.parametrize("kept", [0, 6, 12])
def test_it_is_asked_for_exactly_the_missing_suffix(kept):
    rig = rig_with()
    serve(rig)
    lose_index(rig, keep=kept)
    key, command = again(rig)
    hashes = rig.hasher.extend(b"", STEM)
    assert rig.coordinator.suffix.asked == [tuple(hashes[kept:PAGES])]
    (answer,) = rig.events(ev.SuffixAsked)
    assert (answer.page, answer.asked, answer.found) == (kept, PAGES - kept, PAGES - kept)
    assert rig.state.requests[key].hit_tokens == PAGES * PAGE
    loads = [t for t in command.index_transfers if t.load]
    assert [t.suffix for t in loads] == [rig.state.suffix_index[h] for h in hashes[kept:PAGES]]
    table = rig.state.table(Table.INDEX)[rig.row(key)]
    places = [(int(table[page // 6]), page % 6) for page in range(kept, PAGES)]
    assert [(t.block, t.slot) for t in loads] == places


def test_nothing_is_asked_where_nothing_is_missing():
    rig = rig_with()
    serve(rig)
    key, _ = again(rig)
    assert rig.state.requests[key].hit_tokens == PAGES * PAGE
    assert rig.coordinator.suffix.asked == [] and not rig.events(ev.SuffixAsked)


def test_without_a_source_the_shorter_prefix_is_shared():
    rig = rig_with(suffix_pages=0)
    serve(rig)
    lose_index(rig, keep=6)
    key, command = again(rig)
    assert rig.coordinator.suffix is None
    assert rig.state.requests[key].hit_tokens == 6 * PAGE
    assert not command.index_transfers and not rig.events(ev.SuffixAsked)


def test_what_the_source_cannot_serve_shortens_the_prefix_of_all_groups():
    rig = rig_with(most=3)
    serve(rig)
    lose_index(rig, keep=6)
    key, _ = again(rig)
    assert rig.state.requests[key].hit_tokens == 9 * PAGE
    leased = rig.events(ev.PrefixLeased)[-1]
    assert len(leased.pages) == 9


def test_a_request_that_has_to_wait_is_not_asked_for_and_pins_nothing():
    rig = rig_with(host_pages=20)
    serve(rig)
    lose_index(rig)
    big = rig.arrive("big", [900 + t for t in range(40)])
    rig.step()
    rig.arrive("again", [*STEM, 7], new=11)
    for _ in range(3):
        rig.step(only={big})
    assert rig.coordinator.suffix.asked == []
    assert not rig.state.suffix.refs.any() and not rig.state.suffix_answers


def test_rows_are_provisional_until_the_load_completes_and_only_then_is_it_found():
    rig = rig_with()
    serve(rig)
    lose_index(rig)
    key, command = again(rig, new=8)
    loads = [t.transfer for t in command.index_transfers if t.load]
    rig.step(ack=False)
    confirmed = lambda: rig.coordinator.confirmed(*key)  # noqa: E731
    assert confirmed() == PAGES * PAGE < rig.state.rows.computed[rig.row(key)]
    assert not rig.state.index_prefix
    rig.complete(*loads)
    assert confirmed() == rig.state.rows.computed[rig.row(key)]
    assert set(rig.hasher.extend(b"", STEM)) <= set(rig.state.index_prefix)
    assert not rig.state.suffix.refs.any()


@pytest.mark.parametrize("load", [False, True])
def test_an_index_block_stays_until_its_copies_are_over(load):
    rig = rig_with()
    serve(rig)
    if load:
        lose_index(rig)
        key, command = again(rig)
    else:
        key = rig.arrive("other", [500 + t for t in range(52)])
        rig.step()
        command = rig.step(ack=False)
    flying = {t.block for t in command.index_transfers}
    assert flying and all(t.load is load for t in command.index_transfers)
    rig.coordinator.abort(*key)
    rig.retire()
    rig.complete(*[t.transfer for t in command.transfers])
    assert (rig.state.blocks.refs[list(flying)] == 1).all(), "a copy reads or writes them"
    assert key in rig.state.draining
    rig.complete(*[t.transfer for t in command.index_transfers])
    rig.step()  # and that of the page which its end made final
    assert rig.drained()
    assert all(rig.state.blocks.state[b] in (BlockState.CACHED, BlockState.FREE) for b in flying)


def test_a_block_shared_by_another_stays_until_the_copy_of_the_first_owner_is_over():
    rig = rig_with()
    first = rig.arrive("first", STEM, new=12)
    rig.step()
    rig.step(ack=False)
    stores = list(rig.state.suffix_copies)
    rig.complete(*list(rig.state.transfers))
    second = rig.arrive("second", [*STEM, 7], new=8)
    rig.step(ack=False)
    rig.complete(*list(rig.state.transfers))
    flying = {c.block for c in rig.state.suffix_copies.values() if c.transfer in stores}
    shared = [b for b in flying if rig.state.blocks.refs[b] == 2]
    assert shared
    for key in (first, second):
        rig.coordinator.abort(*key)
    rig.retire()
    rig.complete(*[t for t in rig.state.transfers if t in rig.sent])
    assert rig.state.blocks.refs[shared].all()
    rig.send()
    rig.complete(*list(rig.state.suffix_copies), *list(rig.state.transfers))
    assert rig.drained()


def test_the_tier_is_bounded_and_evicts_least_recently_used_tail_first():
    rig = rig_with(suffix_pages=20)
    serve(rig)
    serve(rig, "other", [700 + t for t in range(44)])  # eleven pages more: four have to go
    hashes = rig.hasher.extend(b"", STEM)
    found = [h in rig.state.suffix_index for h in hashes]
    assert found == [True] * 9 + [False] * 4, "the head of a prefix goes last"
    lose_index(rig)
    key, _ = again(rig)
    assert rig.state.requests[key].hit_tokens == 9 * PAGE


def test_a_leased_page_is_not_evicted_and_a_prefix_does_not_push_itself_out():
    rig = rig_with(suffix_pages=13, blocks=120, host_pages=120)
    serve(rig)
    lose_index(rig)
    key, command = again(rig)
    leased = [t.suffix for t in command.index_transfers if t.load]
    serve_other = rig.arrive("other", [700 + t for t in range(44)])
    for _ in range(3):
        rig.step(only={serve_other}, ack=False)
    assert not rig.events(ev.SuffixEvicted) and len(leased) == 13
    rig = rig_with(suffix_pages=5)
    serve(rig)
    hashes = rig.hasher.extend(b"", STEM)
    assert [h in rig.state.suffix_index for h in hashes] == [True] * 5 + [False] * 8
    assert not rig.events(ev.SuffixEvicted) and key


def test_a_reset_empties_the_tier_and_the_next_lookup_finds_nothing():
    rig = rig_with()
    serve(rig)
    gone = set(rig.state.suffix_index.values())
    assert rig.coordinator.reset_prefix_cache()
    assert not rig.state.suffix_index and not rig.state.suffix.hash_of
    assert rig.state.suffix.free.count == len(rig.state.suffix.state) - 1
    assert set(rig.step().poison_suffixes) == gone
    key, _ = again(rig)
    assert rig.state.requests[key].hit_tokens == 0


def test_a_copy_in_flight_refuses_a_reset():
    rig = rig_with()
    key = rig.arrive("first", STEM)
    for _ in range(2):
        rig.step()
    rig.finish(key)
    rig.step(ack=False)
    rig.complete(*list(rig.state.transfers))
    rig.retire()
    assert rig.state.suffix_copies and not rig.coordinator.reset_prefix_cache()


def test_every_rank_has_to_answer_and_one_failure_is_enough():
    for failing in (None, 0, 1):
        rig = rig_with(ranks=2)
        key = rig.arrive("first", STEM)
        rig.step(ack=False)
        command = rig.step(ack=False)
        stores = [t.transfer for t in command.index_transfers]
        for rank in (0, 1):
            assert set(stores) <= set(rig.state.suffix_copies), "one rank does not settle a copy"
            answer = rig.fail if rank == failing else rig.complete
            answer(*stores, rank=rank)
        assert not set(stores) & set(rig.state.suffix_copies) and key
        assert bool(rig.state.suffix_index) == (failing is None)


def test_the_log_replays_without_a_source():
    rig = rig_with(most=3)
    serve(rig)
    lose_index(rig)
    again(rig)
    rig.check()  # folds the log, in which the answers are, and compares digests


def test_a_source_that_promises_more_than_it_was_asked_for_is_refused():
    class Boaster(CpuSuffix):
        def lookup(self, hashes):
            return len(hashes) + 1

    rig = rig_with()
    serve(rig)
    lose_index(rig)
    rig.coordinator.suffix = Boaster(rig.state)
    rig.arrive("again", [*STEM, 7])
    with pytest.raises(Exception, match="found 14 of 13 pages"):
        rig.coordinator.admit_waiting()


def test_a_source_of_ones_own_is_taken_and_the_configured_one_is_the_default():
    config = make_config(suffix_pages=8)
    assert isinstance(HiSparseCoordinator(config, MemoryLog(10)).suffix, CpuSuffix)
    own = object()
    assert HiSparseCoordinator(config, MemoryLog(10), suffix=own).suffix is own
    assert HiSparseCoordinator(make_config(), MemoryLog(10)).suffix is None
