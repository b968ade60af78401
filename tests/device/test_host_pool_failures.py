"""A pool whose pinning failed is told of once, and gives all back, however its owner ends."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from device_rig import make_config
from host_memory_rig import PIECE, Driver, pinned

from hisparse.device.cpu.streams import SimDevice
from hisparse.device.cuda import device as cuda_device
from hisparse.device.cuda.device import CudaDevice
from hisparse.device.worker import HiSparseWorker
from hisparse.errors import DeviceError
from hisparse.fsm.wire import SparseKVOffloadCommand


def failed(driver):
    memory = pinned(6 * PIECE, driver)
    for thread in memory._threads:
        thread.join()
    return memory


def test_a_failure_that_nobody_waited_for_is_told_at_the_release():
    driver = Driver(most=2)
    memory = failed(driver)
    with pytest.raises(DeviceError, match="piece 3 of 6"):
        memory.release()
    assert driver.registered == {}
    memory.release()


class Pinning(SimDevice):
    """Takes host pools as the CUDA backend does, from a driver that pins two pieces."""

    def allocate_pinned(self, size_bytes, fill=0, granule=1, layer=0):
        self.pools = [*getattr(self, "pools", []), pinned(size_bytes, Driver(most=2), fill=fill)]
        return self.pools[-1].array

    def release(self, array):
        held = [pool for pool in self.pools if pool._bytes is not None]
        mine = [pool for pool in held if pool.address == array.ctypes.data]
        for pool in mine:
            pool.release()
        if not mine and array.ctypes.data in self._memory:
            super().release(array)


def test_a_worker_that_fails_while_it_is_made_gives_back_a_pool_whose_pinning_failed():
    device = Pinning()

    def sink(event):
        for thread in device.pools[0]._threads:
            thread.join()
        raise ZeroDivisionError("of another kind")

    with pytest.raises(ZeroDivisionError) as caught:
        HiSparseWorker(make_config(hosts=2048), device, sink=sink)
    notes = caught.value.__notes__
    assert len(notes) == 1 and "host pool: piece 3 of" in notes[0]
    assert device.statistics()["allocated_bytes"] == 0
    assert all(pool._bytes is None for pool in device.pools)


@pytest.mark.parametrize("told", [DeviceError, KeyboardInterrupt])
def test_a_small_pool_whose_wait_fails_is_nobodys(told, monkeypatch):
    def wait():
        raise told("host pool: piece 1 of 1")

    calls = []
    memory = SimpleNamespace(
        address=4, wait=wait, release=lambda: calls.append("release"), array=np.zeros(1, np.uint8)
    )
    monkeypatch.setattr(cuda_device, "pinned_memory", lambda *args, **kwargs: memory)
    device = SimpleNamespace(index=0, _pinned={}, memory_of=lambda array: memory)
    device.release = lambda array: CudaDevice.release(device, array)
    with pytest.raises(told, match="piece 1 of 1"):
        CudaDevice.allocate_pinned(device, 1 << 20, 0, 1, 0)
    assert calls == ["release"] and not device._pinned


def test_shutdown_tells_of_it_once_and_has_given_all_back_when_it_is_called_again():
    device = Pinning()
    worker = HiSparseWorker(make_config(hosts=2048), device)
    worker.begin_step(SparseKVOffloadCommand(1, 1, 0, 1))
    worker.end_step(1)
    for thread in device.pools[0]._threads:
        thread.join()
    with pytest.raises(DeviceError, match=r"host pool: piece 3 of \d+"):
        worker.shutdown()
    last = worker.shutdown()
    assert last is not None and last.acks, "what the scheduler did not take in is not lost"
    assert worker.host_pool is None and device.statistics()["allocated_bytes"] == 0
    assert worker.shutdown() is None


def test_a_device_that_is_dropped_gives_all_back_and_tells_then():
    good, bad = pinned(PIECE, Driver()), failed(Driver(most=2))
    held = {good.address: good, bad.address: bad}  # the last one is released first
    with pytest.raises(DeviceError, match="piece 3 of 6"):
        cuda_device._give_back([], held, {})
    assert held == {} and bad._bytes is None and good._bytes is None
