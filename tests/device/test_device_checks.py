"""What ``checks="on"`` tells of rows that are only resolved, for attention that reads the pool.

On simulated streams, on a GPU step by step, and on a GPU replayed from a captured graph. Row 0 has
page 0 on the host alone, page 1 in block 2, page 2 nowhere, and page 3 in block 4.
"""

from __future__ import annotations

import backends
import numpy as np
import pytest
from backends import close_all, plain, value
from device_rig import (
    PAGES,
    REQUESTS,
    SPAN,
    Rig,
    expect,
    host,
    hot,
    make_config,
    resident,
    spill,
    step_rows,
)
from graph_rig import GROUPS, KERNEL_NODE, TOP_K, Decode

from hisparse.device import checks
from hisparse.errors import InvariantViolation

CUDA = pytest.mark.gpu
TOKEN = SPAN - 2  # the position of the token that selects
LAYERS = [0, 1, 3]  # two leaders, and the last follower of the first


def checked_rig(**kwargs):
    config = make_config(12, TOP_K, REQUESTS, PAGES, groups=GROUPS, **({"checks": "on"} | kwargs))
    rig = Rig(config)
    rig.begin(tables=(resident(0, 0, 1, 2, 0, 4),))
    for page in (0, 1, 3):
        rig.write_page(0, page)
    rig.end()
    rig.run_step(transfers=(spill(7, 1, 1),))
    rig.run_step(fences=(7,), tables=(resident(0, 0, 0), host(0, 0, 1), hot(0, 30, 31, 32)))
    rig.device.synchronize()
    return rig


def eager(rig, top, **fields):
    """A step of row 0 that resolves `top`, waited for; places by layer."""
    rig.begin(**fields)
    rows, pending = step_rows([0], [TOKEN]), {}
    for group in GROUPS:
        for layer in group:
            chosen = np.array([top]) if layer == group[0] else None
            pending[layer] = rig.worker.handles[layer].resolve(rows, chosen)
    rig.end()
    rig.device.synchronize()
    return {layer: value(places)[0] for layer, places in pending.items()}


def replayed(rig, top, **fields):
    decode, padding = Decode(rig, verb="resolve"), [-1] * TOP_K
    decode.capture()
    places = decode.run([0, -1, -1], [TOKEN] * 3, [top, padding, padding], **fields)
    rig.device.synchronize()
    return {layer: of[0] for layer, of in places.items()}


WAYS = {"cpu": ("cpu", eager), "cuda": ("cuda", eager), "graph": ("cuda", replayed)}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=CUDA), pytest.param("graph", marks=CUDA)])
def resolve(request, monkeypatch):
    backend, way = WAYS[request.param]
    monkeypatch.setattr(backends, "BACKEND", backend)
    yield way
    close_all()


def damage(view, block, offset):
    """One bit of a row, behind everybody's back."""
    view.array[block, offset, 7] ^= 1
    plain(view.base)  # waits


def wrong(position, layer, what):
    return f"content: row 0, position {position}, layer {layer}: {what}"


def test_rows_that_are_what_was_written_are_passed_missed_hit_and_resident(resolve):
    rig, top = checked_rig(), [0, 5, -1, 3]
    for _ in range(2):
        for layer, places in resolve(rig, top).items():
            assert (places >= 0).tolist() == [True, True, False, True]
            rows = plain(rig.worker.handles[layer].resident.rows)[places[[0, 1, 3]]]
            assert (rows == expect([0], np.array([top]), layer)[0, [0, 1, 3]]).all()


@pytest.mark.parametrize("layer", LAYERS)
def test_a_row_that_changed_in_its_block_is_named_of_one_layer_alone(resolve, layer):
    rig = checked_rig()
    damage(rig.worker.handles[layer].resident, 2, 1)
    with pytest.raises(InvariantViolation, match=wrong(5, layer, "other")):
        resolve(rig, [0, 5, -1, 4])


@pytest.mark.parametrize("layer", LAYERS)
def test_a_row_that_changed_on_the_host_before_it_was_fetched_is_named(resolve, layer):
    rig = checked_rig()
    damage(rig.worker.handles[layer].runtime.host, 1, 3)
    with pytest.raises(InvariantViolation, match=wrong(3, layer, "other")):
        resolve(rig, [0, 5, 3, 4])


