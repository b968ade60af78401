"""A07: hashes exist for pages that were allocated and never computed; an end between schedule and
output plans copies of all of them.

Here an end freezes the computed rows, and copies are planned of whole pages below them: hashes and
blocks beyond are not looked at.
"""

from __future__ import annotations

import pytest
from kv_rig import PAGE, SchedulerRig, make_config

from hisparse.fsm import events as ev


@pytest.mark.parametrize("write_back", ["eager", "on_pressure"])
@pytest.mark.parametrize("verb", ["abort", "preempt"])
def test_copies_are_bounded_by_computed_pages(verb, write_back):
    rig = SchedulerRig(make_config(blocks=40, write_back=write_back))
    key = rig.arrive("q", list(range(4 * PAGE)), new=20)
    assert len(rig.state.requests[key].hashes) == 4
    rig.step(rows=2 * PAGE, ack=False)
    row = rig.row(key)
    assert rig.coordinator.grow([row], [2 * PAGE]) == [2 * PAGE]
    step = rig.coordinator.plan_step([row], [2 * PAGE])
    sent = rig.send().transfers
    getattr(rig.coordinator, verb)(*key)  # between schedule and output
    rig.coordinator.rows_computed(step, [row], [2 * PAGE])
    rig.complete(*[t.transfer for t in sent])
    for _ in range(4):
        rig.step()
    copied = {entry for e in rig.events(ev.TransferPinned) for entry in e.entries}
    assert copied <= {0, 1} and (copied or verb == "abort")
    published = sum(len(e.pages) for e in rig.events(ev.PagesPublished))
    assert published <= 2 and rig.drained()
