"""D02: "a step later" on the host orders nothing on the device: a page is copied before the kernel
that writes it has run.

Here a command's copies wait for all that compute was given before them, and ENQUEUED is said when
that wait is in the stream, not when some steps have passed.
"""

from __future__ import annotations

import pytest
from backends import plain, stall
from device_rig import PAGE, Rig, contents, resident, spill

from hisparse.fsm.wire import AckKind

pytestmark = pytest.mark.usefixtures("backend")
HOLD_MS = 4


@pytest.mark.parametrize("steps_between", [0, 1, 3])
def test_a_copy_holds_the_rows_that_were_queued_before_it(steps_between):
    rig = Rig(seed=steps_between, lag=0.6)
    for page in range(12):
        block, row = 1 + page, page % 3
        stall(rig.device, "compute", HOLD_MS)  # a long kernel, and behind it the writer
        rig.begin(tables=(resident(row, 1, block),))
        rig.write_page(row, 1)
        rig.end()
        for _ in range(steps_between):
            rig.run_step()
        rig.run_step(transfers=(spill(page + 1, block, 20 + page),))
        kinds = [(ack.kind, ack.ident) for ack in rig.worker.poll().acks]
        assert (AckKind.ENQUEUED, page + 1) in kinds
        rig.device.synchronize(rig.device.d2h)
        for layer in rig.layers:
            got = rig.worker.handles[layer].runtime.host.array[20 + page]
            assert (plain(got) == contents(row, layer, range(PAGE, 2 * PAGE))).all()
