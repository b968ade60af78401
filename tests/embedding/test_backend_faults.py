"""`HiSparseBackend` when its device tells a fault, or fails: nothing is lost, all is let go of."""

from __future__ import annotations

import numpy as np
import pytest
from backends import closes, open_backend
from device_rig import step_rows
from embedding_rig import PAGE, ROW, settings

from hisparse import HiSparseBackend
from hisparse.errors import DeviceError, InvariantViolation, LogError, UsageError

pytestmark = pytest.mark.usefixtures("backend")
PROMPT = list(range(100, 130))


def opened(log=None, lag=0.5, **how):
    made = HiSparseBackend(settings(**how), device=open_backend(lag=lag), log=log)
    closes(made.worker)
    return made


def write_nowhere(made, position):
    """In a step without rows: no request has a block there, which the device finds."""
    made.begin_step(made.plan_step({}))
    made.worker.handles[1].write(step_rows([0], [position]), np.zeros((1, ROW), np.uint8))
    made.end_step()


@pytest.mark.parametrize("faults", [1, 2])
def test_faults_told_only_at_the_end_keep_nothing_open(faults, tmp_path):
    made = opened(tmp_path, lag=1.0)
    nowhere = "table_truth: row 0, position 0, layer 1"
    with pytest.raises(InvariantViolation, match=nowhere), made:
        for i in range(faults):
            write_nowhere(made, i * PAGE)
    assert made.device.statistics()["allocated_bytes"] == 0
    made.shutdown()  # of what is closed: nothing


def one_who_waits():
    """A backend that has not told yet that "b" is in."""
    made = opened(gpu_blocks=12)
    made.admit("a", PROMPT, 30)
    made.admit("b", PROMPT[::-1], 30)
    made.abort("a")
    with pytest.raises(UsageError, match="'b'"):
        made.drain()
    return made


def test_what_is_not_told_as_a_fault_is_told_instead_is_told_next(monkeypatch):
    with one_who_waits() as made:
        for verb in (made.acknowledge, lambda: made.plan_step({})):
            with monkeypatch.context() as patch, pytest.raises(InvariantViolation):
                patch.setattr(made.device, "check", tells)
                verb()
        assert [one.request for one in made.acknowledge().admitted] == ["b"]
        assert not made.acknowledge()


def test_what_is_not_told_as_a_step_cannot_be_planned_is_told_next(monkeypatch):
    with one_who_waits() as made:
        with monkeypatch.context() as patch, pytest.raises(LogError):
            patch.setattr(made.scheduler, "plan_checked", no_plan)
            made.plan_step({})
        assert [one.request for one in made.plan_step({}).changes.admitted] == ["b"]


def tells():
    raise InvariantViolation("content", "row 0, position 1, layer 0: told once")


def no_plan(asked, changes):
    raise LogError("no space left on the device")


@pytest.mark.parametrize("times", [1, 1000])
def test_a_step_that_cannot_begin_may_be_repeated_and_keeps_nothing_open(times, monkeypatch):
    made = opened()
    assert made.sleep(2)
    made.wake_up()
    recommit, calls = made.device.recommit, iter(range(times))

    def refuse(*args):
        if next(calls, None) is not None:
            raise DeviceError("out of memory")
        recommit(*args)

    monkeypatch.setattr(made.device, "recommit", refuse)
    plan = made.plan_step({})
    with pytest.raises(DeviceError):
        made.begin_step(plan)
    if times == 1:
        made.begin_step(plan)
        made.end_step()
        made.shutdown()
    else:
        with pytest.raises(DeviceError):
            made.shutdown()
    assert made.device.statistics()["allocated_bytes"] == 0
    made.shutdown()


def test_a_step_that_began_in_part_keeps_nothing_open(monkeypatch):
    made = opened()
    with monkeypatch.context() as patch, pytest.raises(DeviceError, match="no room"):
        patch.setattr(made.device.kernels, "change_tables", no_room)
        made.begin_step(made.plan_step({}))
    with pytest.raises(UsageError, match="begin_step"):
        made.shutdown()
    assert made.device.statistics()["allocated_bytes"] == 0
    made.shutdown()


def no_room(*args):
    raise DeviceError("no room for the command")
