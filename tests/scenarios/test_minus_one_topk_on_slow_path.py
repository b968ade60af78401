"""E01: a leader pads its selection with -1; where the context is longer than the hot region, -1 is
looked up, inserted and counted, and followers read through it.

Here what is negative is passed over on every path, for leader and followers alike: nothing is
looked up, missed, copied or used, and the answer is zeros, or -1 where places are asked for.
"""

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
    expect,
    make_config,
    place_pages,
    step_rows,
)
from resolver_reference import ReferenceResolver

pytestmark = pytest.mark.usefixtures("backend")
HOT, TOP_K = 5, 4  # the context is longer than the hot region


def on_host():
    rig = Rig(make_config(HOT, TOP_K, REQUESTS, PAGES, groups=((0, 1, 2),)))
    reference = ReferenceResolver(PAGE, HOT, TOP_K)
    rig.run_step(tables=place_pages(rig, reference, 0, [False] * PAGES))
    rig.begin()
    return rig


def test_padding_is_passed_over_by_leader_and_followers():
    rig, top = on_host(), np.array([[5, 3, -1, -1]])
    for layer, made in rig.gather(step_rows([0]), top).items():
        assert (value(made) == expect([0], top, layer)).all()
    held = rig.positions_of(0)[0]
    assert sorted(held.tolist()) == [-1, -1, -1, 3, 5]
    assert rig.worker.group_statistics(0)["misses"] == 2


@pytest.mark.parametrize("negative", [-1, -2, -(1 << 31)])
def test_whatever_is_negative_is_padding(negative):
    rig = on_host()
    rng = np.random.default_rng(1)
    for _ in range(30):
        top = rng.integers(0, SPAN, (1, TOP_K))
        top[rng.random(top.shape) < 0.4] = negative
        for layer, made in rig.gather(step_rows([0]), top).items():
            assert (value(made) == expect([0], top, layer)).all()
    misses = rig.worker.group_statistics(0)["misses"]
    for _ in range(3):
        rig.gather(step_rows([0]), np.full((1, TOP_K), negative))
    rig.device.synchronize()
    assert rig.worker.group_statistics(0)["misses"] == misses


def test_places_of_padding_are_minus_one():
    rig, top = on_host(), np.array([[5, -1, 3, -7]])
    for handle in rig.worker.handles:
        places = value(handle.resolve(step_rows([0]), top if handle.layer == 0 else None))
        assert (places[0] >= 0).tolist() == [True, False, True, False] and places[0, 1] == -1
        rows = plain(handle.resident.rows)[places[0, [0, 2]]]
        assert (rows == expect([0], top, handle.layer)[0, [0, 2]]).all()
