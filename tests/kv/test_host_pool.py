"""The host pool: extents that stay whole, eviction within LRU bounds, leases by token."""

from __future__ import annotations

import random

import numpy as np
import pytest
from kv_rig import PAGE, SchedulerRig, make_config

from hisparse.errors import IllegalTransition, StaleEpoch
from hisparse.fsm import events as ev
from hisparse.fsm.fold import evolve
from hisparse.fsm.machines import PageState, PageTrigger
from hisparse.fsm.wire import Table, TransferKind
from hisparse.kv.host_pool import WINDOW, choose_extents, extents_held


# -- extents ---------------------------------------------------------------------------------------
def usable(text: str) -> np.ndarray:
    return np.array([c == "." for c in text])


@pytest.mark.parametrize(
    ("pool", "n", "upper", "chosen"),
    [
        ("x....x..x...", 2, False, [6, 7]),  # the smallest that holds it
        ("x....x..x...", 3, False, [9, 10, 11]),
        ("x...x......x", 4, False, [5, 6, 7, 8]),
        ("x...x......x", 4, True, [7, 8, 9, 10]),
        ("x..x...x.x..", 5, False, [1, 2, 4, 5, 6]),  # two pieces: the largest, then what fits
        ("x.x.x.x.", 3, False, [1, 3, 5]),
        ("x...", 0, False, []),
    ],
)
def test_best_fit_then_fewest_pieces(pool, n, upper, chosen):
    assert choose_extents(usable(pool), n, upper=upper).tolist() == chosen


def test_no_choice_has_fewer_pieces():
    rng = random.Random(1)
    for _ in range(200):
        mask = np.array([False] + [rng.random() < 0.6 for _ in range(30)])
        free = int(mask.sum())
        if not free:
            continue
        n = rng.randrange(1, free + 1)
        got = choose_extents(mask, n)
        assert len(got) == n and mask[got].all() and (np.diff(got) > 0).all()
        edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
        lengths = sorted((edges[1::2] - edges[::2]).tolist(), reverse=True)
        least = next(k for k in range(1, len(lengths) + 1) if sum(lengths[:k]) >= n)
        assert int(np.count_nonzero(np.diff(got) != 1)) + 1 == least


def pieces(ids) -> int:
    return int(np.count_nonzero(np.diff(np.sort(ids)) != 1)) + 1


def churn(choose, seed, operations=4000, pool=2048) -> float:
    """Mean pieces a request, when requests of 8 to 128 pages come and go at 85 % load."""
    rng = random.Random(seed)
    free, order = np.ones(pool, dtype=bool), list(range(1, pool))
    free[0] = False
    held, counts = [], []
    for _ in range(operations):
        n = rng.choice([8, 16, 24, 48, 96, 128])
        while held and int(free.sum()) - n < 0.15 * pool:
            gone = held.pop(rng.randrange(len(held)))
            free[gone] = True
            order += gone.tolist()
        got = choose(free, order, n)
        free[got] = False
        taken = set(got.tolist())
        order = [page for page in order if page not in taken]
        held.append(got)
        counts.append(pieces(got))
    return sum(counts) / len(counts)


def test_extents_stay_whole_over_a_long_run_where_a_queue_scatters():
    ours = churn(lambda free, order, n: choose_extents(free, n), 3)
    queue = churn(lambda free, order, n: np.array(order[:n]), 3, operations=1500)
    assert ours < 1.2 and queue > 5 * ours, (ours, queue)


def test_a_requests_pages_lie_together_and_the_statistics_say_so():
    rig = SchedulerRig(make_config(blocks=80, host_pages=120))
    for i in range(6):
        rig.arrive(f"q{i}", [100 * i + j for j in range(20 + 4 * (i % 3))], 4)
    rig.step()
    assert extents_held(rig.state) == [1] * 6
    counts = rig.coordinator.statistics()
    assert counts["host_extents"] == counts["requests_live"] and counts["host_extents_worst"] == 1


def churned(rig, steps=120):
    """Requests come and go; published pages of the gone fill the pool and have to be evicted."""
    worst, live = [], []
    for step in range(steps):
        if len(live) < 3:
            tokens = [1000 * step + j for j in range(4 * random.Random(step).randrange(3, 10))]
            live.append((step, rig.arrive(f"q{step}", tokens, 4)))
        for began, key in list(live):
            if step - began > 3 and rig.state.requests[key].live:
                rig.coordinator.finish(*key)
                live.remove((began, key))
        rig.step()
        worst += extents_held(rig.state)
    return worst


