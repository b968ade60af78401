"""Arrays across the boundary to an engine: numpy or torch in, the same kind out; checked, no copy.

Owns nothing. What an engine passes is looked at before anything is queued: kind, dtype, shape and
strides, never a value that lies on a device. torch is imported only where a tensor came in, or
where the backend's memory lies on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from hisparse.device.backend import Array, Device
from hisparse.errors import UsageError

if TYPE_CHECKING:
    import torch

_ON_GPU = "__cuda_array_interface__"


def is_tensor(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def taken(
    device: Device, array: Any, what: str, dtypes: tuple[str, ...], shape: tuple[int, ...]
) -> Array:
    """`array` as the backend takes it, without a copy. Raises UsageError, beginning with `what`,
    for another kind of thing, memory that this backend cannot read, another dtype or shape (-1 in
    `shape`: any extent), or gaps in memory."""
    tensor = is_tensor(array)
    if not tensor and not isinstance(array, np.ndarray) and not hasattr(array, _ON_GPU):
        raise UsageError(
            f"{what} is a {type(array).__name__}: pass a numpy array or a torch tensor"
        )
    on = _lies_on(array, tensor)
    if on not in ("cpu", device.name):
        raise UsageError(f"{what} lies on {on!r}, the backend on {device.name!r}: move it")
    dtype = str(array.dtype).removeprefix("torch.")
    fits = len(array.shape) == len(shape) and all(
        want in (-1, have) for want, have in zip(shape, array.shape, strict=True)
    )
    if dtype not in dtypes or not fits:
        extents = ", ".join("k" if n < 0 else str(n) for n in shape)
        hint = " (rows are bytes: tensor.view(torch.uint8))" if dtypes == ("uint8",) else ""
        raise UsageError(
            f"{what} is {dtype}{list(array.shape)}, must be {' or '.join(dtypes)}[{extents}]{hint}"
        )
    if not (array.is_contiguous() if tensor else array.flags.c_contiguous):
        raise UsageError(
            f"{what} has gaps or another order in memory (strides {_strides(array)}): pass "
            "tensor.contiguous() or numpy.ascontiguousarray(array)"
        )
    return array.detach().numpy() if tensor and device.name == "cpu" else array


def _lies_on(array: Any, tensor: bool) -> str:
    if tensor:
        return str(array.device.type)
    return "cpu" if isinstance(array, np.ndarray) else "cuda"


@contextmanager
def joined(device: Device) -> Iterator[None]:
    """Inside the `with`, what the engine queues goes to compute, behind what it queued before; what
    it queues afterwards goes behind all of that."""
    if device.name != "cuda":
        with device.on_compute():
            yield
        return
    import torch

    stream: Any = device.compute
    outer, compute = torch.cuda.current_stream(), stream.torch
    compute.wait_stream(outer)
    try:
        with device.on_compute():
            yield
    finally:
        outer.wait_stream(compute)


def _strides(array: Array) -> tuple[int, ...]:
    return tuple(array.stride()) if hasattr(array, "stride") else tuple(array.strides)


def as_tensor(array: Array) -> torch.Tensor:
    """`array` of a backend as a torch tensor, without a copy: numpy, or what lies on a GPU."""
    import torch

    if isinstance(array, torch.Tensor):
        return array

    if isinstance(array, np.ndarray):
        return torch.from_numpy(array)
    return torch.as_tensor(array, device="cuda")


def nothing(device: Device, shape: tuple[int, ...], tensor: bool) -> Any:
    """uint8 of a `shape` without elements. (Of numpy's, torch would not know the strides.)"""
    if not tensor:
        return np.empty(shape, dtype=np.uint8)
    import torch

    return torch.empty(shape, dtype=torch.uint8, device=device.name)
