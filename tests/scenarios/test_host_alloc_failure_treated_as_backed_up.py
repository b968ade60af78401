"""A15: the host pool is full of leased pages, a spill gets no host page, and the caller releases
the GPU block anyway.

Here a host page for every page that a request can ever have is reserved when it is admitted, so a
spill cannot be refused one; a request that would not get them waits, by the name of the resource.
And a block without a valid or enqueued copy has no arrow by which a live request could lose it.
"""

from __future__ import annotations

import numpy as np
import pytest
from byte_rig import ByteRig
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_rig import SchedulerRig, make_config

from hisparse.config import ceil_div
from hisparse.fsm import events as ev
from hisparse.fsm.machines import BLOCK_LEASE, BlockState, BlockTrigger
from hisparse.fsm.wire import Table, TransferKind

PROMPT = list(range(40))


def backed(rig):
    """Every live request holds a host page for each of its pages, filled or reserved."""
    for request in rig.state.requests.values():
        if request.live:
            filled = np.count_nonzero(rig.state.table(Table.HOST)[request.row])
            assert filled + len(request.reserved) == ceil_div(request.max_tokens, 4)


@pytest.mark.parametrize("write_back", ["eager", "on_pressure"])
def test_with_every_host_page_leased_pressure_moves_pages_and_loses_none(write_back):
    pages = 11 + 12  # to the page what the two requests may have
    config = make_config(
        blocks=26, host_pages=pages, write_back=write_back, schedule={"step_rows": 16}
    )
    rig = ByteRig(config, lag=0.6)
    a = rig.arrive("a", PROMPT, new=4)
    rig.step(rows=16)
    b = rig.arrive("b", [700 + t for t in range(40)], new=8)
    c = rig.arrive("c", [900 + t for t in range(40)], new=4)
    for _ in range(8):
        rig.step(rows=16, only=[a, b])
        rig.device.synchronize(rig.device.compute)  # every read is checked
        rig.poll()
        backed(rig)
    assert rig.state.pages.available == 0 and rig.events(ev.PagesSpilled)
    assert rig.state.requests[c].deferred == "host_pages", "it cannot be admitted, and is told why"
    for key in (a, b):
        row = rig.row(key)
        computed = int(rig.state.rows.computed[row])
        for entry in range(computed // 4):
            assert rig.blocks(key)[entry] or rig.host(key)[entry], "every page is somewhere"


def test_the_only_copy_of_rows_has_no_way_out_but_the_end_of_its_request():
    out = {t for t in BlockTrigger if BLOCK_LEASE.table[BlockState.DIRTY, t] == BlockState.FREE}
    assert out == {BlockTrigger.retired}
    rig = SchedulerRig(make_config(blocks=26, write_back="on_pressure"))
    key = rig.arrive("q", PROMPT, new=8)
    rig.step()
    rig.arrive("z", [700 + t for t in range(40)])
    for _ in range(6):
        rig.step(only=[key])
    mine = [e for e in rig.events(ev.BlocksReleased) if e.row == rig.row(key)]
    assert not [e for e in mine if e.trigger is BlockTrigger.retired], "a live request retires none"


@settings(max_examples=8)
@given(st.integers(24, 60), st.integers(24, 40), st.data())
def test_whatever_fails_or_ends_no_live_request_is_without_its_host_pages(hosts, blocks, data):
    rig = SchedulerRig(make_config(blocks=blocks, host_pages=hosts, schedule={"step_rows": 16}))
    keys = [rig.arrive(f"q{i}", [100 * i + t for t in range(24)], new=16) for i in range(3)]
    for _ in range(10):
        command = rig.step(rows=16, ack=False)
        bad = data.draw(st.integers(-1, 3), label="which copy fails")
        ids = [t.transfer for t in command.transfers]
        if 0 <= bad < len(ids):
            rig.fail(ids[bad])
        rig.complete(*[t for t in ids if t in rig.state.transfers])
        rig.retire()
        backed(rig)
        if data.draw(st.integers(0, 9), label="abort") == 0 and keys:
            rig.coordinator.abort(*keys.pop())
    spills = [e for e in rig.events(ev.TransferPinned) if e.kind is TransferKind.SPILL]
    assert all(all(e.pages) for e in spills)
