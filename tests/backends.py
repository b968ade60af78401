"""The backends that tests run on, and how a test looks at their arrays.

`BACKEND` is set by the fixture `backend` of conftest.py: ``cpu``, and ``cuda`` under ``-m gpu``.
Rigs open their device here and close themselves when the test ends, since pinned memory has to be
unregistered before its addresses are used again.
"""

from __future__ import annotations

import numpy as np

from hisparse.device import open_device
from hisparse.device.cuda.kernels import load
from hisparse.errors import HiSparseError, InvariantViolation

BACKEND = "cpu"
HELD_MAX_MS = 4000  # of a stream that nobody lets go: the test fails then, and does not hang
RACECHECK = ("-DALL_WARPS_WAIT=1",)  # resolve_one.cu in the form that racecheck is run on
GATES = 1024  # holds of one device
_OPEN = []  # workers on a GPU
_ASKED = []  # something, where the test asked for faults


def open_backend(seed=0, lag=0.5):
    return open_device(BACKEND, seed=seed, lag=lag)


def closes(worker):
    """The worker is shut down when the test ends."""
    if BACKEND != "cpu":
        _OPEN.append(worker)


def ask_for_faults():
    """The test leaves out what keeps bytes right: a GPU may find that at its end, or not."""
    if BACKEND != "cpu":
        _ASKED.append(True)


def close_all():
    """Shut down what is open. Raises ExceptionGroup with what is told only then: faults that a GPU
    noted and the test did not look for, unless it asked for some."""
    told, asked = [], bool(_ASKED)
    _ASKED.clear()
    while _OPEN:
        worker = _OPEN.pop()
        for _ in range(2):  # what it tells is told once
            try:
                worker.shutdown()
                break
            except HiSparseError as error:
                told.append(error)
    told = [x for x in told if not (asked and isinstance(x, InvariantViolation))]
    if told:
        raise ExceptionGroup("told at the end of the test, and not before", told)


def forget_all():
    """Workers are left to themselves: what a process does that drops them."""
    _OPEN.clear()


def plain(array):
    """As numpy, once the device has done all that it was given. None stays None."""
    if array is None or isinstance(array, np.ndarray):
        return array
    import torch

    torch.cuda.synchronize()
    return array.cpu().numpy() if isinstance(array, torch.Tensor) else array.get()


def value(pending):
    """What a `Pending` gave, as numpy."""
    return plain(pending.result())


def stall(device, name, milliseconds):
    """Hold a stream of a GPU: what is queued on it from now on starts so much later. The simulated
    streams stall by themselves."""
    if device.name != "cpu":
        hold(device, name, milliseconds)


def hold(device, name, milliseconds=HELD_MAX_MS):
    """Hold a stream of a GPU until the function that is returned is called, or for so long. What a
    test's first hold takes of the driver, which may wait for the device, serves all of them."""
    if device.name == "cpu":
        return lambda: None
    if not hasattr(device, "gates"):  # kernels read it to their end, so the device keeps it
        memory = device.cupy.cuda.alloc_pinned_memory(4 * GATES)
        device.gates = np.frombuffer(memory, np.int32, GATES)
        device.gates[:] = 0
        device.free_gates = iter(range(GATES))
    at = next(device.free_gates)
    go = device.gates[at : at + 1]
    kernel = load("hold.cu").get_function("hisparse_hold")
    arguments = (np.uint64(go.ctypes.data), np.uint64(milliseconds * 1_000_000))
    getattr(device, name).enqueue(lambda: kernel((1,), (1,), arguments))

    def let_go():
        go[0] = 1

    return let_go
