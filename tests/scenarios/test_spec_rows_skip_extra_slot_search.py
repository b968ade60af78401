"""E06: verification rows do not find the drafts' rows before them in one of the layouts.

Here there is one layout and one look-up: rows of a step are written before it is resolved, and a
later row reads them as it reads any other, beside rows that only the host has.
"""

from __future__ import annotations

import numpy as np
import pytest
from backends import open_backend, plain
from device_rig import PAGE, PAGES, REQUESTS, SPAN, Rig, expect
from device_rig import make_config as rig_config
from graph_rig import GROUPS, TOP_K, Decode, placed
from kv_rig import make_config

from hisparse.backend import HiSparseBackend
from hisparse.fsm.wire import Table
from hisparse.testing.content import Chain, row_bytes

ROWS = 4  # the newest token and three drafts
HELD = 37
ON_HOST = [2, 3, 14]  # positions; their pages are spilled while the prompt is computed


@pytest.mark.usefixtures("backend")
def test_a_row_reads_the_drafts_before_it_in_its_own_step():
    config = make_config(blocks=12, schedule={"lookahead_rows": ROWS - 1})
    replica = HiSparseBackend(config, device=open_backend())
    tags = Chain().tags(range(HELD + 2 * ROWS))

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
        replica.device.synchronize()
        return read

    replica.admit("q", range(HELD), 20)
    held = 0
    for _ in range(6):
        plan = replica.plan_step({"q": HELD - held})
        computed(plan, np.full((len(plan), 4), -1))
        held += len(plan)
        if held == HELD:
            break
    for first in (HELD, HELD + ROWS):
        plan = replica.plan_step({"q": ROWS})
        assert plan.rows.positions.tolist() == list(range(first, first + ROWS))
        last = first + ROWS - 1
        selection = np.array([[p, p - 1, 3, 14] for p in plan.rows.positions], dtype=np.int32)
        selection[-1] = [last - 2, last - 1, last, 2]
        for layer, data in enumerate(computed(plan, selection)):
            for i, chosen in enumerate(selection):
                assert np.array_equal(data[i], row_bytes(tags[chosen], layer, 32))
    pages = plain(replica.worker.tables[Table.RESIDENT])[int(plan.rows.rows[0])]
    assert not pages[np.array(ON_HOST) // PAGE].any() and pages[HELD // PAGE]
    for group in range(len(config.layout.index_groups)):
        counts = replica.worker.group_statistics(group)
        assert counts["misses"] == len(ON_HOST) and counts["hits"] > ROWS
        assert counts["host_rows"] == len(ON_HOST) * len(config.layout.index_groups[group])
    replica.shutdown()


@pytest.mark.gpu
@pytest.mark.usefixtures("cuda")
def test_a_row_of_a_replayed_step_reads_the_drafts_before_it():
    """The page of the drafts is poisoned before each step: what is read there was written in it."""
    rig = Rig(rig_config(ROWS * TOP_K, TOP_K, REQUESTS, PAGES, groups=GROUPS))
    rig.run_step(tables=placed(rig, [False] * (PAGES - 1) + [True]))
    decode, rng = Decode(rig, span=ROWS), np.random.default_rng(7)
    decode.capture()
    drafts = np.arange(SPAN - ROWS, SPAN)
    rows = np.repeat(np.arange(REQUESTS), ROWS)
    own = plain(rig.worker.tables[Table.RESIDENT])[:, PAGES - 1]
    for _ in range(4):
        before = drafts - rng.integers(0, np.arange(1, ROWS + 1))  # itself, or one before it
        hosted = rng.integers(0, SPAN - PAGE, (REQUESTS, ROWS, 2))
        new = np.stack([drafts, before], axis=1)[None].repeat(REQUESTS, axis=0)
        top = np.concatenate([new, hosted], axis=2).reshape(-1, TOP_K)
        out = decode.run(
            rows.tolist(),
            np.tile(drafts, REQUESTS).tolist(),
            top,
            poison_blocks=tuple(own.tolist()),
        )
        for layer in rig.layers:
            assert (out[layer] == expect(rows, top, layer)).all()
    rig.device.synchronize()
    counts = rig.worker.statistics()
    assert counts["misses"] > 0 and counts["hits"] > 0 and counts["host_rows"] > 0
