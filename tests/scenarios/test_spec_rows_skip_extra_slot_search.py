"""E06: verification rows do not find the drafts' rows before them in one of the layouts.

Here there is one layout and one look-up: rows of a step are written before it is resolved, and a
later row reads them as it reads any other, beside rows that only the host has.
"""

from __future__ import annotations

import numpy as np
import pytest
from backends import open_backend, plain
from kv_rig import make_config

from hisparse.backend import HiSparseBackend
from hisparse.testing.content import Chain, row_bytes

ROWS = 4  # the newest token and three drafts
HELD = 21


@pytest.mark.usefixtures("backend")
def test_a_row_reads_the_drafts_before_it_in_its_own_step():
    config = make_config(blocks=60, schedule={"lookahead_rows": ROWS - 1})
    replica = HiSparseBackend(config, device=open_backend())
    tags = Chain().tags(range(HELD + ROWS))

    def computed(plan, selection):
        replica.begin_step(plan)
        for group in range(len(config.layout.index_groups)):
            width = config.layout.index_row_bytes
            replica.write_index(group, np.zeros((len(plan), width), np.uint8))
        read = []
        for layer in range(config.layout.layers):
            replica.write(layer, row_bytes(tags[plan.rows.positions], layer, 32))
            read.append(plain(replica.resolve(layer, selection if layer in (0, 2) else None)))
        replica.end_step()
        return read

    replica.admit("q", range(HELD), 20)
    computed(replica.plan_step({"q": HELD}), np.full((HELD, 4), -1))
    plan = replica.plan_step({"q": ROWS})
    assert plan.rows.positions.tolist() == list(range(HELD, HELD + ROWS))
    last = HELD + ROWS - 1
    selection = np.array([[p, p - 1, 3, -1] for p in plan.rows.positions], dtype=np.int32)
    selection[-1] = [last - 2, last - 1, last, 2]
    found = computed(plan, selection)
    for layer, data in enumerate(found):
        for i, chosen in enumerate(selection):
            kept = chosen >= 0
            assert np.array_equal(data[i][kept], row_bytes(tags[chosen[kept]], layer, 32))
    replica.shutdown()
