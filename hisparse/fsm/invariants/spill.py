"""`spill_before_free`: whoever takes or writes a block finds nothing there that only it has.

One of the invariants of a run (`invariants.run`), and the one with the most ways to be broken: a
block is given back, handed out, or written by a step, a copy of index rows or a restore.
"""

from __future__ import annotations

from collections.abc import Iterator

from hisparse.fsm import events as ev
from hisparse.fsm.invariants.facts import Place, Run
from hisparse.fsm.invariants.records import Tenant
from hisparse.fsm.machines import BlockRole
from hisparse.fsm.wire import TransferKind


def spill_before_free(run: Run, e: ev.Event) -> Iterator[str]:
    """No block is given back, handed out or written over while it holds what only it has."""
    match e:
        case ev.BlocksReleased() | ev.PagesSpilled():
            yield from _given_back(run, e)
        case ev.BlocksReserved() | ev.HotLeased() | ev.BlocksEvicted():
            for block in e.blocks:
                if run.holders.get(block):
                    yield f"block {block} is taken while it is {_names(run.holders[block])}"
                yield from _copied_from(run, block)
        case ev.StepPlanned():
            for row, start in zip(e.rows, e.starts, strict=True):
                if row in run.rows and start < run.rows[row].computed:
                    yield f"row {row} computes row {start} again, which was accepted"
            for place in run.written(e):
                own = run.block_at.get(place)
                if own is None or len(run.holders[own]) > 1 or own in run.copy_of_block:
                    yield from _overwritten(run, place)
        case ev.IndexPagesCopied():
            for block in dict.fromkeys(e.blocks):
                held = [place for place in run.holders.get(block, ()) if place[1] == e.row]
                yield from _overwritten(run, held[0] if held else (BlockRole.INDEX, e.row, -1))
        case ev.TransferPinned() if e.kind is TransferKind.RESTORE:
            named = zip(e.owners(), e.entries, e.blocks, e.pages, strict=True)
            for (row, _), entry, block, page in named:
                yield from _overwritten(run, (BlockRole.RESIDENT, row, entry))
                if run.host.get(row, {}).get(entry) != page:
                    yield f"block {block} is restored from page {page}, no copy of entry {entry}"


def _names(places: set[Place]) -> str:
    return ", ".join(f"{role.name} entry {at} of row {row}" for role, row, at in sorted(places))


def _given_back(run: Run, e: ev.BlocksReleased | ev.PagesSpilled) -> Iterator[str]:
    role = e.role if isinstance(e, ev.BlocksReleased) else BlockRole.RESIDENT
    tenant = run.rows.get(e.row)
    for entry, block in zip(e.entries, e.blocks, strict=True):
        held = run.holders.get(block, set())
        if (role, e.row, entry) not in held:
            yield f"row {e.row} gives back block {block}, which it does not hold at entry {entry}"
        if e.trigger is not None and len(held) > 1:
            yield f"block {block} is {e.trigger.name} while it is {_names(held)}"
        yield from _copied_from(run, block)
        if role is BlockRole.RESIDENT and tenant is not None and tenant.live:
            yield from _only_copy(run, tenant, e.row, entry, block)


def _only_copy(run: Run, tenant: Tenant, row: int, entry: int, block: int) -> Iterator[str]:
    first, end = entry * run.page_size, (entry + 1) * run.page_size
    if first >= tenant.computed:
        return
    page = run.host.get(row, {}).get(entry)
    if page is None:
        yield f"block {block} is given back with the only copy of page {entry} of row {row}"
        return
    copy = run.page_writer.get(page)
    if page in run.page_hash or copy is None:
        return  # found by prefix: complete, and leased (`one_content` checks the lease)
    same = copy.block == block or run.restored.get(block) == page
    if not same or copy.rows_end < min(tenant.computed, end):
        yield f"block {block} is given back, transfer {copy.ident} copied other rows than it holds"
    elif not copy.readable:
        yield (
            f"block {block} is given back, its copy (transfer {copy.ident}) is enqueued on "
            f"ranks {copy.enqueued | copy.completed:b} of {copy.readers:b}"
        )


def _copied_from(run: Run, block: int) -> Iterator[str]:
    """A planned copy still needs the block: to read it, or (a restore) to write it."""
    copy = run.copy_of_block.get(block)
    if copy is not None and (copy.kind is TransferKind.RESTORE or not copy.queued):
        yield f"block {block} changes hands under transfer {copy.ident}, which is not in its stream"


def _overwritten(run: Run, place: Place) -> Iterator[str]:
    """What is written must be the writer's own block, alone, and not the source of a copy."""
    block = run.block_at.get(place)
    if block is None:
        yield f"row {place[1]} writes {place[0].name} entry {place[2]}, which names no block"
        return
    others = run.holders[block] - {place}
    if others:
        yield f"block {block} is written by row {place[1]} while it is {_names(others)}"
    copy = run.copy_of_block.get(block)
    if copy is not None and copy.kind is not TransferKind.RESTORE and not copy.queued:
        yield f"block {block} is written while transfer {copy.ident} has yet to read it"
