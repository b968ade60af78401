"""D01: what a page's copy needs is prepared each step in Python, which a replayed graph skips:
rows written in replays are missing from the host, and text is garbage once pages leave the GPU.

Here no step mirrors rows. A page is copied whole, by the command that spills it, from the block
that kernels wrote; what a replay skips is nothing that a copy needs.
"""

from __future__ import annotations

import numpy as np
import pytest
from device_rig import (
    PAGE,
    PAGES,
    REQUESTS,
    SPAN,
    contents,
    expect,
    host,
    resident,
    spill,
    step_rows,
)
from graph_rig import TOP_K, Decode, fixed_rig, placed

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]


@pytest.mark.parametrize("eager", [0, 1, 3])
def test_rows_that_a_replay_writes_are_spilled_and_read_back(eager):
    """The first rows of a page are written by `eager` steps as they come, the others by replays."""
    rig = fixed_rig()
    decode = Decode(rig)
    rig.run_step(tables=placed(rig, [True] * PAGES))
    decode.capture()
    blocks = [1 + row * PAGES for row in range(REQUESTS)]
    for layer in rig.layers:  # nothing is there but what the steps write
        rig.worker.handles[layer].resident.array[blocks] = 0
    rig.device.torch.cuda.synchronize()
    none = [[-1] * TOP_K] * REQUESTS
    for position in range(eager):  # page 0 of every request, row by row
        rig.begin()
        for layer in rig.layers:
            data = np.concatenate([contents(row, layer, [position]) for row in range(REQUESTS)])
            rig.worker.handles[layer].write(step_rows([0, 1, 2], [position] * REQUESTS), data)
        rig.end()
    for position in range(eager, PAGE):
        decode.run([0, 1, 2], [position] * REQUESTS, none)
    pages = [40 + row for row in range(REQUESTS)]
    copies = tuple(spill(i + 1, blocks[i], pages[i]) for i in range(REQUESTS))
    rig.run_step(transfers=copies)
    top = [[0, 1, 2, 3]] * REQUESTS
    out = decode.run(
        [0, 1, 2],
        [SPAN - 1] * REQUESTS,
        top,
        fences=(1, 2, 3),
        tables=tuple(
            update
            for row in range(REQUESTS)
            for update in (resident(row, 0, 0), host(row, 0, pages[row]))
        ),
        poison_blocks=tuple(blocks),
    )
    for layer in rig.layers:
        assert (out[layer] == expect([0, 1, 2], np.array(top), layer)).all()
