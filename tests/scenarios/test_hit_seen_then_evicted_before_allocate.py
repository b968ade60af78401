"""A27: a lookup finds ten pages, another request's spill evicts two, the allocation finds eight.

Here room is made first, and lookup and lease are one decision: between what a request was told
and what it holds there is no event of anybody else. What goes before only makes the hit shorter.
"""

from __future__ import annotations

from kv_rig import warm

from hisparse.fsm import events as ev

STEM = list(range(40))


def pressed(rig):
    """`again` waits for its prefix, while another request's pages push a part of it out."""
    other = rig.arrive("other", [900 + t for t in range(44)])
    again = rig.arrive("again", [*STEM, 7], new=1)
    rig.step()
    assert rig.state.requests[again].row < 0, "there is no room for both"
    found = sum(h in rig.state.prefix for h in rig.hasher.extend(b"", STEM))
    assert 0 < found < 10
    return other, again, found


def test_pages_evicted_while_it_waits_make_its_hit_shorter_and_nothing_else():
    rig = warm(STEM, host_pages=20)
    other, again, found = pressed(rig)
    rig.coordinator.abort(*other)
    rig.step()  # its last copies settle
    rig.step()
    assert rig.state.requests[again].hit_tokens == 4 * found
    assert rig.state.rows.computed[rig.row(again)] == 41


def test_between_admission_and_lease_there_is_no_event():
    rig = warm(STEM, host_pages=20)
    other, again, _ = pressed(rig)
    rig.coordinator.abort(*other)
    rig.step()  # its last copies settle
    rig.step()
    events = [e for _, e in rig.log.read(1)]
    at = next(
        i
        for i, e in enumerate(events)
        if isinstance(e, ev.RequestAdmitted) and e.request == again[0]
    )
    admitted, leased = events[at], events[at + 1]
    assert isinstance(leased, ev.PrefixLeased)
    assert admitted.hit_tokens == 4 * len(leased.pages) > 0


def test_pages_promised_to_one_are_not_evicted_for_another():
    rig = warm(STEM, host_pages=22)
    again = rig.arrive("again", [*STEM, 7], new=1)
    rig.arrive("other", [900 + t for t in range(44)])
    rig.step()
    row = rig.row(again)
    assert rig.state.requests[again].hit_tokens == 40
    held = set(rig.host(again)[:10])
    evicted = {p for e in rig.events(ev.HostPagesEvicted) for p in e.pages}
    assert row >= 0 and held and not held & evicted
