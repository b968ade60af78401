"""The fused resolve on a real GPU against plain Python: places, bytes, order, and forgetting."""

from __future__ import annotations

import numpy as np
import pytest
from resolver_reference import ReferenceResolver

from hisparse.device.cuda.kernels import ResolveSizes

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
}
EFFORT = {  # requests, steps: 17,000 rows in all
    "small": (100, 100),
    "odd": (50, 30),
    "hot is top-k": (100, 20),
    "three rows": (30, 20),
    "wide": (16, 10),
    "eight slots a thread": (4, 6),
    "long tables": (4, 10),
}


class World:
    """One index group of two layers on the GPU, and the same in Python."""

    def __init__(self, case, row_bytes=656, requests=5, seed=0, first_row=1):
        """The lowest row that either tier uses is `first_row` at least."""
        import cupy

        from hisparse.device.cuda.resolver import CudaResolver, CudaTables, ResolveCall

        page, top_k, hot, pages, self.span = CASES[case]
        self.rng = np.random.default_rng(seed)
        self.cupy, self.requests = cupy, requests
        self.sizes = ResolveSizes(page, top_k, hot, pages, row_bytes, 3 * page)
        self.reference = ReferenceResolver(page, hot, top_k)
        hot_blocks = self.sizes.hot_blocks
        first = 1 + first_row // self.sizes.block_rows
        self.hot = first + np.arange(requests * hot_blocks).reshape(requests, hot_blocks)
        first += requests * hot_blocks
        self.blocks = first + requests * pages
        self.resident = first + np.arange(requests * pages).reshape(requests, pages)
        self.resident[self.rng.random(self.resident.shape) < 0.7] = 0
        first_page = 1 + first_row // page
        self.host = first_page + self.rng.permutation(requests * pages).reshape(requests, pages)
        self.step = cupy.zeros((1,), cupy.int32)
        self.tables = CudaTables(
            self.table(self.resident),
            self.table(self.host),
            cupy.asarray(self.hot.astype(np.int32)),
        )
        self.resolver = CudaResolver(self.sizes, self.tables, requests, 2, self.step)
        shape = ((first_page + requests * pages) * page, row_bytes)
        self.slabs = [self.pinned(shape, first_page * page) for _ in range(2)]
        self.pools = [
            cupy.zeros((self.blocks * self.sizes.block_rows, row_bytes), cupy.uint8)
            for _ in range(2)
        ]
        self.call = ResolveCall(self.sizes, requests * self.span, self.span)
        self.arguments = self.resolver.arguments(
            self.call, self.slabs[0].ctypes.data, self.pools[0].data.ptr
        )
        for row in range(requests):
            self.reference.hot_blocks[row] = self.hot[row].tolist()
        self.now = 0

    def pinned(self, shape, first_row):
        size = int(np.prod(shape))
        memory = self.cupy.cuda.alloc_pinned_memory(size)
        slab = np.frombuffer(memory, np.uint8, size).reshape(shape)
        rows = slab[first_row:]
        rows[:] = self.rng.integers(0, 256, rows.shape, dtype=np.uint8)
        return slab

    def table(self, entries):
        padded = np.concatenate([entries, np.zeros((len(entries), 1), np.int64)], axis=1)
        return self.cupy.asarray(padded.astype(np.int32))

    def choose(self):
        """A top-k of one of several kinds: far apart, repeated, hot again, in order."""
        n, (reach, k) = self.requests * self.span, (self.sizes.reach, self.sizes.top_k)
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

    def run(self, rows, picks):
        """One step on both; returns (GPU's places, reference's places, None for nothing)."""
        self.now += 1
        self.step.fill(self.now)
        self.call.rows.set(rows.astype(np.int32))
        self.call.top_k.set(picks.astype(np.int32))
        self.call.out.fill(-9)
        self.resolver.resolve(self.call, self.arguments)
        self.resolver.replay(self.call, 1, self.slabs[1].ctypes.data, self.pools[1].data.ptr)
        live = rows >= 0
        places = {}
        for row, page in np.argwhere(self.resident).tolist():
            places[row, page] = int(self.resident[row, page])
        self.reference.resident_pages = places
        answers = self.reference.resolve(rows[live].tolist(), picks[live].tolist(), self.now)
        wanted = np.full(picks.shape, -1, dtype=np.int64)
        for at, line in zip(np.flatnonzero(live), answers, strict=True):
            wanted[at] = [-1 if x is None else x for x in line]
        page = self.sizes.page_size
        packed = wanted + (wanted // page) * (self.sizes.block_rows - page)
        return self.call.out.get().astype(np.int64), np.where(wanted < 0, -1, packed)

    def check_bytes(self, rows, picks, out):
        size = self.sizes.page_size
        pages = np.maximum(picks, 0) // size
        of = np.maximum(rows, 0)[:, None]
        backed = (out >= 0) & (self.resident[of, pages] == 0)
        sources = self.host[of, pages] * size + np.maximum(picks, 0) % size
        for slab, pool in zip(self.slabs, self.pools, strict=True):
            got = pool[self.cupy.asarray(out[backed])].get()
            assert np.array_equal(got, slab[sources[backed]])

    def check_state(self):
        order = self.resolver.order.get()[:, : self.sizes.hot_rows]
        positions = self.resolver.positions.get()[:, : self.sizes.hot_rows]
        for row in range(self.requests):
            slots = self.reference.slots_of(row)
            assert positions[row].tolist() == [-1 if s is None else s["position"] for s in slots]
            stamp = [(-1, s) if x is None else (2 * x["step"] + x["hit"], s)
                     for s, x in enumerate(slots)]  # fmt: skip
            assert order[row].tolist() == [s for _, s in sorted(stamp)]


def step_rows(world):
    rows = np.repeat(world.rng.permutation(world.requests), world.span)
    parked = np.repeat(world.rng.random(world.requests) < 0.2, world.span)
    later = np.arange(len(rows)) % world.span > 0  # also padding: the end of a shorter draft
    parked |= later & (world.rng.random(len(rows)) < 0.15)
    return np.where(parked, -1, rows)


def compare(world, rows, picks):
    out, wanted = world.run(rows, picks)
    bad = np.argwhere(out != wanted)
    assert not len(bad), (world.now, bad[:3], out[tuple(bad[0])], wanted[tuple(bad[0])])
    world.check_bytes(rows, picks, out)


@pytest.mark.parametrize("case", CASES)
def test_places_order_and_bytes_are_the_references(case):
    requests, steps = EFFORT[case]
    world = World(case, requests=requests)
    for _ in range(steps):
        compare(world, step_rows(world), world.choose())
    world.check_state()


def missed(world):
    return world.resolver.statistics()["misses"]


@pytest.mark.parametrize("case", ["small", "hot is top-k", "wide"])
def test_edges(case):
    """All misses, all hits, all padding, one position alone, slots that tie in all but place."""
    world = World(case)
    k, n = world.sizes.top_k, world.requests
    rows = np.arange(n)
    world.resident[:] = 0
    world.tables.resident.fill(0)
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
        compare(world, rows, picks)
        assert misses is None or missed(world) - before == misses
    world.check_state()


def test_rows_beyond_two_gibibytes_of_either_tier():
    world = World("odd", requests=2, first_row=(1 << 31) // 656)
    for _ in range(5):
        compare(world, step_rows(world), world.choose())


@pytest.mark.parametrize("row_bytes", ROW_BYTES.values(), ids=ROW_BYTES)
def test_rows_of_each_width_arrive_whole(row_bytes):
    world = World("odd", row_bytes)
    for _ in range(20):
        rows, picks = step_rows(world), world.choose()
        out, _ = world.run(rows, picks)
        world.check_bytes(rows, picks, out)


def test_what_is_forgotten_misses_again_and_its_slots_go_first():
    world = World("odd")
    size, hot = world.sizes.page_size, world.sizes.hot_rows
    for turn in range(60):
        out, wanted = world.run(step_rows(world), world.choose())
        assert np.array_equal(out, wanted)
        row = int(world.rng.integers(world.requests))
        slots = world.reference.slots_of(row)
        if turn % 3 == 0:
            world.resolver.forget_rows([row])
            world.reference.reset(row)
        elif turn % 3 == 1:
            page = int(world.rng.integers(world.sizes.pages))
            world.resolver.forget_positions(row, page * size, (page + 1) * size)
            world.reference.forget_page(row, page)
        else:
            first, last = sorted(world.rng.integers(0, hot + 1, 2).tolist())
            world.resolver.forget_slots(row, first, last)
            slots[first:last] = [None] * (last - first)
    world.check_state()


def test_two_runs_end_in_equal_state():
    states = []
    for _ in range(2):
        world = World("wide", seed=3)
        for _ in range(10):
            world.run(step_rows(world), world.choose())
        arrays = (world.resolver.map, world.resolver.order, world.resolver.positions)
        states.append([x.get().tobytes() for x in arrays])
    assert states[0] == states[1]


def test_a_position_with_no_copy_gives_minus_one_and_is_counted():
    world = World("small")
    world.resident[:] = 0
    world.host[0, 2] = 0
    world.tables.resident[:] = 0
    world.tables.host.set(np.concatenate(
        [world.host, np.zeros((world.requests, 1), np.int64)], axis=1
    ).astype(np.int32))  # fmt: skip
    picks = np.full((world.requests, world.sizes.top_k), -1)
    picks[:, 0] = 2 * world.sizes.page_size + 1
    rows = np.arange(world.requests)
    world.step.fill(1)
    world.call.rows.set(rows.astype(np.int32))
    world.call.top_k.set(picks.astype(np.int32))
    world.resolver.resolve(world.call, world.arguments)
    out = world.call.out.get()
    assert out[0, 0] == -1 and (out[1:, 0] >= 0).all()
    assert world.resolver.statistics()["lost"] == 1


def test_one_captured_graph_serves_resident_mixed_and_host_backed_batches():
    world = World("odd")
    stream = world.cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        world.resolver.resolve(world.call, world.arguments)
        world.resolver.replay(world.call, 1, world.slabs[1].ctypes.data, world.pools[1].data.ptr)
        graph = stream.end_capture()
    eager = (world.resolver.resolve, world.resolver.replay)
    world.resolver.resolve = lambda *_: graph.launch(stream)
    world.resolver.replay = lambda *_: stream.synchronize()
    whole = world.resident.copy()
    for share in (1.0, 0.5, 0.0, 0.7):
        world.resident = np.where(world.rng.random(whole.shape) < share, 0, whole)
        world.tables.resident.set(np.concatenate(
            [world.resident, np.zeros((world.requests, 1), np.int64)], axis=1
        ).astype(np.int32))  # fmt: skip
        world.cupy.cuda.runtime.deviceSynchronize()
        for _ in range(5):
            rows, picks = step_rows(world), world.choose()
            world.cupy.cuda.runtime.deviceSynchronize()
            out, wanted = world.run(rows, picks)
            assert np.array_equal(out, wanted)
            world.check_bytes(rows, picks, out)
    world.resolver.resolve, world.resolver.replay = eager
