"""E06: verification rows do not find the drafts' rows before them in one of the layouts.

Here there is one layout and one look-up: rows of a step are written before it is resolved, and a
later row reads them as it reads any other, beside rows that only the host has.
"""

from __future__ import annotations

import numpy as np
import pytest
from backends import open_backend, value
from kv_rig import PAGE, make_config

from hisparse.engine.local import LocalReplica
from hisparse.testing.content import Chain, row_bytes

ROWS = 4  # the newest token and three drafts
HELD = 21


@pytest.mark.usefixtures("backend")
def test_a_row_reads_the_drafts_before_it_in_its_own_step():
    config = make_config(blocks=60, schedule={"lookahead_rows": ROWS - 1})
    replica = LocalReplica(config, device=open_backend())
    tags = Chain().tags(range(HELD + ROWS))

    def compute(rows, selection):
        for layer in range(config.layout.layers):
            replica.worker.handles[layer].write(rows, row_bytes(tags[rows.positions], layer, 32))
        return [
            replica.worker.handles[layer].gather(rows, selection if layer in (0, 2) else None)
            for layer in range(config.layout.layers)
        ]

    hashes = [bytes([page]) * 16 for page in range(HELD // PAGE)]
    epoch = replica.coordinator.arrive("q", HELD, HELD + 20, hashes)
    replica.coordinator.admit_waiting()
    with replica.step([0], [HELD]) as rows:
        compute(rows, np.full((HELD, 4), -1))
    with replica.step([0], [ROWS]) as rows:
        assert rows.positions.tolist() == list(range(HELD, HELD + ROWS))
        last = HELD + ROWS - 1
        selection = np.array([[p, p - 1, 3, -1] for p in rows.positions], dtype=np.int32)
        selection[-1] = [last - 2, last - 1, last, 2]
        found = [value(pending) for pending in compute(rows, selection)]
    for layer, data in enumerate(found):
        for i, chosen in enumerate(selection):
            kept = chosen >= 0
            assert np.array_equal(data[i][kept], row_bytes(tags[chosen[kept]], layer, 32))
    replica.coordinator.abort("q", epoch)
    replica.drain()
    replica.shutdown()
