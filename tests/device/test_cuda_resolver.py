"""The fused resolve on a real GPU against plain Python, after each of 10,000 random calls.

A call is one launch over several requests, on the state that all calls before it left. Whatever it
answers or changes is compared: the place of each entry; the plan, which is how many misses each
line has, and from which host row to which pool row each goes; the slots' positions, the kept map
and the replacement order of every request; the bytes that leader and follower then have. Between
calls pages come and go, host pages and hot blocks are replaced and request rows handed on; some
calls share a step; one request has no hot region. So it is with each call of the edges below.
"""

from __future__ import annotations

import numpy as np
import pytest
from resolver_reference import ReferenceResolver

from hisparse.device.cuda.kernels import CALLS_MAX, ResolveSizes

pytestmark = pytest.mark.gpu

ROW_BYTES = {"656": 656, "576": 576, "1152": 1152}
CASES = {  # page, top_k, hot, pages, rows of a request in a call
    "small": (4, 6, 12, 10, 1),
    "odd": (16, 49, 101, 40, 2),
    "hot is top-k": (16, 32, 32, 16, 1),
    "three rows": (8, 10, 64, 32, 3),
    "wide": (64, 2048, 4096, 96, 1),
    "eight slots a thread": (64, 1000, 8192, 160, 2),
    "long tables": (4, 64, 128, 5000, 1),
    "one": (16, 49, 101, 40, 1),
    "one, hot is top-k": (16, 32, 32, 16, 1),
    "one, wide": (64, 2048, 4096, 96, 1),
    "one, long tables": (4, 1, 128, 5000, 1),
    "one, three rows": (8, 10, 64, 32, 3),
}
EFFORT = {  # worlds, calls in each, requests
    "small": (5, 1000, 5),
    "odd": (3, 500, 4),
    "hot is top-k": (2, 450, 5),
    "three rows": (3, 500, 4),
    "wide": (1, 40, 5),
    "eight slots a thread": (1, 20, 3),
    "long tables": (1, 40, 5),
    "one": (2, 250, 3),
    "one, hot is top-k": (1, 250, 3),
    "one, wide": (1, 100, 3),
    "one, long tables": (1, 50, 3),
    "one, three rows": (1, 100, 3),
}
WORLDS = [(case, seed) for case, (worlds, _, _) in EFFORT.items() for seed in range(worlds)]
assert sum(EFFORT[case][1] for case, _ in WORLDS) == 10_000
CALLS = 3  # at most in a step
ONE = "one"  # begins cases whose calls have one request; if of one row, resolve_one.cu takes it
VALUE = (1 << 32) - 1  # of a word; above it is the epoch


