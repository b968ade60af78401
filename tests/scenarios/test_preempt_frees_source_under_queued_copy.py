"""A02: a copy is planned and sent, its request is preempted, another request gets the source block
and writes it, and only then the worker enqueues the copy: the page is published with foreign rows.

Here the source is leased to the transfer in the event that plans it, and goes back only when every
reading rank has enqueued it, whatever ends the request: no machine arrow leads from PINNED to FREE.
"""

from __future__ import annotations

import pytest
from byte_rig import ByteRig
from kv_rig import make_config

from hisparse.fsm import events as ev

PROMPT = list(range(40))
OTHER = [700 + t for t in range(40)]


def sent_not_enqueued(lag=1.0, seed=0):
    """(rig, victim, blocks): ten copies are sent; the worker has not seen the command."""
    rig = ByteRig(make_config(blocks=26, host_pages=60), lag=lag, seed=seed)
    victim = rig.arrive("victim", PROMPT, new=8)
    rig.step()
    command = rig.step(deliver=False)
    return rig, victim, {t.block for t in command.transfers}


def reused_under_a_copy(rig):
    """Blocks that were given out between the plan of a copy and its last ENQUEUED (or failure)."""
    source, bad = {}, set()
    for _, e in rig.log.read(1):
        match e:
            case ev.TransferPinned() if e.kind != e.kind.RESTORE:
                source |= dict(zip(e.transfers, e.blocks, strict=True))
            case ev.TransferEnqueued() if e.last:
                for transfer in e.transfers:
                    source.pop(transfer, None)
            case ev.TransferFailed():
                for transfer in e.transfers:
                    source.pop(transfer, None)
            case ev.BlocksReserved():
                bad |= set(e.blocks) & set(source.values())
    return bad


@pytest.mark.usefixtures("backend")
def test_the_block_of_a_sent_copy_goes_to_nobody_and_the_page_holds_its_own_rows():
    rig, victim, sources = sent_not_enqueued()
    assert len(sources) == 10
    rig.coordinator.preempt(*victim)
    z = rig.arrive("z", OTHER)
    rig.step(deliver=False)
    assert rig.state.requests[z].live and not sources & set(rig.blocks(z))
    rig.deliver()  # the worker enqueues the copies now, behind nothing that wrote their blocks
    rig.poll()
    rig.settle()
    assert rig.assert_findable_pages_hold_what_they_are_named() >= 10
    rig.coordinator.abort(*z)
    again = rig.arrive("victim", [*PROMPT, 5])
    rig.settle()
    rig.step()
    rig.settle()  # its forward read the pages that it found, and checked them
    assert rig.state.requests[again].hit_tokens > 0 and rig.rows_read


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("end", ["finish", "abort", "preempt"])
@pytest.mark.parametrize("when", ["planned", "sent", "enqueued"])
@pytest.mark.parametrize("lag", [1.0, 0.6])
def test_whatever_ends_it_and_whenever_the_lease_outlives_the_request(end, when, lag):
    rig = ByteRig(make_config(blocks=26, host_pages=60), lag=lag, seed=3)
    victim = rig.arrive("victim", PROMPT, new=8)
    rig.step()
    if when != "planned":
        rig.step(deliver=when == "enqueued")
    getattr(rig.coordinator, end)(*victim)
    rig.arrive("z", OTHER)
    for _ in range(4):
        rig.step()
        rig.poll()
    rig.settle()
    assert not reused_under_a_copy(rig)
    assert rig.assert_findable_pages_hold_what_they_are_named() >= 10
