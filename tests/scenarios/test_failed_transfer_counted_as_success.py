"""A14: a load fails on the device, its completion is counted all the same, and the request runs on
blocks that nobody wrote.

Here an acknowledgement is COMPLETED or FAILED, two kinds with two events. A failed page goes to
FAILED, from where no arrow leads to a page that can be found or read as valid; rows that could have
read it are never certain; the request goes back to its last valid boundary or ends, by policy, and
both are counted.
"""

from __future__ import annotations

import pytest
from byte_rig import ByteRig
from kv_rig import make_config, restoring

from hisparse.fsm import events as ev
from hisparse.fsm.machines import HOST_PAGE, PageState
from hisparse.testing.calm import CalmSimulation

PROMPT = list(range(40))
COUNTS = ("transfers_failed", "rewinds", "requests_failed")


@pytest.mark.parametrize("policy", ["rewind", "fail"])
def test_a_failed_load_is_no_success_in_any_counter_and_its_rows_are_never_certain(policy):
    rig, key, copies = restoring(PROMPT, on_copy_failure=policy)
    counts = rig.coordinator.metrics.counts
    before, hit = dict(counts), rig.state.requests[key].hit_tokens
    rig.fail(copies[0].transfer)
    rig.complete(*[t.transfer for t in copies[1:]])
    assert counts["transfers_failed"] == before["transfers_failed"] + 1
    assert counts["transfers_completed"] == before["transfers_completed"] + len(copies) - 1
    ended = {"rewind": "rewinds", "fail": "requests_failed"}[policy]
    assert counts[ended] == before[ended] + 1
    assert sum(counts[n] - before[n] for n in ("rewinds", "requests_failed")) == 1
    assert rig.coordinator.confirmed(*key) <= hit
    if policy == "rewind":
        assert rig.state.rows.computed[rig.row(key)] <= hit, "it computes on from what is valid"
        assert copies[0].block not in rig.blocks(key)
    else:
        assert [e.reason for e in rig.events(ev.RequestAborted)] == ["copy failed"]


def test_no_arrow_leads_from_failed_to_anything_but_free():
    after = HOST_PAGE.table[PageState.FAILED]
    assert {PageState(s) for s in after if s != 255} == {PageState.FREE}


@pytest.mark.parametrize("position", range(10))
@pytest.mark.parametrize("write_back", ["eager", "on_pressure"])
def test_whichever_page_fails_nothing_from_it_on_is_found_with_wrong_bytes(position, write_back):
    made = []

    def fault(transfer):
        made.append(transfer)
        return len(made) - 1 == position

    rig = ByteRig(make_config(write_back=write_back), lag=0.6, copy_fault=fault)
    key = rig.arrive("q", PROMPT, new=8)
    rig.step()
    if write_back == "on_pressure":
        rig.finish(key)
    rig.settle()
    chain = rig.hasher.extend(b"", PROMPT)
    assert [name in rig.state.prefix for name in chain] == [i < position for i in range(10)]
    rig.assert_findable_pages_hold_what_they_are_named()
    assert rig.coordinator.metrics.counts["transfers_failed"] == 1
    if write_back == "eager":
        rig.step()  # goes on, from the block that still holds it
        rig.settle()
        assert rig.state.requests[key].live


def test_in_worlds_where_a_third_of_all_copies_fail_no_byte_is_lost():
    counted = {policy: dict.fromkeys(COUNTS, 0) for policy in ("rewind", "fail")}
    for seed in (10, 11, 12, 15):  # under pressure, two by each policy
        world = CalmSimulation(seed, requests=8)
        world.fault_rate, world.runner.seen.tolerates_faults = 0.3, True
        result = world.run()
        assert result.violation is None, result.violation
        for name in COUNTS:
            counted[world.config.policy.on_copy_failure][name] += result.counts[name]
    for policy, answer in (("rewind", "rewinds"), ("fail", "requests_failed")):
        assert counted[policy]["transfers_failed"] > counted[policy][answer] > 0
    assert counted["fail"]["rewinds"] == 0
