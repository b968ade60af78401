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

import numpy as np

from hisparse.device.rows import StepRows


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


def newest_tokens(
    tokens: np.ndarray, rows: StepRows, sampled: np.ndarray, chosen: np.ndarray, eos: int
) -> tuple[np.ndarray, StepRows]:
    """The last token that stands of each sampling request, int64 [m], and its place; none for a
    request that ends in EOS."""
    owners, newest, places = rows.rows[sampled], [], []
    for row in np.unique(owners).tolist():
        mine = np.flatnonzero(owners == row)
        at = sampled[mine]
        last = standing(tokens[at[1:]].tolist(), chosen[mine].tolist(), eos) - 1
        if chosen[mine[last]] != eos:
            newest.append(int(chosen[mine[last]]))
            places.append((row, int(rows.positions[at[last]]) + 1))
    where = StepRows(
        np.array([row for row, _ in places], dtype=np.int32),
        np.array([position for _, position in places], dtype=np.int64),
    )
    return np.array(newest, dtype=np.int64), where
