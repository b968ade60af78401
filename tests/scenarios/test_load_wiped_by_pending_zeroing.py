"""D04: a block is wiped by work that was queued before it changed hands, after a load has filled
it.

Here all writers of a GPU block are in one order: a load waits for what compute was given, wiping
included, whatever step that was in.
"""

from __future__ import annotations

import numpy as np
import pytest
from backends import stall, value
from device_rig import PAGE, Rig, expect, resident, restore, step_rows

pytestmark = pytest.mark.usefixtures("backend")
HOLD_MS = 4
ALL = np.arange(PAGE)[None]


@pytest.mark.parametrize("steps_later", [0, 1, 2])
def test_a_load_comes_after_the_wiping_that_was_queued_before_it(steps_later):
    for seed in range(6):
        rig = Rig(seed=seed, lag=0.6)
        rig.put("host", 0, 0, 1)
        stall(rig.device, "compute", HOLD_MS)
        wiped = {"poison_blocks": (2,)}
        load = {"transfers": (restore(1, 1, 2),), "tables": (resident(0, 0, 2),)}
        if steps_later:
            rig.run_step(**wiped)
        for _ in range(steps_later - 1):
            rig.run_step()
        rig.begin(**load if steps_later else wiped | load)
        pending = rig.gather(step_rows([0]), ALL)
        rig.end()
        for layer, made in pending.items():
            assert (value(made) == expect([0], ALL, layer)).all()
