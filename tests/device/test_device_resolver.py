"""The fused resolve, one property at a time."""

from __future__ import annotations

import numpy as np
import pytest
from backends import plain, value
from device_rig import (
    PAGE,
    PAGES,
    REQUESTS,
    SPAN,
    Rig,
    content,
    contents,
    expect,
    host,
    hot,
    make_config,
    place_pages,
    step_rows,
)
from resolver_reference import ReferenceResolver

from hisparse.errors import DeviceError, InvariantViolation, UsageError
from hisparse.fsm.wire import Table

on_both = pytest.mark.usefixtures("backend")


def on_host(hot_rows=8, top_k=4, rows=1, seed=0):
    """Requests whose every page is on the host, with the first step begun."""
    rig = Rig(make_config(hot_rows, top_k, REQUESTS, PAGES), seed=seed)
    reference = ReferenceResolver(PAGE, hot_rows, top_k)
    tables = ()
    for row in range(rows):
        tables += place_pages(rig, reference, row, [False] * PAGES)
    rig.begin(tables=tables)
    return rig


def resolve(rig, rows, top_k):
    pending = rig.gather(step_rows(rows), np.array(top_k))
    return {layer: value(made) for layer, made in pending.items()}


def counts(rig):
    s = rig.worker.group_statistics(0)
    return s["hits"], s["misses"], s["resident"]


@on_both
def test_all_misses_then_all_hits():
    rig = on_host()
    resolve(rig, [0], [[0, 5, 10, 15]])
    assert counts(rig) == (0, 4, 0)
    resolve(rig, [0], [[15, 10, 5, 0]])
    assert counts(rig) == (4, 4, 0)


@on_both
def test_misses_of_calls_that_say_where_rows_are_take_no_hits_from_those_that_copy_them():
    """As a leader has them that takes one for prompts and the other for decode."""
    rig = on_host()
    for first in 0, 4:
        for layer in (0, 2):
            top = np.arange(first, first + 4, dtype=np.int32)[None]
            handle = rig.worker.handles[layer]
            value(handle.resolve(step_rows([0]), None if layer else top))
    assert counts(rig) == (0, 8, 0)
    resolve(rig, [0], [[7, 6, -1, -1]])
    assert counts(rig) == (2, 8, 0)
    resolve(rig, [0], [[7, 8, 9, -1]])
    assert counts(rig) == (3, 10, 0)


@on_both
def test_padding_gives_zeros_and_touches_nothing():
    rig = on_host()
    out = resolve(rig, [0, -1], [[-1] * 4, [3, 2, 1, 0]])
    assert all((value == 0).all() for value in out.values())
    assert counts(rig) == (0, 0, 0)
    assert (rig.positions_of(0) == -1).all()


def test_duplicates_share_a_slot_and_count_once():
    rig = on_host()
    out = resolve(rig, [0], [[7, 7, 7, 7]])
    assert (out[0] == content(0, 0, 7)).all()
    assert counts(rig) == (0, 1, 0)
    assert (rig.positions_of(0)[0] >= 0).sum() == 1


@on_both
def test_a_selection_as_large_as_the_hot_region():
    rig = on_host(hot_rows=4, top_k=4)
    for first in (0, 4, 8):
        top = np.arange(first, first + 4)[None]
        assert (resolve(rig, [0], top)[2] == expect([0], top, 2)).all()
    assert counts(rig) == (0, 12, 0)


@on_both
def test_a_hit_outranks_a_miss_of_the_same_step():
    rig = on_host(hot_rows=2, top_k=1)
    resolve(rig, [0], [[0]])  # slot 0, miss
    rig.end()
    rig.begin()
    resolve(rig, [0, 0], [[0], [1]])  # slot 0 hit, slot 1 miss, both in step 2
    rig.end()
    rig.begin()
    resolve(rig, [0], [[2]])
    assert rig.positions_of(0)[0].tolist() == [0, 2]


@on_both
def test_a_row_takes_no_victim_that_it_hits_itself():
    """Both slots were last used as hits in this very step; only the row's own use tells them."""
    rig = on_host(hot_rows=2, top_k=2)
    resolve(rig, [0], [[0, 1]])
    rig.end()
    rig.begin()
    rows, top = [0, 0], np.array([[0, 1], [0, 2]])
    out = resolve(rig, rows, top)
    assert (out[0] == expect(rows, top, 0)).all()
    assert rig.positions_of(0)[0].tolist() == [0, 2]


