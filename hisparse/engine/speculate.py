"""Speculation, model aside: which drafts stand, and what was proposed and accepted.

A verification row is a row of the step like any other: the newest token's row and one a draft
behind it. The target chooses after each of them; a draft stands when it is what the target chose
after the row before it, and all drafts before it stand. Rows of the others are not accepted: they
are never published, and the next step writes over them.

    rows     newest  d1  d2  d3
    chosen     d1    d2   x   -      d1, d2 stand: three rows are accepted, three tokens are new
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Acceptance:
    """Drafts that were verified, and those that stood."""

    proposed: int = 0
    accepted: int = 0

    @property
    def rate(self) -> float:
        return self.accepted / self.proposed if self.proposed else 0.0


def standing(drafts: Sequence[int], chosen: Sequence[int], eos: int) -> int:
    """How many tokens of `chosen`, one a verification row, are the request's next ones: at least
    one, none behind EOS. As many rows are accepted."""
    count = 1
    for draft, token in zip(drafts, chosen, strict=False):
        if token != draft or token == eos:
            break
        count += 1
    return count
