"""What a GPU finds wrong in its kernels, and how the worker comes to tell it."""

from __future__ import annotations

import time

import numpy as np
import pytest
from backends import hold, plain, value
from device_rig import (
    PAGE,
    PAGES,
    REQUESTS,
    SPAN,
    Rig,
    contents,
    expect,
    host,
    hot,
    make_config,
    resident,
    step_rows,
)
from graph_rig import GROUPS, STATES, TOP_K, Decode, fixed_rig, placed

from hisparse.errors import InvariantViolation
from hisparse.fsm.wire import AckKind

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]


# -- a position without a copy --------------------------------------------------------------------


def test_a_position_without_a_copy_gives_zeros_and_is_told_a_step_later():
    rig = fixed_rig()
    rig.run_step(tables=placed(rig, STATES["all on the host"]))
    rig.begin(tables=(host(1, 2, 0),))
    out = rig.gather(step_rows([0, 1]), np.array([[9, 1, -1, -1], [1, 9, -1, -1]]))
    rig.end()
    got = value(out[1])
    assert (got[1, 1] == 0).all() and (got[0, 0] == contents(0, 1, [9])[0]).all()
    with pytest.raises(InvariantViolation, match=r"always_readable: row 1, position 9, layer \d"):
        for _ in range(3):
            rig.run_step()
            plain(rig.worker.gpu_pool)
            rig.worker.poll()
    rig.worker.poll()  # told once
    assert sum(rig.device.statistics()["faults"].values()) == len(rig.layers)


@pytest.mark.parametrize("hot_region", [True, False])
def test_a_position_without_a_copy_is_told_where_rows_are_only_resolved(hot_region):
    """By a resolve, which counts it, and by a look-up, which names it: more rows than a wave."""
    rig = fixed_rig()
    rig.run_step(tables=placed(rig, STATES["all on the host"]))
    rig.begin(tables=(host(1, 2, 0),) if hot_region else (hot(1, 0, 0, 0),))
    rows = 1 if hot_region else 5
    top = np.array([[9, SPAN - 1, -1, -1]] * rows)
    places = value(rig.worker.handles[1].resolve(step_rows([1] * rows), top))
    rig.end()
    assert (places[:, 0] == -1).all() and (places[:, 1] >= 0).all()
    with pytest.raises(InvariantViolation, match="always_readable"):
        rig.device.synchronize()


def test_a_fault_is_found_in_a_replayed_graph_too():
    rig = fixed_rig()
    rig.run_step(tables=placed(rig, STATES["all on the host"]))
    decode = Decode(rig)
    decode.capture()
    decode.run(
        [0, 1, 2],
        [SPAN - 1] * 3,
        [[-1] * TOP_K, [4] * TOP_K, [-1] * TOP_K],
        tables=(host(1, 1, 0),),
    )
    with pytest.raises(InvariantViolation, match="always_readable: row 1, position 4, layer"):
        rig.device.synchronize()


# -- one after the other --------------------------------------------------------------------------


def test_a_device_that_told_a_fault_tells_the_next_and_waits_for_neither():
    """Named by a copy that came with a step, while a kernel holds compute; the second is noted
    behind the wipe that the first one's telling queued there."""
    import torch

    rig = fixed_rig()
    rig.run_step(tables=placed(rig, STATES["all on the host"]))
    for page in range(2):  # kernels are loaded
        rig.begin()
        rig.gather(step_rows([0, 1]), np.array([[page, 1, -1, -1]] * 2))
        rig.end()
    hold(rig.device, "compute")()
    rig.device.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for position in (9, 5):  # of the third page, then of the second
            rig.begin(tables=(host(1, position // PAGE, 0),))
            rig.gather(step_rows([1]), np.array([[position, 1, -1, -1]]))
            rig.end()
            rig.run_step()
            seen = rig.device.compute.record()
            while not rig.device.query(seen):
                time.sleep(0.001)
            let_go = hold(rig.device, "compute")
            held = rig.device.compute.record()
            wanted = f"always_readable: row 1, position {position}, layer"
            with pytest.raises(InvariantViolation, match=wanted):
                rig.worker.poll()
            retired = {a.ident for a in rig.worker.poll().acks if a.kind == AckKind.RETIRED}
            waited = rig.device.query(held)
            let_go()
            assert not waited and rig.step in retired
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rig.device.synchronize()
    assert sum(rig.device.statistics()["faults"].values()) == 2 * len(rig.layers)


# -- with checks on -------------------------------------------------------------------------------


def checked_rig():
    rig = Rig(make_config(12, TOP_K, REQUESTS, PAGES, groups=GROUPS, checks="on"))
    rig.run_step(tables=(resident(0, 0, 1), resident(0, 1, 2), hot(0, 30, 31, 32)))
    return rig


def test_checks_trap_a_selection_behind_the_token_that_selects():
    rig = checked_rig()
    rig.begin()
    rig.gather(step_rows([0], [4]), np.array([[0, 4, 5, -1]]))
    rig.end()
    with pytest.raises(InvariantViolation, match=r"row 0, position 5, layer 0.*behind the token"):
        rig.device.synchronize()


def test_checks_tell_a_row_whose_bytes_changed_behind_the_back():
    rig = checked_rig()
    rig.begin()
    rig.write_page(0, 0)
    top = np.array([[0, 1, 2, 3]])
    for layer, pending in rig.gather(step_rows([0]), top).items():
        assert (value(pending) == expect([0], top, layer)).all()
    rig.end()
    rig.device.synchronize()
    rig.worker.handles[3].resident.array[1, 2, 7] ^= 1
    plain(rig.worker.gpu_pool)
    rig.begin()
    rig.gather(step_rows([0]), top)
    rig.end()
    with pytest.raises(InvariantViolation, match="content: row 0, position 2, layer 3"):
        rig.device.synchronize()


def test_checks_forget_the_rows_of_a_request_row_that_is_handed_on():
    rig = checked_rig()
    rig.begin()
    rig.write_page(0, 0)
    rig.end()
    rig.put("gpu", 1, 0, 1)  # bytes of another request, which a prefix hit would bring
    rig.begin(resets=(0,), tables=(resident(0, 0, 1),))
    top = np.array([[0, 1, 2, 3]])
    assert (value(rig.gather(step_rows([0]), top)[1]) == expect([1], top, 1)).all()
    rig.end()
    rig.device.synchronize()
