"""A small worker with real bytes, and an oracle that shares nothing with it.

A row's bytes are a function of (request row, layer, position); blocks and pages are set up by
writing those bytes into the pools directly. The device is of the backend that `backends` says.
"""

from __future__ import annotations

import numpy as np
from backends import ask_for_faults, closes, open_backend, plain

from hisparse.config import (
    HiSparseConfig,
    ModelLayout,
    PolicyConfig,
    PoolConfig,
    ScheduleConfig,
)
from hisparse.device.rows import StepRows
from hisparse.device.worker import HiSparseWorker
from hisparse.fsm.wire import (
    SparseKVOffloadCommand,
    SparseKVPageTransfer,
    Table,
    TableUpdate,
    TransferKind,
)

PAGE = 4
ROW_BYTES = 16
GIB = 1 << 30
PAGES, REQUESTS = 4, 3  # what `place_pages` sets up
SPAN = PAGES * PAGE


def make_config(
    hot_rows=8, top_k=4, requests=3, pages=6, blocks=64, hosts=64, groups=((0, 2), (1,)), **more
):
    layers = sum(len(g) for g in groups)
    stride = -(-PAGE * layers * ROW_BYTES // 256) * 256
    return HiSparseConfig(
        layout=ModelLayout(row_bytes=ROW_BYTES, index_row_bytes=3, index_groups=groups),
        pools=PoolConfig(page_size=PAGE, gpu_blocks=blocks, host_pool_gib=hosts * stride / GIB),
        policy=PolicyConfig(top_k=top_k, hot_rows=hot_rows),
        schedule=ScheduleConfig(max_requests=requests, max_model_len=pages * PAGE),
        **more,
    )


def content(row, layer, position):
    """uint8 [16]: never zero, different for every (row, layer, position)."""
    value = (layer + 1) << 48 | (int(row) + 1) << 24 | (int(position) + 1)
    return np.frombuffer(value.to_bytes(ROW_BYTES, "little"), dtype=np.uint8)


def contents(row, layer, positions):
    return np.stack([content(row, layer, p) for p in positions])


def expect(rows, top_k, layer):
    """What a gather must return: uint8 [n, k, 16]."""
    out = np.zeros((*top_k.shape, ROW_BYTES), dtype=np.uint8)
    for i, row in enumerate(rows):
        for j, position in enumerate(top_k[i]):
            if position >= 0:
                out[i, j] = content(row, layer, position)
    return out


def step_rows(rows, positions=None):
    """By default the tokens lie behind everything that they could select."""
    positions = [SPAN * 2] * len(rows) if positions is None else positions
    return StepRows(np.array(rows, dtype=np.int32), np.array(positions, dtype=np.int64))


def page_rows(row, page):
    """StepRows of the four positions of one page."""
    return step_rows([row] * PAGE, range(page * PAGE, (page + 1) * PAGE))


def knock_out(transfers, without):
    """Leaves out every wait of one name."""
    if without is not None:
        ask_for_faults()

    def wait(stream, event, why):
        if why != without:
            made(stream, event, why)

    made, transfers._wait = transfers._wait, wait


class Rig:
    """Worker, device and the numbering of commands."""

    def __init__(self, config=None, seed=0, lag=0.5, without=None, sink=None, copy_fault=None):
        self.config = config or make_config()
        self.device = open_backend(seed, lag)
        self.worker = HiSparseWorker(self.config, self.device, sink=sink, copy_fault=copy_fault)
        knock_out(self.worker.transfers, without)
        self.step = 0
        closes(self.worker)

    def command(self, **fields):
        seq = self.worker.to_seq
        return SparseKVOffloadCommand(self.step + 1, 1, seq, seq + 1, **fields)

    def begin(self, **fields):
        self.worker.begin_step(self.command(**fields))
        self.step += 1

    def end(self):
        self.worker.end_step(self.step)

    def run_step(self, **fields):
        self.begin(**fields)
        self.end()

    @property
    def layers(self):
        return range(self.config.layout.layers)

    def write_page(self, row, page):
        for layer in self.layers:
            data = contents(row, layer, range(page * PAGE, (page + 1) * PAGE))
            self.worker.handles[layer].write(page_rows(row, page), data)

    def gather(self, rows, top_k):
        """Every layer in group order, leaders with top_k; arrays by layer, not yet synchronised."""
        pending = {}
        for group in self.config.layout.index_groups:
            for layer in group:
                chosen = top_k if layer == group[0] else None
                pending[layer] = self.worker.handles[layer].gather(rows, chosen)
        return pending

    def put(self, tier, row, page, ident):
        """Write a page's bytes straight into a block or host page."""
        for layer in self.layers:
            runtime = self.worker.handles[layer].runtime
            view = runtime.hot if tier == "gpu" else runtime.host
            rows = contents(row, layer, range(page * PAGE, (page + 1) * PAGE))
            on_host = isinstance(view.base, np.ndarray)
            view.array[ident] = rows if on_host else self.upload(rows)
            if not on_host:  # before the next rows take the memory of these
                self.device.torch.cuda.synchronize()

    def upload(self, array):
        """On the device, when it returns."""
        made = self.device.upload(array)
        self.device.torch.cuda.synchronize()
        return made

    def positions_of(self, layer):
        """int ``[requests, hot_rows]`` of a leader: the position in each hot slot, or -1."""
        resolver = self.worker.handles[layer].runtime.resolver
        if self.device.name == "cpu":
            return resolver.positions
        return plain(resolver.state[1])[:, : self.config.policy.hot_rows]


def resident(row, page, *ids):
    return TableUpdate(Table.RESIDENT, row, page, ids)


def host(row, page, *ids):
    return TableUpdate(Table.HOST, row, page, ids)


def hot(row, *ids):
    return TableUpdate(Table.HOT, row, 0, ids)


def spill(ident, block, page, kind=TransferKind.SPILL):
    return SparseKVPageTransfer(ident, 1, kind, block, 1, page, 1)


def restore(ident, page, block):
    return spill(ident, block, page, TransferKind.RESTORE)


def place_pages(rig, reference, row, on_gpu):
    """Pages of `row` on the GPU where `on_gpu`, all on the host; hot blocks; as table updates."""
    first = 1 + row * PAGES
    hots = [30 + row * 4 + i for i in range(rig.config.hot_blocks)]
    for page in range(PAGES):
        rig.put("host", row, page, first + page)
        rig.put("gpu", row, page, first + page)
        reference.host_pages[row, page] = first + page
        reference.resident_pages[row, page] = first + page if on_gpu[page] else 0
    reference.hot_blocks[row] = hots
    blocks = [first + page if on_gpu[page] else 0 for page in range(PAGES)]
    return (
        resident(row, 0, *blocks),
        host(row, 0, *range(first, first + PAGES)),
        hot(row, *hots),
    )
