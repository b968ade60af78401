"""Between host and device without waiting: what the step path uses, on any torch device.

Owns nothing. On the CPU every function is the plain thing. On a GPU, data goes up and down through
pinned memory of torch's allocator, in the order of the current stream; the only place that waits is
`Fetch.result`, and `forbid_waiting` makes torch raise where another one would.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy of `values` on `device`, in the current stream's order."""
    host = torch.from_numpy(np.array(values))
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)


class Fetch:
    """Tensors on their way to the host, queued now on the current stream.

    Args:
        tensors: on one device, or already on the host.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tuple(tensors)
        if any(tensor.is_cuda for tensor in tensors):
            self._host = tuple(_pinned_copy(tensor) for tensor in tensors)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def ready(self) -> bool:
        """Whether the values were on the host from the start: they are views, and not copies."""
        return self._event is None

    def result(self) -> tuple[np.ndarray, ...]:
        """The values; waits for the stream to get there."""
        if self._event is not None:
            self._event.synchronize()
        return tuple(tensor.numpy() for tensor in self._host)


def _pinned_copy(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@cache
def _hear_warning() -> None:
    """Torch says once, whenever the mode is set first, that it may overlook something."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode(before)


@contextmanager
def forbid_waiting(device: torch.device) -> Iterator[None]:
    """Inside the `with`, torch raises where it would wait for a GPU."""
    if device.type != "cuda":
        yield
        return
    _hear_warning()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
