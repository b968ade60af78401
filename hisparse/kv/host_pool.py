"""HostPool: ids of the pinned host pages, a space of its own beside the GPU blocks.

A request's pages are taken at once, at admission, and lie together: rows gathered from a compact
region of the host arrive up to 2.5 times as fast as scattered ones, and page i of a layer's slab
lies beside page i + 1. So the pool is a set of extents (runs of adjacent free ids), not a queue:

    1. the smallest extent of free pages that holds all n
    2. failing that, the published pages that nobody leases count as free, as far as they are old:
       the oldest quarter of them in LRU order, or 4 n if that is more. What the chosen extent
       holds of them is evicted, its upper end first: a request's pages rise with its prefix, so
       a tail goes before its head
    3. failing that, the fewest extents, largest first

So nothing younger than that bound is ever evicted for an extent, and free fragments are left for
who fits in them. A GPU copy that is only cached is not found any more once its host page is gone;
it goes in its turn.

A lease is named by its token: the row, the table entry (or the row's reservation) and the epoch of
the page. The fold refuses a release whose token is not held, at the call.

A host page is written once an epoch, by the copy that its own reservation was made for, and is
shared only when PUBLISHED, as a whole page. A hit ends at a page boundary, so the page in which two
requests part is each one's own, and no shared tail is ever written: copy on write is the
reservation of a fresh page. A machine that has no arrow from PUBLISHED to PINNED holds it. (Index
blocks hold several pages and are shared: what is kept of one that parts is copied, on the GPU.)

One use is left to a tail that is really copied: a prompt that is cached whole, and ends with a
page, computes that page again for its last row, where a copy would leave the row alone. It is not
built, for want of such prompts: of the 12,031 of the Mooncake conversation trace none (pages of
64), or 7, and 105 rows of 145 M (pages of 16). Of other prompts no cached page is computed again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hisparse.errors import CapacityError
from hisparse.fsm.events import HostPagesEvicted, Ints
from hisparse.fsm.machines import PageState
from hisparse.fsm.state import State
from hisparse.fsm.wire import Table
from hisparse.kv.decision import I64, Decision, ints

WINDOW = 4  # evictable pages to choose among: this many times n, or this part of them


def next_page_epochs(state: State, pages: I64) -> Ints:
    """The epoch that each page gets by its next reservation."""
    return ints(state.pages.epoch[pages].astype(np.int64) + 1)


def page_epochs(state: State, pages: I64) -> Ints:
    return ints(state.pages.epoch[pages])


def take_pages(state: State, n: int, cause: int) -> Decision[I64]:
    """Pick `n` host pages to reserve, in ascending order, evicting published ones as needed.

    Raises CapacityError if there are not enough: callers check `state.pages.available` first.
    """
    p = state.pages
    usable = p.state == PageState.FREE
    usable[0] = False
    short = n - p.free.count
    if short <= 0:
        pages = choose_extents(usable, n)
        if not p.evictable.count or np.count_nonzero(np.diff(pages) != 1) == 0:
            return pages
    old = p.evictable.peek(max(short, 0) + max(WINDOW * n, p.evictable.count // WINDOW))
    if len(old) < short:
        raise CapacityError(f"{n} host pages wanted, {p.available} available")
    usable[old] = True
    pages = choose_extents(usable, n, upper=True)
    gone = pages[p.state[pages] == PageState.PUBLISHED]
    if len(gone):
        yield HostPagesEvicted(cause, ints(gone), page_epochs(state, gone))
    return pages


def choose_extents(usable: npt.NDArray[np.bool_], n: int, *, upper: bool = False) -> I64:
    """int64 [n]: ids in as few runs of `usable` as can be, ascending; best fit, lowest first.

    Args:
        usable: bool [pages], which ids may be had; at least `n` of them.
        upper: take the upper end of a run that is not used up, instead of its lower end.
    """
    edges = np.flatnonzero(np.diff(usable, prepend=False, append=False))
    starts, ends = edges[::2], edges[1::2]
    lengths = ends - starts
    assert int(lengths.sum()) >= n, (int(lengths.sum()), n)
    found: list[I64] = [np.zeros(0, dtype=np.int64)]
    while n > 0:
        fits = lengths >= n
        at = int(np.argmin(np.where(fits, lengths, len(usable) + 1)) if fits.any() else -1)
        at = at if at >= 0 else int(np.argmax(lengths))
        size = min(n, int(lengths[at]))
        first = int(ends[at]) - size if upper else int(starts[at])
        found.append(np.arange(first, first + size))
        lengths[at] = 0
        n -= size
    return np.sort(np.concatenate(found))


def extents_held(state: State) -> list[int]:
    """Extents that each live request's host pages lie in (its reservation included)."""
    counts = []
    for row in np.flatnonzero(state.rows.live).tolist():
        pages = state.table(Table.HOST)[row]
        ids = np.sort(np.concatenate([pages[pages > 0], state.request_of(row).reserved]))
        counts.append(int(np.count_nonzero(np.diff(ids) != 1)) + 1 if len(ids) else 0)
    return counts
