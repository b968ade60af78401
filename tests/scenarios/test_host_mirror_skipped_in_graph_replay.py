"""D01: what a page's copy needs is prepared each step in Python, which a replayed graph skips:
rows written in replays are missing from the host, and text is garbage once pages leave the GPU.

Here no step mirrors rows. A page is copied whole, by the command that spills it, from the block
that kernels wrote; what a replay skips is nothing that a copy needs.
"""

from __future__ import annotations

import numpy as np
import pytest
from device_rig import PAGE, PAGES, REQUESTS, SPAN, expect, host, resident, spill
from graph_rig import TOP_K, Decode, fixed_rig, placed

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]


def test_rows_that_a_replay_writes_are_spilled_and_read_back():
    rig = fixed_rig()
    decode = Decode(rig)
    rig.run_step(tables=placed(rig, [True] * PAGES))
    decode.capture()
    none = [[-1] * TOP_K] * REQUESTS
    for position in range(PAGE):  # page 0 of every request, row by row, by replays
        decode.run([0, 1, 2], [position] * REQUESTS, none)
    blocks = [1 + row * PAGES for row in range(REQUESTS)]
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
