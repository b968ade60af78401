"""Small pools: HiSparse never holds fewer requests at once than the same GPU blocks hold resident,
and a request that its hot region would not make smaller stays resident to its end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from kv_rig import SchedulerRig, make_config

from hisparse.config import GIB, HiSparseConfig
from hisparse.fsm import events as ev
from hisparse.fsm.log import MemoryLog
from hisparse.fsm.machines import HotState
from hisparse.fsm.wire import TransferKind
from hisparse.kv.budget import promised, spare
from hisparse.kv.coordinator import HiSparseCoordinator


@st.composite
def pools(draw):
    """A configuration with more host pages than anybody asks for."""
    page_size, hot_rows = draw(st.integers(1, 8)), draw(st.integers(1, 48))
    return HiSparseConfig.model_validate(
        {
            "layout": {"row_bytes": 256, "index_row_bytes": 64, "index_groups": [[0, 1], [2]]},
            "pools": {
                "page_size": page_size,
                "gpu_blocks": 2,  # see `with_blocks`
                "host_pool_gib": 1600 * page_size * 768 / GIB,
                "index_pages_per_block": draw(st.sampled_from([0, 1, 4])),
            },
            "policy": {
                "name": draw(st.sampled_from(["hybrid", "lru", "even", "host_first"])),
                "write_back": draw(st.sampled_from(["eager", "on_pressure"])),
                "top_k": 1,
                "hot_rows": hot_rows,
                "watermark_blocks": draw(st.sampled_from([0, 3])),
            },
            "schedule": {
                "max_model_len": 120,
                "max_requests": 12,
                "prefill_chunk": draw(st.integers(1, 64)),
                "step_rows": draw(st.sampled_from([8, 32, 256])),
                "lookahead_rows": draw(st.integers(0, 4)),
            },
            "checks": "on",
        }
    )


SIZES = st.tuples(st.integers(1, 80), st.integers(1, 40))  # of prompt and answer


def resident(config):
    policy = config.policy.model_copy(update={"name": "resident"})
    return config.model_copy(update={"policy": policy})


def with_blocks(config, blocks):
    """The null block comes on top."""
    pools = config.pools.model_copy(update={"gpu_blocks": blocks + 1})
    return config.model_copy(update={"pools": pools})


def held_at_once(config, sizes):
    """How many of the requests, in this order, an empty pool admits in one go."""
    scheduler = HiSparseCoordinator(config, MemoryLog(0))
    for i, (prompt, new) in enumerate(sizes):
        hashes = [b"%d, %d" % (i, page) for page in range(prompt // config.pools.page_size)]
        scheduler.arrive(f"q{i}", prompt, prompt + new, hashes)
    admitted = len(scheduler.admit_waiting())
    assert spare(scheduler.state) >= 0, "more is promised than there is"
    return admitted


@given(pools(), SIZES, st.integers(2, 6), st.integers(0, 8))
def test_of_equal_requests_no_fewer_are_held_at_once_than_resident(config, size, n, more):
    config = with_blocks(config, n * resident(config).steady_blocks(sum(size)) + more)
    least = held_at_once(resident(config), [size] * 12)
    assert least >= n and held_at_once(config, [size] * 12) >= least


@given(pools(), st.lists(SIZES, min_size=2, max_size=12), st.integers(2, 6), st.integers(0, 8))
def test_nor_of_requests_that_differ(config, sizes, n, more):
    need = [resident(config).steady_blocks(sum(size)) for size in sizes]
    config = with_blocks(config, max(*need, sum(need[:n])) + more)
    least = held_at_once(resident(config), sizes)
    assert least >= min(n, len(sizes)) and held_at_once(config, sizes) >= least


@settings(max_examples=20)
@given(
    pools(), st.integers(0, 12), st.integers(1, 40), st.integers(1, 9), st.integers(2, 5),
    st.integers(0, 40), st.data(),
)  # fmt: skip
def test_each_of_them_runs_to_its_end(config, more, prompt, new, n, shared, data):
    """With a prefix that they share, which those that come late find; one fits, and little more."""
    rig = SchedulerRig(with_blocks(config, config.steady_blocks(prompt + new) + more))
    rig.check = lambda: None  # folding the log again at each step takes long
    for i in range(n):
        own = [1000 * (i + 1) + t for t in range(prompt)]
        rig.arrive(f"q{i}", [*range(shared), *own][:prompt], new)
        for _ in range(data.draw(st.integers(0, 3))):
            rig.step(rows=config.schedule.prefill_chunk)
    for _ in range(n * (prompt + new + 10)):
        rig.step(rows=config.schedule.prefill_chunk)
        for request in list(rig.state.requests.values()):
            if request.live and rig.state.rows.computed[request.row] >= request.max_tokens - 1:
                rig.finish(request.key)
        if not rig.state.requests:
            break
    assert len(rig.events(ev.RequestFinished)) == n, "somebody is stuck"
    assert rig.drained()
    SchedulerRig.check(rig)


# -- who stays: a request of no more pages than its window and its hot region (here 2 + 2) ---------


def short(i, n=10):
    return [1000 * i + t for t in range(n)]


def under_pressure(**changes):
    """(rig, a request that stays, beside one that lost pages to a third)"""
    rig = SchedulerRig(make_config(blocks=20, **changes))
    stays = rig.arrive("stays", short(1), new=6)
    rig.arrive("leaves", short(2, 40), new=8)
    for _ in range(2):
        rig.step()
    rig.arrive("waits", short(3, 40), new=8)
    for _ in range(3):
        rig.step()
    assert rig.events(ev.PagesSpilled), "no pressure"
    return rig, stays


def test_who_stays_is_promised_its_pages_and_no_hot_region():
    rig = SchedulerRig(make_config())
    stays = rig.arrive("stays", short(1), new=6)
    leaves = rig.arrive("leaves", short(2, 11), new=6)  # a page more
    rig.coordinator.admit_waiting()
    requests = rig.state.requests
    assert requests[stays].steady_blocks == 4 + 1 and requests[leaves].steady_blocks == 4 + 1
    assert promised(rig.state) == requests[stays].steady_blocks + requests[leaves].steady_blocks
    rig.step()
    assert rig.events(ev.HotLeased) == []


def test_who_stays_loses_nothing_to_others():
    rig, stays = under_pressure()
    assert 0 not in rig.blocks(stays)
    assert {e.row for e in rig.events(ev.PagesSpilled)} == {1}
    assert rig.row(stays) not in {e.row for e in rig.events(ev.HotWanted)}


def test_under_host_first_too():
    rig, stays = under_pressure(name="host_first")
    assert 0 not in rig.blocks(stays)
    assert rig.row(stays) not in {e.row for e in rig.events(ev.HotLeased)}


def found_on_the_host(**changes):
    """(rig, a request that stays and whose prefix of two pages is on the host, its restores)"""
    rig = SchedulerRig(make_config(blocks=20, host_pages=100, **changes))
    rig.serve("first", short(1), steps=4)
    for i in range(3):  # others take the cached GPU copies, the host pages stay
        rig.serve(f"other{i}", short(5 + i, 40), steps=3)
    key = rig.arrive("again", short(1), new=6)
    return rig, key, [t.transfer for t in rig.step(ack=False).transfers]


def test_its_hit_is_restored_whatever_else_there_is_room_for():
    rig, key, restores = found_on_the_host(watermark_blocks=15)
    assert len(restores) == 2 and 0 not in rig.blocks(key)
    assert rig.state.requests[key].hot is HotState.NONE


def test_a_restore_that_failed_is_tried_again_and_its_rows_are_taken_back():
    rig, key, restores = found_on_the_host()
    rig.enqueue(*restores)
    rig.fail(restores[1])
    assert [(e.rows, e.certain) for e in rig.coordinator.take_rewound()] == [(8, 8)]
    again = rig.step(ack=False).transfers
    assert [t.transfer for t in again if t.kind is TransferKind.RESTORE] == [restores[1] + 1]
    assert 0 not in rig.blocks(key)
    rig.complete(*rig.state.transfers)
    rig.retire()
    for _ in range(6):
        rig.step()
    assert rig.coordinator.confirmed(*key) == 16


def test_restores_that_never_succeed_end_it_by_name():
    rig, key, _ = found_on_the_host()
    for _ in range(20):
        rig.fail(*[t for t in rig.state.transfers if rig.state.transfers[t].row == rig.row(key)])
        if not rig.state.requests[key].live:
            break
        rig.step(ack=False)
    (end,) = rig.events(ev.RequestAborted)
    assert (end.request, end.reason) == ("again", "copy failed, 18 times")
