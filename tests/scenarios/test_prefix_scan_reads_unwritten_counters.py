"""E08: a scan over the hot slots strides past the counters that were initialised; long prompts
hang, or the replacement order comes back as zeros.

Here, for sizes about multiples of a warp and of a block, the order stays a permutation of the
slots, and the very one of a model in plain Python, as do the positions in the slots and the kept
map, through resolves and through forgetting.
"""

from __future__ import annotations

import numpy as np
import pytest
from backends import plain
from device_rig import PAGE, Rig, host, make_config, step_rows
from device_rig import hot as hot_entries
from resolver_reference import ReferenceResolver

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]


@pytest.mark.parametrize(
    ("hot", "top_k"), [(31, 31), (32, 32), (33, 7), (1025, 64), (4095, 2048), (4096, 2048)]
)
def test_the_order_is_the_models_permutation_of_the_slots(hot, top_k):
    pages = 2 * hot // PAGE + 8
    hot_blocks = -(-hot // PAGE)
    rig = Rig(
        make_config(
            hot, top_k, 2, pages, blocks=2 * hot_blocks + 2, hosts=2 * pages + 4, groups=((0,),)
        )
    )
    model, tables = ReferenceResolver(PAGE, hot, top_k), []
    for row in range(2):
        first, first_page = 1 + row * hot_blocks, 1 + row * pages
        model.hot_blocks[row] = [*range(first, first + hot_blocks)]
        model.host_pages |= {(row, page): first_page + page for page in range(pages)}
        tables.append(hot_entries(row, *model.hot_blocks[row]))
        tables.append(host(row, 0, *range(first_page, first_page + pages)))
    rig.run_step(tables=tuple(tables))
    rng = np.random.default_rng(hot)
    kept, positions, order, _group = rig.worker.handles[0].runtime.resolver.state
    for step in range(12):
        changed = ()
        if step % 3 == 2:
            moved, to = int(rng.integers(pages)), 2 * pages + 1 + step % 2
            changed, model.host_pages[0, moved] = (host(0, moved, to),), to
            model.forget_page(0, moved)
        if step == 7:
            model.reset(1)
        rig.begin(tables=changed, resets=(1,) if step == 7 else ())
        top = rng.integers(-1, pages * PAGE, (2, top_k))
        if step >= 7:
            top[1] = -1
        rig.gather(step_rows([0, 1], [pages * PAGE] * 2), top)
        rig.end()
        rig.device.synchronize()
        model.resolve([0, 1], top.tolist(), rig.step)
        for row in range(2):
            held, ranked, slots = model.state_of(row)
            assert sorted(plain(order)[row, :hot].tolist()) == [*range(hot)]
            assert plain(order)[row, :hot].tolist() == ranked
            assert plain(positions)[row, :hot].tolist() == held
            found = plain(kept)[row]
            assert {p: int(found[p]) for p in np.flatnonzero(found >= 0).tolist()} == slots
