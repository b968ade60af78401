"""Decisions on requests and what they hold on the GPU, kinds 20..39 and 60..69: what `decide` made
of the inputs. Vectorised over blocks. Those on host pages and copies are in `events.copies`."""

from __future__ import annotations

from hisparse.fsm.events.base import Event, Ints, places_of
from hisparse.fsm.machines import BlockRole, BlockTrigger

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
        return places_of(self.row, self.entry, self.rows, self.entries, len(self.blocks))


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
