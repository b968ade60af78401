"""What a GPU found wrong, and no assertion of a test looked for, fails the test when it ends."""

from __future__ import annotations

from types import SimpleNamespace

import backends
import pytest
from device_rig import knock_out

from hisparse.errors import DeviceError, InvariantViolation

FAULT = InvariantViolation("content", "row 0, position 1, layer 2: the row is poison")


class Worker:
    """Its shutdowns raise these, one after the other, and then end."""

    def __init__(self, *errors):
        self.errors, self.closed = list(errors), False

    def shutdown(self):
        if self.errors:
            raise self.errors.pop(0)
        self.closed = True


@pytest.fixture
def rigs(monkeypatch):
    monkeypatch.setattr(backends, "BACKEND", "cuda")
    monkeypatch.setattr(backends, "_OPEN", [])
    monkeypatch.setattr(backends, "_ASKED", [])

    def opened(*workers):
        for worker in workers:
            backends.closes(worker)
        return workers

    return opened


def test_a_fault_that_nobody_looked_for_is_raised_when_all_are_closed(rigs):
    workers = rigs(Worker(), Worker(FAULT), Worker())
    with pytest.raises(ExceptionGroup, match="not before") as caught:
        backends.close_all()
    assert caught.value.exceptions == (FAULT,) and all(worker.closed for worker in workers)
    backends.close_all()


def test_where_a_wait_is_left_out_faults_are_asked_for_and_in_that_test_alone(rigs):
    worker = rigs(Worker(FAULT))[0]
    knock_out(SimpleNamespace(_wait=None), "compute_after_spill")
    backends.close_all()
    assert worker.closed
    rigs(Worker(FAULT))
    knock_out(SimpleNamespace(_wait=None), None)
    with pytest.raises(ExceptionGroup):
        backends.close_all()


def test_an_error_of_the_memory_is_not_asked_for(rigs):
    worker, _ = rigs(Worker(DeviceError("host pool: piece 3 of 6")), Worker(FAULT))
    backends.ask_for_faults()
    with pytest.raises(ExceptionGroup) as caught:
        backends.close_all()
    assert [type(error) for error in caught.value.exceptions] == [DeviceError] and worker.closed
