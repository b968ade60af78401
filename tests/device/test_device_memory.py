"""A worker's memory: sleep gives it up behind the same addresses, shutdown waits and frees it."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
from backends import closes, open_backend, plain
from device_rig import GIB, PAGE, Rig, contents, make_config, resident, restore, spill

from hisparse.device.cpu.streams import SimDevice
from hisparse.device.cuda.faults import GROUPS_MAX
from hisparse.device.worker import HiSparseWorker
from hisparse.errors import DeviceError, InvariantViolation, ProtocolError, UsageError
from hisparse.fsm.wire import AckKind

on_both = pytest.mark.usefixtures("backend")


def with_suffix():
    return make_config(suffix={"name": "cpu", "gib": 8 * 2 * PAGE * 3 / GIB})


def worker_rig(**kwargs):
    return Rig(with_suffix(), **kwargs)


def no_gpu_content(rig):
    """While it is asleep; the memory of a GPU is not there to be looked at."""
    return rig.device.name == "cuda" or not rig.worker.gpu_pool.any()


@on_both
def test_level_1_loses_the_gpu_pool_and_keeps_the_host():
    rig = worker_rig()
    rig.begin(tables=(resident(0, 0, 1),))
    rig.write_page(0, 0)
    rig.end()
    rig.run_step(transfers=(spill(1, 1, 1),))
    pools = rig.worker.gpu_pool, rig.worker.host_pool, rig.worker.suffix_pool
    rig.run_step(memory=(1,))
    assert rig.worker.asleep == 1 and no_gpu_content(rig)
    assert rig.worker.host_pool.any(), "the copy was waited for"
    rig.run_step(memory=(0,))
    now = rig.worker.gpu_pool, rig.worker.host_pool, rig.worker.suffix_pool
    assert all(a is b for a, b in zip(pools, now, strict=True)), "the addresses are the same"
    assert not plain(rig.worker.gpu_pool).any()
    rig.begin(tables=(resident(0, 0, 1),))
    rig.write_page(0, 0)
    rig.end()
    rig.device.synchronize()
    got = plain(rig.worker.handles[1].resident.array)[1]
    assert (got == contents(0, 1, range(PAGE))).all()


@on_both
def test_a_worker_that_is_awake_keeps_what_it_has_when_others_wake_up():
    rig = worker_rig()
    rig.begin(tables=(resident(0, 0, 1),))
    rig.write_page(0, 0)
    rig.end()
    rig.run_step(memory=(0,))
    rig.device.synchronize()
    got = plain(rig.worker.handles[1].resident.array)[1]
    assert (got == contents(0, 1, range(PAGE))).all()


@on_both
def test_level_2_loses_the_host_tiers_too_and_both_ops_may_come_in_one_command():
    rig = worker_rig()
    rig.worker.host_pool[:] = 7
    rig.worker.suffix_pool[:] = 7
    rig.run_step(memory=(2, 0))
    assert not rig.worker.host_pool.any() and not rig.worker.suffix_pool.any()
    assert rig.worker.asleep == 0


def resident_bytes():
    with open("/proc/self/statm") as sizes:
        return int(sizes.read().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="nothing says what is resident")
def test_the_memory_really_goes_back():
    device, size = SimDevice(), 64 << 20
    pool = device.allocate(size)
    pool[:] = 1
    before = resident_bytes()
    device.discard(pool)
    assert before - resident_bytes() > 0.9 * size
    device.release(pool)
    assert device.statistics()["allocated_bytes"] == 0


def no_memory(*_, **__):
    raise MemoryError("as much as that")


@on_both
@pytest.mark.parametrize(
    ("where", "good_calls"),
    [("allocate_pinned", 1), ("make_resolver", 1), ("make_copies", 0), ("sink", 0)],
)
def test_a_worker_that_fails_while_it_is_made_gives_all_back(where, good_calls, monkeypatch):
    """And another can be made on the device, which has no less room for it."""
    device, config = open_backend(), with_suffix()
    owner = device if where == "allocate_pinned" else device.kernels
    good, calls = getattr(owner, where, None), []

    def fails(*arguments, **more):
        calls.append(arguments)
        return (good if len(calls) <= good_calls else no_memory)(*arguments, **more)

    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="as much as that"):
        if where != "sink":
            patch.setattr(owner, where, fails)
        HiSparseWorker(config, device, sink=fails if where == "sink" else None)
    assert len(calls) == good_calls + 1 and device.statistics()["allocated_bytes"] == 0
    closes(HiSparseWorker(config, device))
    assert device.statistics()["allocated_bytes"] > 0
    if device.name == "cuda":
        device.faults.check_groups(GROUPS_MAX - len(config.layout.index_groups))


@on_both
def test_asleep_nothing_is_copied_or_poisoned_and_tables_still_change():
    rig = worker_rig()
    rig.run_step(memory=(1,))
    with pytest.raises(ProtocolError, match="no memory"):
        rig.begin(transfers=(restore(1, 1, 2),))
    rig.run_step(poison_blocks=(3,), tables=(resident(0, 0, 4),))
    rig.device.synchronize()
    assert no_gpu_content(rig) and plain(rig.worker.tables[0])[0, 0] == 4


def test_shutdown_waits_for_copies_and_says_how_they_ended():
    rig = worker_rig(lag=1.0)
    rig.begin(tables=(resident(0, 0, 1),))
    rig.write_page(0, 0)
    rig.end()
    rig.run_step(transfers=(spill(1, 1, 1),))
    host = np.array(rig.worker.host_pool)
    view = rig.worker.handles[0].runtime.host
    assert (rig.worker.host_pool == host).all()
    last = rig.worker.shutdown()
    told = [(ack.kind, ack.ident) for ack in last.acks]
    assert (AckKind.COMPLETED, 1) in told and (AckKind.RETIRED, rig.step) in told
    assert view.array[1].any(), "the page arrived before the memory went"
    assert rig.device.statistics()["allocated_bytes"] == 0


@on_both
def test_shutdown_is_idempotent_and_the_end_of_all_work():
    rig = worker_rig()
    rig.run_step()
    assert rig.worker.shutdown() is not None
    assert rig.worker.shutdown() is None
    with pytest.raises(UsageError, match="shut down"):
        rig.begin()


def test_a_device_that_cannot_end_its_work_keeps_the_memory():
    """D09: unmapped while a copy is under way."""
    rig = worker_rig()
    never = rig.device.make_event()
    rig.device.d2h.wait(never)
    rig.run_step(transfers=(spill(1, 1, 1),))
    for _ in range(2):
        with pytest.raises(DeviceError, match="deadlock"):
            rig.worker.shutdown()
        assert rig.worker.host_pool is not None and rig.worker.gpu_pool is not None
        with pytest.raises(UsageError, match="shut down"):
            rig.begin()
    rig.device.compute.record(never)
    assert rig.worker.shutdown() is not None


class Refuses:
    """A call of the device that fails the `at`-th time, before it does anything."""

    def __init__(self, monkeypatch, where, name, at=1, error=DeviceError):
        self.made, self.left, self.error = getattr(where, name), at, error
        monkeypatch.setattr(where, name, self)

    def __call__(self, *args):
        self.left -= 1
        if self.left == 0:
            raise self.error("content", "told") if self.error is InvariantViolation else self.error
        return self.made(*args)


@on_both
@pytest.mark.parametrize(
    ("level", "verb", "at", "error"),
    [
        *((level, "synchronize", 1, InvariantViolation) for level in (1, 2)),
        *((2, "discard", at, DeviceError) for at in (1, 2, 3)),
    ],
)
def test_a_worker_that_could_not_go_to_sleep_has_not_begun(level, verb, at, error, monkeypatch):
    rig = worker_rig()
    rig.run_step()
    Refuses(monkeypatch, rig.device, verb, at, error)
    seq = rig.worker.to_seq
    with pytest.raises(error):
        rig.begin(memory=(level,))
    assert (rig.worker.to_seq, rig.worker.asleep) == (seq, 0)
    rig.run_step(memory=(level,))
    assert rig.worker.asleep == level
    rig.run_step(memory=(0,))
    rig.worker.shutdown()


@on_both
@pytest.mark.parametrize(("level", "at"), [(1, 1), (2, 1), (2, 2), (2, 3)])
def test_a_worker_that_found_no_memory_to_wake_up_has_not_begun(level, at, monkeypatch):
    rig = worker_rig()
    rig.run_step(memory=(level,))
    Refuses(monkeypatch, rig.device, "recommit", at)
    seq = rig.worker.to_seq
    with pytest.raises(DeviceError):
        rig.begin(memory=(0,), tables=(resident(0, 0, 1),))
    assert (rig.worker.to_seq, rig.worker.asleep) == (seq, level)
    rig.begin(memory=(0,), tables=(resident(0, 0, 1),))
    rig.write_page(0, 0)
    rig.end()
    rig.device.synchronize()
    rig.worker.shutdown()


@on_both
def test_a_step_whose_host_pages_are_not_pinned_has_not_begun(monkeypatch):
    rig = worker_rig()
    Refuses(monkeypatch, rig.device.kernels, "wait_host")
    with pytest.raises(DeviceError):
        rig.begin(tables=(resident(0, 0, 1),))
    rig.begin(tables=(resident(0, 0, 1),))
    rig.write_page(0, 0)
    rig.end()
    rig.device.synchronize()
    rig.worker.shutdown()
