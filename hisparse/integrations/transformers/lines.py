"""Lines of a batch: which request each is, and which of its columns hold tokens.

`generate` runs a batch as a rectangle of columns. A line begins with padding, so that all lines end
in the same column; padding is never written, so positions in the cache count tokens alone::

    column        0   1   2   3   4   5 | 6   7          6 columns held, 2 come now
    line 0        a0  a1  a2  a3  a4  a5| a6  a7         padding 0
    line 1        -   -   -   b0  b1  b2| b3  b4         padding 3: column 6 is position 3

Pure: nothing here knows a backend.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hisparse.errors import UsageError


@dataclass
class Line:
    """One line: a request from its first token on."""

    request: str
    padding: int = 0
    rows: int = 0
    """rows that the cache holds of it"""
    last: int = -1
    """its newest token"""
    admitted: bool = False
    fresh: bool = False
    """admitted by the pass that runs: if that fails, it was never there"""
    ended: bool = False


def paddings(mask: Any, lines: int, columns: int) -> list[int]:
    """Columns of padding before each line's first token.

    Args:
        mask: None, or what the model was given: [lines, columns], true or 1 at tokens.

    Raises UsageError for anything but padding on the left.
    """
    if mask is None:
        return [0] * lines
    if not isinstance(mask, torch.Tensor) or mask.shape != (lines, columns):
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise UsageError(
            f"attention_mask is {shape}, must be [{lines}, {columns}]: 0 at padding, which is on "
            "the left, 1 at every token, those in the cache included"
        )
    held = mask.bool()
    made = (~held).sum(1)
    at = torch.arange(columns, device=mask.device)
    if not torch.equal(held, at >= made[:, None]):
        line = int((held != (at >= made[:, None])).any(1).nonzero()[0, 0])
        raise UsageError(
            f"attention_mask of line {line} has padding behind a token: pad on the left "
            "(padding_side='left'), and add nothing between turns"
        )
    return [int(n) for n in made.tolist()]


@dataclass(frozen=True)
class Step:
    """The tokens of one forward pass that have rows, request after request, as the plan has them.

    Of n tokens: `at` int64 [n] is their place in the rectangle, line by line; `padding` and
    `positions` int64 [n, 1] are those of their lines and their own.
    """

    lines: tuple[int, ...]
    requests: tuple[str, ...]
    at: torch.Tensor
    padding: torch.Tensor
    positions: torch.Tensor

    def selected(self, indices: torch.Tensor) -> torch.Tensor:
        """Columns that an indexer chose, int [lines, width, k], as positions: int32 [n, k], -1
        where it chose padding, or what comes later, for want of enough tokens."""
        chosen = indices.flatten(0, 1).index_select(0, self.at) - self.padding
        visible = (chosen >= 0) & (chosen <= self.positions)
        return chosen.masked_fill(~visible, -1).to(torch.int32)


def make_step(batch: list[Line], granted: dict[int, int], width: int, device: torch.device) -> Step:
    """The step in which line i of `batch` computes its last ``granted[i]`` of `width` columns."""
    at: list[int] = []
    padding: list[int] = []
    positions: list[int] = []
    for i, n in granted.items():
        at += range((i + 1) * width - n, (i + 1) * width)
        padding += [batch[i].padding] * n
        positions += range(batch[i].rows, batch[i].rows + n)
    on = torch.tensor([at, padding, positions], device=device)
    names = tuple(batch[i].request for i in granted)
    return Step(tuple(granted), names, on[0], on[1, :, None], on[2, :, None])
