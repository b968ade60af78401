"""Indexer pages to the CPU tier and back: real bytes, ordered by the named waits, slot for slot."""

from __future__ import annotations

import numpy as np
import pytest
from backends import value
from device_rig import GIB, PAGE, Rig, make_config, page_rows

from hisparse.errors import ProtocolError
from hisparse.fsm import events as ev
from hisparse.fsm.wire import AckKind, IndexTransfer, Table, TableUpdate

on_both = pytest.mark.usefixtures("backend")
SEEDS = range(60)
WIDTH = 3  # index_row_bytes of the rig
TIER = 8  # pages of the CPU tier, null included


def suffix_rig(**kwargs):
    page_bytes = 2 * PAGE * WIDTH
    suffix = {"name": "cpu", "gib": TIER * page_bytes / GIB}
    return Rig(make_config(suffix=suffix), **kwargs)


def index(row, *blocks):
    return TableUpdate(Table.INDEX, row, 0, blocks)


def copy(ident, block, slot, page, load):
    return IndexTransfer(ident, 1, load, block, 1, slot, page, 1)


def rows_of(page, group):
    """uint8 [PAGE, 3]: the indexer rows of a page, different in every byte that could be mixed."""
    base = 1 + 40 * group + 8 * page
    return np.array([[base + i, 200 - base - i, i + 1] for i in range(PAGE)], dtype=np.uint8)


def write_pages(rig, row, pages):
    for page in pages:
        for group in (0, 1):
            rig.worker.index.write(group, page_rows(row, page), rows_of(page, group))


def keys(rig, row, pages):
    """Whether every group's keys of `row` are those of `pages`, once it is asked."""
    pending = [rig.worker.index.keys(group, row, len(pages) * PAGE) for group in (0, 1)]

    def right():
        want = [np.concatenate([rows_of(page, group) for page in pages]) for group in (0, 1)]
        return all(
            bool((value(p) == expected).all()) for p, expected in zip(pending, want, strict=True)
        )

    return right


def store_two_pages(rig):
    """Pages 0 and 1 of row 0, in index block 1, go to pages 3 and 5 of the tier."""
    rig.begin(tables=(index(0, 1),))
    write_pages(rig, 0, [0, 1])
    rig.end()
    rig.run_step(index_transfers=(copy(1, 1, 0, 3, False), copy(2, 1, 1, 5, False)))
    rig.device.synchronize(rig.device.d2h)


@on_both
def test_pages_come_back_slot_for_slot_into_another_block():
    rig = suffix_rig()
    store_two_pages(rig)
    rig.run_step(poison_blocks=(1,))
    rig.begin(
        tables=(index(1, 2),), index_transfers=(copy(3, 2, 0, 5, True), copy(4, 2, 1, 3, True))
    )
    right = keys(rig, 1, [1, 0])
    rig.end()
    assert right()


def stored_rows_are_the_last_written(rig):
    """d2h_after_compute: the store reads the block behind the rows that were written to it."""
    store_two_pages(rig)
    rig.begin(tables=(index(1, 2),), index_transfers=(copy(3, 2, 0, 3, True),))
    right = keys(rig, 1, [0])
    rig.end()
    return right()


def loaded_into_a_block_that_was_in_use(rig):
    """h2d_after_compute: the block is poisoned, and then loaded into, in that order."""
    store_two_pages(rig)
    rig.begin(
        poison_blocks=(2, 3, 4), tables=(index(1, 2),), index_transfers=(copy(3, 2, 0, 3, True),)
    )
    right = keys(rig, 1, [0])
    rig.end()
    return right()


def read_in_the_step_that_loads(rig):
    """compute_after_restore: the step that loads a page reads it."""
    store_two_pages(rig)
    loads = (copy(3, 6, 0, 5, True), copy(4, 2, 0, 3, True))
    rig.begin(tables=(index(1, 2),), index_transfers=loads)
    right = keys(rig, 1, [0])
    rig.end()
    return right()


