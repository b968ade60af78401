"""Admission: a waiting request gets its row and all its promises at once, or waits for a named one.

Budgets checked together: request rows, host pages, and GPU blocks for the steady-state need (index
blocks to the end; hot region and resident window with lookahead, or all pages where they are no
more). So nobody waits for GPU blocks who would have them all-resident. What a spill could reclaim
counts: it is reclaimed before the answer is "wait". Lookup leases what it promises in the same
decision.

    prompt pages    0 ....... local ....... hit ......................... pages_max
    resident        adopted / restored        | window, then while there is room
    host            leased (published)        | reserved, filled as pages seal
    index           shared, copied | loaded   | reserved as pages are given a place

`make_room` says whether a request fits with what both tiers hold of its prefix (`local`). Between
it and `admit`, which always succeeds then, the suffix source is asked for the pages up to `hit`.
"""

from __future__ import annotations

import numpy as np

from hisparse.config import ceil_div
from hisparse.fsm import events as ev
from hisparse.fsm.machines import BlockRole, BlockState
from hisparse.fsm.state import Request, State
from hisparse.fsm.wire import Table, TransferKind
from hisparse.kv.block_pool import block_epochs, next_block_epochs, take_blocks
from hisparse.kv.budget import passing_pages, spare, stays
from hisparse.kv.decision import I64, Decision, ints
from hisparse.kv.host_pool import next_page_epochs, page_epochs, take_pages
from hisparse.kv.policies.registry import policy_of
from hisparse.kv.prefix import find_prefix
from hisparse.kv.residency import lease_hot, reclaim
from hisparse.kv.suffix import SuffixSource, promised_suffix
from hisparse.kv.transfers import pin

Binding = tuple[str, int, int]  # resource, need, have


def never_fits(state: State, prompt_tokens: int, max_tokens: int) -> Binding | None:
    """The resource that is too small for such a request even in an empty system, if any."""
    config = state.config
    if max_tokens > config.schedule.max_model_len:
        return ("max_model_len", max_tokens, config.schedule.max_model_len)
    blocks = config.steady_blocks(max_tokens)
    if blocks > config.pools.gpu_blocks - 1:
        return ("gpu_blocks", blocks, config.pools.gpu_blocks - 1)
    pages = ceil_div(max_tokens, config.pools.page_size)
    if config.offload and pages > config.host_pages - 1:
        return ("host_pages", pages, config.host_pages - 1)
    return None


def make_room(state: State, request: Request, cause: int) -> Decision[bool]:
    """Whether every budget holds `request` now; else emit which one does not."""
    binding = _binding(state, request)
    if binding is not None and binding[0] == "gpu_blocks":
        yield from reclaim(state, binding[1] - binding[2], cause, "admission")
        binding = _binding(state, request)
    if binding is not None and request.deferred != binding[0]:
        yield ev.AdmissionDeferred(cause, request.request, request.epoch, *binding)
    return binding is None


def admit(
    state: State, request: Request, cause: int, suffix: SuffixSource | None = None
) -> Decision[None]:
    """Admit `request`, for which room was made."""
    config = state.config
    # Looked up only now: reclaiming may evict what an earlier look-up would have promised.
    local = local_hit(state, request)
    hit = local + promised_suffix(state, request, local)
    pages_max = ceil_div(request.max_tokens, config.pools.page_size)
    steady = config.steady_blocks(request.max_tokens)
    row = int(np.argmin(state.rows.used))
    tokens = hit * config.pools.page_size
    yield ev.RequestAdmitted(cause, request.request, request.epoch, row, tokens, steady)
    if hit:
        pages = _prefix_pages(state, request, hit)
        yield ev.PrefixLeased(cause, row, ints(pages), page_epochs(state, pages))
    if config.offload and pages_max > hit:
        fresh = yield from take_pages(state, pages_max - hit, cause)
        yield ev.HostPagesReserved(cause, row, ints(fresh), next_page_epochs(state, fresh))
    if hit:
        yield from _share_index(state, request, local, hit, cause)
        if suffix is not None and hit > local:
            yield from suffix.load(row, local, hit, cause)
    if config.offload and policy_of(state).host_first and not stays(state)[row]:
        yield from lease_hot(state, row, cause)
    elif hit:
        yield from _place_hit(state, row, hit, cause)


def _binding(state: State, request: Request) -> Binding | None:
    """The first budget that does not hold `request` now, or None if all do."""
    config = state.config
    if state.rows.used.all():
        return ("rows", 1, 0)
    hit = local_hit(state, request)
    if config.offload:
        need = ceil_div(request.max_tokens, config.pools.page_size) - hit
        idle = np.count_nonzero(state.pages.refs[_prefix_pages(state, request, hit)] == 0)
        have = state.pages.available - int(idle)  # those will be leased, not evicted
        if need > have:
            return ("host_pages", need, have)
    need = config.steady_blocks(request.max_tokens)
    need += len(_cached_index_sources(state, request, hit))
    if state.rows.live.any():
        need += passing_pages(state, request, hit)
    if spare(state) < need:
        return ("gpu_blocks", need, spare(state))
    return None


