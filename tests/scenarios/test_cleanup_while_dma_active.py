"""D09: memory is unmapped while copies run, since an error on the way skipped the wait for them.

Here a shutdown takes no more work, waits for the device, and only then unpins and frees; if the
wait fails, all memory stays, and the shutdown can be repeated.
"""

from __future__ import annotations

import numpy as np
import pytest
from backends import stall
from device_rig import PAGE, Rig, contents, resident, spill

from hisparse.errors import DeviceError, UsageError
from hisparse.fsm.wire import AckKind

pytestmark = pytest.mark.usefixtures("backend")
HOLD_MS = 30


def with_a_copy_under_way():
    rig = Rig(lag=1.0)
    rig.begin(tables=(resident(0, 0, 1),))
    rig.write_page(0, 0)
    rig.end()
    rig.device.synchronize(rig.device.compute)
    stall(rig.device, "d2h", HOLD_MS)
    rig.run_step(transfers=(spill(1, 1, 1),))
    return rig


def test_shutdown_waits_for_the_copy_and_says_how_it_ended():
    rig, kept = with_a_copy_under_way(), []
    release, host = rig.device.release, rig.worker.host_pool

    def look_first(array):
        if array is host:
            kept.append(np.array(array))
        release(array)

    rig.device.release = look_first
    last = rig.worker.shutdown()
    assert (AckKind.COMPLETED, 1) in [(ack.kind, ack.ident) for ack in last.acks]
    page = kept[0].reshape(len(rig.layers), -1, PAGE, 16)[:, 1]
    for layer in rig.layers:
        assert (page[layer] == contents(0, layer, range(PAGE))).all(), "it arrived before the end"
    assert rig.device.statistics()["allocated_bytes"] == 0


def test_when_the_wait_fails_everything_stays_mapped(monkeypatch):
    rig = with_a_copy_under_way()
    host, gpu = rig.worker.host_pool, rig.worker.gpu_pool

    def fails(target=None):
        raise DeviceError("cudaErrorUnknown: unknown error")

    with monkeypatch.context() as broken:
        broken.setattr(rig.device, "synchronize", fails)
        for _ in range(2):
            with pytest.raises(DeviceError, match="unknown error"):
                rig.worker.shutdown()
            with pytest.raises(UsageError, match="shut down"):
                rig.begin()
    assert rig.worker.host_pool is host and rig.worker.gpu_pool is gpu
    assert rig.device.statistics()["allocated_bytes"] >= host.nbytes + gpu.nbytes
    assert rig.worker.shutdown() is not None
