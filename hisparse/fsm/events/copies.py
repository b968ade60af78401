"""Decisions on host pages, on copies between the tiers and on the CPU tier of indexer pages: kinds
40..59 and 70..79. Vectorised over pages."""

from __future__ import annotations

from hisparse.fsm.events.base import Event, Hashes, Ints, places_of
from hisparse.fsm.machines import PageTrigger
from hisparse.fsm.wire import TransferKind

# -- decisions: host pages ------------------------------------------------------------------------


class HostPagesReserved(Event, frozen=True, gc=False, array_like=True, tag=40):
    """Host pages promised to `row` for pages that it will seal."""

    row: int
    pages: Ints
    epochs: Ints


class PrefixLeased(Event, frozen=True, gc=False, array_like=True, tag=41):
    """Published pages found by prefix are leased to `row` as its pages 0, 1, …"""

    row: int
    pages: Ints
    epochs: Ints


class HostPagesReleased(Event, frozen=True, gc=False, array_like=True, tag=42):
    """`row` gives host pages back (trigger None: published, they stay for the prefix cache).

    `entries` are those of its table that named them; none for a reservation.
    """

    row: int
    trigger: PageTrigger | None
    pages: Ints
    epochs: Ints
    entries: Ints = ()


class HostPagesEvicted(Event, frozen=True, gc=False, array_like=True, tag=43):
    """Published pages that nobody leases lose their content and their place in the index."""

    pages: Ints
    epochs: Ints


class PagesPublished(Event, frozen=True, gc=False, array_like=True, tag=44):
    """Pages `entry`, `entry` + 1, … of `row` are findable (page 0: equal content already was).

    Of several rows: page i is page `entries[i]` of `rows[i]`; `row` and `entry` are -1.
    """

    row: int
    entry: int
    pages: Ints
    epochs: Ints
    page_hashes: Hashes
    rows: Ints = ()
    entries: Ints = ()

    def places(self) -> list[tuple[int, int]]:
        """(row, page of its request) of each page."""
        return places_of(self.row, self.entry, self.rows, self.entries, len(self.pages))


# -- decisions: transfers -------------------------------------------------------------------------


class TransferPinned(Event, frozen=True, gc=False, array_like=True, tag=50):
    """Copies planned for `row`; source and destination leases are taken in this very event.

    `readers` and `writers` are bit masks of ranks: who reads the source, who writes the
    destination. `epoch` is the request's.
    Of several rows: copy i is of `rows[i]`, its request's epoch `request_epochs[i]`; `row` and
    `epoch` are -1.
    """

    kind: TransferKind
    row: int
    epoch: int
    readers: int
    writers: int
    transfers: Ints
    entries: Ints
    blocks: Ints
    block_epochs: Ints
    pages: Ints
    page_epochs: Ints
    rows: Ints = ()
    request_epochs: Ints = ()

    def owners(self) -> list[tuple[int, int]]:
        """(row, epoch of its request) of each copy."""
        if self.rows:
            return list(zip(self.rows, self.request_epochs, strict=True))
        return [(self.row, self.epoch)] * len(self.transfers)


class TransferEnqueued(Event, frozen=True, gc=False, array_like=True, tag=51):
    """`rank` has the copies in its stream; `last`: with it, every reader has."""

    rank: int
    last: bool
    transfers: Ints


class TransferCompleted(Event, frozen=True, gc=False, array_like=True, tag=52):
    """`rank` saw the copies' events; `last`: with it, every writer has answered. Copies that failed
    on another rank settle as failed."""

    rank: int
    last: bool
    transfers: Ints


class TransferFailed(Event, frozen=True, gc=False, array_like=True, tag=53):
    """`rank` could not copy; the destinations are not valid. `last`: with it, every writer has
    answered, and the copies settle."""

    rank: int
    transfers: Ints
    last: bool = True


# -- decisions: the CPU tier of indexer pages -----------------------------------------------------


class SuffixPinned(Event, frozen=True, gc=False, array_like=True, tag=70):
    """Indexer pages `entries` of `row` are to be copied between `slots` of its index `blocks` and
    pages `suffixes` of the CPU tier: into the blocks (`load`), or out of them.

    Leases are taken in this very event. A store reserves its page under a new epoch, for the hash
    of the page that it holds; a load leases it. `writers` is a bit mask: ranks that copy, each
    between its own block and its own tier. `epoch` is the request's.
    """

    load: bool
    row: int
    epoch: int
    writers: int
    transfers: Ints
    entries: Ints
    blocks: Ints
    block_epochs: Ints
    slots: Ints
    suffixes: Ints
    suffix_epochs: Ints


class SuffixEvicted(Event, frozen=True, gc=False, array_like=True, tag=71):
    """Pages of the CPU tier that nobody leases lose their content; no prefix finds it there."""

    suffixes: Ints
    suffix_epochs: Ints


class SuffixCompleted(Event, frozen=True, gc=False, array_like=True, tag=72):
    """`rank` saw the copies' events; `last`: with it, every rank has answered."""

    rank: int
    last: bool
    transfers: Ints


class SuffixFailed(Event, frozen=True, gc=False, array_like=True, tag=73):
    """`rank` could not copy; what it was to write is not valid. `last`: all ranks have answered."""

    rank: int
    last: bool
    transfers: Ints