def test_extents_stay_whole_when_published_pages_have_to_go():
    rig = SchedulerRig(make_config(blocks=80, host_pages=60))
    check, rig.check = rig.check, lambda: None  # it folds the whole log: at the end is enough
    counts = churned(rig)
    check()
    assert rig.events(ev.HostPagesEvicted), "the pool was full"
    assert max(counts) == 1
    assert rig.coordinator.statistics()["host_pages_published"] > 40, "and the cache stays full"


def test_eviction_stays_within_its_bound_of_the_oldest():
    rig = SchedulerRig(make_config(blocks=80, host_pages=240))
    rig.check = lambda: None
    record, reaches = rig.coordinator._record, []

    def watched(event):
        if isinstance(event, ev.HostPagesEvicted):
            oldest = rig.state.pages.evictable.ordered().tolist()
            reach = max(oldest.index(page) for page in event.pages) + 1
            n, short = rig.config.max_pages, rig.config.max_pages
            assert reach <= short + max(WINDOW * n, len(oldest) // WINDOW)
            reaches.append(reach / len(oldest))
        return record(event)

    rig.coordinator._record = watched
    churned(rig)
    assert reaches and min(reaches) < 0.5 and max(reaches) < 1, "and the youngest stay"


# -- leases by token -------------------------------------------------------------------------------
def two_requests():
    rig = SchedulerRig(make_config(blocks=60, host_pages=60))
    a, b = (
        rig.arrive(name, [first + j for j in range(12)], 8)
        for name, first in (("a", 1), ("b", 500))
    )
    rig.step()
    return rig, a, b


def release(rig, row, trigger, pages, entries=(), epochs=None):
    state = rig.state
    epochs = epochs or tuple(int(state.pages.epoch[p]) for p in pages)
    event = ev.HostPagesReleased(0, row, trigger, tuple(pages), epochs, tuple(entries))
    evolve(state, event, state.seq + 1)


def test_a_reservation_is_given_back_by_its_owner_only_and_once():
    rig, a, b = two_requests()
    page = rig.state.requests[a].reserved[0]
    with pytest.raises(IllegalTransition, match="not held by reservation"):
        release(rig, rig.row(b), PageTrigger.abandoned, [page])
    with pytest.raises(IllegalTransition, match="a second time"):
        release(rig, rig.row(a), PageTrigger.abandoned, [page, page])
    release(rig, rig.row(a), PageTrigger.abandoned, [page])
    with pytest.raises(IllegalTransition, match="not held by reservation"):
        release(rig, rig.row(a), PageTrigger.abandoned, [page])


def test_a_lease_of_an_earlier_epoch_releases_nothing():
    rig, a, _ = two_requests()
    with pytest.raises(StaleEpoch):
        release(rig, rig.row(a), None, [rig.host(a)[0]], (0,), epochs=(99,))


# -- the tail in which two requests part ----------------------------------------------------------
def test_requests_that_part_within_a_page_never_share_it():
    rig = SchedulerRig(make_config(blocks=60, host_pages=60))
    stem = list(range(3 * PAGE))
    first = rig.arrive("first", [*stem, 1, 2, 3, 4, 5], 4)
    for _ in range(3):
        rig.step()
    second = rig.arrive("second", [*stem, 1, 2, 9, 9, 9], 4)
    for _ in range(3):
        rig.step()
    shared = set(rig.host(first)) & set(rig.host(second)) - {0}
    assert shared == set(rig.host(first)[:3]), (
        "the whole pages of the stem, and nothing of the tail"
    )
    copies = [e for e in rig.events(ev.TransferPinned) if e.kind is not TransferKind.RESTORE]
    written = [named for e in copies for named in zip(e.pages, e.page_epochs, strict=True)]
    assert len(written) == len(set(written)), "a host page is written once an epoch"


def test_a_shared_or_findable_page_cannot_be_a_copys_destination():
    rig = SchedulerRig(make_config(blocks=60, host_pages=60))
    key = rig.arrive("q", list(range(3 * PAGE)), 8)
    for _ in range(2):
        rig.step()
    page = rig.host(key)[0]
    assert rig.state.pages.state[page] == PageState.PUBLISHED
    block = int(rig.state.table(Table.RESIDENT)[rig.row(key), 2])
    planned = rig.events(ev.TransferPinned)[0]
    event = ev.TransferPinned(
        0, planned.kind, rig.row(key), rig.state.requests[key].epoch, 1, 1,
        (rig.state.next_transfer,), (2,), (block,), (int(rig.state.blocks.epoch[block]),),
        (page,), (int(rig.state.pages.epoch[page]),),
    )  # fmt: skip
    with pytest.raises((AssertionError, IllegalTransition)):
        evolve(rig.state, event, rig.state.seq + 1)
