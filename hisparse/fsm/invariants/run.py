"""Invariants of a run: each event against what the log said before it (`facts.Run`).

An invariant is one function of (run, event), called before the run takes the event in. It yields a
message per fault, shares no code with `decide` or `evolve`, and judges any event, however wrong:
what an event names and the log never spoke of is a fault, not a KeyError. `spill_before_free` has
a module of its own (`spill`), and so has what the same promises say of the CPU tier (`suffix`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

from hisparse.fsm import events as ev
from hisparse.fsm.invariants import suffix
from hisparse.fsm.invariants.facts import Run
from hisparse.fsm.invariants.spill import spill_before_free
from hisparse.fsm.machines import BlockRole, PageTrigger

Check = Callable[[Run, ev.Event], Iterator[str]]


def complete_before_publish(run: Run, e: ev.Event) -> Iterator[str]:
    """A published page was filled by a copy that every writing rank saw complete."""
    if not isinstance(e, ev.PagesPublished):
        return
    for (_, entry), page in zip(e.places(), e.pages, strict=True):
        copy = run.page_writer.get(page)
        if not page:
            continue
        if copy is None:
            yield f"host page {page} is published, and nothing was ever copied to it"
        elif not copy.complete:
            yield (
                f"host page {page} is published, its copy (transfer {copy.ident}) is "
                f"complete on ranks {copy.completed:b} of {copy.writers:b}"
            )
        elif copy.rows_end < (entry + 1) * run.page_size:
            yield f"host page {page} is published, and was copied before its rows were computed"


def publish_accepted_only(run: Run, e: ev.Event) -> Iterator[str]:
    """Publication has no gap and ends where accepted rows end; accepted rows were planned; what
    was published is not taken back, nor a leased page that it has the indexer rows of."""
    if isinstance(e, ev.PagesPublished):
        published: dict[int, int] = {}
        for row, entry in e.places():
            known = published.get(row, run.rows[row].published)
            if entry != known:
                yield f"row {row} publishes from page {entry}, published {known}"
            published[row] = entry + 1
        for row, pages in published.items():
            end, computed = pages * run.page_size, run.rows[row].computed
            if end > computed:
                yield f"row {row} publishes rows up to {end}, computed {computed}"
    elif isinstance(e, ev.RequestRewound):
        tenant = run.rows[e.row]
        entry, slot = divmod(e.rows // run.page_size, run.index_pages_per_block)
        block = run.block_at.get((BlockRole.INDEX, e.row, entry))
        lacks = tenant.published == tenant.leased and (block, slot) in run.suffix.unsure
        least = 0 if lacks else tenant.published * run.page_size
        if not least <= e.rows <= tenant.computed:
            yield (
                f"row {e.row} goes back to {e.rows} rows: it has published {tenant.published} "
                f"pages and computed {tenant.computed} rows"
            )
    elif isinstance(e, ev.RowsComputed):
        for row, count in zip(e.rows, e.counts, strict=True):
            end = run.rows[row].computed + count
            if end > run.rows[row].planned:
                yield f"row {row} accepts rows up to {end}, planned {run.rows[row].planned}"


def one_content(run: Run, e: ev.Event) -> Iterator[str]:
    """Epochs rise at every reuse; whoever is given an id finds in it exactly what was promised."""
    match e:
        case ev.BlocksReserved() | ev.HotLeased():
            yield from _epochs_rise("block", run.block_epoch, e.blocks, e.epochs)
        case ev.HostPagesReserved():
            yield from _epochs_rise("host page", run.page_epoch, e.pages, e.epochs)
        case ev.BlocksAdopted():
            yield from _adopted(run, e)
        case ev.IndexPagesCopied():
            yield from _copied_index(run, e)
        case ev.PrefixLeased():
            hashes = run.rows[e.row].hashes
            for entry, (page, epoch) in enumerate(zip(e.pages, e.epochs, strict=True)):
                found = run.page_hash.get(page)
                if found is None or hashes[entry : entry + 1] != [found]:
                    yield f"row {e.row} leases host page {page}, which holds another prefix page"
                if epoch != run.page_epoch.get(page):
                    yield f"row {e.row} leases host page {page} under epoch {epoch}"
        case ev.PagesPublished():
            for (row, entry), page, name in zip(e.places(), e.pages, e.page_hashes, strict=True):
                hashes = run.rows[row].hashes
                own = run.host.get(row, {}).get(entry) == page and page not in run.page_hash
                if hashes[entry : entry + 1] != [name] or (page and not own):
                    yield f"host page {page} is published as page {entry} of row {row}"


def _epochs_rise(what: str, known: dict[int, int], ids: ev.Ints, epochs: ev.Ints) -> Iterator[str]:
    for ident, epoch in zip(ids, epochs, strict=True):
        if epoch <= known.get(ident, 0):
            yield f"{what} {ident} is given out again under epoch {epoch}"


def _adopted(run: Run, e: ev.BlocksAdopted) -> Iterator[str]:
    n, hashes = run.span(e.role), run.rows[e.row].hashes
    for entry, block, epoch in zip(e.entries, e.blocks, e.epochs, strict=True):
        wanted = hashes[entry * n : (entry + 1) * n]
        found = [_held(run, block, e.role, slot) for slot in range(n)]
        if epoch != run.block_epoch.get(block) or len(wanted) < n or found != wanted:
            yield f"row {e.row} adopts block {block}, which holds another prefix page"


def _copied_index(run: Run, e: ev.IndexPagesCopied) -> Iterator[str]:
    n, hashes = run.index_pages_per_block, run.rows[e.row].hashes
    named = zip(e.sources, e.source_epochs, e.source_slots, e.blocks, e.slots, strict=True)
    for source, epoch, source_slot, block, slot in named:
        entries = [at for role, row, at in run.holders.get(block, ()) if row == e.row]
        page = entries[0] * n + slot if entries else -1
        wanted = hashes[page] if 0 <= page < len(hashes) else None
        found = _held(run, source, BlockRole.INDEX, source_slot)
        if wanted is None or found != wanted or epoch != run.block_epoch.get(source):
            yield f"row {e.row} copies slot {source_slot} of block {source}, another prefix page"


def _held(run: Run, block: int, role: BlockRole, slot: int) -> bytes | None:
    """Hash of the page in `slot` of a block, if all rows of that page were computed."""
    held = run.content.get(block)
    if held is None or held[0] is not role or (block, slot) in run.suffix.unsure:
        return None
    tenant, page = held[1], held[2] * run.span(role) + slot
    known = page < len(tenant.hashes) and (page + 1) * run.page_size <= tenant.computed
    return tenant.hashes[page] if known else None


def rank_quorum(run: Run, e: ev.Event) -> Iterator[str]:
    """Ranks are declared when a copy is planned; each counts once it said so, and no other does."""
    if isinstance(e, ev.TransferPinned):
        for what, mask in (("readers", e.readers), ("writers", e.writers)):
            if not mask or mask & ~run.ranks:
                yield f"transfers {e.transfers} declare {what} {mask:b} of ranks {run.ranks:b}"
    elif isinstance(e, ev.TransferEnqueued | ev.TransferCompleted | ev.TransferFailed):
        queued = isinstance(e, ev.TransferEnqueued)
        for copy in [run.copies[ident] for ident in e.transfers if ident in run.copies]:
            declared = copy.readers if queued else copy.writers
            want = declared if e.last else 1 << e.rank
            have = copy.completed | (copy.enqueued if queued else copy.failed)
            if have & declared & want != want:
                yield f"transfer {copy.ident} counts as answered by {want:b}, ranks {have:b} did"
            if isinstance(e, ev.TransferFailed) and not copy.failed >> e.rank & 1:
                yield f"transfer {copy.ident} counts as failed on rank {e.rank}, unsaid"
            unsaid = copy.failed and not (copy.told or copy.assumed)
            if isinstance(e, ev.TransferCompleted) and unsaid:
                yield f"transfer {copy.ident} counts as complete, and a rank failed it"


def settle_once(run: Run, e: ev.Event) -> Iterator[str]:
    """No transfer moves on after it completed or failed, and none that was never planned."""
    if isinstance(e, ev.TransferEnqueued | ev.TransferCompleted | ev.TransferFailed):
        for ident in e.transfers:
            copy = run.copies.get(ident)
            if copy is None:
                yield f"transfer {ident} is not known: never planned, or settled long ago"
            elif copy.settled:
                yield f"transfer {ident} settles twice"


def host_reuse_after_readers(run: Run, e: ev.Event) -> Iterator[str]:
    """A host page is given back when the last step and copy that could read it are over."""
    match e:
        case ev.HostPagesReleased():
            yield from _page_given_back(run, e)
        case ev.HostPagesReserved() | ev.HostPagesEvicted():
            for page in e.pages:
                if run.leases.get(page):
                    yield f"host page {page} is taken from rows {sorted(run.leases[page])}"
                yield from _page_in_use(run, page, None)


def _page_given_back(run: Run, e: ev.HostPagesReleased) -> Iterator[str]:
    tenant, held = run.rows[e.row], run.entries_of(e)
    for page in e.pages:
        writer = run.page_writer.get(page)
        failed = writer is not None and writer.failed
        if e.row not in run.leases.get(page, ()):
            yield f"row {e.row} gives back host page {page}, which it does not hold"
        if e.trigger is not None and len(run.leases.get(page, ())) > 1:
            yield f"host page {page} is freed under rows {sorted(run.leases[page])}"
        if e.trigger is PageTrigger.reclaimed and not failed:
            yield f"host page {page} is reclaimed, and its copy did not fail"
        if writer is not None and writer.failed and not writer.settled:
            yield f"host page {page} is given back, and not all ranks have ended their copy to it"
        # A failed page may have been read by a step under way, whose tokens are never accepted.
        if page in held and not failed:
            yield from _page_in_use(run, page, e.row)
            if tenant.live and held[page] * run.page_size < tenant.computed:
                yield f"live row {e.row} gives back host page {page}, which holds rows of it"
            if min(run.retired) < tenant.last_step:
                yield (
                    f"row {e.row} gives host page {page} back, ranks have retired "
                    f"{run.retired} of {tenant.last_step}"
                )


def _page_in_use(run: Run, page: int, row: int | None) -> Iterator[str]:
    """Copies of `row` (None: of anybody) that still read or write the page."""
    writer = run.page_writer.get(page)
    busy = set(run.reads_of_page.get(page, ()))
    busy |= {writer.ident} if writer is not None and not writer.settled else set()
    busy = {ident for ident in busy if row is None or run.copies[ident].row == row}
    if busy:
        yield f"host page {page} changes hands under transfers {sorted(busy)}"


def _with(name: str, check: Check) -> Check:
    """`check`, and what the same promise says of the CPU tier of indexer pages."""

    of_tier, kinds = suffix.CHECKS[name], suffix.JUDGED[name]

    def both(run: Run, e: ev.Event) -> Iterator[str]:
        own = check(run, e)
        return chain(own, of_tier(run, e)) if type(e) in kinds else own

    return both


RUN_CHECKS: dict[str, Check] = {
    "spill_before_free": spill_before_free,
    "complete_before_publish": complete_before_publish,
    "publish_accepted_only": publish_accepted_only,
    "one_content": one_content,
    "rank_quorum": rank_quorum,
    "settle_once": settle_once,
    "host_reuse_after_readers": host_reuse_after_readers,
}
RUN_CHECKS = {name: _with(name, check) for name, check in RUN_CHECKS.items()}
