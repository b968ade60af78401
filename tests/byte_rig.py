"""A `SchedulerRig` whose worker is the production one: what is said of pages is checked on bytes.

The bytes of a row are a function of (tokens up to it, layer), which neither side computes. Every
step writes the rows that it computes and reads random earlier ones. With ``lag=1`` the copy streams
stand still until something has to wait for them, so a copy that nothing orders comes last. On a GPU
a kernel holds each of them for some time before a step, ever more often as `lag` grows. Rows are
copied out, or, in a share `resolves` of the steps, read in the pool where a resolve says they are.
"""

from __future__ import annotations

import numpy as np
from backends import closes, open_backend, plain, stall
from kv_rig import PAGE, SchedulerRig

from hisparse.device.rows import StepRows
from hisparse.device.worker import HiSparseWorker
from hisparse.testing.content import Chain, row_bytes

HOLD_MS = 2
INDEX_CACHE = 1000  # cache numbers of the index groups, beside those of the layers


class ByteRig(SchedulerRig):
    """Commands wait in `held` until `deliver`; acknowledgements are fetched by `poll`."""

    def __init__(self, config=None, *, seed=0, lag=1.0, copy_fault=None):
        super().__init__(config)
        self.device = open_backend(seed, lag)
        self.worker = HiSparseWorker(self.config, self.device, copy_fault=copy_fault)
        closes(self.worker)
        self.lag, self.holds, self.hold_ms = lag, ("d2h", "h2d"), HOLD_MS
        self._unread: list = []  # (array on the GPU, what it must be)
        self._holds = np.random.RandomState(seed)
        self._verbs = np.random.RandomState(seed)
        self.resolves, self.rows_resolved = 0.0, 0
        self.random = np.random.RandomState(seed)
        self.held: list = []
        self.rows_read = 0

    # -- what a row must hold -----------------------------------------------------------------
    def tags(self, key):
        return Chain().tags(self.tokens[key])

    def named_pages(self):
        """Content tags of every page that a request of this rig could have named, by its hash."""
        found = {}
        for key, tokens in self.tokens.items():
            tags = self.tags(key)
            for page, name in enumerate(self.hasher.extend(b"", tokens)):
                found[name] = tags[page * PAGE : (page + 1) * PAGE]
        return found

    # -- steps ------------------------------------------------------------------------------
    def send(self):
        command = super().send()
        state = self.state
        requests, positions = [], []
        for request in [r for r in state.by_row if r is not None and r.live]:
            first, end = state.rows.computed[request.row], state.rows.planned[request.row]
            requests += [request.row] * int(end - first)
            positions += range(int(first), int(end))
        rows = StepRows(np.array(requests, np.int32), np.array(positions, np.int64))
        tags = {r: self.tags(state.request_of(r).key) for r in set(requests)}
        self.held.append((command, rows, tags))
        return command

    def step(self, *, deliver=True, **how):
        """As the base's, but it is the worker that acknowledges: `poll` takes that in."""
        command = super().step(ack=False, **how)
        if deliver:
            self.deliver()
        return command

    def deliver(self):
        """The worker takes every held command, in order, and runs its step's forward."""
        while self.held:
            command, rows, tags = self.held.pop(0)
            for stream in self.holds:
                if self._holds.rand() < self.lag:
                    stall(self.device, stream, self.hold_ms)
            self.worker.begin_step(command)
            if len(rows.rows):
                self._forward(rows, tags)
            self.worker.end_step(command.step)

    def _forward(self, rows, tags):
        layout = self.config.layout
        own = np.array([tags[r][p] for r, p in zip(rows.rows, rows.positions, strict=True)])
        shape = (len(rows.rows), self.config.policy.top_k)
        resolve = np.bincount(rows.rows).max() <= self.worker.geometry.wave_rows
        resolve = resolve and self._verbs.rand() < self.resolves
        self.rows_resolved += int(resolve) * len(rows.rows) * layout.layers
        for group, layers in enumerate(layout.index_groups):
            data = row_bytes(own, INDEX_CACHE + group, layout.index_row_bytes)
            self.worker.index.write(group, rows, data)
            chosen = (self.random.rand(*shape) * (rows.positions[:, None] + 1)).astype(np.int32)
            read = np.array([tags[r][c] for r, c in zip(rows.rows, chosen, strict=True)])
            for layer in layers:
                handle = self.worker.handles[layer]
                handle.write(rows, row_bytes(own, layer, layout.row_bytes))
                top_k = chosen if layer == layers[0] else None
                want = row_bytes(read.reshape(-1), layer, layout.row_bytes).reshape(*shape, -1)
                if resolve:
                    places = handle.resolve(rows, top_k)
                    self._expect_at(places, handle.resident.rows, want)
                else:
                    self._expect(handle.gather(rows, top_k), want)

    def _expect(self, pending, want):
        if self.device.name == "cpu":
            pending.on_done(lambda data: self._compare(data, want))
        else:
            self._unread.append((pending.result(), want))

    def _expect_at(self, pending, pool, want):
        """Rows of `pool` at the places that a resolve gives, read in stream order."""
        if self.device.name == "cpu":
            pending.on_done(lambda places: self._compare(pool[places], want))
            return
        places = pending.result()
        with self.device.on_compute():
            taken = self.device.torch.as_tensor(pool, device="cuda")
            at = places.reshape(-1).clamp(min=0)  # -1, of a row that is lost: nobody's bytes
            self._unread.append((taken.index_select(0, at).reshape(want.shape), want))

    def _compare(self, data, want):
        self.rows_read += len(data)
        assert (data == want).all(), "a request read rows that are not its own"

    def read(self):
        """Look at what a GPU read; the simulated device looks while it reads."""
        for data, want in self._unread:
            self._compare(plain(data), want)
        self._unread.clear()

    def poll(self):
        """What the worker knows by now reaches the coordinator."""
        acks = self.worker.poll()
        if acks is not None:
            self.coordinator.update_acknowledgements(acks)
        self.check()

    def settle(self, steps=6):
        """Everything queued happens and is acknowledged."""
        for _ in range(steps):
            self.deliver()
            self.device.synchronize(None)
            self.read()
            self.poll()
            if not self.state.transfers and min(self.state.retired) == self.state.step:
                return
            self.step(only=())
        raise AssertionError("the worker does not settle")

    # -- looking ------------------------------------------------------------------------------
    def host_bytes(self, page, layer):
        return self.worker.handles[layer].runtime.host.array[page]

    def assert_findable_pages_hold_what_they_are_named(self):
        """Every page that a prefix finds holds the rows of exactly those tokens; returns how many.

        No device work is waited for: what can be found must be there now."""
        named = self.named_pages()
        for name, page in self.state.prefix.items():
            for layer in range(self.config.layout.layers):
                want = row_bytes(named[name], layer, self.config.layout.row_bytes)
                assert (self.host_bytes(page, layer) == want).all(), (page, layer)
        return len(self.state.prefix)
