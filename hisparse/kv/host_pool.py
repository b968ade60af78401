"""HostPool: ids of the pinned host pages, a space of its own beside the GPU blocks.

Pages are taken from the free queue, then from published pages that nobody leases, least recently
used first. A GPU copy that is only cached is not found any more once its host page is gone; it goes
in its turn.
"""

from __future__ import annotations

import numpy as np

from hisparse.errors import CapacityError
from hisparse.fsm.events import HostPagesEvicted, Ints
from hisparse.fsm.state import State
from hisparse.kv.decision import I64, Decision, ints


def next_page_epochs(state: State, pages: I64) -> Ints:
    """The epoch that each page gets by its next reservation."""
    return ints(state.pages.epoch[pages].astype(np.int64) + 1)


def page_epochs(state: State, pages: I64) -> Ints:
    return ints(state.pages.epoch[pages])


def take_pages(state: State, n: int, cause: int) -> Decision[I64]:
    """Pick `n` host pages to reserve, evicting published ones as needed.

    Raises CapacityError if there are not enough: callers check `state.pages.available` first.
    """
    short = n - state.pages.free.count
    if short > 0:
        old = state.pages.evictable.peek(short)
        if len(old) < short:
            raise CapacityError(f"{n} host pages wanted, {state.pages.available} available")
        yield HostPagesEvicted(cause, ints(old), page_epochs(state, old))
    pages = state.pages.free.peek(n)
    assert len(pages) == n, (len(pages), n)
    return pages
