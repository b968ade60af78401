"""Simulated streams: deterministic by seed, ordered by waits and by nothing else."""

from __future__ import annotations

from functools import partial

import pytest

from hisparse.device.cpu.streams import SimDevice
from hisparse.errors import DeviceError


def interleave(seed, lag=0.5):
    device = SimDevice(seed=seed, lag=lag)
    trace = []
    for stream in device.streams:
        stream.enqueue([lambda n=stream.name, i=i: trace.append((n, i)) for i in range(20)])
    device.synchronize(device.compute)
    device.advance(7)
    device.synchronize()
    return trace


def test_same_seed_same_interleaving_and_seeds_differ():
    assert interleave(4) == interleave(4)
    assert len({tuple(interleave(seed)) for seed in range(20)}) > 15


def test_each_stream_keeps_its_order():
    trace = interleave(9)
    for name in ("compute", "d2h", "h2d"):
        assert [i for n, i in trace if n == name] == list(range(20))


@pytest.mark.parametrize(("lag", "others"), [(0.0, 20), (1.0, 0)])
def test_lag_decides_how_far_the_others_get(lag, others):
    device = SimDevice(seed=1, lag=lag)
    for stream in device.streams:
        stream.enqueue([lambda: None] * 20)
    event = device.compute.record()
    device.synchronize(event)
    assert event.done and device.d2h.ran_units == others


def test_a_wait_holds_its_stream_until_the_event_is_done():
    for seed in range(50):
        device = SimDevice(seed=seed, lag=0.2)
        trace: list[str] = []
        copy, read = partial(trace.append, "copy"), partial(trace.append, "read")
        device.d2h.enqueue([copy] * 5)
        copied = device.d2h.record()
        device.compute.wait(copied)
        device.compute.enqueue(read)
        device.h2d.enqueue([lambda: None] * 5)
        device.synchronize(device.compute)
        assert trace == ["copy"] * 5 + ["read"]


def test_a_deadlock_names_streams_and_events():
    device = SimDevice()
    first, second = device.make_event(), device.make_event()
    device.compute.wait(second)
    device.compute.record(first)
    device.d2h.wait(first)
    device.d2h.record(second)
    with pytest.raises(
        DeviceError, match=r"deadlock: compute waits for event 2 \(d2h\), d2h waits"
    ):
        device.synchronize(device.compute)
    device = SimDevice()
    device.h2d.wait(device.make_event())
    with pytest.raises(DeviceError, match=r"h2d waits for event 1 \(never recorded\)"):
        device.synchronize()


def test_run_ahead_bounds_what_is_queued():
    device = SimDevice(run_ahead=8, lag=1.0)
    done = []
    for i in range(50):
        device.compute.enqueue(lambda i=i: done.append(i))
        assert device.compute.pending_units <= 8
    assert done == list(range(42))


def test_query_lets_time_pass_so_that_polling_gets_there():
    device = SimDevice(seed=3, lag=0.8)
    device.d2h.enqueue([lambda: None] * 10)
    event = device.d2h.record()
    assert sum(not device.query(event) for _ in range(1000)) in range(1, 999)


def test_a_failing_op_is_not_run_again():
    device = SimDevice()
    device.compute.enqueue(lambda: 1 / 0)
    device.compute.enqueue(lambda: None)
    with pytest.raises(ZeroDivisionError):
        device.synchronize()
    device.synchronize()
    assert device.statistics()["compute_pending"] == 0
