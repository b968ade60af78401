"""E03: where scores tie fewer than k entries are written, and the tail of the selection is the
last step's: positions beyond the context as it is now.

Here a position that no table entry covers is never read as something: it is refused by name, and
on a GPU, which does not ask, it gives zeros, is counted and told. With checks on so is every
position behind the token that selects it.
"""

from __future__ import annotations

import numpy as np
import pytest
from backends import value
from device_rig import PAGE, Rig, contents, hot, make_config, page_rows, resident, step_rows

from hisparse.errors import InvariantViolation


def holding_six_rows(**kwargs):
    """Rows 0..5 of request 0 are written; its second page has room for two more."""
    rig = Rig(make_config(8, 4, 3, 4, **kwargs))
    rig.begin(tables=(resident(0, 0, 1, 2), hot(0, 30, 31)))
    for layer in rig.layers:
        rig.worker.handles[layer].write(page_rows(0, 0), contents(0, layer, range(PAGE)))
        rows = step_rows([0, 0], [4, 5])
        rig.worker.handles[layer].write(rows, contents(0, layer, [4, 5]))
    return rig


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("stale", [8, 15, 16, 1 << 20])
def test_a_stale_tail_beyond_the_pages_is_told_by_name_and_position(stale):
    rig = holding_six_rows()
    rig.gather(step_rows([0], [5]), np.array([[5, 2, 0, stale]]))
    with pytest.raises(InvariantViolation, match=f"always_readable: row 0, position {stale}, "):
        rig.device.synchronize()


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_what_is_told_later_gave_zeros_and_left_the_rest_alone():
    rig = holding_six_rows()
    got = value(rig.gather(step_rows([0], [5]), np.array([[5, 2, 12, 99]]))[1])
    assert (got[0, :2] == contents(0, 1, [5, 2])).all() and not got[0, 2:].any()
    with pytest.raises(InvariantViolation, match="always_readable"):
        rig.device.synchronize()
    assert sum(rig.device.statistics()["faults"].values()) == 2 * len(rig.layers)


@pytest.mark.usefixtures("backend")
def test_checks_find_a_stale_entry_within_the_last_page():
    rig = holding_six_rows(checks="on")
    rig.gather(step_rows([0], [5]), np.array([[5, 2, 0, 7]]))
    with pytest.raises(InvariantViolation, match="row 0, position 7, layer 0"):
        rig.device.synchronize()
