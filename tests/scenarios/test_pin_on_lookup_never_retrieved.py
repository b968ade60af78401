"""A25: a lookup pins pages, the load that would unpin them never comes, the cache is all pinned.

Here a lookup leases nothing by itself: pages are leased by `PrefixLeased`, in the decision that
admits the request that they were promised to, and go back at the end of that very request.
"""

from __future__ import annotations

import numpy as np
from kv_rig import warm

from hisparse.fsm import events as ev

STEM = list(range(40))


def pinned(rig):
    return int(np.count_nonzero(rig.state.pages.refs))


def test_a_hit_that_the_gpu_holds_too_needs_no_load_and_leaves_no_pin():
    rig = warm(STEM)
    key = rig.arrive("again", [*STEM, 7])
    rig.step()
    assert rig.state.requests[key].hit_tokens == 40 and pinned(rig) >= 10
    assert not [e for e in rig.events(ev.TransferPinned) if e.kind == e.kind.RESTORE], "no load"
    rig.coordinator.abort(*key)
    rig.step()
    assert pinned(rig) == 0 and rig.drained()


def test_a_refused_attempt_holds_nothing_however_often_it_is_retried():
    rig = warm(STEM, host_pages=24)
    big = rig.arrive("big", [900 + t for t in range(48)], new=16)
    rig.step()
    held = pinned(rig)
    waiting = rig.arrive("waits", [*STEM, 7], new=20)
    for _ in range(5):
        rig.step(only={big})
    assert rig.state.requests[waiting].row < 0, "the host pages are taken"
    assert pinned(rig) == held
    rig.coordinator.abort(*waiting)
    assert pinned(rig) == held
    rig.coordinator.abort(*big)
    rig.step()
    assert pinned(rig) == 0 and rig.drained()


def test_an_attempt_that_is_aborted_or_preempted_gives_its_pins_back_once():
    rig = warm(STEM)
    for end in (rig.coordinator.abort, rig.coordinator.preempt):
        key = rig.arrive("again", [*STEM, 7])
        rig.step()
        end(*key)
        rig.coordinator.abort(*key)  # a second path that would unpin: there is nothing left to it
        rig.step()
        assert pinned(rig) == 0 and rig.drained()
