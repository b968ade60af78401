"""Which lines of which resolve call each token of an eager step takes. numpy only.

The rows of one request in a call are consumed in waves whose selections fit the hot region
together: row j of the request, counting all of them, is in wave j // width. A resolve call takes
the same number of adjacent lines (`span`) for each of its requests; a request with fewer leaves its
last ones empty.

Requests without a hot region have nothing to take turns for: where a step has more rows of a
request than a wave takes, theirs are looked up at once, and only the others are laid out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hisparse.device.rows import ordinals as ordinals_of

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class WaveLines:
    """One resolve call: `rows` int32 ``[lines]`` request row of each line; `tokens` int32
    ``[lines]`` whose line it is, -1 for nobody's."""

    span: int
    rows: I32
    tokens: I32


def lay_out(
    rows: I32, backed: npt.NDArray[np.bool_], width: int
) -> tuple[I32, tuple[WaveLines, ...]]:
    """The tokens that are only looked up (padding too), and the waves of the others.

    Args:
        rows: int32 ``[n]`` request row of each token, -1 for padding.
        backed: bool ``[requests]`` whether a request has a hot region.
        width: most rows of a request in a wave.
    """
    real = rows >= 0
    ordinals = ordinals_of(rows)
    deepest = int(ordinals[real].max(initial=-1)) + 1
    waves_in = real if deepest <= width else real & backed[rows]
    made = []
    for first in range(0, int(ordinals[waves_in].max(initial=-1)) + 1, width):
        here = np.flatnonzero(waves_in & (ordinals >= first) & (ordinals < first + width))
        made.append(_lines(rows[here], ordinals[here] - first, here))
    return np.flatnonzero(~waves_in).astype(np.int32), tuple(made)


def _lines(rows: I32, ordinals: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> WaveLines:
    requests, at = np.unique(rows, return_inverse=True)
    span = int(ordinals.max()) + 1
    lines = np.full((2, len(requests) * span), -1, dtype=np.int32)
    lines[0] = np.repeat(requests, span)
    lines[1, at * span + ordinals] = tokens
    return WaveLines(span, lines[0], lines[1])


def most_lines(rows: int, requests: int, width: int) -> int:
    """Most lines that all waves of up to `rows` tokens of up to `requests` requests have together.

    A request leaves lines empty in its last wave alone, and the one with the most rows in none. So
    the most are where one request sets the span of all others, which have a row each.
    """
    return max(
        rows + (n - 1) * (min(width, rows - n + 1) - 1) for n in range(1, min(requests, rows) + 1)
    )
