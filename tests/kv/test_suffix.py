"""Indexer and host prefix of different length: the suffix source is asked for what is missing."""

from __future__ import annotations

import numpy as np
import pytest
from kv_rig import PAGE, SchedulerRig, make_config

from hisparse.fsm import events as ev
from hisparse.fsm.log import MemoryLog
from hisparse.fsm.machines import BlockRole, BlockState, PageState
from hisparse.fsm.wire import Table
from hisparse.kv.coordinator import HiSparseCoordinator
from hisparse.kv.suffix_cpu import CpuSuffix

STEM = list(range(52))  # 13 pages: two whole index blocks of six pages, and one page of a third
PAGES = 13


class Spy(CpuSuffix):
    """The real source, and what it was asked for."""

    def __init__(self, state, most=1 << 30):
        super().__init__(state)
        self.asked, self.most = [], most

    def lookup(self, hashes):
        self.asked.append(tuple(hashes))
        return min(super().lookup(hashes), self.most)


def rig_with(
    *, suffix_pages=64, blocks=64, host_pages=64, ranks=1, most=1 << 30, longest=64, **policy
):
    rig = SchedulerRig(
        make_config(
            blocks=blocks,
            host_pages=host_pages,
            ranks=ranks,
            suffix_pages=suffix_pages,
            longest=longest,
            **policy,
        )
    )
    if suffix_pages:
        rig.coordinator.suffix = Spy(rig.state, most)
    return rig


def serve(rig, name="first", tokens=STEM):
    key = rig.arrive(name, tokens)
    for _ in range(4):
        rig.step()
    rig.finish(key)
    for _ in range(2):
        rig.step()
    return key


def lose_index(rig, keep=0):
    """Cached index blocks go, but for those of the first `keep` pages of the stem."""
    kept = {rig.state.index_prefix[h][0] for h in rig.hasher.extend(b"", STEM)[:keep]}
    cached = rig.state.blocks.cached.ordered()
    gone = cached[rig.state.blocks.role[cached] == BlockRole.INDEX]
    gone = np.array([block for block in gone.tolist() if block not in kept], dtype=np.int64)
    epochs = tuple(rig.state.blocks.epoch[gone].tolist())
    rig.coordinator._record(ev.BlocksEvicted(0, tuple(gone.tolist()), epochs))


def again(rig, name="again", **kwargs):
    key = rig.arrive(name, [*STEM, 7], **kwargs)
    command = rig.step(ack=False)
    return key, command


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
