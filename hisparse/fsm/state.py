"""The scheduler's state: what the fold of the log builds, and nothing that it does not.

Only `fsm.fold` writes it. Blocks, host pages and request rows are columns of small arrays (one byte
of state and an epoch a block); requests and transfers, of which there are few, are records.

    column            a block                       a host page
    state             BlockState                    PageState
    epoch             raised at every `reserved`    raised at every `reserved`
    refs              table entries that name it    table entries and reservations that name it
    partner           host page with its content    GPU block with its content

PYTEST_DONT_REWRITE (what an assertion says is part of a fault's signature, see `fsm.reduce`)
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from hisparse.config import HiSparseConfig
from hisparse.fsm.idqueue import IdQueue
from hisparse.fsm.machines import (
    LIVE,
    BlockRole,
    HotState,
    RequestState,
    TransferState,
)
from hisparse.fsm.wire import Table, TransferKind

Key = tuple[str, int]  # a request id and its epoch


class Request(msgspec.Struct):
    """A request of one epoch. `row` is -1 until it is admitted."""

    request: str
    epoch: int
    prompt_tokens: int
    max_tokens: int
    hashes: list[bytes]
    arrived_seq: int
    state: RequestState = RequestState.WAITING
    row: int = -1
    hot: HotState = HotState.NONE
    steady_blocks: int = 0
    hit_tokens: int = 0
    reserved: list[int] = []  # host pages promised and not yet filled, next first
    in_flight: int = 0  # transfers of it that have not settled
    failures: int = 0  # copies of its pages that failed
    deferred: str = ""  # the resource that it waits for
    reason: str = ""

    @property
    def key(self) -> Key:
        return (self.request, self.epoch)

    @property
    def live(self) -> bool:
        return self.state in LIVE


class Transfer(msgspec.Struct, gc=False):
    """A page copy in flight. Masks hold one bit a rank."""

    transfer: int
    epoch: int
    kind: TransferKind
    row: int
    entry: int
    block: int
    block_epoch: int
    page: int
    page_epoch: int
    readers: int
    writers: int
    pinned_seq: int
    state: TransferState = TransferState.PINNED
    enqueued: int = 0
    completed: int = 0  # once a rank failed: ranks that answered, either way
    holds_block: bool = True  # False once the spill gave the resident lease back

    @property
    def is_read(self) -> bool:
        """Whether steps may read what it writes before it has completed."""
        return self.kind is TransferKind.RESTORE or not self.holds_block


class SuffixCopy(msgspec.Struct):
    """An indexer page in flight between an index block and the CPU tier. Masks: one bit a rank."""

    transfer: int
    epoch: int
    load: bool
    row: int
    entry: int  # the page of the request
    block: int
    block_epoch: int
    suffix: int
    suffix_epoch: int
    writers: int
    pinned_seq: int
    answered: int = 0
    failed: int = 0


class BlockColumns:
    """GPU blocks 0..n-1; block 0 is null and never leaves FREE."""

    def __init__(self, n: int) -> None:
        self.state = np.zeros(n, dtype=np.uint8)
        self.epoch = np.zeros(n, dtype=np.uint32)
        self.role = np.zeros(n, dtype=np.uint8)
        self.refs = np.zeros(n, dtype=np.int32)
        self.partner = np.zeros(n, dtype=np.int32)
        self.free = IdQueue(n, np.arange(1, n, dtype=np.int64))
        self.cached = IdQueue(n)

    @property
    def available(self) -> int:
        """Blocks that a reservation can have at once: free ones and cached ones."""
        return self.free.count + self.cached.count


class PageColumns:
    """Host pages 0..n-1; page 0 is null and never leaves FREE."""

    def __init__(self, n: int) -> None:
        self.state = np.zeros(n, dtype=np.uint8)
        self.epoch = np.zeros(n, dtype=np.uint32)
        self.refs = np.zeros(n, dtype=np.int32)
        self.partner = np.zeros(n, dtype=np.int32)
        self.free = IdQueue(n, np.arange(1, n, dtype=np.int64))
        self.evictable = IdQueue(n)  # published, and leased by nobody
        self.hash_of: dict[int, bytes] = {}

    @property
    def available(self) -> int:
        return self.free.count + self.evictable.count


class SuffixColumns:
    """Indexer pages of the CPU tier 0..n-1, the HostPage machine; page 0 is null. `refs` counts the
    loads in flight that read a page."""

    def __init__(self, n: int) -> None:
        self.state = np.zeros(n, dtype=np.uint8)
        self.epoch = np.zeros(n, dtype=np.uint32)
        self.refs = np.zeros(n, dtype=np.int32)
        self.free = IdQueue(n, np.arange(1, n, dtype=np.int64))
        self.evictable = IdQueue(n)  # stored, and read by no load; least recently used first
        self.hash_of: dict[int, bytes] = {}


class RowColumns:
    """Request rows: tables and counters of the requests that hold one."""

    def __init__(self, config: HiSparseConfig) -> None:
        n = config.schedule.max_requests
        self.tables: tuple[npt.NDArray[np.int32], ...] = tuple(
            np.zeros((n, max(width, 1)), dtype=np.int32) for width in table_widths(config)
        )
        self.used = np.zeros(n, dtype=np.bool_)
        self.prompt = np.zeros(n, dtype=np.int64)  # rows of the prompt
        self.limit = np.zeros(n, dtype=np.int64)  # most rows it may ever compute
        self.live = np.zeros(n, dtype=np.bool_)
        self.computed = np.zeros(n, dtype=np.int64)  # rows computed and accepted
        self.planned = np.zeros(n, dtype=np.int64)  # rows computed or in a step under way
        # Rows beyond `confirmed` are provisional: their step could read pages whose copies, of
        # which `unsettled` are left, have not completed.
        self.confirmed = np.zeros(n, dtype=np.int64)
        self.unsettled = np.zeros(n, dtype=np.int32)
        self.published = np.zeros(n, dtype=np.int64)  # leading pages findable by prefix
        self.pages = np.zeros(n, dtype=np.int64)  # leading pages that were given a place
        self.pages_max = np.zeros(n, dtype=np.int64)  # pages of the request at its longest
        self.last_step = np.zeros(n, dtype=np.int64)
        self.resident = np.zeros(n, dtype=np.int32)  # entries of the resident table in use
        self.index = np.zeros(n, dtype=np.int32)
        self.hot = np.zeros(n, dtype=np.int32)
        self.spilling = np.zeros(n, dtype=np.int32)  # resident entries that a spill will free


def table_widths(config: HiSparseConfig) -> tuple[int, int, int, int]:
    """Entries a row of each `wire.Table` has."""
    return (config.max_pages, config.max_pages, config.max_index_blocks, config.hot_blocks)


BLOCK_BYTES_MAX = 96  # that the columns and queues of a pool take a block or host page
ROW_BYTES_MAX = 256  # that those of a request row take beside its tables


def state_bytes(config: HiSparseConfig) -> int:
    """Most bytes that ``State(config)`` takes at once: to be asked before a file's configuration
    is trusted with it."""
    ids = config.pools.gpu_blocks + (config.host_pages if config.offload else 0)
    ids += config.suffix_pages
    row = ROW_BYTES_MAX + 4 * sum(table_widths(config))
    return BLOCK_BYTES_MAX * ids + row * config.schedule.max_requests


class State:
    """Everything the scheduler knows. ``State(config)`` is the state before the first event."""

    def __init__(self, config: HiSparseConfig) -> None:
        self.config = config
        # Sizes that every event needs; the config derives them anew at each use.
        self.page_size = config.pools.page_size
        self.index_pages_per_block = config.index_pages_per_block
        self.hot_blocks = config.hot_blocks
        self.window_pages = config.window_pages
        self.backed_pages = config.backed_pages
        self.seq = 0
        self.step = 0
        self.now_us = 0
        self.blocks = BlockColumns(config.pools.gpu_blocks)
        self.pages = PageColumns(max(config.host_pages, 1) if config.offload else 1)
        self.rows = RowColumns(config)
        self.requests: dict[Key, Request] = {}
        self.by_row: list[Request | None] = [None] * config.schedule.max_requests
        self.waiting: dict[Key, None] = {}  # in order of arrival
        self.draining: dict[Key, None] = {}
        self.rewinding: dict[Key, None] = {}  # those in state REWINDING
        self.transfers: dict[int, Transfer] = {}
        self.prefix: dict[bytes, int] = {}  # page hash -> published host page
        self.index_prefix: dict[bytes, tuple[int, int]] = {}  # page hash -> index block, slot
        self.index_hashes: dict[int, list[bytes]] = {}  # index block -> hashes that name it
        self.suffix = SuffixColumns(config.suffix_pages)
        self.suffix_index: dict[bytes, int] = {}  # page hash -> page of the CPU tier, stored or not
        self.suffix_copies: dict[int, SuffixCopy] = {}
        self.suffix_answers: dict[Key, tuple[int, int]] = {}  # first page, pages promised
        self.next_epoch = 1
        self.next_transfer = 1
        self.acked = [0] * config.ranks  # last acknowledgement taken in, per rank
        self.worker_epoch = [1] * config.ranks
        self.lost = 0  # ranks whose worker is gone, one bit each: nobody is admitted meanwhile
        self.asleep = 0  # 1: the GPU pool has no memory; 2: the host tiers have none either
        self.promotion_held_until = 0  # no page comes back to the GPU before this step
        self.retired = [0] * config.ranks  # last step whose device accesses are over, per rank

    @property
    def device_pools(self) -> tuple[BlockColumns, ...]:
        """GPU pools by the `block_pool_id` of a cache group."""
        return (self.blocks,)

    def table(self, table: Table) -> npt.NDArray[np.int32]:
        return self.rows.tables[table]

    def request_of(self, row: int) -> Request:
        request = self.by_row[row]
        assert request is not None, f"request row {row} is not in use"
        return request

    def used_of(self, role: BlockRole) -> npt.NDArray[np.int32]:
        """int32 [rows]: table entries in use, per row, of the table that `role` belongs to."""
        columns = {
            BlockRole.RESIDENT: self.rows.resident,
            BlockRole.INDEX: self.rows.index,
            BlockRole.HOT: self.rows.hot,
        }
        return columns[role]


def digest(state: State) -> str:
    """128-bit hex digest of the whole state; equal for equal folds, on any machine."""
    h = hashlib.blake2b(digest_size=16)
    # A tier that is not there adds nothing: logs from before it have the digests that they had.
    suffix = (state.suffix,) if len(state.suffix.state) else ()
    for columns in (state.blocks, state.pages, state.rows, *suffix):
        for name, value in sorted(vars(columns).items()):
            h.update(name.encode())
            _feed(h, value)
    h.update(msgspec.msgpack.encode(_records(state)))
    return h.hexdigest()


def _feed(h: Any, value: Any) -> None:
    if isinstance(value, IdQueue):
        h.update(value.ordered().astype("<i8").tobytes())
    elif isinstance(value, np.ndarray):
        h.update(value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes())
    elif isinstance(value, tuple):
        for item in value:
            _feed(h, item)
    else:
        h.update(msgspec.msgpack.encode(sorted(value.items())))


def _records(state: State) -> list[Any]:
    # What logs of before this field never set is left out: their digests stay what they were.
    held = [state.promotion_held_until] if state.promotion_held_until else []
    asleep = [["asleep", state.asleep]] if state.asleep else []
    lost = [["lost", state.lost]] if state.lost else []
    suffix = [
        sorted(state.suffix_index.items()),
        list(state.suffix_copies.values()),
        list(state.suffix_answers.items()),
    ]
    return [
        *held,
        *asleep,
        *lost,
        state.seq,
        state.step,
        state.now_us,
        list(state.requests.values()),
        list(state.waiting),
        list(state.draining),
        list(state.transfers.values()),
        sorted(state.prefix.items()),
        sorted(state.index_prefix.items()),
        sorted(state.index_hashes.items()),
        [state.next_epoch, state.next_transfer],
        [state.acked, state.worker_epoch, state.retired],
        *([suffix] if any(suffix) else []),
    ]
