"""How far the pinning of host pools is, as `statistics()` tells it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from host_memory_rig import PIECE, Driver, pinned

from hisparse.device.cuda.device import CudaDevice
from hisparse.device.cuda.host_pages import Placement


@pytest.fixture
def pools():
    """Two of them, pinned piece by piece as their drivers let go."""
    drivers = [Driver(hold=True), Driver(hold=True)]
    near = Placement(why="node 0, next to GPU 0000:01:00.0")
    made = [
        pinned(3 * PIECE, drivers[0], placement=near),
        pinned(PIECE - 1, drivers[1], what="suffix pool"),
    ]
    yield made, drivers
    for driver in drivers:
        driver.go.release(10)
    for pool in made:
        pool.release()


def device_of(pools):
    """What of a `CudaDevice` needs no GPU."""
    stream = SimpleNamespace(staging=SimpleNamespace(waits=0))
    return SimpleNamespace(
        **dict.fromkeys(("_events", "launches", "copies", "_synchronizes"), 0),
        _streams=(stream,),
        faults=SimpleNamespace(counts={}, lost=0),
        _pinned={pool.address: pool for pool in pools},
        _allocated={},
    )


def test_statistics_tell_how_much_is_pinned_and_where_it_lies(pools):
    (host, suffix), drivers = pools
    device = device_of([host, suffix])
    drivers[0].go.release()
    host.wait(0, 1)
    told = CudaDevice.statistics(device)
    assert (told["pinned_bytes"], told["pinned_total_bytes"]) == (PIECE, 4 * PIECE - 1)
    assert told["pinned_places"] == [
        "pinning: node 0, next to GPU 0000:01:00.0",
        "pinning: anywhere",
    ]
    for driver in drivers:
        driver.go.release(10)
    host.wait()
    suffix.wait()
    for thread in (*host._threads, *suffix._threads):
        thread.join()
    told = CudaDevice.statistics(device)
    assert told["pinned_bytes"] == told["pinned_total_bytes"] == told["allocated_bytes"]
    assert told["pinned_places"][1] == "pinned: anywhere"


def test_the_share_of_pages_that_lies_near_the_gpu_is_told(pools):
    (host, _), _ = pools
    host._local = 0.984
    assert CudaDevice.statistics(device_of([host]))["pinned_places"] == [
        "pinning: node 0, next to GPU 0000:01:00.0, 98% of its pages there"
    ]