def test_a_row_that_changed_in_its_hot_slot_is_named(resolve):
    """A hit: this step fetches nothing."""
    rig = checked_rig()
    place = int(resolve(rig, [2, -1, -1, -1])[2][0])
    view = rig.worker.handles[2].resident
    damage(view, place // view.block_rows, place % view.block_rows)
    with pytest.raises(InvariantViolation, match=wrong(2, 2, "other")):
        resolve(rig, [2, 5, -1, -1])


def test_a_freed_block_that_a_table_still_names_is_told_by_its_poison(resolve):
    rig = checked_rig()
    with pytest.raises(InvariantViolation, match=wrong(6, 0, "the row is poison")):
        resolve(rig, [0, 6, -1, -1], poison_blocks=(2,))


def test_poison_is_told_where_nobody_knows_what_was_written(resolve):
    """Rows that came with a prefix pass as they are, until what they lie in is freed."""
    rig = checked_rig()
    rig.put("gpu", 2, 1, 2)  # another request's bytes
    rig.run_step(resets=(0,), tables=(resident(0, 0, 0, 2, 0, 4), host(0, 0, 1)))
    resolve(rig, [6, -1, -1, -1])
    with pytest.raises(InvariantViolation, match=wrong(6, 0, "the row is poison")):
        resolve(rig, [6, -1, -1, -1], poison_blocks=(2,))


@pytest.mark.parametrize("hot_region", [True, False])
def test_a_position_without_a_copy_is_named(resolve, hot_region):
    rig = checked_rig()
    tables = () if hot_region else (hot(0, 0, 0, 0),)
    with pytest.raises(InvariantViolation, match="always_readable: row 0, position 9, layer 0: "):
        resolve(rig, [5, -1, 9, 6], tables=tables)


def test_a_position_behind_its_token_is_named(resolve):
    rig = checked_rig()
    with pytest.raises(
        InvariantViolation, match=r"row 0, position 15, layer 0: .* behind the token"
    ):
        resolve(rig, [5, TOKEN, TOKEN + 1, -1])


def test_sums_that_would_take_too_much_are_not_kept_and_that_is_said(resolve, monkeypatch):
    need = 4 * REQUESTS * SPAN * 4  # of four layers
    said = checked_rig().worker.statistics()
    assert (said["checksum_bytes"], said["checksum_bytes_refused"]) == (need, 0)
    monkeypatch.setattr(checks, "SUMS_LIMIT_BYTES", need - 1)
    rig = checked_rig()
    said = rig.worker.statistics()
    assert (said["checksum_bytes"], said["checksum_bytes_refused"]) == (0, need)
    damage(rig.worker.handles[0].resident, 2, 1)
    resolve(rig, [5, -1, -1, -1])  # nobody knows
    with pytest.raises(InvariantViolation, match=wrong(6, 0, "the row is poison")):
        resolve(rig, [0, 6, -1, -1], poison_blocks=(2,))


def test_without_checks_nothing_is_looked_at_and_nothing_kept(resolve):
    rig = checked_rig(checks="off")
    damage(rig.worker.handles[0].resident, 2, 1)
    resolve(rig, [5, -1, -1, -1])
    said = rig.worker.statistics()
    assert (said["checksum_bytes"], said["checksum_bytes_refused"]) == (0, 0)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("verb", "copies", "looks"), [("resolve", 0, 4), ("gather", 4, 0)])
def test_checks_are_launches_of_their_own_and_off_there_is_none(verb, copies, looks):
    """Groups of three layers and of one: two resolves, two fetches, four writes. With checks each
    leader's selection is looked at, and each layer's rows: in the copy, where there is one."""
    resolves, fetches, writes = 2, 2, 4
    for kept, more in (("off", 0), ("on", 2 + looks)):
        nodes, launches = Decode(checked_rig(checks=kept), verb=verb).capture()
        assert nodes == [KERNEL_NODE] * (resolves + fetches + writes + copies + more)
        assert launches == len(nodes)


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_checks_wait_for_nothing():
    import torch

    rig, rows = checked_rig(), step_rows([0], [TOKEN])
    decode, padding = Decode(rig, verb="resolve"), [-1] * TOP_K
    decode.capture()
    decode.run([0, -1, -1], [TOKEN] * 3, [[0, 5, 3, -1], padding, padding])
    rig.device.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(20):
            rig.begin()
            if step % 2:
                for layer in (0, 2, 3, 1):
                    top = np.array([[0, 5, step % 4, 4]]) if layer < 2 else None
                    rig.worker.handles[layer].resolve(rows, top)
            else:
                with rig.device.on_compute():
                    decode.graph.replay()
            rig.end()
            rig.worker.poll()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rig.device.synchronize()
