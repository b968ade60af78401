"""The backends that tests run on, and how a test looks at their arrays.

`BACKEND` is set by the fixture `backend` of conftest.py: ``cpu``, and ``cuda`` under ``-m gpu``.
Rigs open their device here and close themselves when the test ends, since pinned memory has to be
unregistered before its addresses are used again.
"""

from __future__ import annotations

import numpy as np

from hisparse.device import open_device
from hisparse.errors import HiSparseError

BACKEND = "cpu"
_OPEN = []  # workers on a GPU

_HOLD = r"""
extern "C" __global__ void hold(unsigned long long nanoseconds) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  while (now - begin < nanoseconds);
}
"""


def open_backend(seed=0, lag=0.5):
    return open_device(BACKEND, seed=seed, lag=lag)


def closes(worker):
    """The worker is shut down when the test ends."""
    if BACKEND != "cpu":
        _OPEN.append(worker)


def close_all():
    while _OPEN:
        worker = _OPEN.pop()
        try:
            worker.shutdown()
        except HiSparseError:  # a fault that the test did not ask for: it is told once
            worker.shutdown()


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
    if device.name == "cpu":
        return
    if not hasattr(device, "held"):
        device.held = device.cupy.RawKernel(_HOLD, "hold")
    stream = getattr(device, name)
    stream.enqueue(lambda: device.held((1,), (1,), (np.uint64(milliseconds * 1_000_000),)))