@on_both
def test_the_next_wave_may_reuse_slots_only_after_they_are_gathered():
    rig = on_host(hot_rows=4, top_k=2)
    rows, top = [0] * 5, np.array([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]])
    out = resolve(rig, rows, top)
    for layer in rig.layers:
        assert (out[layer] == expect(rows, top, layer)).all()


def test_waves_are_as_many_rows_as_fit():
    rig = on_host(hot_rows=4, top_k=2)
    resolve(rig, [0] * 5, [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]])
    waves = rig.worker.groups[0].calls[0].plan.waves
    assert [wave.rows.tolist() for wave in waves] == [[0, 1], [2, 3], [4]]


def test_an_all_resident_batch_is_one_gather_and_no_hot_state():
    rig = Rig(make_config(8, 4, REQUESTS, PAGES))
    reference = ReferenceResolver(PAGE, 8, 4)
    rig.begin(tables=place_pages(rig, reference, 0, [True] * PAGES))
    resolve(rig, [0, 0], [[0, 1, 2, 3], [12, 13, 14, 15]])
    plan = rig.worker.groups[0].calls[0].plan
    assert len(plan.waves) == 1 and plan.waves[0].rows is None
    assert counts(rig) == (0, 0, 8)


def test_a_position_with_no_copy_is_refused_by_name_and_changes_nothing():
    rig = on_host()
    rig.worker.device.synchronize()
    rig.worker.tables[1][0, 2] = 0
    pending = rig.worker.handles[1].gather(step_rows([0]), np.array([[0, 9]]))
    with pytest.raises(InvariantViolation, match=r"always_readable: row 0, position 9, layer 1"):
        rig.device.synchronize()
    with pytest.raises(DeviceError, match="position 9"):
        pending.result()
    assert (rig.positions_of(1) == -1).all()


def test_a_host_row_without_a_hot_region_is_refused():
    rig = on_host(rows=1)
    rig.end()
    rig.begin(tables=(hot(0, 0, 0),))
    with pytest.raises(InvariantViolation, match="no hot region"):
        resolve(rig, [0], [[3]])


@on_both
def test_a_reset_row_forgets_its_hot_rows():
    rig = on_host(rows=2)
    resolve(rig, [0, 1], [[0, 1], [2, 3]])
    rig.end()
    rig.begin(resets=(0,))
    rig.device.synchronize()
    positions = rig.positions_of(0)
    assert (positions[0] == -1).all() and set(positions[1].tolist()) == {2, 3, -1}
    if rig.device.name == "cpu":
        assert (rig.worker.handles[0].runtime.resolver.hot_map[0] == -1).all()
    assert all((plain(rig.worker.tables[t])[0] == 0).all() for t in Table)


@on_both
def test_rows_from_a_replaced_host_page_are_read_again():
    rig = on_host()
    resolve(rig, [0], [[4, 5, 8]])
    rig.end()
    rig.put("host", 2, 1, 50)  # other bytes: page 1 of request row 2
    rig.begin(tables=(host(0, 1, 50),))
    out = resolve(rig, [0], [[4, 8]])
    assert (out[0][0, 0] == content(2, 0, 4)).all()
    assert rig.positions_of(0)[0, :3].tolist() == [4, -1, 8]
    assert counts(rig) == (1, 4, 0)  # 8 was kept, 4 came again


@on_both
def test_slots_of_a_replaced_hot_block_are_forgotten():
    rig = on_host()
    resolve(rig, [0], [[0, 1, 2, 3]])
    resolve(rig, [0], [[4, 5]])
    rig.end()
    rig.begin(tables=(hot(0, 60, 31),))
    out = resolve(rig, [0], [[0, 4]])
    assert (out[2] == expect([0], np.array([[0, 4]]), 2)).all()
    assert counts(rig) == (1, 7, 0)


@on_both
def test_followers_replay_what_they_would_have_resolved():
    """The same layers, once as followers and once each its own leader, give the same bytes."""
    rng = np.random.default_rng(5)
    rigs = [
        Rig(make_config(6, 3, REQUESTS, PAGES, groups=groups), seed=1)
        for groups in (((0, 1, 2),), ((0,), (1,), (2,)))
    ]
    for rig in rigs:
        reference = ReferenceResolver(PAGE, 6, 3)
        rig.run_step(tables=place_pages(rig, reference, 0, [False, True, False, False]))
    for _ in range(20):
        rows, top = [0] * 3, rng.integers(-1, SPAN, (3, 3))
        values = []
        for rig in rigs:
            rig.begin()
            values.append(resolve(rig, rows, top))
            rig.end()
        for layer in range(3):
            assert (values[0][layer] == values[1][layer]).all()
    led, own = (
        np.stack([plain(r.worker.handles[i].runtime.hot.array)[30:32] for i in range(3)])
        for r in rigs
    )
    assert (led == own).all()


