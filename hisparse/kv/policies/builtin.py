"""The policies that come with hisparse. Each is stateless; `Hybrid` is the base of the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hisparse.kv.policies.base import I64, PolicyView


class Hybrid:
    """All resident while it fits; then the request with most pages above its window loses first,
    and gets back last: long contexts pay for short ones."""

    choice = "spill_largest_head_first"
    host_first = False

    def victims(self, view: PolicyView, need: int) -> Sequence[tuple[int, int]]:
        return _in_order(view, np.argsort(-view.excess, kind="stable"))

    def promotions(self, view: PolicyView) -> Sequence[int]:
        """Fewest pages to copy first; among equals, who came first."""
        missing = np.flatnonzero(view.on_host > 0)
        order = np.lexsort((view.arrived_seq[missing], view.on_host[missing]))
        return list(missing[order].tolist())


class LeastRecentlyUsed(Hybrid):
    """The request whose last step is longest ago loses first: parked before running ones."""

    choice = "spill_least_recent_head_first"

    def victims(self, view: PolicyView, need: int) -> Sequence[tuple[int, int]]:
        return _in_order(view, np.lexsort((-view.excess, view.last_step)))


class Even(Hybrid):
    """Every request loses in proportion to its excess, so that none becomes host-bound alone."""

    choice = "spill_even_head_first"

    def victims(self, view: PolicyView, need: int) -> Sequence[tuple[int, int]]:
        total = int(view.excess.sum())
        share = np.minimum(-(-view.excess * min(need, total) // max(total, 1)), view.excess)
        rows = np.flatnonzero(view.excess).tolist()
        # Where a share cannot go at once (a copy is on its way), the others make up for it.
        rest = view.excess - share
        return [(row, int(part[row])) for part in (share, rest) for row in rows if part[row]]


class HostFirst(Hybrid):
    """Every request reads its sealed pages from the host from the start: most requests at once, at
    the price of host reads even where nothing is short. Nothing comes back."""

    choice = "spill_all_head_first"
    host_first = True

    def promotions(self, view: PolicyView) -> Sequence[int]:
        return ()


class Resident(Hybrid):
    """No host tier: nothing is ever asked, because nothing can leave."""

    choice = "none"

    def victims(self, view: PolicyView, need: int) -> Sequence[tuple[int, int]]:
        return ()

    def promotions(self, view: PolicyView) -> Sequence[int]:
        return ()


def _in_order(view: PolicyView, order: I64) -> list[tuple[int, int]]:
    return [(row, int(view.excess[row])) for row in order.tolist() if view.excess[row] > 0]
