"""What a GPU finds wrong in its kernels, and how the worker comes to tell it."""

from __future__ import annotations

import numpy as np
import pytest
from backends import plain, value
from device_rig import (
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
    assert sum(rig.device.faults.counts().values()) == len(rig.layers)


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
