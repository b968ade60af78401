"""E08: a scan over the hot slots strides past the counters that were initialised; long prompts
hang, or the replacement order comes back as zeros.

Here, for sizes about multiples of a warp and of a block, the order stays a permutation of the
slots, and no two slots hold one position, through resolves and through forgetting.
"""

from __future__ import annotations

import numpy as np
import pytest
from backends import plain
from device_rig import PAGE, Rig, host, make_config, step_rows
from device_rig import hot as hot_entries

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]


@pytest.mark.parametrize(("hot", "top_k"), [(31, 31), (33, 7), (1025, 64), (4095, 2048)])
def test_the_order_is_a_permutation_of_the_slots(hot, top_k):
    pages = 2 * hot // PAGE + 8
    hot_blocks = -(-hot // PAGE)
    rig = Rig(
        make_config(
            hot, top_k, 2, pages, blocks=2 * hot_blocks + 2, hosts=2 * pages + 4, groups=((0,),)
        )
    )
    tables = []
    for row in range(2):
        first = 1 + row * hot_blocks
        tables.append(hot_entries(row, *range(first, first + hot_blocks)))
        tables.append(host(row, 0, *range(1 + row * pages, 1 + (row + 1) * pages)))
    rig.run_step(tables=tuple(tables))
    rng = np.random.default_rng(hot)
    _map, positions, order, _group = rig.worker.handles[0].runtime.resolver.state
    for step in range(12):
        moved = int(rng.integers(pages))
        changed = (host(0, moved, 2 * pages + 1 + step % 2),) if step % 3 == 2 else ()
        rig.begin(tables=changed, resets=(1,) if step == 7 else ())
        top = rng.integers(-1, pages * PAGE, (2, top_k))
        if step >= 7:
            top[1] = -1
        rig.gather(step_rows([0, 1], [pages * PAGE] * 2), top)
        rig.end()
        rig.device.synchronize()
        for row in range(2):
            assert sorted(plain(order)[row, :hot].tolist()) == [*range(hot)]
            held = plain(positions)[row, :hot]
            held = held[held >= 0]
            assert len(np.unique(held)) == len(held)