class World:
    """One index group of two layers on the GPU, and the same in Python.

    Args:
        about: a row that lies in the middle of either tier; their addresses are made up so that
            nothing is taken for the rows below. None: either tier begins with its first row.
        overlap: chance that a call is in the step of the one before it.
        homeless: whether the last request has no hot region, and all its pages on the GPU.
    """

    def __init__(
        self, case, row_bytes=656, requests=5, seed=0, about=None, overlap=0.0, homeless=False
    ):
        import cupy

        from hisparse.device.cuda.resolver import CudaResolver, CudaTables, ResolveCall

        page, top_k, hot, pages, self.span = CASES[case]
        self.rng = np.random.default_rng(seed)
        self.cupy, self.requests, self.overlap = cupy, requests, overlap
        self.together = 1 if case.startswith(ONE) else requests  # in a call
        self.backed = requests - homeless
        self.sizes = sizes = ResolveSizes(page, top_k, hot, pages, row_bytes, 3 * page)
        blocks = requests * (sizes.hot_blocks + pages)
        first = 1 if about is None else about // sizes.block_rows - blocks // 2
        first_page = 1 if about is None else about // page - requests * pages // 2
        self.first_row, self.first_host_row = first * sizes.block_rows, first_page * page
        ids = first + np.arange(blocks)
        self.hot = ids[: requests * sizes.hot_blocks].reshape(requests, -1)
        self.blocks = ids[requests * sizes.hot_blocks :].reshape(requests, pages)
        self.resident = self.blocks.copy()
        self.resident[: self.backed][self.rng.random((self.backed, pages)) < 0.7] = 0
        self.hot[self.backed :] = 0
        self.host = first_page + self.rng.permutation(requests * pages).reshape(requests, pages)
        self.step = cupy.zeros((1,), cupy.int32)
        self.tables = CudaTables(
            self.table(self.resident),
            self.table(self.host),
            cupy.asarray(self.hot.astype(np.int32)),
        )
        self.resolver = CudaResolver(sizes, self.tables, requests, 2, self.step)
        self.slabs = [self.pinned((requests * pages * page, row_bytes)) for _ in range(2)]
        shape = (blocks * sizes.block_rows, row_bytes)
        self.pools = [cupy.zeros(shape, cupy.uint8) for _ in range(2)]
        below = self.first_host_row * row_bytes, self.first_row * row_bytes
        self.at = [
            ((slab.ctypes.data - below[0]) % (1 << 64), (pool.data.ptr - below[1]) % (1 << 64))
            for slab, pool in zip(self.slabs, self.pools, strict=True)
        ]
        lines = self.together * self.span
        self.calls = [ResolveCall(sizes, lines, self.span, i) for i in range(CALLS)]
        self.arguments = [self.resolver.arguments(call, *self.at[0]) for call in self.calls]
        self.call = self.calls[0]
        self.now = 0
        self.reference = reference = ReferenceResolver(page, hot, top_k)
        for row in range(requests):
            reference.hot_blocks[row] = self.hot[row].tolist()
            for where in range(pages):
                self.place(row, where)

    def pinned(self, shape):
        size = int(np.prod(shape))
        memory = self.cupy.cuda.alloc_pinned_memory(size)
        slab = np.frombuffer(memory, np.uint8, size).reshape(shape)
        slab[:] = self.rng.integers(0, 256, shape, dtype=np.uint8)
        return slab

    def table(self, entries):
        padded = np.concatenate([entries, np.zeros((len(entries), 1), np.int64)], axis=1)
        return self.cupy.asarray(padded.astype(np.int32))

    def place(self, row, page):
        """The reference has the page where the tables have it."""
        self.reference.resident_pages[row, page] = int(self.resident[row, page])
        self.reference.host_pages[row, page] = int(self.host[row, page])

    def set_resident(self, resident):
        """Other pages are on the GPU."""
        self.resident = np.array(resident)
        self.tables.resident[:, :-1] = self.cupy.asarray(self.resident.astype(np.int32))
        for row, page in np.ndindex(*self.resident.shape):
            self.place(row, page)

    # -- calls -----------------------------------------------------------------------------------
    def choose(self):
        """A top-k of one of several kinds: far apart, repeated, hot again, in order."""
        n, (reach, k) = self.together * self.span, (self.sizes.reach, self.sizes.top_k)
        kind = self.rng.integers(5)
        if kind == 0:
            picks = np.stack([self.rng.permutation(reach)[:k] for _ in range(n)])
        elif kind == 1:
            picks = self.rng.integers(0, min(reach, 2 * k), (n, k))
        elif kind == 2:
            near = min(reach, max(k, self.sizes.hot_rows // 2))
            picks = np.stack([self.rng.permutation(near)[:k] for _ in range(n)])
        elif kind == 3 and self.now > 1:
            picks = self.last.copy()
            picks[:, : 1 + k // 10] = self.rng.integers(0, reach, (n, 1 + k // 10))
        else:
            picks = np.sort(self.rng.integers(0, reach, (n, k)), axis=1)
        picks[self.rng.random(picks.shape) < 0.1] = -1
        if self.rng.random() < 0.05:
            picks[:] = -1
        self.last = picks
        return picks

    def rows(self):
        """The requests in any order; some parked, and some rows of a shorter draft padding."""
        rows = np.repeat(self.rng.permutation(self.requests)[: self.together], self.span)
        parked = np.repeat(self.rng.random(self.together) < 0.2, self.span)
        later = np.arange(len(rows)) % self.span > 0
        parked |= later & (self.rng.random(len(rows)) < 0.15)
        return np.where(parked, -1, rows)

    def next_call(self):
        """The next call of the step, or the first of the next step."""
        if self.now and self.call is not self.calls[-1] and self.rng.random() < self.overlap:
            self.call = self.calls[self.call.ordinal + 1]
        else:
            self.call = self.calls[0]
            self.now += 1
            self.step.fill(self.now)

    def run(self, rows, picks):
        """One call on both; returns (GPU's places, reference's places, -1 for nothing)."""
        self.next_call()
        self.call.rows.set(rows.astype(np.int32))
        self.call.top_k.set(picks.astype(np.int32))
        self.call.out.fill(-9)
        self.resolver.resolve(self.call, self.arguments[self.call.ordinal])
        self.resolver.replay(self.call, 1, *self.at[1])
        live = rows >= 0
        answers = self.reference.resolve(rows[live].tolist(), picks[live].tolist(), self.now)
        wanted = np.full(picks.shape, -1, dtype=np.int64)
        for at, line in zip(np.flatnonzero(live), answers, strict=True):
            wanted[at] = [-1 if x is None else x for x in line]
        return self.call.out.get().astype(np.int64), self.packed(wanted)

    def packed(self, physical):
        """Rows of blocks, as the kernels number them: other layers' rows lie between blocks."""
        page = self.sizes.page_size
        apart = physical + physical // page * (self.sizes.block_rows - page)
        return np.where(physical < 0, -1, apart)

    def compare(self, rows, picks):
        """One call, after which all is as in the reference."""
        out, wanted = self.run(rows, picks)
        bad = np.argwhere(out != wanted)
        assert not len(bad), (self.now, bad[:3], out[tuple(bad[0])], wanted[tuple(bad[0])])
        self.check_plan(rows)
        self.check_state()
        self.check_bytes(rows, picks, out)

    # -- what a call leaves ----------------------------------------------------------------------
    def check_plan(self, rows):
        """The misses of each line: their number, and where each comes from and goes to. Their order
        is no contract. No word but theirs is of this call."""
        epoch = self.now * CALLS_MAX + self.call.ordinal
        count, misses = self.call.count.get(), self.call.misses.get()
        assert (count >> 32 == epoch).all()
        planned = dict(zip(np.flatnonzero(rows >= 0).tolist(), self.reference.plan, strict=True))
        wanted = [planned.get(line, []) for line in range(len(rows))]
        assert (count & VALUE).tolist() == [len(line) for line in wanted]
        listed = np.arange(misses.shape[1]) < (count & VALUE).astype(np.int64)[:, None]
        assert ((misses >> 32 == epoch) == listed[:, :, None]).all()
        lines = np.nonzero(listed)[0]
        made = np.column_stack([lines, (misses[listed] & VALUE).astype(np.int64)])
        flat = [(line, *pair) for line, pairs in enumerate(wanted) for pair in pairs]
        due = np.array(flat, dtype=np.int64).reshape(-1, 3)
        due[:, 2] = self.packed(due[:, 2])
        assert np.array_equal(*(x[np.lexsort(x.T)] for x in (made, due)))

    def check_state(self):
        """Positions, kept map and order of every request, whole arrays of them."""
        kept = np.full((self.requests, self.sizes.map_stride), -1, np.int16)
        found = [self.reference.state_of(row) for row in range(self.requests)]
        for row, (_, _, slots) in enumerate(found):
            kept[row, list(slots)] = list(slots.values())
        hot = self.sizes.hot_rows
        positions, order, map_ = (
            array.get()
            for array in (self.resolver.positions, self.resolver.order, self.resolver.map)
        )
        assert positions[:, :hot].tolist() == [held for held, _, _ in found]
        assert order[:, :hot].tolist() == [ranked for _, ranked, _ in found]
        assert np.array_equal(map_, kept)

    def check_bytes(self, rows, picks, out):
        size = self.sizes.page_size
        pages = np.maximum(picks, 0) // size
        of = np.maximum(rows, 0)[:, None]
        hosted = (out >= 0) & (self.resident[of, pages] == 0)
        sources = self.host[of, pages] * size + np.maximum(picks, 0) % size
        places = self.cupy.asarray(out[hosted] - self.first_row)
        for slab, pool in zip(self.slabs, self.pools, strict=True):
            assert np.array_equal(pool[places].get(), slab[sources[hosted] - self.first_host_row])

    # -- between steps ---------------------------------------------------------------------------
    def disturb(self, kind):
        """Something of one request changes, and what it makes stale is forgotten: a step begins."""
        self.call = self.calls[-1]
        row, page = int(self.rng.integers(self.backed)), int(self.rng.integers(self.sizes.pages))
        if kind == "resident":  # the page comes to the GPU, or leaves it
            self.resident[row, page] = 0 if self.resident[row, page] else self.blocks[row, page]
            self.tables.resident[row, page] = int(self.resident[row, page])
            self.place(row, page)
        elif kind == "host":  # it is in another host page, and another page is in that
            places = (row, page), (int(self.rng.integers(self.backed)), 0)
            swapped = [int(self.host[place]) for place in reversed(places)]
            for place, ident in zip(places, swapped, strict=True):
                self.host[place] = ident
                self.tables.host[place] = ident
                self.place(*place)
                first = place[1] * self.sizes.page_size
                self.resolver.forget_positions(place[0], first, first + self.sizes.page_size)
                self.reference.forget_page(*place)
        elif kind == "slots":  # they lost their bytes
            first, last = sorted(self.rng.integers(0, self.sizes.hot_rows + 1, 2).tolist())
            self.resolver.forget_slots(row, first, last)
            self.reference.slots_of(row)[first:last] = [None] * (last - first)
        else:  # the request row is handed on
            self.resolver.forget_rows([row])
            self.reference.reset(row)


DISTURBANCES = ("resident", "host", "slots", "row")


@pytest.mark.parametrize(("case", "seed"), WORLDS, ids=[f"{case}-{seed}" for case, seed in WORLDS])
def test_every_call_answers_plans_and_leaves_what_the_reference_does(case, seed):
    _, calls, requests = EFFORT[case]
    world = World(case, requests=requests, seed=seed, overlap=0.3, homeless=True)
    for _ in range(calls):
        world.compare(world.rows(), world.choose())
        if world.rng.random() < 0.2:
            world.disturb(world.rng.choice(DISTURBANCES))


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
    world.tables.host[0, 2] = 0
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
        world.resolver.resolve(world.call, world.arguments[0])
        world.resolver.replay(world.call, 1, *world.at[1])
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
