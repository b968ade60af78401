"""BlockPool: the scheduler's view of the packed GPU allocation. Owns ids, no bytes, no KV meaning.

A block is taken from the free queue, and from the cached blocks (least recently used first) when
that is empty; a cached block loses its content, by a BlocksEvicted, before it is handed out. Among
the oldest, resident pages go before index blocks: a page can be restored from the host, and without
its indexer rows no page of the prefix is found.

QUARANTINED blocks and pages count as neither free nor leased, and hold a reset back. Nothing here
puts one there: how a copy on this node ended is told by its rank, which keeps saying so until it
was taken in. The state is for writers that may never say, such as a peer's import.

    0      null, never given out
    free   -> BlocksReserved          cached -> BlocksEvicted -> free
"""

from __future__ import annotations

import numpy as np

from hisparse.errors import CapacityError
from hisparse.fsm.events import BlocksEvicted, Ints
from hisparse.fsm.machines import BlockRole
from hisparse.fsm.state import State
from hisparse.kv.decision import I64, Decision, ints

NOTHING = frozenset[int]()
EVICTION_WINDOW = 256  # cached blocks, oldest first, among which the choice is made


def next_block_epochs(state: State, blocks: I64) -> Ints:
    """The epoch that each block gets by its next reservation."""
    return ints(state.blocks.epoch[blocks].astype(np.int64) + 1)


def block_epochs(state: State, blocks: I64) -> Ints:
    return ints(state.blocks.epoch[blocks])


def take_blocks(
    state: State, n: int, cause: int, *, keep: frozenset[int] = NOTHING
) -> Decision[I64]:
    """Pick `n` blocks to reserve, evicting cached ones as needed, but none of `keep`.

    Raises CapacityError if there are not enough: callers ask `kv.budget` first.
    """
    short = n - state.blocks.free.count
    if short > 0:
        cached = state.blocks.cached.peek(max(short + len(keep), EVICTION_WINDOW))
        if keep:
            cached = cached[~np.isin(cached, list(keep))]
        is_index = state.blocks.role[cached] == BlockRole.INDEX
        cached = cached[np.argsort(is_index, kind="stable")][:short]
        if len(cached) < short:
            raise CapacityError(
                f"{n} GPU blocks wanted, {state.blocks.free.count} free and {len(cached)} cached: "
                "the budget promised blocks that the pool does not have"
            )
        yield BlocksEvicted(cause, ints(cached), block_epochs(state, cached))
    blocks = state.blocks.free.peek(n)
    assert len(blocks) == n, (len(blocks), n)
    return blocks