SCENARIOS = {
    "d2h_after_compute": stored_rows_are_the_last_written,
    "h2d_after_compute": loaded_into_a_block_that_was_in_use,
    "compute_after_restore": read_in_the_step_that_loads,
}


@on_both
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_scenarios_hold(name):
    assert all(SCENARIOS[name](suffix_rig(seed=s)) for s in range(4))


@pytest.mark.parametrize("name", SCENARIOS)
def test_without_the_wait_indexer_rows_go_wrong(name):
    assert any(not SCENARIOS[name](suffix_rig(seed=s, lag=0.6, without=name)) for s in SEEDS)


@pytest.mark.parametrize("lag", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("name", SCENARIOS)
def test_with_all_waits_no_seed_corrupts(name, lag):
    assert all(SCENARIOS[name](suffix_rig(seed=s, lag=lag)) for s in SEEDS)


@on_both
def test_a_copy_is_acknowledged_as_any_other_and_its_accesses_are_told():
    told = []
    rig = suffix_rig(sink=told.append)
    store_two_pages(rig)
    rig.run_step(index_transfers=(copy(3, 2, 0, 3, True),))
    rig.device.synchronize()
    acks = [(a.kind, a.ident) for a in rig.worker.poll().acks if a.kind != AckKind.RETIRED]
    enqueued, completed = AckKind.ENQUEUED, AckKind.COMPLETED
    assert sorted(acks) == sorted([(k, i) for k in (enqueued, completed) for i in (1, 2, 3)])
    accesses = {
        (e.transfer, e.stream, e.pool, e.write, e.ids)
        for e in told
        if isinstance(e, ev.MemoryAccessed) and e.transfer in (1, 3)
    }
    assert accesses == {
        (1, "d2h", "gpu", False, (1,)),
        (1, "d2h", "suffix", True, (3,)),
        (3, "h2d", "gpu", True, (2,)),
        (3, "h2d", "suffix", False, (3,)),
    }
    counts = rig.worker.statistics()
    assert (counts["index_pages_stored"], counts["index_pages_loaded"]) == (2, 1)


@on_both
def test_a_copy_made_to_fail_says_so_and_leaves_its_target_alone():
    rig = suffix_rig(copy_fault=lambda transfer: transfer.transfer == 3)
    store_two_pages(rig)
    rig.run_step(poison_blocks=(2,))
    rig.begin(tables=(index(1, 2),), index_transfers=(copy(3, 2, 0, 3, True),))
    right = keys(rig, 1, [0])
    rig.end()
    assert not right()
    rig.device.synchronize()
    assert [a.ident for a in rig.worker.poll().acks if a.kind == AckKind.FAILED] == [3]


@pytest.mark.parametrize(
    "fields",
    [
        {"index_transfers": (copy(1, 1, 0, TIER, False),)},
        {"index_transfers": (copy(1, 1, 0, 0, False),)},
        {"index_transfers": (copy(1, 0, 0, 1, True),)},
        {"index_transfers": (copy(1, 1, 99, 1, True),)},
        {"index_transfers": (copy(1, 1, 0, 1, False), copy(2, 2, 0, 1, False))},
        {"index_transfers": (copy(1, 1, 0, 1, False), copy(2, 2, 0, 1, True))},
        {"index_transfers": (copy(1, 1, 0, 1, True),), "poison_suffixes": (1,)},
        {"poison_suffixes": (TIER,)},
    ],
)
def test_what_does_not_exist_or_meets_is_refused_before_anything_is_queued(fields):
    rig = suffix_rig()
    with pytest.raises(ProtocolError):
        rig.begin(**fields)
    assert rig.worker.to_seq == 0


def test_without_a_tier_there_is_no_pool_and_no_page():
    rig = Rig()
    assert rig.worker.suffix_pool is None and rig.worker.suffix == ()
    assert "index_pages_stored" not in rig.worker.statistics()
    with pytest.raises(ProtocolError):
        rig.begin(index_transfers=(copy(1, 1, 0, 1, True),))
