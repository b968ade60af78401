"""Emptying the caches: what a reset forgets, in both tiers, by event.

Only where nothing is leased: every block and page is free, or cached for a prefix that may come.
What goes loses its content first, as in any eviction, so that afterwards both pools are wholly free
and the next lookup finds nothing.
"""

from __future__ import annotations

from hisparse.fsm.events import BlocksEvicted, HostPagesEvicted
from hisparse.fsm.state import State
from hisparse.kv.block_pool import block_epochs
from hisparse.kv.decision import Decision, ints
from hisparse.kv.host_pool import page_epochs
from hisparse.kv.suffix import SuffixSource


def holders(state: State) -> str:
    """Who still leases something, in words; empty when nobody does. Requests that wait do not."""
    held = [f"{request.request}/{request.epoch}" for request in state.by_row if request is not None]
    if held:
        return f"requests {', '.join(held[:8])}{' and more' if len(held) > 8 else ''}"
    flying = len(state.transfers) + len(state.suffix_copies)
    if flying:
        return f"{flying} transfers in flight"
    kept = len(state.blocks.state) - 1 - state.blocks.available
    kept += len(state.pages.state) - 1 - state.pages.available
    return f"{kept} blocks and pages in quarantine" if kept else ""


def drop_gpu(state: State, cause: int) -> Decision[None]:
    """Every cached block, resident and index, loses its content."""
    cached = state.blocks.cached.ordered()
    if len(cached):
        yield BlocksEvicted(cause, ints(cached), block_epochs(state, cached))


def drop_host(state: State, cause: int) -> Decision[None]:
    """Every published page loses its content and its place in the index."""
    idle = state.pages.evictable.ordered()
    if len(idle):
        yield HostPagesEvicted(cause, ints(idle), page_epochs(state, idle))


def drop_all(state: State, suffix: SuffixSource | None, cause: int) -> Decision[None]:
    """Both tiers, and what `suffix` stores, are empty afterwards. Raises AssertionError if
    something was leased after all."""
    if suffix is not None:
        yield from suffix.drop(cause)
    yield from drop_gpu(state, cause)
    yield from drop_host(state, cause)
    assert state.blocks.free.count == len(state.blocks.state) - 1, "a block is still in use"
    assert state.pages.free.count == len(state.pages.state) - 1, "a host page is still in use"
    tier = state.suffix
    assert not state.suffix_index and tier.free.count == max(len(tier.state) - 1, 0)
    assert not state.prefix and not state.index_prefix, "a prefix still finds something"
