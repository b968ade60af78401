"""Invariants of a run, for the CPU tier of indexer pages: the promises of `run.py` under the names
that they have there, kept from facts of their own. Pure; shares no code with `decide` or `evolve`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hisparse.fsm import events as ev
from hisparse.fsm.invariants.facts import Run
from hisparse.fsm.machines import BlockRole


def _named(e: ev.SuffixPinned) -> Iterator[tuple[int, int, int]]:
    return zip(e.entries, e.suffixes, e.suffix_epochs, strict=True)


def one_content(run: Run, e: ev.Event) -> Iterator[str]:
    """A page of the tier holds the page that it is loaded as; epochs rise at every reuse."""
    if not isinstance(e, ev.SuffixPinned):
        return
    tenant, s = run.rows.get(e.row), run.suffix
    hashes = tenant.hashes if tenant is not None else []
    for entry, page, epoch in _named(e):
        wanted = hashes[entry : entry + 1]
        if e.load and ([s.hash_of.get(page)] != wanted or s.epochs.get(page) != epoch):
            yield f"row {e.row} loads suffix page {page} as page {entry}, which it does not hold"
        if not e.load and (epoch <= s.epochs.get(page, 0) or not wanted):
            yield f"suffix page {page} is given out again under epoch {epoch}"


def complete_before_publish(run: Run, e: ev.Event) -> Iterator[str]:
    """Only pages whose store every rank saw complete are loaded, and only what was loaded for good
    is stored again."""
    if isinstance(e, ev.SuffixPinned) and not e.load:
        for at in zip(e.blocks, e.slots, strict=True):
            if at in run.suffix.unsure:
                yield f"slot {at[1]} of block {at[0]} is stored, and its load did not complete"
    if isinstance(e, ev.SuffixPinned) and e.load:
        for page in e.suffixes:
            store = run.suffix.store_of.get(page)
            if store is None or store.failed or store.completed & store.writers != store.writers:
                yield f"suffix page {page} is loaded, and its store is not complete on every rank"


def publish_accepted_only(run: Run, e: ev.Event) -> Iterator[str]:
    """Only computed and accepted rows are stored."""
    if isinstance(e, ev.SuffixPinned) and not e.load:
        tenant = run.rows.get(e.row)
        computed = tenant.computed if tenant is not None else 0
        for entry in e.entries:
            if (entry + 1) * run.page_size > computed:
                yield f"row {e.row} stores page {entry}, computed {computed} rows"


def host_reuse_after_readers(run: Run, e: ev.Event) -> Iterator[str]:
    """A page of the tier changes hands when no copy reads or writes it."""
    if isinstance(e, ev.SuffixEvicted) or (isinstance(e, ev.SuffixPinned) and not e.load):
        for page in e.suffixes:
            busy = run.suffix.flying(suffix=page)
            if busy:
                yield f"suffix page {page} changes hands under transfers {busy}"


def spill_before_free(run: Run, e: ev.Event) -> Iterator[str]:
    """An index block stays with its owner until its copies to and from the tier are over."""
    if isinstance(e, ev.BlocksReserved | ev.HotLeased | ev.BlocksEvicted) or (
        isinstance(e, ev.BlocksReleased) and e.role is BlockRole.INDEX and e.trigger is not None
    ):
        for block in e.blocks if run.suffix.copies else ():
            busy = run.suffix.flying(block=block)
            if busy:
                yield f"block {block} changes hands under transfers {busy}"


def rank_quorum(run: Run, e: ev.Event) -> Iterator[str]:
    """Ranks are declared when a copy is planned; each counts once it said so, and no other does."""
    if isinstance(e, ev.SuffixPinned) and (not e.writers or e.writers & ~run.ranks):
        yield f"transfers {e.transfers} declare writers {e.writers:b} of ranks {run.ranks:b}"
    elif isinstance(e, ev.SuffixCompleted | ev.SuffixFailed):
        failed = isinstance(e, ev.SuffixFailed)
        for copy in [run.suffix.copies[i] for i in e.transfers if i in run.suffix.copies]:
            said = copy.failed if failed else copy.completed
            want = copy.writers if e.last else 1 << e.rank
            if not said >> e.rank & 1 or (copy.completed | copy.failed) & want != want:
                yield f"transfer {copy.ident} counts as answered by {want:b}, ranks did not"


def settle_once(run: Run, e: ev.Event) -> Iterator[str]:
    """No copy moves on after it settled, and none that was never planned."""
    if isinstance(e, ev.SuffixCompleted | ev.SuffixFailed):
        for ident in e.transfers:
            copy = run.suffix.copies.get(ident)
            if copy is None or copy.settled:
                yield f"transfer {ident} settles twice, or was never planned"


# The kinds of event that each judges: it says nothing of any other.
JUDGED: dict[str, tuple[type[ev.Event], ...]] = {
    "spill_before_free": (ev.BlocksReserved, ev.HotLeased, ev.BlocksEvicted, ev.BlocksReleased),
    "complete_before_publish": (ev.SuffixPinned,),
    "publish_accepted_only": (ev.SuffixPinned,),
    "one_content": (ev.SuffixPinned,),
    "rank_quorum": (ev.SuffixPinned, ev.SuffixCompleted, ev.SuffixFailed),
    "settle_once": (ev.SuffixCompleted, ev.SuffixFailed),
    "host_reuse_after_readers": (ev.SuffixPinned, ev.SuffixEvicted),
}
CHECKS: dict[str, Callable[[Run, ev.Event], Iterator[str]]] = {
    "spill_before_free": spill_before_free,
    "complete_before_publish": complete_before_publish,
    "publish_accepted_only": publish_accepted_only,
    "one_content": one_content,
    "rank_quorum": rank_quorum,
    "settle_once": settle_once,
    "host_reuse_after_readers": host_reuse_after_readers,
}