def local_hit(state: State, request: Request) -> int:
    """Pages of the prompt that both tiers hold and need not be computed; its last row always is."""
    if not state.config.offload:
        return 0
    most = (request.prompt_tokens - 1) // state.page_size
    hit = find_prefix(state, request.hashes, most)
    # Blocks that indexer rows are copied from stay cached meanwhile: in a pool that has no room for
    # them a shorter hit is taken, or the request would wait for ever.
    room = len(state.blocks.state) - 1 - state.config.steady_blocks(request.max_tokens)
    while hit and len(_cached_index_sources(state, request, hit)) > room:
        hit -= 1
    return hit


def _prefix_pages(state: State, request: Request, hit: int) -> I64:
    return np.array([state.prefix[h] for h in request.hashes[:hit]], dtype=np.int64)


# -- indexer rows of the hit: whole blocks are shared, the rest is copied on the GPU ---------------


def _shareable(state: State, request: Request, entry: int) -> int:
    """The block that holds exactly pages ``[entry*P, (entry+1)*P)`` of the request, or 0."""
    per_block = state.index_pages_per_block
    wanted = request.hashes[entry * per_block : (entry + 1) * per_block]
    places = [state.index_prefix[h] for h in wanted]
    block = places[0][0]
    whole = places == [(block, slot) for slot in range(per_block)]
    final = state.blocks.state[block] in (BlockState.CLEAN, BlockState.CACHED)
    return block if whole and final else 0


def _copied_pages(state: State, request: Request, hit: int) -> list[int]:
    """Pages of the hit whose indexer rows cannot be shared in place."""
    per_block = state.index_pages_per_block
    whole = [e for e in range(hit // per_block) if _shareable(state, request, e)]
    shared = {page for e in whole for page in range(e * per_block, (e + 1) * per_block)}
    return [page for page in range(hit) if page not in shared]


def _cached_index_sources(state: State, request: Request, hit: int) -> frozenset[int]:
    """Cached blocks that indexer pages must be copied from: they may not be evicted for it."""
    pages = _copied_pages(state, request, hit)
    sources = {state.index_prefix[request.hashes[page]][0] for page in pages}
    return frozenset(b for b in sources if state.blocks.state[b] == BlockState.CACHED)


def _share_index(
    state: State, request: Request, local: int, hit: int, cause: int
) -> Decision[None]:
    """Index blocks of the hit: shared, or filled from the GPU up to page `local`; for those of
    pages ``[local, hit)``, which are loaded afterwards, there is just a place."""
    per_block, row = state.index_pages_per_block, request.row
    copied = _copied_pages(state, request, local)
    places = [state.index_prefix[request.hashes[page]] for page in copied]
    keep = _cached_index_sources(state, request, local)
    own = sorted({page // per_block for page in (*copied, *range(local, hit))})
    whole = [e for e in range(local // per_block) if e not in own]
    if whole:
        blocks = np.array([_shareable(state, request, e) for e in whole], dtype=np.int64)
        yield ev.BlocksAdopted(
            cause, BlockRole.INDEX, row, ints(whole), ints(blocks), block_epochs(state, blocks)
        )
    if not own:
        return
    fresh = yield from take_blocks(state, len(own), cause, keep=keep)
    for entry, block in zip(own, fresh, strict=True):
        one = np.array([block])
        epochs = next_block_epochs(state, one)
        yield ev.BlocksReserved(cause, BlockRole.INDEX, row, entry, ints(one), epochs)
    if not copied:
        return
    sources = np.array([block for block, _ in places], dtype=np.int64)
    table = state.table(Table.INDEX)[row]
    yield ev.IndexPagesCopied(
        cause,
        row,
        ints(sources),
        block_epochs(state, sources),
        ints(slot for _, slot in places),
        ints(int(table[page // per_block]) for page in copied),
        ints(page % per_block for page in copied),
    )


# -- latent rows of the hit: where a GPU copy lives, adopt it; while there is room, restore -------


def _place_hit(state: State, row: int, hit: int, cause: int) -> Decision[None]:
    pages = state.table(Table.HOST)[row, :hit].astype(np.int64)
    blocks = state.pages.partner[pages].astype(np.int64)
    cached = state.blocks.state[blocks] == BlockState.CACHED
    stay = bool(stays(state)[row])
    entries = np.flatnonzero(cached)[: None if stay else spare(state)]
    if len(entries):
        adopted = blocks[entries]
        epochs = block_epochs(state, adopted)
        yield ev.BlocksAdopted(cause, BlockRole.RESIDENT, row, ints(entries), ints(adopted), epochs)
    missing = np.flatnonzero(state.table(Table.RESIDENT)[row, :hit] == 0)
    if not len(missing):
        return
    if not stay and spare(state) < len(missing) + state.config.policy.watermark_blocks:
        yield from lease_hot(state, row, cause)
        return
    fresh = yield from take_blocks(state, len(missing), cause)
    for entry, block in zip(missing.tolist(), fresh, strict=True):
        one = np.array([block])
        epochs = next_block_epochs(state, one)
        yield ev.BlocksReserved(cause, BlockRole.RESIDENT, row, entry, ints(one), epochs)
    yield from pin(state, TransferKind.RESTORE, row, missing, cause)
