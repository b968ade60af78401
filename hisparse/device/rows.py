"""`StepRows`: which request, and which position of it, each token of a step is.

The one piece of attention metadata that the model adapter, the cache handle and the kernels all
read. numpy only: it crosses from the serving loop to the device side with no framework attached.

A step lays its tokens end to end; the tokens of one request are adjacent and in position order:

    token     0   1   2 | 3 | 4   5
    rows      7   7   7 | 2 | 5   5      request rows, each in one span
    positions 64  65  66| 9 | 0   1      rising by one inside a span
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StepRows:
    """The tokens of a step, in order: attention metadata."""

    rows: np.ndarray
    """int32 [n]: request row index of each token; a request's tokens are adjacent."""
    positions: np.ndarray
    """int64 [n]: position of each token in its request, rising by one inside a request."""
