"""Every event, as msgspec tagged structs. The log holds these and nothing else.

Rules: past participles; ids with their epochs; no token text; `cause` is the seq of the event or
input that led to this one (0: nothing in the log did). Events on pages and blocks are vectorised:
parallel tuples, one entry a page. A kind number, once given, is never given again; fields are only
ever added at the end, with a default, so that an old log stays readable.

    kinds   1..19   inputs: what the scheduler was told
    kinds  20..79   decisions: what `decide` made of them
    kinds  80..99   a worker rank's own stream
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from hisparse.fsm.machines import BlockRole, BlockTrigger, PageTrigger
from hisparse.fsm.wire import TransferKind

Ints = tuple[int, ...]
Hashes = tuple[bytes, ...]


class Event(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Base of all events."""

    is_input: ClassVar[bool] = False
    cause: int


# -- inputs ---------------------------------------------------------------------------------------


class RequestArrived(Event, frozen=True, gc=False, array_like=True, tag=1):
    """A request: its lengths in tokens, and the salted chain hash of each whole prompt page."""

    is_input: ClassVar[bool] = True
    request: str
    epoch: int
    prompt_tokens: int
    max_tokens: int
    page_hashes: Hashes


class StepPlanned(Event, frozen=True, gc=False, array_like=True, tag=2):
    """Step `step` computes rows ``[starts[i], starts[i] + counts[i])`` of request row `rows[i]`."""

    is_input: ClassVar[bool] = True
    step: int
    rows: Ints
    starts: Ints
    counts: Ints


class RowsComputed(Event, frozen=True, gc=False, array_like=True, tag=3):
    """Of the rows planned in `step`, the first `counts[i]` of `rows[i]` are computed and accepted.

    `page_hashes[j]` is the chain hash of the next page of request row `hash_rows[j]` that these
    rows complete (pages of the prompt had theirs at arrival).
    """

    is_input: ClassVar[bool] = True
    step: int
    rows: Ints
    counts: Ints
    hash_rows: Ints
    page_hashes: Hashes


class RequestFinished(Event, frozen=True, gc=False, array_like=True, tag=4):
    is_input: ClassVar[bool] = True
    request: str
    epoch: int
    reason: str


class RequestAborted(Event, frozen=True, gc=False, array_like=True, tag=5):
    is_input: ClassVar[bool] = True
    request: str
    epoch: int
    reason: str


class RequestPreempted(Event, frozen=True, gc=False, array_like=True, tag=6):
    is_input: ClassVar[bool] = True
    request: str
    epoch: int
    reason: str


class Tick(Event, frozen=True, gc=False, array_like=True, tag=7):
    """Time passed: the only way in which a clock reaches `decide`."""

    is_input: ClassVar[bool] = True
    now_us: int


class AcknowledgementsTaken(Event, frozen=True, gc=False, array_like=True, tag=8):
    """The scheduler took ``(first_seq..last_seq)`` of a rank's acknowledgement stream in, now.

    `retired_step` is the last step whose every device access has happened on that rank.
    Each list holds transfer ids; `*_epochs` run parallel.
    """

    is_input: ClassVar[bool] = True
    rank: int
    worker_epoch: int
    first_seq: int
    last_seq: int
    enqueued: Ints
    enqueued_epochs: Ints
    completed: Ints
    completed_epochs: Ints
    failed: Ints
    failed_epochs: Ints
    retired_step: int


class LogGap(Event, frozen=True, gc=False, array_like=True, tag=9):
    """Events in ``(after_seq, this)`` were lost; the next snapshot resumes the fold."""

    is_input: ClassVar[bool] = True
    after_seq: int
    reason: str


class PolicyChosen(Event, frozen=True, gc=False, array_like=True, tag=10):
    """A policy answered pressure on `resource`: `need` wanted, `have` at hand, both in `unit`s."""

    is_input: ClassVar[bool] = True
    policy: str
    choice: str
    resource: str
    need: int
    have: int


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


# -- decisions: GPU blocks ------------------------------------------------------------------------


