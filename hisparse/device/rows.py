"""`StepRows`: which request, and which position of it, each token of a step is.

The one piece of attention metadata that the model adapter, the cache handle and the kernels all
read. It crosses from the serving loop to the device side with no framework attached: numpy, unless
the step is one of fixed shape whose arrays lie on the device (`span`).

A step lays its tokens end to end; the tokens of one request are adjacent and in position order:

    token     0   1   2 | 3 | 4   5
    rows      7   7   7 | 2 | 5   5      request rows, each in one span
    positions 64  65  66| 9 | 0   1      rising by one inside a span
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class StepRows:
    """The tokens of a step, in order: attention metadata.

    Host arrays are read until the device has done the step's work; then the next step's tokens may
    be written there.
    """

    rows: Any
    """int32 [n]: request row index of each token, below `schedule.max_requests`; a request's tokens
    are adjacent. -1: padding. Handles refuse a row beyond that in host arrays; on a device nobody
    looks, and a kernel reads beyond its tables."""
    positions: Any
    """int64 [n]: position of each token in its request, rising by one inside a request."""
    span: int | None = None
    """None: host arrays. Else the arrays are device memory without gaps whose content no host code
    looks at, so that a captured graph can read them (replayed once a step), and each request has
    exactly `span` adjacent tokens of which the last may be padding: n is a multiple of it. What
    padding selects is not looked at. Other types and strides are refused by UsageError.
    Only a backend with graphs takes these."""


def ordinals(rows: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """For each row of integers ``[n]``, how many rows of its request come before it."""
    order = np.argsort(rows, kind="stable")
    ranked = rows[order]
    starts = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
    counts = np.diff(np.r_[starts, ranked.size])
    made = np.empty(rows.size, dtype=np.int64)
    made[order] = np.arange(rows.size) - np.repeat(starts, counts)
    return made
