"""Facts of a run that is taken up at a snapshot, because a gap hides how it came to that. Pure.

Who holds what, who is computed how far, and which transfers are under way are taken from the state,
which is then believed. What no state holds stays unknown, and is never guessed: what ranks answered
before (a transfer under way counts as answered by all), which rows a settled copy copied, and whose
content an idle block holds. `NEEDS_HISTORY` are the invariants that cannot be judged without.
"""

from __future__ import annotations

import numpy as np

from hisparse.fsm.invariants.facts import Run
from hisparse.fsm.invariants.records import Copy, Tenant
from hisparse.fsm.invariants.suffix_facts import IndexCopy
from hisparse.fsm.machines import BlockRole, PageState, TransferState
from hisparse.fsm.state import State
from hisparse.fsm.wire import Table, TransferKind

NEEDS_HISTORY = ("complete_before_publish", "one_content")


def inherited(state: State) -> Run:
    """What is known of a run whose state is `state`."""
    config = state.config
    run = Run(config.pools.page_size, config.index_pages_per_block, config.ranks)
    run.retired, run.step = list(state.retired), state.step
    _requests(run, state)
    for role in (BlockRole.RESIDENT, BlockRole.INDEX, BlockRole.HOT):
        table = state.table(Table(role))
        for row, entry in np.argwhere(table).tolist():
            place, block = (role, row, entry), table.item(row, entry)
            run.holders.setdefault(block, set()).add(place)
            run.block_at[place] = block
    for epochs, known in (
        (state.blocks.epoch, run.block_epoch),
        (state.pages.epoch, run.page_epoch),
    ):
        ids = np.flatnonzero(epochs)
        known.update(zip(ids.tolist(), epochs[ids].tolist(), strict=True))
    run.page_hash = dict(state.pages.hash_of)
    for page in np.flatnonzero(state.pages.state == PageState.FAILED).tolist():
        run.page_writer[page] = Copy(
            0, TransferKind.SPILL, -1, -1, 0, 0, page, 0, 0, 0, failed=1, settled=True
        )
    _transfers(run, state)
    _suffix(run, state)
    return run


def _requests(run: Run, state: State) -> None:
    host, rows = state.table(Table.HOST), state.rows
    for key, request in state.requests.items():
        tenant = run.tenants[key] = Tenant(request.request, request.epoch, list(request.hashes))
        tenant.live = request.live
        row = request.row
        if row < 0:
            continue
        run.rows[row] = tenant
        tenant.computed, tenant.planned = rows.computed.item(row), rows.planned.item(row)
        tenant.published, tenant.last_step = rows.published.item(row), rows.last_step.item(row)
        tenant.leased = min(tenant.published, request.hit_tokens // state.page_size)
        named = np.flatnonzero(host[row])
        run.host[row] = dict(zip(named.tolist(), host[row, named].tolist(), strict=True))
        for page in (*run.host[row].values(), *request.reserved):
            run.leases.setdefault(page, set()).add(row)


def _transfers(run: Run, state: State) -> None:
    for ident, t in state.transfers.items():
        failing = t.state is TransferState.FAILING
        copy = Copy(
            ident, t.kind, t.row, t.entry, t.epoch, t.block, t.page, t.readers, t.writers,
            rows_end=(t.entry + 1) * run.page_size, enqueued=t.readers, completed=t.writers,
            failed=t.writers * failing, told=failing, assumed=True,
        )  # fmt: skip
        run.copies[ident] = run.copy_of_block[t.block] = copy
        if t.kind is TransferKind.RESTORE:
            run.reads_of_page.setdefault(t.page, set()).add(ident)
        else:
            run.page_writer[t.page] = copy


def _suffix(run: Run, state: State) -> None:
    """The CPU tier of indexer pages: what is stored, and the copies under way, whose ranks count as
    having said whatever is claimed of them later: only `NEEDS_HISTORY` asks more of it."""
    held = run.suffix
    held.hash_of = dict(state.suffix.hash_of)
    ids = np.flatnonzero(state.suffix.epoch)
    held.epochs.update(zip(ids.tolist(), state.suffix.epoch[ids].tolist(), strict=True))
    for ident, c in state.suffix_copies.items():
        slot = c.entry % run.index_pages_per_block
        copy = IndexCopy(
            ident, c.load, c.epoch, c.block, slot, c.suffix, c.writers,
            completed=c.writers, failed=c.writers,
        )  # fmt: skip
        held.copies[ident] = copy
        if c.load:
            held.unsure.add((c.block, slot))
        else:
            held.store_of[c.suffix] = copy
