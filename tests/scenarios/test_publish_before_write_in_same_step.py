"""C06: a page is findable when it is allocated, before the forward that writes it has run.

Here the log's order is reserved < planned < computed < copied < completed < published, for every
page: a page is found only behind a PagesPublished, and that follows the completed copy of accepted
rows. Two requests with one prefix in one step each compute it.
"""

from __future__ import annotations

from kv_rig import SchedulerRig, make_config

from hisparse.fsm import events as ev

STEM = list(range(40))


def test_two_requests_of_one_step_share_nothing_that_is_not_written():
    rig = SchedulerRig(make_config(blocks=64, host_pages=64))
    a, b = rig.arrive("a", STEM, new=8), rig.arrive("b", [*STEM, 7], new=8)
    command = rig.step(rows=16)
    assert rig.state.requests[a].hit_tokens == rig.state.requests[b].hit_tokens == 0
    assert not command.index_copies
    assert not set(rig.blocks(a)) & set(rig.blocks(b)) - {0}


def test_every_published_page_was_reserved_written_and_copied_before_in_this_order():
    rig = SchedulerRig(make_config(blocks=64, host_pages=64))
    first = rig.arrive("first", STEM, new=20)
    rig.step(rows=16)
    rig.arrive("second", [*STEM[:30], 7, 8, 9], new=8)
    for _ in range(5):
        rig.step(rows=16)
    rig.finish(first)
    rig.step()
    pinned, filled, computed, planned, rows = {}, {}, {}, {}, {}
    published = 0
    for seq, e in rig.log.read(1):
        match e:
            case ev.RequestAdmitted():
                rows[e.row], computed[e.row] = [], e.hit_tokens
            case ev.BlocksReserved() if e.role == 0:
                for row, _ in e.places():
                    rows[row].append(seq)
            case ev.StepPlanned():
                planned |= dict.fromkeys(e.rows, seq)
            case ev.RowsComputed():
                for row, count in zip(e.rows, e.counts, strict=True):
                    assert planned[row] < seq
                    computed[row] += count
            case ev.TransferPinned() if e.kind != e.kind.RESTORE:
                for page, entry, (row, _) in zip(e.pages, e.entries, e.owners(), strict=True):
                    assert (entry + 1) * 4 <= computed[row], "copied before it was computed"
                    pinned[page] = seq
                filled |= dict(zip(e.transfers, e.pages, strict=True))
            case ev.TransferCompleted() if e.last:
                for ident in e.transfers:
                    pinned[filled[ident]] *= -1
            case ev.PagesPublished():
                published += len(e.pages)
                assert all((at + 1) * 4 <= computed[row] for row, at in e.places())
                for page in filter(None, e.pages):
                    assert pinned[page] < 0, "published before its copy completed"
    assert published >= 10
