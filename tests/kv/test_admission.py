"""Admission: all budgets together, reclaimable space counted, the binding resource named."""

from __future__ import annotations

import pytest
from kv_rig import SchedulerRig, make_config

from hisparse.config import check_capacity
from hisparse.errors import CapacityError, UsageError
from hisparse.fsm import events as ev
from hisparse.kv.budget import promised, spare


def long_prompt(i: int, n: int = 40) -> list[int]:
    return [1000 * i + t for t in range(n)]


def test_a_full_pool_of_clean_pages_does_not_refuse():
    # Ten resident pages a request: two fill the pool, all of them on the host already.
    rig = SchedulerRig(make_config(blocks=30, host_pages=60, schedule={"step_rows": 16}))
    rig.arrive("a", long_prompt(1))
    rig.arrive("b", long_prompt(2))
    for _ in range(3):
        rig.step()
    assert rig.state.blocks.free.count < rig.config.steady_blocks(44)
    key = rig.arrive("c", long_prompt(3))
    for _ in range(2):
        rig.step()
    assert rig.state.requests[key].live
    assert rig.events(ev.PolicyChosen)[0].resource == "admission"


@pytest.mark.parametrize(
    ("change", "resource"),
    [
        ({"host_pages": 12, "blocks": 64}, "host_pages"),
        ({"blocks": 9, "host_pages": 64}, "gpu_blocks"),
        ({"schedule": {"max_requests": 1}}, "rows"),
    ],
)
def test_a_wait_names_the_binding_resource(change, resource):
    rig = SchedulerRig(make_config(**change))
    first = rig.arrive("first", long_prompt(1))
    waiting = rig.arrive("waiting", long_prompt(2))
    rig.step()
    assert rig.state.requests[first].live and not rig.state.requests[waiting].live
    deferred = rig.events(ev.AdmissionDeferred)
    assert [(e.request, e.resource) for e in deferred] == [("waiting", resource)]
    assert deferred[0].need > deferred[0].have


def test_a_wait_is_logged_once_however_long():
    rig = SchedulerRig(make_config(schedule={"max_requests": 1}))
    rig.arrive("first", long_prompt(1), new=20)
    rig.arrive("waiting", long_prompt(2))
    for _ in range(10):
        rig.step()
    assert len(rig.events(ev.AdmissionDeferred)) == 1


def test_who_waits_is_admitted_when_the_resource_is_back():
    rig = SchedulerRig(make_config(schedule={"max_requests": 1}))
    first = rig.arrive("first", long_prompt(1))
    waiting = rig.arrive("waiting", long_prompt(2))
    rig.step()
    rig.finish(first)
    for _ in range(3):
        rig.step()
    assert rig.state.requests[waiting].live


def test_nobody_overtakes_who_waits_and_a_stream_of_small_requests_starves_no_large_one():
    rig = SchedulerRig(make_config(blocks=19, host_pages=200, schedule={"step_rows": 8}))
    for i in range(2):
        rig.arrive(f"small{i}", long_prompt(i, 10), new=12)
    rig.step()
    large = rig.arrive("large", long_prompt(9, 56), new=8)
    for i in range(2, 30):  # each would fit at once, beside the two
        rig.arrive(f"small{i}", long_prompt(10 + i, 10), new=12)
        rig.step()
        for request in list(rig.state.requests.values()):
            row = request.row
            if request.live and rig.state.rows.computed[row] == request.max_tokens - 1:
                rig.finish(request.key)
    order = [e.request for e in rig.events(ev.RequestAdmitted)]
    assert order[:3] == ["small0", "small1", "large"] and len(order) > 3
    deferred = rig.events(ev.AdmissionDeferred)[0]
    assert deferred.request == "large" and deferred.need > deferred.have
    assert deferred.have >= rig.config.steady_blocks(22) + rig.config.step_pages
    assert large not in rig.state.waiting


def test_acknowledgements_are_taken_whoever_waits_and_whether_a_step_computes_or_not():
    rig = SchedulerRig(make_config(schedule={"max_requests": 1}))
    first = rig.arrive("first", long_prompt(1))
    waiting = rig.arrive("waiting", long_prompt(2))
    rig.step(ack=False)
    rig.finish(first)
    command = rig.step(only=[], ack=False)  # nobody can compute: the row is still draining
    assert not rig.state.requests[waiting].live
    copies = [t.transfer for t in command.transfers]
    for transfer in reversed(copies):
        rig.complete(transfer)
    assert rig.state.requests[first].in_flight == 0 and rig.state.prefix
    rig.retire()
    rig.step()
    assert rig.state.requests[waiting].live


def test_a_request_cannot_compute_more_rows_than_it_was_admitted_for():
    rig = SchedulerRig()
    key = rig.arrive("q", long_prompt(1), new=4)
    rig.step()
    before = rig.coordinator.digest()
    with pytest.raises(UsageError, match="has computed 40 and was admitted for 44"):
        rig.coordinator.grow([rig.row(key)], [5])
    assert rig.coordinator.digest() == before


def test_what_can_never_fit_is_refused_at_arrival_by_name():
    rig = SchedulerRig(make_config(longest=64))
    key = rig.arrive("q", long_prompt(1, 70), new=4)
    assert key not in rig.state.requests
    refused = rig.events(ev.RequestRefused)
    assert [(e.resource, e.need, e.have) for e in refused] == [("max_model_len", 74, 64)]


def test_promises_never_exceed_what_is_available():
    rig = SchedulerRig(make_config(blocks=40, host_pages=100))
    for i in range(6):
        rig.arrive(f"q{i}", long_prompt(i), new=12)
    for _ in range(30):
        rig.step(rows=8)
        assert spare(rig.state) >= 0
    assert promised(rig.state) <= rig.state.blocks.available


@pytest.mark.parametrize("field", ["gpu_blocks", "host_pool_gib"])
def test_pools_too_small_for_one_request_are_refused_with_the_size_that_would_do(field):
    config = make_config(longest=400, host_pages=8 if field == "host_pool_gib" else 200, blocks=24)
    if field == "gpu_blocks":
        config = make_config(longest=400, host_pages=200, blocks=5)
    with pytest.raises(CapacityError, match=field) as refusal:
        check_capacity(config)
    would_do = float(str(refusal.value).rsplit(" ", 1)[1])
    pools = config.pools.model_copy(
        update={field: int(would_do) if field == "gpu_blocks" else would_do}
    )
    check_capacity(config.model_copy(update={"pools": pools}))
    less = config.pools.model_copy(
        update={field: would_do - 1 if field == "gpu_blocks" else would_do - 1e-6}
    )
    with pytest.raises(CapacityError):
        check_capacity(config.model_copy(update={"pools": less}))


def test_a_live_id_cannot_arrive_again():
    rig = SchedulerRig()
    rig.arrive("q", long_prompt(1))
    with pytest.raises(UsageError, match="is live"):
        rig.arrive("q", long_prompt(1))
    with pytest.raises(UsageError, match="page hashes for 10 whole pages"):
        rig.coordinator.arrive("r", 40, 44, [])
    with pytest.raises(UsageError, match="prompt_tokens=0"):
        rig.coordinator.arrive("r", 0, 44, [])
