"""Arrays across the boundary to an engine: numpy or torch in, the same kind out; checked, no copy.

Owns nothing. What an engine passes is looked at before anything is queued: kind, dtype, shape and
strides, never a value that lies on a device. torch is imported only where a tensor came in, or
where the backend's memory lies on a GPU.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from hisparse.device.backend import Array, Device
from hisparse.errors import UsageError

SELECTIONS = ("int32", "int64")


def is_tensor(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def given(device: Device, array: Any, what: str) -> Array:
    """`array` as the backend takes it, no copy. Raises UsageError for another kind of thing, or a
    tensor that lies where this backend cannot read it."""
    if is_tensor(array):
        on = array.device.type
        if on not in ("cpu", device.name):
            raise UsageError(f"{what} lies on {on!r}, the backend on {device.name!r}: move it")
        return array.detach().numpy() if device.name == "cpu" else array
    if isinstance(array, np.ndarray) or hasattr(array, "__cuda_array_interface__"):
        return array
    raise UsageError(f"{what} is a {type(array).__name__}: pass a numpy array or a torch tensor")


def check_array(array: Array, what: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """Raise UsageError unless it has one of `dtypes`, this `shape` (-1: any extent), and lies in
    memory in its order, without gaps."""
    dtype = str(array.dtype).removeprefix("torch.")
    fits = len(array.shape) == len(shape) and all(
        want in (-1, have) for want, have in zip(shape, array.shape, strict=True)
    )
    if dtype not in dtypes or not fits:
        extents = ", ".join("k" if n < 0 else str(n) for n in shape)
        raise UsageError(
            f"{what} is {dtype}{list(array.shape)}, must be {' or '.join(dtypes)}[{extents}]"
        )
    contiguous = (
        array.is_contiguous() if hasattr(array, "is_contiguous") else array.flags.c_contiguous
    )
    if not contiguous:
        raise UsageError(
            f"{what} has gaps or another order in memory (strides {_strides(array)}): pass "
            "tensor.contiguous() or numpy.ascontiguousarray(array)"
        )


def _strides(array: Array) -> tuple[int, ...]:
    return tuple(array.stride()) if hasattr(array, "stride") else tuple(array.strides)


def as_kind(array: Array, tensor: bool) -> Any:
    """`array` of a backend as a torch tensor, or as it is; no copy."""
    if not tensor or is_tensor(array):
        return array
    import torch

    if isinstance(array, np.ndarray):
        return torch.from_numpy(array)
    return torch.as_tensor(array, device="cuda")
