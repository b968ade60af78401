"""D06: the views of all layers start at one base; later layers overwrite earlier ones, and a test
that compares two equally wrong runs passes.

Here views are checked for shared bytes when they are bound (`disjoint_views`). What each layer
wrote is looked for in the pools at addresses worked out in this file.
"""

from __future__ import annotations

import numpy as np
import pytest
from backends import plain
from device_rig import PAGE, ROW_BYTES, Rig, make_config, page_rows, resident, spill

pytestmark = pytest.mark.usefixtures("backend")
LAYERS = 3


@pytest.mark.parametrize("groups", [((0, 1, 2),), ((2,), (0, 1))])
def test_each_layer_has_bytes_of_its_own_in_blocks_and_in_host_pages(groups):
    rig = Rig(make_config(groups=groups))
    block, page, size = 7, 9, PAGE * ROW_BYTES
    rig.begin(tables=(resident(1, 0, block),))
    for layer in range(LAYERS):
        rows = np.full((PAGE, ROW_BYTES), layer + 1, dtype=np.uint8)
        rig.worker.handles[layer].write(page_rows(1, 0), rows)
    rig.end()
    rig.run_step(transfers=(spill(1, block, page),))
    rig.device.synchronize()
    gpu, host = plain(rig.worker.gpu_pool), plain(rig.worker.host_pool)
    pages = rig.config.host_pages
    written = np.zeros_like(gpu)
    for layer in range(LAYERS):
        at = block * LAYERS * size + layer * size
        written[at : at + size] = layer + 1
        there = (layer * pages + page) * size
        assert (host[there : there + size] == layer + 1).all()
    assert (gpu == written).all(), "and nothing anywhere else"