@on_both
def test_followers_own_no_replacement_state():
    rig = Rig()
    for handle in rig.worker.handles:
        assert (handle.runtime.state_bytes > 0) == (handle.layer in rig.config.layout.leaders)
        assert handle.runtime.is_leader or handle.runtime.resolver is None


@on_both
def test_a_follower_cannot_run_before_its_leader():
    rig = on_host()
    with pytest.raises(UsageError, match="leader 0 has not resolved in step 1"):
        rig.worker.handles[2].gather(step_rows([0]))
    with pytest.raises(UsageError, match="follows layer 0"):
        rig.worker.handles[2].gather(step_rows([0]), np.array([[1]]))
    with pytest.raises(UsageError, match="pass top_k"):
        rig.worker.handles[0].gather(step_rows([0]))


@on_both
def test_a_step_cannot_end_while_a_follower_owes_a_replay():
    rig = on_host()
    rig.worker.handles[0].gather(step_rows([0]), np.array([[1]]))
    with pytest.raises(UsageError, match=r"layers \[2\] did not gather"):
        rig.end()
    rig.worker.handles[2].gather(step_rows([0]))
    rig.end()


@on_both
def test_resolve_says_where_the_rows_are():
    rig = on_host(hot_rows=8, top_k=4)
    top = np.array([[3, -1, 9, 3], [0, 4, 8, 12]])
    for layer in (0, 2):
        handle = rig.worker.handles[layer]
        places = value(handle.resolve(step_rows([0, 0]), None if layer else top))
        rows = plain(handle.resident.rows)
        got = np.where((places >= 0)[:, :, None], rows[places], 0)
        assert (places[0, 1] == -1) and (got == expect([0, 0], top, layer)).all()


@on_both
@pytest.mark.parametrize("rows", [[0, 1], [0, -1, 1]])
def test_a_follower_may_ask_where_rows_are_that_its_leader_copied_out(rows):
    rig, step = on_host(rows=2), step_rows(rows)
    top = np.array([[0, 5, -1, 15], [3, -1, 2, 9], [4, 5, 6, -1]])[: len(rows)]
    rig.worker.handles[0].gather(step, top)
    places = value(rig.worker.handles[2].resolve(step))
    live = (top >= 0) & (np.array(rows) >= 0)[:, None]
    assert ((places >= 0) == live).all()
    found = plain(rig.worker.handles[2].resident.rows)[places[live]]
    assert (found == expect(np.maximum(rows, 0), top, 2)[live]).all()


@on_both
def test_resolve_refuses_what_does_not_fit_together():
    rig = on_host(hot_rows=4, top_k=2)
    top = np.array([[0, 1], [2, 3], [4, 5]])
    with pytest.raises((UsageError, DeviceError), match="waves: gather"):
        rig.worker.handles[1].resolve(step_rows([0] * 3), top).result()


@on_both
def test_a_refused_resolve_leaves_rows_that_later_calls_may_read():
    """What did not fit is hot all the same, in the leader and in whoever follows it."""
    rig, steps = on_host(hot_rows=4, top_k=2), [step_rows([0] * 3), step_rows([0])]
    top = np.array([[0, 1], [2, 3], [4, 5]])
    with pytest.raises((UsageError, DeviceError), match="waves: gather"):
        rig.worker.handles[0].resolve(steps[0], top).result()
    followed = value(rig.worker.handles[2].gather(steps[0]))
    assert (followed == expect([0] * 3, top, 2)).all()
    rig.end()
    rig.begin()
    for layer, rows in rig.gather(steps[1], top[2:]).items():
        assert (value(rows) == expect([0], top[2:], layer)).all()


def test_on_done_runs_in_the_op_with_the_array():
    rig = on_host()
    seen = []
    pending = rig.worker.handles[1].gather(step_rows([0]), np.array([[6]]))
    pending.on_done(lambda array: seen.append(array.copy()))
    assert not seen
    rig.device.synchronize(rig.device.compute)
    assert (seen[0][0] == contents(0, 1, [6])).all()
    pending.on_done(lambda array: seen.append(array))
    assert len(seen) == 2
