"""The CPU tier of indexer pages, fitted to the state of now. Pure.

Each function gives the event with the columns that can happen now, or None if there is none.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hisparse.fsm import events as ev
from hisparse.fsm.machines import BlockState, BlockTrigger, PageState, RequestState
from hisparse.fsm.rerun.names import RESIDENT, Names, with_columns
from hisparse.fsm.wire import Table

replace = msgspec.structs.replace


def asked(names: Names, e: ev.SuffixAsked) -> ev.SuffixAsked | None:
    request = names.request(e.epoch)
    if request is None or request.state is not RequestState.WAITING:
        return None
    return replace(e, epoch=request.epoch)


def pinned(names: Names, e: ev.SuffixPinned) -> ev.SuffixPinned | None:
    state, request, kept = names.state, names.tenant(e.row), list[tuple[int, ...]]()
    if request is None:
        return None
    fields = ("transfers", "entries", "blocks", "block_epochs", "suffixes", "suffix_epochs")
    table, per_block = state.table(Table.INDEX)[request.row], state.index_pages_per_block
    for ident, old, block, block_was, page, page_was in zip(
        *(getattr(e, name) for name in fields), strict=True
    ):
        entry, block_epoch = names.entry(e.row, RESIDENT, old), names.block(block, block_was)
        if entry < 0 or block_epoch is None or table[entry // per_block] != block:
            continue
        name = request.hashes[entry] if entry < len(request.hashes) else None
        epoch = _loaded(names, page, page_was, name) if e.load else _stored(names, page, name)
        goes = names.block_goes(block, BlockTrigger.written)
        sealed = state.blocks.state[block] == BlockState.CLEAN
        end = (entry + 1) * state.page_size
        certain = end <= state.rows.confirmed[request.row]
        if epoch is None or not (goes if e.load else sealed and certain):
            continue
        names.suffixes[page, page_was] = epoch
        names.transfers[ident] = state.next_transfer + len(kept)
        copy = (names.transfers[ident], entry, block, block_epoch, page, epoch)
        kept.append((*copy, entry % per_block))
    made = with_columns(e, (*fields, "slots"), kept)
    return replace(made, row=request.row, epoch=request.epoch) if kept else None


def _loaded(names: Names, page: int, was: int, name: bytes | None) -> int | None:
    tier, epoch = names.state.suffix, names.suffixes.get((page, was))
    there = tier.state[page] == PageState.PUBLISHED and tier.epoch[page] == epoch
    return epoch if there and tier.hash_of.get(page) == name else None


def _stored(names: Names, page: int, name: bytes | None) -> int | None:
    tier = names.state.suffix
    if name is None or name in names.state.suffix_index or tier.state[page] != PageState.FREE:
        return None
    return tier.epoch.item(page) + 1


def evicted(names: Names, e: ev.SuffixEvicted) -> ev.SuffixEvicted | None:
    tier, kept = names.state.suffix, list[tuple[int, int]]()
    for page, was in zip(e.suffixes, e.suffix_epochs, strict=True):
        epoch = names.suffixes.get((page, was))
        idle = tier.state[page] == PageState.PUBLISHED and not tier.refs[page]
        if epoch is not None and idle and tier.epoch[page] == epoch:
            kept.append((page, epoch))
    return with_columns(e, ("suffixes", "suffix_epochs"), kept) if kept else None


def answered(names: Names, e: Any) -> Any:
    """Completed or failed on a rank: those whose quorum says what the event says."""
    kept, bit = list[int](), 1 << e.rank
    for old in e.transfers:
        copy = names.state.suffix_copies.get(names.transfers.get(old, -1))
        if copy is None or not copy.writers & bit or copy.answered & bit:
            continue
        if e.last == (copy.answered | bit == copy.writers):
            kept.append(copy.transfer)
    return replace(e, transfers=tuple(kept)) if kept else None
