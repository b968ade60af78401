"""A17: the slots of a page are freed when its copy starts though its request still attends to it;
or a finished request frees slots with two copies outstanding, and they are overwritten.

Here a block of a live request leaves by PagesSpilled alone, which replaces the reader's table entry
in the same event, after the copy is enqueued; the reader then reads the host page, behind the copy.
What an ended request still copies stays leased to the copies.
"""

from __future__ import annotations

import pytest
from byte_rig import ByteRig
from kv_rig import make_config

from hisparse.fsm import events as ev
from hisparse.fsm.wire import TransferKind

PROMPT = list(range(40))
OTHER = [700 + t for t in range(40)]


def squeezed(write_back, lag=1.0, seed=0, step_rows=16):
    """A request of ten pages decodes; another arrives that needs some of its blocks."""
    config = make_config(
        blocks=26, host_pages=60, write_back=write_back, schedule={"step_rows": step_rows}
    )
    rig = ByteRig(config, lag=lag, seed=seed)
    q = rig.arrive("q", PROMPT, new=20)
    rig.step()
    return rig, q, rig.arrive("z", OTHER, new=20)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("write_back", ["eager", "on_pressure"])
@pytest.mark.parametrize(("lag", "seed"), [(0.0, 0), (0.6, 1), (0.6, 2), (0.97, 3), (1.0, 4)])
def test_a_decoding_request_reads_its_own_rows_while_its_pages_leave(write_back, lag, seed):
    rig, _q, z = squeezed(write_back, lag, seed)
    for i in range(12):
        rig.step(rows=16)
        if i % 3 == 2 or lag < 1.0:
            rig.device.synchronize(rig.device.compute)
            rig.read()
        rig.poll()
    assert rig.state.requests[z].live and rig.events(ev.PagesSpilled)
    rig.device.synchronize(None)
    rig.read()
    assert rig.rows_read > 100


def test_a_block_is_free_no_earlier_than_the_table_that_the_reader_gets():
    rig, q, _z = squeezed("on_pressure", step_rows=64)
    command = rig.step(only=[q], deliver=False)
    leaving = {t.block: t for t in command.transfers if t.kind is TransferKind.SPILL}
    assert leaving and leaving.keys() <= set(rig.blocks(q)), "planned, and still attended to"
    assert not any(int(rig.state.blocks.state[b]) == 0 for b in leaving)
    rig.deliver()
    rig.poll()  # enqueued: the entry is replaced in the event that gives the block back
    assert not leaving.keys() & set(rig.blocks(q))
    following = rig.step(deliver=False)
    emptied = {
        u.entry + i for u in following.tables if u.row == rig.row(q) and u.table == 0
        for i, block in enumerate(u.ids) if not block
    }  # fmt: skip
    gone = {e for p in rig.events(ev.PagesSpilled) for e in p.entries}
    assert emptied == gone, "the next command tells the reader, before anything of it runs"
    assert set(following.fences) >= {t.transfer for t in leaving.values()}


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("outstanding", [1, 2, 10])
def test_a_finished_request_with_copies_in_flight_keeps_their_slots(outstanding):
    rig = ByteRig(make_config(blocks=26, host_pages=60))
    q = rig.arrive("q", PROMPT[: 4 * outstanding], new=4)
    rig.step()
    rig.step(deliver=False)
    rig.finish(q)
    copied = {t.block for t in rig.state.transfers.values()}
    assert len(copied) == outstanding
    z = rig.arrive("z", OTHER)
    rig.step(deliver=False)
    assert rig.state.requests[z].live and not copied & set(rig.blocks(z))
    rig.settle()
    assert rig.assert_findable_pages_hold_what_they_are_named() >= outstanding
