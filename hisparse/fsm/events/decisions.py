"""Decisions, kinds 20..79: what `decide` made of the inputs. Vectorised over blocks and pages."""

from __future__ import annotations

from hisparse.fsm.events.base import Event, Hashes, Ints
from hisparse.fsm.machines import BlockRole, BlockTrigger, PageTrigger
from hisparse.fsm.wire import TransferKind


def _places(e: BlocksReserved | PagesPublished, n: int) -> list[tuple[int, int]]:
    if e.rows:
        return list(zip(e.rows, e.entries, strict=True))
    return [(e.row, e.entry + i) for i in range(n)]


# -- decisions: requests --------------------------------------------------------------------------


class RequestAdmitted(Event, frozen=True, gc=False, array_like=True, tag=20):
    """The request holds row `row`; `steady_blocks` GPU blocks are promised to it until its end."""

    request: str
    epoch: int
    row: int
    hit_tokens: int
    steady_blocks: int


class AdmissionDeferred(Event, frozen=True, gc=False, array_like=True, tag=21):
    """The request at the head of the queue waits for `resource`."""

    request: str
    epoch: int
    resource: str
    need: int
    have: int


class RequestRefused(Event, frozen=True, gc=False, array_like=True, tag=22):
    """The request can never fit: `resource` is too small for it."""

    request: str
    epoch: int
    resource: str
    need: int
    have: int


class RequestDrained(Event, frozen=True, gc=False, array_like=True, tag=23):
    """Nothing of the request is left on any device; its row may be given to another."""

    request: str
    epoch: int
    row: int


class RequestRewound(Event, frozen=True, gc=False, array_like=True, tag=24):
    """A failed copy made rows doubtful: `row` goes back to its first `rows` computed rows.

    Tokens sampled from its first `certain` rows stand; later ones were never certain, and are
    withdrawn. `blocks` are index blocks that hold rows on both sides: they are written again.
    """

    request: str
    epoch: int
    row: int
    rows: int
    certain: int
    blocks: Ints
    epochs: Ints


class RequestResumed(Event, frozen=True, gc=False, array_like=True, tag=25):
    """Nothing beyond the rewound rows is held any more: they are computed again from here."""

    request: str
    epoch: int
    row: int


# -- decisions: GPU blocks ------------------------------------------------------------------------


class BlocksReserved(Event, frozen=True, gc=False, array_like=True, tag=30):
    """Blocks leased to `row` as `role`; they become table entries `entry`, `entry` + 1, …

    Of several rows: block i becomes entry `entries[i]` of `rows[i]`; `row` and `entry` are -1.
    """

    role: BlockRole
    row: int
    entry: int
    blocks: Ints
    epochs: Ints
    rows: Ints = ()
    entries: Ints = ()

    def places(self) -> list[tuple[int, int]]:
        """(row, entry) of each block."""
        return _places(self, len(self.blocks))


class BlocksAdopted(Event, frozen=True, gc=False, array_like=True, tag=31):
    """Blocks that hold what `row` would compute become its table entries `entries`."""

    role: BlockRole
    row: int
    entries: Ints
    blocks: Ints
    epochs: Ints


class BlocksEvicted(Event, frozen=True, gc=False, array_like=True, tag=32):
    """Cached blocks lose their content; no prefix finds it in them any more."""

    blocks: Ints
    epochs: Ints


class BlocksSealed(Event, frozen=True, gc=False, array_like=True, tag=33):
    """Index blocks whose rows are all final: they may be shared, and cached after their owner."""

    blocks: Ints
    epochs: Ints


class BlocksReleased(Event, frozen=True, gc=False, array_like=True, tag=34):
    """`row` gives entries back; `trigger` moves the block (None: other owners remain)."""

    role: BlockRole
    row: int
    trigger: BlockTrigger | None
    entries: Ints
    blocks: Ints
    epochs: Ints


class PagesSpilled(Event, frozen=True, gc=False, array_like=True, tag=35):
    """Table entries now read from the host: the resident lease is given back.

    `transfers[i]` is the copy that must precede any reuse in stream order, 0 where the host page
    was complete already. `trigger` is `spilled` (copy enqueued), `cached` or `dropped` (clean).
    """

    row: int
    trigger: BlockTrigger
    entries: Ints
    blocks: Ints
    epochs: Ints
    transfers: Ints


class IndexPagesCopied(Event, frozen=True, gc=False, array_like=True, tag=36):
    """Shared indexer pages copied GPU -> GPU into blocks of `row`, in compute-stream order."""

    row: int
    sources: Ints
    source_epochs: Ints
    source_slots: Ints
    blocks: Ints
    slots: Ints


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
        return _places(self, len(self.pages))


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


# -- decisions: hot regions -----------------------------------------------------------------------


class HotWanted(Event, frozen=True, gc=False, array_like=True, tag=60):
    row: int


class HotLeased(Event, frozen=True, gc=False, array_like=True, tag=61):
    row: int
    blocks: Ints
    epochs: Ints


class HotReleased(Event, frozen=True, gc=False, array_like=True, tag=62):
    """The region is over; its blocks follow in a BlocksReleased."""

    row: int


# -- decisions: residency -------------------------------------------------------------------------


class PromotionHeld(Event, frozen=True, gc=False, array_like=True, tag=63):
    """Pages leave under pressure: none comes back to the GPU before step `until_step`."""

    until_step: int


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