class BlocksReserved(Event, frozen=True, gc=False, array_like=True, tag=30):
    """Blocks leased to `row` as `role`; they become table entries `entry`, `entry` + 1, …"""

    role: BlockRole
    row: int
    entry: int
    blocks: Ints
    epochs: Ints


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
    """`row` gives host pages back (trigger None: published, they stay for the prefix cache)."""

    row: int
    trigger: PageTrigger | None
    pages: Ints
    epochs: Ints


class HostPagesEvicted(Event, frozen=True, gc=False, array_like=True, tag=43):
    """Published pages that nobody leases lose their content and their place in the index."""

    pages: Ints
    epochs: Ints


class PagesPublished(Event, frozen=True, gc=False, array_like=True, tag=44):
    """Pages `entry`, `entry` + 1, … of `row` are findable (page 0: equal content already was)."""

    row: int
    entry: int
    pages: Ints
    epochs: Ints
    page_hashes: Hashes


# -- decisions: transfers -------------------------------------------------------------------------


class TransferPinned(Event, frozen=True, gc=False, array_like=True, tag=50):
    """Copies planned for `row`; source and destination leases are taken in this very event.

    `readers` and `writers` are bit masks of ranks: who reads the source, who writes the
    destination. `epoch` is the request's.
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


class TransferEnqueued(Event, frozen=True, gc=False, array_like=True, tag=51):
    """`rank` has the copies in its stream; `last`: with it, every reader has."""

    rank: int
    last: bool
    transfers: Ints


class TransferCompleted(Event, frozen=True, gc=False, array_like=True, tag=52):
    """`rank` saw the copies' events; `last`: with it, every writer has."""

    rank: int
    last: bool
    transfers: Ints


class TransferFailed(Event, frozen=True, gc=False, array_like=True, tag=53):
    """`rank` could not copy; the destinations are not valid."""

    rank: int
    transfers: Ints


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


# -- a worker rank's own stream -------------------------------------------------------------------


class WorkerOpened(Event, frozen=True, gc=False, array_like=True, tag=80):
    """A rank begins worker epoch `worker_epoch` with its cursor at `at_seq` of the log."""

    is_input: ClassVar[bool] = True
    rank: int
    worker_epoch: int
    at_seq: int


class CommandApplied(Event, frozen=True, gc=False, array_like=True, tag=81):
    step: int
    from_seq: int
    to_seq: int


class AckSent(Event, frozen=True, gc=False, array_like=True, tag=82):
    """Acknowledgement `ack_seq` of this rank: kind as in `wire.AckKind`."""

    ack_seq: int
    kind: int
    ident: int
    epoch: int


class StreamRecorded(Event, frozen=True, gc=False, array_like=True, tag=83):
    """Device event `event` was recorded on `stream`."""

    stream: str
    event: int


class StreamWaited(Event, frozen=True, gc=False, array_like=True, tag=84):
    """Work queued on `stream` from here on waits for device event `event`; `why` names the edge."""

    stream: str
    event: int
    why: str


class MemoryAccessed(Event, frozen=True, gc=False, array_like=True, tag=85):
    """Work queued on `stream` reads or writes whole blocks (`pool` "gpu") or pages ("host")."""

    stream: str
    pool: str
    write: bool
    ids: Ints
    transfer: int


EVENT_TYPES: tuple[type[Event], ...] = (
    RequestArrived,
    StepPlanned,
    RowsComputed,
    RequestFinished,
    RequestAborted,
    RequestPreempted,
    Tick,
    AcknowledgementsTaken,
    LogGap,
    PolicyChosen,
    RequestAdmitted,
    AdmissionDeferred,
    RequestRefused,
    RequestDrained,
    BlocksReserved,
    BlocksAdopted,
    BlocksEvicted,
    BlocksSealed,
    BlocksReleased,
    PagesSpilled,
    IndexPagesCopied,
    HostPagesReserved,
    PrefixLeased,
    HostPagesReleased,
    HostPagesEvicted,
    PagesPublished,
    TransferPinned,
    TransferEnqueued,
    TransferCompleted,
    TransferFailed,
    HotWanted,
    HotLeased,
    HotReleased,
    WorkerOpened,
    CommandApplied,
    AckSent,
    StreamRecorded,
    StreamWaited,
    MemoryAccessed,
)
