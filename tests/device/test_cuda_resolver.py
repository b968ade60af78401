"""The fused resolve on a real GPU against plain Python, after each of 10,000 random calls.

A call is one launch over several requests, on the state that all calls before it left. Whatever it
answers or changes is compared: the place of each entry; the plan, which is how many misses each
line has, and from which host row to which pool row each goes; the slots' positions, the kept map
and the replacement order of every request; the bytes that leader and follower then have. Between
steps pages come and go, host pages and hot blocks are replaced and request rows handed on, by the
launch that begins a worker's step; some calls share a step; one request has no hot region. So it is
with each call of the edges below.
"""

from __future__ import annotations

import numpy as np
import pytest
from cuda_world import DISTURBANCES, World

from hisparse.fsm.wire import Table, TableUpdate

pytestmark = pytest.mark.gpu

ROW_BYTES = {"656": 656, "576": 576, "1152": 1152}
EFFORT = {  # worlds, calls in each, requests
    "small": (5, 1000, 5),
    "odd": (3, 500, 4),
    "hot is top-k": (2, 450, 5),
    "three rows": (3, 500, 4),
    "wide": (1, 40, 5),
    "eight slots a thread": (1, 20, 3),
    "wide top-k": (1, 15, 3),
    "long tables": (1, 40, 5),
    "one": (2, 225, 3),
    "one, hot is top-k": (1, 250, 3),
    "one, wide": (1, 100, 3),
    "one, eight slots a thread": (1, 20, 3),
    "one, wide top-k": (1, 15, 3),
    "one, long tables": (1, 50, 3),
    "one, three rows": (1, 100, 3),
}
WORLDS = [(case, seed) for case, (worlds, _, _) in EFFORT.items() for seed in range(worlds)]
assert sum(EFFORT[case][1] for case, _ in WORLDS) == 10_000


@pytest.mark.parametrize(("case", "seed"), WORLDS, ids=[f"{case}-{seed}" for case, seed in WORLDS])
def test_every_call_answers_plans_and_leaves_what_the_reference_does(case, seed):
    _, calls, requests = EFFORT[case]
    world = World(case, requests=requests, seed=seed, overlap=0.3, homeless=True)
    for _ in range(calls):
        world.compare(world.rows(), world.choose())
        if world.rng.random() < 0.2:
            world.disturb(*world.rng.choice(DISTURBANCES, world.rng.integers(1, 4)))


def missed(world):
    return world.resolver.statistics()["misses"]


@pytest.mark.parametrize(
    "case", ["small", "hot is top-k", "wide", "one", "one, hot is top-k", "one, wide"]
)
def test_edges(case):
    """All misses, all hits, all padding, one position alone, slots that tie in all but place."""
    world = World(case)
    k, n = world.sizes.top_k, world.together
    rows = np.arange(n)
    world.set_resident(np.zeros_like(world.resident))
    there = np.stack([world.rng.permutation(world.sizes.reach)[: 2 * k] for _ in rows])
    a, b = there[:, :k], there[:, k:]
    if b.shape[1] < k:
        b = a[:, ::-1]
    for picks, misses in (
        (a, n * k),
        (a[:, ::-1], 0),
        (np.full_like(a, -1), 0),
        (np.repeat(a[:, :1], k, axis=1), 0),
        (a, 0),
        (b, None),
        (np.concatenate([a[:, : k // 2], b[:, : k - k // 2]], axis=1), None),
    ):
        before = missed(world)
        world.compare(rows, picks)
        assert misses is None or missed(world) - before == misses


@pytest.mark.parametrize("about", ["2 GiB", "4 GiB", "the last row that 32 bits name"])
@pytest.mark.parametrize("row_bytes", ROW_BYTES.values(), ids=ROW_BYTES)
@pytest.mark.parametrize("case", ["odd", "one"])
def test_rows_about_the_limits_of_32_bits_in_either_tier(case, row_bytes, about):
    """Offsets of rows beyond are 64-bit. Nothing lies at the rows below: either tier's address is
    made up for them, so that 2 TB of rows take no memory."""
    rows = {"2 GiB": (1 << 31) // row_bytes, "4 GiB": (1 << 32) // row_bytes}
    world = World(case, row_bytes, requests=2, about=rows.get(about, (1 << 31) - 3000))
    for _ in range(20):
        world.compare(world.rows(), world.choose())


@pytest.mark.parametrize("row_bytes", ROW_BYTES.values(), ids=ROW_BYTES)
def test_rows_of_each_width_arrive_whole(row_bytes):
    world = World("odd", row_bytes)
    for _ in range(20):
        world.compare(world.rows(), world.choose())


@pytest.mark.parametrize("kind", DISTURBANCES)
def test_what_is_forgotten_misses_again_and_its_slots_go_first(kind):
    world = World("odd")
    for _ in range(20):
        world.compare(world.rows(), world.choose())
        world.disturb(kind)
        world.check_state()


@pytest.mark.parametrize("case", ["wide", "one, wide"])
def test_two_runs_end_in_equal_state(case):
    states = []
    for _ in range(2):
        world = World(case, seed=3)
        for _ in range(10):
            world.run(world.rows(), world.choose())
        arrays = (world.resolver.map, world.resolver.order, world.resolver.positions)
        states.append([x.get().tobytes() for x in arrays])
    assert states[0] == states[1]


@pytest.mark.parametrize("case", ["small", "one"])
def test_a_position_with_no_copy_gives_minus_one_and_is_counted(case):
    world = World(case)
    world.set_resident(np.zeros_like(world.resident))
    world.begin([TableUpdate(Table.HOST, 0, 2, (0,))])
    picks = np.full((world.together, world.sizes.top_k), -1)
    picks[:, 0] = 2 * world.sizes.page_size + 1
    picks[:, 1] = picks[:, 0] + world.sizes.page_size
    out, _ = world.run(np.arange(world.together), picks)
    assert out[0, 0] == -1 and (out[1:, 0] >= 0).all() and (out[:, 1] >= 0).all()
    assert (out[:, 2:] == -1).all()
    assert world.resolver.statistics() == {"misses": 2 * len(out) - 1, "lost": 1}


def test_calls_of_one_row_do_not_need_the_blocks_that_plan_a_request_each():
    world = World("one")
    if world.resolver._resolve_one is None:
        pytest.skip("a GPU of compute capability 9.0 or later is needed")
    world.resolver._resolve = None
    for _ in range(20):
        world.compare(world.rows(), world.choose())


@pytest.mark.parametrize("case", ["odd", "one"])
def test_one_captured_graph_serves_resident_mixed_and_host_backed_batches(case):
    world = World(case)
    stream = world.cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        world.resolver.resolve(world.calls[0], world.arguments[0])
        world.resolver.replay(world.calls[0], 1, *world.at[1])
        graph = stream.end_capture()
    eager = (world.resolver.resolve, world.resolver.replay)

    def launch(*_):
        world.cupy.cuda.runtime.deviceSynchronize()
        graph.launch(stream)

    world.resolver.resolve = launch
    world.resolver.replay = lambda *_: stream.synchronize()
    for share in (1.0, 0.5, 0.0, 0.7):
        there = world.rng.random(world.blocks.shape) >= share
        world.set_resident(np.where(there, world.blocks, 0))
        for _ in range(5):
            world.compare(world.rows(), world.choose())
    world.resolver.resolve, world.resolver.replay = eager
