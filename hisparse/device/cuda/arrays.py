"""What a kernel takes for an array."""

from __future__ import annotations

from typing import Any

import numpy as np


def address(array: Any) -> np.uint64:
    """Of a torch tensor or a CuPy array; None: null."""
    if array is None:
        return np.uint64(0)
    return np.uint64(array.data_ptr() if hasattr(array, "data_ptr") else array.data.ptr)
