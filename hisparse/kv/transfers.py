"""Planning page copies: leases are taken at the moment the copy becomes intended, not when sent."""

from __future__ import annotations

import numpy as np

from hisparse.fsm.events import TransferPinned
from hisparse.fsm.state import State
from hisparse.fsm.wire import Table, TransferKind
from hisparse.kv.block_pool import block_epochs
from hisparse.kv.decision import I64, Decision, ints
from hisparse.kv.host_pool import page_epochs


def pin(state: State, kind: TransferKind, row: int, entries: I64, cause: int) -> Decision[None]:
    """Plan a copy of table entries `entries` of `row`, from GPU to host or (RESTORE) back.

    Copies to the host fill the request's reservation in order. Every rank reads its own source;
    every rank writes its own destination.
    """
    if not len(entries):
        return
    request = state.request_of(row)
    n = len(entries)
    if kind is TransferKind.RESTORE:
        pages = state.table(Table.HOST)[row, entries].astype(np.int64)
    else:
        assert len(request.reserved) >= n, f"{request.key} has no host page reserved for a copy"
        pages = np.array(request.reserved[:n], dtype=np.int64)
    blocks = state.table(Table.RESIDENT)[row, entries].astype(np.int64)
    ranks = (1 << state.config.ranks) - 1
    first = state.next_transfer
    yield TransferPinned(
        cause, kind, row, request.epoch, ranks, ranks, ints(range(first, first + n)),
        ints(entries), ints(blocks), block_epochs(state, blocks),
        ints(pages), page_epochs(state, pages),
    )  # fmt: skip


def pin_rows(
    state: State, kind: TransferKind, rows: I64, entries: I64, cause: int
) -> Decision[None]:
    """The same for several rows at once, to the host: entry `entries[i]` of `rows[i]`."""
    if not len(rows):
        return
    if rows[0] == rows[-1] and (rows == rows[0]).all():
        yield from pin(state, kind, int(rows[0]), entries, cause)
        return
    pages: list[int] = []
    epochs: list[int] = []
    taken: dict[int, int] = {}
    for row in rows.tolist():
        request, at = state.request_of(row), taken.get(row, 0)
        assert at < len(request.reserved), f"{request.key} has no host page reserved for a copy"
        pages.append(request.reserved[at])
        epochs.append(request.epoch)
        taken[row] = at + 1
    blocks = state.table(Table.RESIDENT)[rows, entries].astype(np.int64)
    ranks = (1 << state.config.ranks) - 1
    first = state.next_transfer
    yield TransferPinned(
        cause, kind, -1, -1, ranks, ranks, ints(range(first, first + len(rows))),
        ints(entries), ints(blocks), block_epochs(state, blocks),
        tuple(pages), page_epochs(state, np.array(pages, dtype=np.int64)),
        ints(rows), tuple(epochs),
    )  # fmt: skip
