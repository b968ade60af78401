"""canonical: what of a scheduler's state its future depends on, under names that say nothing else.

Blocks, pages, transfers and requests are numbered in the order in which a walk over the state meets
them: requests by arrival, their table entries in order, then what is cached, least recently used
first. Sequence numbers, epochs and step numbers appear only as far as something compares them. Two
states with equal keys differ by a renaming; the search goes on from the first of them alone.

`exact` tells host pages apart by their ids: the allocator of the host pool looks at which ids are
adjacent, so that to rename pages is to leave out that a neighbour would have been chosen. `plain`
renames nothing at all.
"""

from __future__ import annotations

from typing import Any

from hisparse.fsm.machines import BlockState, PageState
from hisparse.fsm.state import Request, State
from hisparse.fsm.wire import Table
from hisparse.testing.explore.world import World

FREE_BLOCK, FREE_PAGE = int(BlockState.FREE), int(PageState.FREE)
COUNTERS = ("computed", "planned", "confirmed", "unsettled", "published", "pages", "live")
HELD = ("resident", "index", "hot", "spilling")
FAILURES_MAX = 17  # of a request: the coordinator does not count further


class Labels:
    """Numbers for ids, given out as they are met."""

    def __init__(self, world: World, exact: bool, plain: bool) -> None:
        self.blocks: dict[int, int] = {0: 0}
        self.pages: dict[int, int] = {0: 0}
        self.names: dict[str, int] = {}
        self.exact, self.plain = exact or plain, plain
        if plain:
            self.names.update(zip(world.names, range(world.requests), strict=True))

    def block(self, ident: int) -> int:
        label = self.blocks.setdefault(ident, len(self.blocks))
        return ident if self.plain else label

    def page(self, ident: int) -> int:
        label = self.pages.setdefault(ident, len(self.pages))
        return ident if self.exact else label

    def name(self, name: str) -> int:
        return self.names.setdefault(name, len(self.names))

    def content(self, world: World, page_hash: bytes) -> tuple[int, int]:
        number, page = world.contents[page_hash]
        return (-1 if number < 0 else self.name(world.names[number]), page)


def canonical(
    world: World, state: State, extra: Any, exact: bool, plain: bool = False
) -> tuple[Any, tuple[str, ...]]:
    """The key of `state` with `extra`, and the requests' names by their numbers in it."""
    labels = Labels(world, exact, plain)
    rows_of = {name: getattr(state.rows, name).tolist() for name in (*COUNTERS, *HELD)}
    last_step = state.rows.last_step.tolist()
    tables = [state.table(table).tolist() for table in Table]
    lag = max(state.step - retired for retired in state.retired)
    requests = [
        _request(world, state, request, labels, rows_of, last_step, tables, lag)
        for request in state.requests.values()
    ]
    index = {key: i for i, key in enumerate(state.requests)}
    transfers = [_transfer(state, t, labels, index) for t in state.transfers.values()]
    cached = [labels.block(b) for b in state.blocks.cached.ordered().tolist()]
    evictable = [labels.page(p) for p in state.pages.evictable.ordered().tolist()]
    key = (
        tuple(requests),
        tuple(transfers),
        tuple([index[k] for k in state.draining]),
        tuple([index[k] for k in state.rewinding]),
        tuple(cached),
        tuple(state.blocks.free.ordered().tolist()) if plain else None,
        tuple(evictable),
        _blocks(world, state, labels),
        _pages(world, state, labels),
        max(state.promotion_held_until - state.step, 0),
        tuple([state.step - retired for retired in state.retired]),
        (state.asleep, state.lost),
        extra,
    )
    left = [name for name in world.names if name not in labels.names]
    return key, (*labels.names, *left)


def _request(
    world: World,
    state: State,
    q: Request,
    labels: Labels,
    rows_of: dict[str, list[int]],
    last_step: list[int],
    tables: list[list[list[int]]],
    lag: int,
) -> tuple[Any, ...]:
    row = q.row
    common = (
        labels.name(q.request), int(q.state), row, int(q.hot), q.hit_tokens, q.in_flight,
        min(q.failures, FAILURES_MAX), q.deferred, len(q.hashes),
    )  # fmt: skip
    if row < 0:
        return common
    resident, host, indexed, hot = (table[row] for table in tables)
    return (
        *common,
        tuple([labels.page(p) for p in q.reserved]),
        tuple([column[row] for column in rows_of.values()]),
        min(state.step - last_step[row], lag),  # all ranks have retired what is as old as the lag
        tuple([labels.block(b) for b in resident]),
        tuple([labels.page(p) for p in host]),
        tuple([labels.block(b) for b in indexed]),
        tuple([labels.block(b) for b in hot]),
    )


def _transfer(state: State, t: Any, labels: Labels, index: dict[Any, int]) -> tuple[Any, ...]:
    owner = state.by_row[t.row]
    return (
        int(t.kind), -1 if owner is None else index[owner.key], t.entry,
        labels.block(t.block) if t.holds_block else 0, labels.page(t.page),
        int(t.state), t.enqueued, t.completed, t.holds_block,
    )  # fmt: skip


def _blocks(world: World, state: State, labels: Labels) -> tuple[Any, ...]:
    b = state.blocks
    states, roles, refs = b.state.tolist(), b.role.tolist(), b.refs.tolist()
    partners = b.partner.tolist()
    for ident, now in enumerate(states):
        if now != FREE_BLOCK:
            labels.block(ident)  # of a sound state all are known by now
    found = []
    for ident in range(len(states)) if labels.plain else list(labels.blocks):
        hashes = [labels.content(world, h) for h in state.index_hashes.get(ident, ())]
        places = [
            (content, state.index_prefix.get(h))
            for h, content in zip(state.index_hashes.get(ident, ()), hashes, strict=True)
        ]
        named = tuple([(c, -1 if at is None or at[0] != ident else at[1]) for c, at in places])
        role = roles[ident] if states[ident] != FREE_BLOCK else 0
        partner = labels.page(partners[ident])
        found.append((states[ident], role, refs[ident], partner, named))
    return tuple(found)


def _pages(world: World, state: State, labels: Labels) -> tuple[Any, ...]:
    p = state.pages
    states, refs, partners = p.state.tolist(), p.refs.tolist(), p.partner.tolist()
    for ident, now in enumerate(states):
        if now != FREE_PAGE:
            labels.page(ident)
    found = []
    for ident in range(len(states)) if labels.exact else list(labels.pages):
        page_hash = p.hash_of.get(ident)
        content = None if page_hash is None else labels.content(world, page_hash)
        found.append((states[ident], refs[ident], labels.block(partners[ident]), content))
    return tuple(found)
