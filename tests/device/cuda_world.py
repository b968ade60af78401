"""A world of the fused resolve: one index group on a real GPU, and the same in plain Python.

A call is one launch over several requests, on the state that all calls before it left; between
steps the launch that begins a worker's step changes tables and resets requests. `World` draws
both, and compares all that a call answers or leaves with `resolver_reference`.
"""

from __future__ import annotations

import numpy as np
from resolver_reference import ReferenceResolver

from hisparse.device.cuda.kernels import CALLS_MAX, ResolveSizes
from hisparse.fsm.wire import SparseKVOffloadCommand, Table, TableUpdate

CASES = {  # page, top_k, hot, pages, rows of a request in a call
    "small": (4, 6, 12, 10, 1),
    "odd": (16, 49, 101, 40, 2),
    "hot is top-k": (16, 32, 32, 16, 1),
    "three rows": (8, 10, 64, 32, 3),
    "wide": (64, 2048, 4096, 96, 1),
    "eight slots a thread": (64, 1000, 8192, 160, 2),
    "wide top-k": (64, 4096, 8192, 160, 1),
    "long tables": (4, 64, 128, 5000, 1),
    "one": (16, 49, 101, 40, 1),
    "one, hot is top-k": (16, 32, 32, 16, 1),
    "one, wide": (64, 2048, 4096, 96, 1),
    "one, eight slots a thread": (64, 1000, 8192, 160, 1),
    "one, wide top-k": (64, 4096, 8192, 160, 1),
    "one, long tables": (4, 1, 128, 5000, 1),
    "one, three rows": (8, 10, 64, 32, 3),
}
CALLS = 3  # at most in a step
ONE = "one"  # begins cases whose calls have one request; if of one row, resolve_one.cu takes it
VALUE = (1 << 32) - 1  # of a word; above it is the epoch
DISTURBANCES = ("resident", "host", "hot", "back", "row")


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

        from hisparse.device.cuda.device import CudaDevice
        from hisparse.device.cuda.resolver import CudaResolver, CudaTables, ResolveCall
        from hisparse.device.cuda.tables import TableWriter

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
        self.ids = {Table.RESIDENT: self.resident, Table.HOST: self.host, Table.HOT: self.hot}
        self.device = CudaDevice()
        self.tables = {
            table: self.device.allocate_table(requests, ids.shape[1], int(table != Table.HOT))
            for table, ids in self.ids.items()
        }
        self.step = cupy.zeros((1,), cupy.int32)
        read = CudaTables(*self.tables.values())
        self.resolver = r = CudaResolver(sizes, read, requests, 2, self.step)
        written = self.tables | {Table.INDEX: self.device.allocate_table(requests, 1)}
        state = (r.map, r.positions, r.order, r.group)
        self.writer = TableWriter(self.device, sizes, written, [state], self.step)
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
        self.now, self.last = 0, None
        self.reference = ReferenceResolver(page, hot, top_k)
        self.begin([update for row in range(requests) for update in self.hand_out(row)])

    def pinned(self, shape):
        size = int(np.prod(shape))
        memory = self.cupy.cuda.alloc_pinned_memory(size)
        slab = np.frombuffer(memory, np.uint8, size).reshape(shape)
        slab[:] = self.rng.integers(0, 256, shape, dtype=np.uint8)
        return slab

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
        elif kind == 3 and self.last is not None:
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
        if self.call not in (None, self.calls[-1]) and self.rng.random() < self.overlap:
            self.call = self.calls[self.call.ordinal + 1]
            return
        if self.call is not None:
            self.begin()
        self.call = self.calls[0]

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
        """Positions, kept map and order of every request, whole arrays of them; the tables; no step
        has used a free slot."""
        kept = np.full((self.requests, self.sizes.map_stride), -1, np.int16)
        found = [self.reference.state_of(row) for row in range(self.requests)]
        for row, (_, _, slots) in enumerate(found):
            kept[row, list(slots)] = list(slots.values())
        hot = self.sizes.hot_rows
        r = self.resolver
        positions, order, map_, group = (x.get() for x in (r.positions, r.order, r.map, r.group))
        assert positions[:, :hot].tolist() == [held for held, _, _ in found]
        assert order[:, :hot].tolist() == [ranked for _, ranked, _ in found]
        assert np.array_equal(map_, kept)
        assert not group[:, :hot][positions[:, :hot] < 0].any()
        for table, ids in self.ids.items():
            assert np.array_equal(self.tables[table].get(), ids), table

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
    def begin(self, tables=(), resets=()):
        """A step begins as a worker's does; everything else runs on another stream."""
        self.now, self.call = self.now + 1, None
        command = SparseKVOffloadCommand(self.now, 0, 0, 0, tuple(resets), tuple(tables))
        self.cupy.cuda.runtime.deviceSynchronize()
        with self.device.on_compute():
            self.writer.begin(command)
        self.cupy.cuda.runtime.deviceSynchronize()

    def name(self, table, row, entry, ident):
        """The entry is to name another id. The reference has that at once, and forgets what lay in
        the page or block."""
        reference, size = self.reference, self.sizes.page_size
        if self.ids[table][row, entry] != ident and table != Table.RESIDENT:
            slots = reference.slots_of(row)
            if table == Table.HOST:
                reference.forget_page(row, entry)
            else:
                block = slice(entry * size, (entry + 1) * size)
                slots[block] = [None] * len(slots[block])
        self.ids[table][row, entry] = ident
        if table == Table.HOT:
            reference.hot_blocks[row] = self.hot[row].tolist()
        else:
            known = {Table.RESIDENT: reference.resident_pages, Table.HOST: reference.host_pages}
            known[table][row, entry] = ident
        return TableUpdate(table, row, entry, (ident,))

    def hand_out(self, row):
        """What the tables have of `row` from now on, which had nothing."""
        self.reference.hot_blocks[row] = self.hot[row].tolist()
        for page in range(self.sizes.pages):
            self.reference.resident_pages[row, page] = int(self.resident[row, page])
            self.reference.host_pages[row, page] = int(self.host[row, page])
        for table in (Table.HOST, Table.HOT):
            yield TableUpdate(table, row, 0, tuple(self.ids[table][row].tolist()))
        for page in np.flatnonzero(self.resident[row]).tolist():
            yield TableUpdate(Table.RESIDENT, row, page, (int(self.resident[row, page]),))

    def set_resident(self, resident):
        """Other pages are on the GPU."""
        self.begin(
            self.name(Table.RESIDENT, row, page, int(resident[row, page]))
            for row, page in np.ndindex(*resident.shape)
        )

    def disturb(self, *kinds):
        """One command changes something of a request for each kind. A step begins."""
        tables, resets = [], []
        for kind in sorted(kinds, key=lambda kind: kind != "row"):  # resets come first
            row = int(self.rng.integers(self.backed))
            if kind == "row":  # handed on, to a request of other pages and blocks
                resets.append(row)
                self.reference.reset(row)
                gone = self.rng.random(self.sizes.pages) < 0.7
                self.resident[row] = np.where(gone, 0, self.blocks[row])
                for table in (Table.HOST, Table.HOT):
                    self.ids[table][row] = self.rng.permutation(self.ids[table][row])
                tables = [update for update in tables if update.row != row]
                tables += self.hand_out(row)
                continue
            back_hot = kind == "back" and self.rng.random() < 0.5
            table = Table.HOT if kind == "hot" or back_hot else Table.HOST
            entry = int(self.rng.integers(self.ids[table].shape[1]))
            ident = int(self.ids[table][row, entry])
            if kind == "resident":  # the page comes to the GPU, or leaves it
                ident = 0 if self.resident[row, entry] else int(self.blocks[row, entry])
                tables.append(self.name(Table.RESIDENT, row, entry, ident))
            elif kind == "back":  # it is taken away and given back
                tables += [self.name(table, row, entry, each) for each in (0, ident)]
            else:  # it is in another host page or hot block, and what was in that is in its own
                other = int(self.rng.integers(self.backed)), 0
                tables.append(self.name(table, row, entry, int(self.ids[table][other])))
                tables.append(self.name(table, *other, ident))
        self.begin(tables, resets)
